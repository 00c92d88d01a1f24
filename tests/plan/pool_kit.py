"""Builders for tests of pool planning."""

from __future__ import annotations

from typing import Any

from rlfleet.api.wire import (
    EngineReport,
    EngineState,
    ErrorBody,
    ErrorReason,
    GateStatus,
    Held,
    HoldsRecord,
    LoadRecord,
    OperationState,
)
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.rounds import Committed

DIGEST = "sha256:" + "a" * 64
OLD_DIGEST = "sha256:" + "b" * 64
COMMITTED = Committed(version=12, manifest_digest=DIGEST)


def pool(*, replicas: int = 2, name: str = "a", pod_spec: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """An EnginePool with defaults filled in as the apiserver does."""
    return {
        "apiVersion": "rlfleet.dev/v1alpha1",
        "kind": "EnginePool",
        "metadata": {"name": name, "namespace": "ns", "uid": "pool-uid", "generation": 3, "resourceVersion": "7"},
        "spec": {
            "pipeline": "p",
            "replicas": replicas,
            "engine": {"type": "SGLang", "port": 30000, "gpusPerEngine": 1},
            "gate": {"image": "rlfleet:1", "port": 9440, "stagingMiB": 64},
            "placement": {"mode": "Scheduler"},
            "source": {
                "template": {
                    "metadata": {"labels": {"app": "engine"}},
                    "spec": pod_spec or {"containers": [{"name": "engine", "image": "sglang"}]},
                }
            },
            "routers": [],
        }
        | spec,
    }


def fact(index: int, uid: str = "", **changes: Any) -> PodFact:
    """A Ready pod."""
    values: dict[str, Any] = {
        "name": f"a-{index}-{uid or 'x'}",
        "uid": uid or f"uid-{index}",
        "index": index,
        "created": "2026-01-01T00:00:00Z",
        "phase": "Running",
        "node": "n",
        "ip": f"10.0.0.{index + 1}",
        "ready": True,
        "scheduled": True,
        "started": True,
    }
    return PodFact(**(values | changes))


def gate(
    *,
    state: EngineState = EngineState.READY,
    paused: bool | None = False,
    holds: tuple[int, str] | None = (12, DIGEST),
    routed: dict[str, bool | None] | None = None,
    uncertain: bool = False,
    load: OperationState | None = None,
    incarnation: str | None = "inc",
    generation: int = 5,
    startup: ErrorReason | None = None,
    shunned: dict[str, str] | None = None,
    guarded: bool | None = None,
) -> GateStatus:
    """What a gate says of its engine."""
    return GateStatus(
        protocol_version=1,
        pod_uid="uid",
        incarnation=incarnation,
        enrolled=True,
        fence=Held(pipeline="pu", operation="o", generation=generation),
        engine=EngineReport(state=state, paused=paused, guarded=guarded),
        holds=HoldsRecord(version=holds[0], manifest_digest=holds[1]) if holds else None,
        loads=(LoadRecord(operation="o", version=12, manifest_digest=DIGEST, state=load),) if load else (),
        routed=routed or {},
        shunned=shunned or {},
        uncertain=uncertain,
        startup=ErrorBody(reason=startup, message="main does not answer") if startup else None,
    )
