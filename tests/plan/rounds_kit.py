"""Builders of observed states for the tests of the pure round planner."""

from __future__ import annotations

from typing import Any

from rlfleet.api import wire
from rlfleet.plan.freeze import freeze
from rlfleet.plan.rounds import Engine, RoundPlan, RoundRef
from rlfleet.plan.transport import Refusal

DIGEST_A = "sha256:" + "a" * 64
DIGEST_B = "sha256:" + "b" * 64


def cache(version: int = 1, digest: str = DIGEST_A, size: int = 1000) -> wire.SenderCache:
    return wire.SenderCache(version=version, manifest_digest=digest, total_bytes=size, tensors=3, buckets=1)


def sender(newest: wire.SenderCache | None = None, **changes: Any) -> wire.SenderStatus:
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "capabilities": ("Serialized", "Broadcast/gloo"),
        "pod_uid": "trainer",
        "incarnation": "s1",
        "cache": newest,
        "slots": (newest,) if newest else (),
    }
    return wire.SenderStatus(**{**fields, **changes})


def gate(
    *,
    holds: tuple[int, str] | None = None,
    loads: tuple[wire.LoadRecord, ...] = (),
    fence: int = 10,
    devices: tuple[str, ...] = (),
    node: str = "n0",
    incarnation: str | None = "i1",
    paused: bool | None = False,
    **changes: Any,
) -> wire.GateStatus:
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "capabilities": ("Serialized", "Serialized/Parts", "Broadcast", "Checksum"),
        "pod_uid": "uid",
        "incarnation": incarnation,
        "enrolled": True,
        "fence": wire.Held(pipeline="p", operation="r", generation=fence),
        "engine": wire.EngineReport(state=wire.EngineState.READY, paused=paused, world_size=1, layout="L"),
        "holds": wire.HoldsRecord(version=holds[0], manifest_digest=holds[1], engine_digest="E") if holds else None,
        "loads": loads,
        "staging_capacity_bytes": 10_000,
        "devices": wire.DeviceReport(source="Declared" if devices else "Unknown", node=node, uuids=devices),
    }
    return wire.GateStatus(**{**fields, **changes})


def engine(name: str, status: wire.GateStatus | None = None, **changes: Any) -> Engine:
    fields: dict[str, Any] = {"pool": "pool", "pod_uid": f"uid-{name}", "url": f"http://{name}:9440"}
    return Engine(name=name, status=status, **{**fields, **changes})


def load(
    operation: str = "r",
    *,
    state: wire.OperationState = wire.OperationState.SUCCEEDED,
    verified: bool = False,
    published: bool = False,
    version: int = 1,
) -> wire.LoadRecord:
    return wire.LoadRecord(
        operation=operation,
        version=version,
        manifest_digest=DIGEST_A,
        state=state,
        verified=verified,
        published=published,
        engine_digest="E",
    )


def ref(name: str = "a", version: int = 1, **changes: Any) -> RoundRef:
    fields: dict[str, Any] = {
        "uid": f"uid-{name}",
        "attempt": 1,
        "sender_incarnation": "s1",
        "phase": "Pending",
        "created_ms": 1_000,
    }
    return RoundRef(name=name, version=version, **{**fields, **changes})


def frozen(engines: list[Engine], **changes: Any) -> RoundPlan | Refusal:
    """Freeze the members of a serialized round."""
    fields: dict[str, Any] = {
        "mode": "CPUSerialize",
        "assert_mixed": False,
        "backend": "gloo",
        "train": None,
        "sender": sender(cache()),
        "total_bytes": 1000,
        "verify": "IfSupported",
        "max_unavailable": "10%",
    }
    return freeze(engines, **{**fields, **changes})
