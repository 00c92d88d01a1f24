"""What a scenario of the sweeps is: it can be run again and again in one fleet and has an end that can be compared.

``Round`` is the plainest; the others are in ``catalog`` and ``ways``.

An end state is canonical: it names no UID, time, fence, version or hash, only how these relate, so that the end of a
disturbed run must equal the end of the undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from e2e.scenarios.kit import TERMINAL, Fleet, condition
from tests.fault.stand import Stand

State = dict[str, Any]
Arm = Callable[[], None]

LIMIT = 180.0
DISK = "update_weights_from_disk"


class Scenario:
    """``prepare`` brings the fleet to the start; ``begin`` calls ``arm`` when faults may strike and sets things going;
    ``drive`` is called again and again until ``over``; ``end_state`` is what is compared."""

    name = ""
    #: How a Stand for it differs from the default.
    stand_options: ClassVar[State] = {}
    #: Stands of it that one machine bears at a time.
    most_stands: ClassVar[int] = 8

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.fleet: Fleet = stand.fleet

    def prepare(self) -> None:
        """Everybody serves what is committed."""
        self.stand.wait_steady("the fleet to be steady before the next run")

    def begin(self, arm: Arm) -> None:
        """Set it going."""
        raise NotImplementedError

    def drive(self) -> None:
        """What the environment does meanwhile."""

    def over(self) -> bool:
        """It has come to its end."""
        raise NotImplementedError

    def next_step(self) -> None:
        """What the trainer does anyway after a run: the next version."""
        plain_round(self.stand)

    def end_state(self) -> State:
        """Canonical; see the module."""
        return fleet_state(self.stand)

    def leave(self) -> None:
        """Take back what the scenario changed for its stand; the next one may use it."""


def plain_round(stand: Stand) -> None:
    """One more version, undisturbed, which every engine takes over."""
    done = stand.fleet.ended(stand.order_next())
    assert done["status"]["phase"] == "Succeeded", done["status"]
    stand.wait_steady("the fleet to be steady after a plain round")


def everybody_serves(stand: Stand, count: int = 0) -> bool:
    """The pool has its engines and knows these very pods, all of them ready and active, and nothing is claimed."""
    count = count or stand.engines
    status = stand.fleet.status("enginepool", "e")
    pods = stand.fleet.engines()
    return (
        int((status.get("counts") or {}).get("active") or 0) == count == len(pods)
        and status.get("readyReplicas") == count
        and {e.get("podUID") for e in status.get("engines") or []} == {p["metadata"]["uid"] for p in pods}
        and all(condition(p, "Ready") == "True" and "deletionTimestamp" not in p["metadata"] for p in pods)
        and not stand.fleet.status("rlpipeline", "p").get("activeOperation")
    )


def awaits_next(stand: Stand) -> bool:
    """The trainer must come first: an engine is closed, and only a newer version can open it (the sender keeps one)."""
    status = stand.fleet.status("rlpipeline", "p")
    ready = _conditions(status).get("Ready")
    pods = stand.fleet.engines()
    known = {e.get("podUID") for e in stand.fleet.status("enginepool", "e").get("engines") or []}
    return (
        ready == ("False", "AwaitingRound")
        and not status.get("activeOperation")
        and known == {p["metadata"]["uid"] for p in pods}
        and all(condition(p, "Ready") == "True" and "deletionTimestamp" not in p["metadata"] for p in pods)
        and len(pods) == stand.engines
    )


def fleet_state(stand: Stand) -> State:
    """Engines, pools and pipeline as they relate to what is committed."""
    fleet = stand.fleet
    pipeline = fleet.status("rlpipeline", "p")
    committed = pipeline.get("committed") or {}
    digests = {d["digest"] for d in committed.get("engineDigests") or []}
    engines = {}
    for pod in fleet.engines():
        paused = fleet.paused(pod)
        engines[_engine(pod)] = {
            "takesRequests": not paused,
            "atCommitted": fleet.label(pod) == str(committed.get("version")) and fleet.checksum(pod) in digests,
        }
    pools = fleet.cluster.get("enginepools", "-n", fleet.namespace)["items"]
    return {
        "newestIsCommitted": committed.get("version") == stand.version,
        "claimed": pipeline.get("activeOperation"),
        "pipeline": _conditions(pipeline),
        "counts": pipeline.get("engines"),
        "engines": engines,
        "pools": {p["metadata"]["name"]: _pool(p) for p in pools},
        "finalizers": sorted(
            r["metadata"]["name"]
            for r in fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"]
            if r["metadata"].get("finalizers")
        ),
    }


def _engine(pod: State) -> str:
    names = pod["metadata"]["labels"]
    return f"{names['rlfleet.dev/pool']}-{names['rlfleet.dev/engine-index']}"


def _pool(pool: State) -> State:
    status = pool.get("status") or {}
    return {
        "conditions": _conditions(status),
        "counts": status.get("counts"),
        "replicas": status.get("replicas"),
        "readyReplicas": status.get("readyReplicas"),
        "states": {str(e["index"]): e["state"] for e in status.get("engines") or []},
        "observed": status.get("observedGeneration") == pool["metadata"]["generation"],
    }


def _conditions(status: State) -> State:
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions") or []}


class Round(Scenario):
    """A serialized round of all engines."""

    name = "round"

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand)
        self.round = ""

    def order(self) -> None:
        """Publish and order the next version."""
        self.round = self.stand.order_next()

    def begin(self, arm: Arm) -> None:
        arm()
        self.order()

    def phase(self) -> str:
        """Phase of the round."""
        return self.fleet.phase(self.round)

    def ended(self) -> bool:
        """The round is over, and its slot and finalizer are free."""
        found = self.fleet.get("syncround", self.round)
        return (
            (found.get("status") or {}).get("phase") in TERMINAL
            and not found["metadata"].get("finalizers")
            and not self.fleet.status("rlpipeline", "p").get("activeOperation")
        )

    def over(self) -> bool:
        return self.ended() and (everybody_serves(self.stand) or awaits_next(self.stand))

    def end_state(self) -> State:
        status = self.fleet.status("syncround", self.round)
        return super().end_state() | {
            "round": status.get("phase"),
            "members": sorted(m["result"] for m in status.get("members") or []),
            "failure": (status.get("failure") or {}).get("reason"),
        }
