"""The scenarios of the sweeps: what befalls engines, rounds, pools and pipelines (other ways of weights: ``ways``)."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import ClassVar

from e2e.cluster.hollow.control import HollowError
from e2e.scenarios.kit import TERMINAL, wait_until
from tests.fault.lives import Evicted, Granted, Quarantine, Restarted
from tests.fault.proxy import Fault, Rule
from tests.fault.scenarios import DISK, LIMIT, Arm, Round, Scenario, State, everybody_serves, plain_round
from tests.fault.ways import Blocks, Checkpoints, Ports, Stream


class Mixed(Round):
    """A round with serialized and broadcast members: torch engines, real process groups."""

    name = "mixed-round"
    most_stands: ClassVar[int] = 2
    stand_options: ClassVar[State] = {
        "engines": 3,
        "backend": "torch",
        "pipeline": {
            "transport": {"mode": "Auto", "backend": "gloo", "assertMixed": True},
            "trainer": {"gpus": [{"node": "hollow-000", "devices": ["GPU-train-0"]}]},
            "sync": {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 40}},
        },
        "pool": {
            "placement": {
                "mode": "Pinned",
                "devices": [{"node": "hollow-000", "devices": ["GPU-train-0", "GPU-free-0", "GPU-free-1"]}],
            }
        },
    }


class Poisoned(Round):
    """The load of one engine fails; a CatchUp heals it, or it is replaced and the new one catches up."""

    name = "poisoned-engine"
    stand_options: ClassVar[State] = {"engines": 3}

    def prepare(self) -> None:
        plain_round(self.stand)

    def begin(self, arm: Arm) -> None:
        victim = self.fleet.engines()[0]
        self.fleet.fault(victim, DISK, action="http500", times=1, when="after")
        arm()
        self.order()


class Holding(Round):
    """A load fails and none may be missing: the round holds both engines closed, loads again, and commits."""

    name = "holding"
    stand_options: ClassVar[State] = {
        "pipeline": {
            "sync": {
                "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60},
                "maxUnavailable": 0,
            }
        }
    }

    def prepare(self) -> None:
        plain_round(self.stand)

    def begin(self, arm: Arm) -> None:
        self.fleet.fault(self.fleet.engines()[0], DISK, action="http500", times=1, when="after")
        arm()
        self.order()


class Silent(Round):
    """One gate is frozen until the round holds because of it; its engine missed the round, and catches up."""

    name = "silent-gate"
    # A silent gate is waited for as long as the deadline's parts allow: the shorter, the sooner Holding comes.
    stand_options: ClassVar[State] = {
        "pipeline": {"sync": {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 30}}}
    }

    def prepare(self) -> None:
        plain_round(self.stand)

    def begin(self, arm: Arm) -> None:
        self.frozen: str | None = self.fleet.engines()[0]["metadata"]["name"]
        self.stand.cluster.hollow.freeze(self.fleet.namespace, self.frozen, "gate", spared=True)
        arm()
        self.order()

    def drive(self) -> None:
        if self.frozen is not None and self.phase() in ("Holding", *TERMINAL):
            with suppress(HollowError):  # It may have been replaced meanwhile.
                self.stand.cluster.hollow.thaw(self.fleet.namespace, self.frozen, "gate")
            self.frozen = None

    def over(self) -> bool:
        return self.frozen is None and super().over()


class Takeover(Round):
    """The operator dies while engines load; it is the successor that is disturbed."""

    name = "takeover"

    def begin(self, arm: Arm) -> None:
        for pod in self.fleet.engines():
            self.fleet.fault(pod, DISK, action="delay", seconds=1.5, times=1, when="before")
        # When every engine was told to load, not when the phase says so: the end must be the same each time.
        told = Rule(
            lambda call: call.lane == "peer" and not call.read and call.label.endswith(" Load"),
            Fault.KILL_AFTER,
            skip=self.stand.engines - 1,
        )
        self.stand.proxy.strike(told)
        self.order()
        wait_until(self.stand.proxy.fired.is_set, "the operator to die while engines load", LIMIT)
        arm()
        self.stand.operator.start(wait=False)


class ScaleUp(Scenario):
    """A pool grows from one engine to three; the new ones catch up."""

    name = "scale-up"
    stand_options: ClassVar[State] = {"engines": 1}

    def prepare(self) -> None:
        self.scale(1)
        wait_until(lambda: len(self.fleet.engines()) == 1, "the pool to be small again", LIMIT)
        super().prepare()

    def scale(self, replicas: int) -> None:
        """Change the size."""
        self.wanted = replicas
        self.fleet.cluster.kubectl(
            "patch",
            "enginepool",
            "e",
            "-n",
            self.fleet.namespace,
            "--type=merge",
            "-p",
            f'{{"spec":{{"replicas":{replicas}}}}}',
        )

    def begin(self, arm: Arm) -> None:
        arm()
        self.scale(3)

    def over(self) -> bool:
        return everybody_serves(self.stand, self.wanted)


class Sleep(Scenario):
    """One engine is put to sleep by spec.active, wakes when the ceiling is raised, and catches up."""

    name = "sleep-and-wake"
    stand_options: ClassVar[State] = {"pool": {"shrink": "Offload", "engine_args": ("--enable-memory-saver",)}}

    def prepare(self) -> None:
        self.active(None)
        super().prepare()

    def active(self, count: int | None) -> None:
        """Change the ceiling; None: none."""
        patch = json.dumps({"spec": {"active": count}})
        self.fleet.cluster.kubectl("patch", "enginepool", "e", "-n", self.fleet.namespace, "--type=merge", "-p", patch)

    def begin(self, arm: Arm) -> None:
        self.woken = False
        arm()
        self.active(self.stand.engines - 1)

    def drive(self) -> None:
        counts = self.fleet.status("enginepool", "e").get("counts") or {}
        claimed = self.fleet.status("rlpipeline", "p").get("activeOperation")
        if not self.woken and counts.get("offloaded") == 1 and not claimed:
            self.active(None)
            self.woken = True

    def over(self) -> bool:
        return self.woken and everybody_serves(self.stand)


class CatchUp(Scenario):
    """An engine's pod vanishes; its successor catches up."""

    name = "catch-up"

    def begin(self, arm: Arm) -> None:
        victim = self.fleet.engines()[0]["metadata"]
        self.victim = victim["uid"]
        arm()
        self.fleet.cluster.kubectl(
            "delete", "pod", victim["name"], "-n", self.fleet.namespace, "--force", "--grace-period=0"
        )

    def over(self) -> bool:
        pods = {p["metadata"]["uid"] for p in self.fleet.engines()}
        return self.victim not in pods and everybody_serves(self.stand)


class Deletion(Scenario):
    """Pool and pipeline are deleted; nothing of ours remains. Then they are made anew under the same names."""

    name = "deletion"
    stand_options: ClassVar[State] = {"base": False}

    def prepare(self) -> None:
        stand = self.stand
        if not stand.cluster.get("rlpipelines", "-n", stand.namespace)["items"]:
            stand.fleet.pipeline(sync={"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}})
            stand.fleet.pool(stand.engines)
            if not [p for p in stand.cluster.get("pods", "-n", stand.namespace)["items"] if _is_trainer(p)]:
                stand.make_trainer()
            stand.fleet.ready_engines(stand.engines)
            plain_round(stand)
        super().prepare()

    def begin(self, arm: Arm) -> None:
        arm()
        self.delete("enginepool", "e")
        self.delete("rlpipeline", "p")

    def delete(self, kind: str, name: str) -> None:
        """Without waiting for the end."""
        self.fleet.cluster.kubectl("delete", kind, name, "-n", self.fleet.namespace, "--wait=false")

    def over(self) -> bool:
        return not self.left()

    def left(self) -> list[str]:
        """What remains of ours."""
        fleet = self.fleet
        kinds = ("rlpipelines", "enginepools", "syncrounds")
        found = [o for kind in kinds for o in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]]
        return [o["metadata"]["name"] for o in [*found, *fleet.engines()]]

    def next_step(self) -> None:
        """Nothing is left that could be synced."""

    def end_state(self) -> State:
        return {"left": self.left()}


class DeletionInRound(Deletion):
    """The pipeline is deleted while engines load, its pool when it is gone: a round to end, engines to close."""

    name = "deletion-in-round"

    def begin(self, arm: Arm) -> None:
        stand, fleet = self.stand, self.fleet
        for pod in fleet.engines():
            fleet.fault(pod, DISK, action="delay", seconds=1.5, times=1, when="before")
        version = stand.next_version()
        fleet.publish(version)
        name = fleet.order(version)
        wait_until(lambda: fleet.phase(name) == "Transferring", "engines to load", LIMIT, every=0.02)
        arm()
        self.pool_left = True
        self.delete("rlpipeline", "p")

    def drive(self) -> None:
        if self.pool_left and not self.fleet.cluster.get("rlpipelines", "-n", self.fleet.namespace)["items"]:
            self.pool_left = False
            self.delete("enginepool", "e")

    def over(self) -> bool:
        return not self.pool_left and super().over()


def _is_trainer(pod: State) -> bool:
    return (pod["metadata"].get("labels") or {}).get("app") == "trainer"


SCENARIOS: tuple[type[Scenario], ...] = (
    Round,
    Takeover,
    CatchUp,
    Poisoned,
    Holding,
    Silent,
    ScaleUp,
    Sleep,
    Deletion,
    DeletionInRound,
    Mixed,
    Stream,
    Checkpoints,
    Ports,
    Blocks,
    Quarantine,
    Evicted,
    Restarted,
    Granted,
)
