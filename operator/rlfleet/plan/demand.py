"""What a trainer demands of the devices that it shares with engines, and what has become of it: plain frozen data.

Invariant: a demand names physical devices, (node, UUID); which engines lie on them is found by the one mapping of
plan.topology, never counted from indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority
from rlfleet.plan.topology import Device

#: Most grants that a pipeline's status holds.
MAX_GRANTS = 16
MAX_MESSAGE = 256
_ORDER = {p: i for i, p in enumerate(DemandPriority)}


@dataclass(frozen=True, slots=True)
class Demand:
    """One part of the trainer wants these devices for a step; it stands until it is withdrawn."""

    cluster: str
    priority: DemandPriority
    step: int
    devices: frozenset[Device]

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
            ),
            granted=bool(row["granted"]),
            reason=Reason.parse(row["reason"]),
            message=str(row.get("message") or ""),
        )
        for row in status.get("grants") or ()
    )


def held_devices(grants: Iterable[Grant]) -> frozenset[Device]:
    """Devices on which engines are to sleep: every demanded one, whether it is granted yet or not."""
    return frozenset(d for g in grants for d in g.demand.devices)
