"""Scenarios of what befalls single engines: a person's quarantine, an eviction, a restart in place, a trainer's demand.

All but the quarantine strike in the middle of a round.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, ClassVar

from e2e.cluster.local import ClusterError
from e2e.scenarios.kit import TERMINAL, wait_until
from e2e.scenarios.test_disruption import allowed, evict
from e2e.sim.device import ledger
from rlfleet.api import labels
from tests.fault.scenarios import (
    DISK,
    LIMIT,
    Arm,
    Round,
    Scenario,
    State,
    awaits_next,
    everybody_serves,
    plain_round,
)

NODE = "hollow-000"
SHARED, OWN = f"GPU-{NODE}-00", f"GPU-{NODE}-01"
#: Longer than any round here: what ends is the engine, not the load.
_FOR_LIFE = 300


class Quarantine(Scenario):
    """A person takes one engine out of service, and gives it back when it is closed."""

    name = "quarantine"

    def prepare(self) -> None:
        for pod in self.fleet.engines():
            self.annotate(pod, None)
        super().prepare()

    def annotate(self, pod: State, why: str | None) -> None:
        """What ``rlfleet quarantine`` and ``rlfleet release`` write."""
        patch = json.dumps({"metadata": {"annotations": {labels.QUARANTINE: why}}})
        name = pod["metadata"]["name"]
        self.fleet.cluster.kubectl("patch", "pod", name, "-n", self.fleet.namespace, "--type=merge", "-p", patch)

    def begin(self, arm: Arm) -> None:
        self.victim = self.fleet.engines()[0]
        self.released = False
        arm()
        self.annotate(self.victim, "its GPU is suspect")

    def drive(self) -> None:
        rows = self.fleet.status("enginepool", "e").get("engines") or []
        state = next((r["state"] for r in rows if r.get("podUID") == self.victim["metadata"]["uid"]), "")
        claimed = self.fleet.status("rlpipeline", "p").get("activeOperation")
        if not self.released and state == "Quarantined" and not claimed and self.fleet.paused(self.victim):
            self.released = True
            self.annotate(self.victim, None)

    def over(self) -> bool:
        return self.released and everybody_serves(self.stand)


class Evicted(Round):
    """One engine of three is evicted while it loads, and none may be missing: it is dropped, another one comes."""

    name = "eviction"
    stand_options: ClassVar[State] = {
        "engines": 3,
        "pipeline": {
            "sync": {
                "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60},
                "maxUnavailable": 0,
                "drainSeconds": 1,
            }
        },
    }

    def prepare(self) -> None:
        plain_round(self.stand)
        wait_until(lambda: allowed(self.fleet) == 1, "the budget to count the engines", LIMIT)

    def begin(self, arm: Arm) -> None:
        self.victim = self.fleet.engines()[0]
        self.evicted = False
        self.fleet.fault(self.victim, DISK, action="delay", seconds=_FOR_LIFE, times=1, when="before")
        arm()
        self.order()

    def drive(self) -> None:
        if not self.evicted and self.phase() in ("Transferring", "Holding", *TERMINAL):
            with suppress(ClusterError):  # the budget counts the engine as missing for now, or it is gone
                evict(self.fleet, self.victim)
            self.evicted = self.is_leaving()

    def is_leaving(self) -> bool:
        """Its pod is on its way out, or gone."""
        uid = self.victim["metadata"]["uid"]
        left = [p for p in self.fleet.engines() if p["metadata"]["uid"] == uid]
        return not left or "deletionTimestamp" in left[0]["metadata"]

    def over(self) -> bool:
        pods = {p["metadata"]["uid"] for p in self.fleet.engines()}
        return self.evicted and self.victim["metadata"]["uid"] not in pods and super().over()


class Restarted(Round):
    """The engine of an adopted pod starts again in place while it loads: another process, which catches up."""

    name = "restart-in-place"
    stand_options: ClassVar[State] = {"adopted": True}

    def prepare(self) -> None:
        plain_round(self.stand)

    def begin(self, arm: Arm) -> None:
        self.victim = self.fleet.engines()[0]
        self.before = self.process()
        self.crashed = False
        self.fleet.fault(self.victim, DISK, action="delay", seconds=_FOR_LIFE, times=1, when="before")
        arm()
        self.order()

    def process(self) -> str:
        """What its kubelet calls the engine's container."""
        status = self.fleet.pod(self.victim["metadata"]["name"]).get("status") or {}
        found = [c for c in status.get("containerStatuses") or [] if c["name"] == "engine"]
        return str(found[0].get("containerID") or "") if found else ""

    def drive(self) -> None:
        if not self.crashed and self.phase() in ("Transferring", "Holding", *TERMINAL):
            self.fleet.cluster.hollow.crash(self.fleet.namespace, self.victim["metadata"]["name"], "engine")
            self.crashed = True

    def over(self) -> bool:
        replaced = self.crashed and self.process() not in ("", self.before)
        return replaced and super().over() and (self.is_current() or awaits_next(self.stand))

    def end_state(self) -> State:
        found = super().end_state()
        # Whether the round ends before or after the kubelet has told of the other process is nobody's to say.
        members = ["Lost" if result == "Unknown" else result for result in found["members"]]
        return found | {"members": sorted(members)}

    def is_current(self) -> bool:
        """The pool knows the engines by what they hold now, not by what they held before the restart."""
        committed = (self.fleet.status("rlpipeline", "p").get("committed") or {}).get("version")
        return all(self.fleet.label(p) == str(committed) for p in self.fleet.engines())


class Granted(Round):
    """A trainer demands the device of the engine that a round in Holding misses: the round gives it up and commits, the
    engine sleeps, the trainer is granted the device, and gives it back."""

    name = "grant-in-holding"
    #: All stands have the same devices.
    most_stands: ClassVar[int] = 1
    stand_options: ClassVar[State] = {
        "pipeline": {
            "trainer": {"gpus": [{"node": NODE, "devices": [SHARED]}]},
            "sync": {
                "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 120},
                "maxUnavailable": 0,
                "onFailure": "Hold",
                "drainSeconds": 1,
            },
        },
        "pool": {
            "shrink": "Offload",
            "engine_args": ("--enable-memory-saver",),
            "placement": {"mode": "Pinned", "devices": [{"node": NODE, "devices": [SHARED, OWN]}]},
        },
    }

    def prepare(self) -> None:
        self.demand(False)
        for pod in self.fleet.engines():
            self.fleet.heal(pod)
        plain_round(self.stand)

    def demand(self, wanted: bool) -> None:
        """Ask for the device, or give it back, as the SDK does."""
        uid = self.fleet.pod("trainer")["metadata"]["uid"]
        asked = [{"cluster": "actor", "step": self.stand.version + 1}] if wanted else []
        self.fleet.apply("TrainerDemand", "p", {"trainer": {"podUID": uid, "podName": "trainer"}, "requests": asked})

    def begin(self, arm: Arm) -> None:
        self.victim = self.fleet.engines()[0]
        self.demanded = self.returned = False
        self.awake = self.in_use()
        self.fleet.fault(self.victim, DISK, action="http500", when="after")
        arm()
        self.order()

    def grants(self) -> list[Any]:
        """What the pipeline says of the demand."""
        return list(self.fleet.status("rlpipeline", "p").get("grants") or [])

    def drive(self) -> None:
        if not self.demanded and self.phase() in ("Holding", *TERMINAL):
            self.demanded = True
            self.demand(True)
        elif self.demanded and not self.returned and any(g["granted"] for g in self.grants()):
            assert self.in_use() < self.awake, "the device was granted while an engine on it is awake"
            self.returned = True
            self.fleet.heal(self.victim)
            self.demand(False)

    def in_use(self) -> int:
        """Bytes in use on the device, as its driver would say."""
        return sum(ledger.holders(self.fleet.cluster.state / "hollow" / "devices" / NODE / SHARED).values())

    def over(self) -> bool:
        return self.returned and not self.grants() and super().over()

    def leave(self) -> None:
        self.demand(False)
