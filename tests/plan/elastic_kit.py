"""Builders of sleeping and waking engines."""

from __future__ import annotations

from typing import Any

from rlfleet.api import wire
from rlfleet.plan.elastic import GIB, Ceiling
from rlfleet.plan.rounds import Engine
from tests.plan.rounds_kit import DIGEST_A, engine, gate

ALL_TAGS = (wire.MemoryTag.WEIGHTS, wire.MemoryTag.KV_CACHE)
NODE = "n0"


def devices(
    *uuids: str, used: float | None = None, others: tuple[str, ...] = (), node: str = NODE
) -> wire.DeviceReport:
    """What a gate reads of its devices; ``used`` in GiB, None: the driver can not be read."""
    memory = None
    if used is not None:
        memory = {u: wire.DeviceMemory(used_bytes=int(used * GIB), total_bytes=80 * GIB) for u in uuids}
    processes = tuple(
        wire.DeviceProcess(uuid=uuids[0], pid=100 + i, name=name, used_bytes=GIB) for i, name in enumerate(others)
    )
    source: Any = "Declared" if uuids else "Unknown"
    return wire.DeviceReport(source=source, node=node, uuids=uuids, memory=memory, processes=processes)


def awake(index: int, *, pool: str = "a", held: bool = True, **changes: Any) -> Engine:
    """An engine that serves version 1, or whose weights nothing proves."""
    report = changes.pop("devices", devices(f"GPU-{index}", used=60))
    fields: dict[str, Any] = {
        "holds": (1, DIGEST_A) if held else None,
        "capabilities": ("Serialized", "Checksum", "Offload"),
        "incarnation": f"i{index}",
        "pipeline": "p",
    }
    status = gate(**{**fields, **changes.pop("gate", {})}).model_copy(update={"devices": report})
    return engine(f"{pool}-{index}", status, pool=pool, index=index, **changes)


def asleep(index: int, *, tags: tuple[wire.MemoryTag, ...] = ALL_TAGS, **changes: Any) -> Engine:
    """An engine that has released its memory, or ``tags`` of it."""
    more = {"released": tags, "paused": True, **changes.pop("gate", {})}
    report = changes.pop("devices", devices(f"GPU-{index}", used=2))
    return awake(index, held=False, gate=more, devices=report, **changes)


def silent(index: int, *, pool: str = "a", **changes: Any) -> Engine:
    """An engine whose gate does not answer."""
    return engine(f"{pool}-{index}", None, pool=pool, index=index, **changes)


def ceilings(active: int, *, replicas: int = 4, offloads: bool = True, residual: float = 13) -> dict[str, Ceiling]:
    """One pool ``a``."""
    return {"a": Ceiling(replicas, min(active, replicas), offloads, int(residual * GIB))}
