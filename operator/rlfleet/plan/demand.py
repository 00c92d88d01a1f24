"""What a trainer demands of the devices that it shares with engines, what has become of it, and what it reports.

Invariants:
- a demand names physical devices, (node, UUID); which engines lie on them is found by the one mapping of plan.topology,
  never counted from indices;
- a granted demand keeps the devices that it was granted, whatever becomes known or unknown of the train pool later: the
  trainer is using them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.progress import Progress, StreamProgress, aggregate
from rlfleet.api.v1alpha1.common import MAX_EXACT
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority
from rlfleet.plan.topology import Device, train_devices

#: Most grants that a pipeline's status holds.
MAX_GRANTS = 64
MAX_MESSAGE = 256
_ORDER = {p: i for i, p in enumerate(DemandPriority)}


@dataclass(frozen=True, slots=True)
class Demand:
    """One part of the trainer wants these devices for a step; it stands until it is withdrawn."""

    cluster: str
    priority: DemandPriority
    step: int
    devices: frozenset[Device]
    id: str = ""

    @property
    def order(self) -> tuple[int, str]:
        """Who goes first: by priority, then by name."""
        return _ORDER[self.priority], self.cluster


@dataclass(frozen=True, slots=True)
class Grant:
    """One entry of ``RLPipeline.status.grants``."""

    demand: Demand
    granted: bool
    reason: Reason
    message: str = ""

    def row(self) -> dict[str, Any]:
        """As it stands in status."""
        by_node: dict[str, list[str]] = {}
        for device in sorted(self.demand.devices):
            by_node.setdefault(device.node, []).append(device.uuid)
        return {
            "cluster": self.demand.cluster,
            "priority": self.demand.priority.value,
            "step": self.demand.step,
            **({"id": self.demand.id} if self.demand.id else {}),
            "granted": self.granted,
            "reason": self.reason.value,
            "message": self.message[:MAX_MESSAGE],
            "devices": [{"node": node, "devices": uuids} for node, uuids in by_node.items()],
        }


def grants_of(status: Mapping[str, Any]) -> tuple[Grant, ...]:
    """``status.grants`` of an RLPipeline."""
    return tuple(
        Grant(
            Demand(
                cluster=str(row["cluster"]),
                priority=DemandPriority(row["priority"]),
                step=int(row["step"]),
                devices=frozenset(Device(d["node"], uuid) for d in row["devices"] for uuid in d["devices"]),
                id=str(row.get("id") or ""),
            ),
            granted=bool(row["granted"]),
            reason=Reason.parse(row["reason"]),
            message=str(row.get("message") or ""),
        )
        for row in status.get("grants") or ()
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """Who wrote a TrainerDemand. ``pod_name`` empty: no pod that could be looked for."""

    pod_name: str
    pod_uid: str


def trainer_of(demand: Mapping[str, Any]) -> Trainer:
    """The trainer of a TrainerDemand."""
    trainer = demand["spec"]["trainer"]
    return Trainer(str(trainer.get("podName") or ""), str(trainer["podUID"]))


def is_of(demand: Mapping[str, Any], pipeline_uid: str) -> bool:
    """The TrainerDemand is not left over from an earlier pipeline of the same name."""
    owners = demand["metadata"].get("ownerReferences") or []
    return not any(o.get("kind") == "RLPipeline" and o.get("uid") != pipeline_uid for o in owners)


def demands_of(
    demand: Mapping[str, Any], *, train: frozenset[Device] | None, before: Iterable[Grant]
) -> tuple[Demand, ...]:
    """What a TrainerDemand asks for. ``train``: the train pool, None when unknown; ``before``: grants as recorded.

    A request without devices of its own is for the whole train pool. While that is not known it names no device, and
    the memory gate refuses it.
    """
    standing = {(g.demand.cluster, g.demand.step, g.demand.id): g.demand.devices for g in before if g.granted}
    out = []
    for request in demand["spec"].get("requests") or ():
        key = str(request["cluster"]), int(request["step"]), str(request.get("id") or "")
        devices = standing.get(key) or train_devices(request.get("devices")) or train or frozenset()
        priority = DemandPriority(request.get("priority") or DemandPriority.ACTOR_TRAINING)
        out.append(Demand(cluster=key[0], priority=priority, step=key[1], devices=devices, id=key[2]))
    return tuple(out)


def progress_of(demand: Mapping[str, Any]) -> Progress | None:
    """Progress over all streams of a TrainerDemand."""
    return aggregate(
        StreamProgress(str(s["key"]), int(s.get("batch") or 0), int(s["target"]), int(s["collected"]))
        for s in demand["spec"].get("streams") or ()
    )


def progress_row(found: Progress | None, before: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``status.progress``: as it was, unless enough has happened since to be worth a write."""
    if found is None:
        return None
    # Each counter of a stream may be as large as a number in status; their sum is larger.
    row = {
        "target": min(found.target, MAX_EXACT),
        "collected": min(found.collected, MAX_EXACT),
        "completed": min(found.completed, MAX_EXACT),
        "percent": found.percent,
        "batches": found.batches,
    }
    same = before is not None and (before.get("percent"), before.get("batches")) == (found.percent, found.batches)
    return dict(before) if same and before is not None else row


def held_devices(grants: Iterable[Grant]) -> frozenset[Device]:
    """Devices on which engines are to sleep: every demanded one, whether it is granted yet or not."""
    return frozenset(d for g in grants for d in g.demand.devices)


def while_held(grants: Iterable[Grant], round: str) -> tuple[Grant, ...]:
    """The same, where what is waited for is the end of a round that holds the engines: it says so, and what ends it."""
    why = (
        f"SyncRound {round} is Holding and owns the engines there: they sleep when it has ended. A newer sync ends it, "
        "a cancel, or the end of the pods that it misses"
    )
    return tuple(
        replace(g, reason=Reason.HOLDING, message=why) if g.reason is Reason.ENGINES_AWAKE else g for g in grants
    )
