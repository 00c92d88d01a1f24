"""RLPipelines and SyncRounds as the planner sees them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfleet.api.timestamps import epoch_ms
from rlfleet.plan.attempts import RoundRecord, applied
from rlfleet.plan.rounds import TERMINAL, Committed, RoundRef


def committed_of(pipeline: Mapping[str, Any]) -> Committed | None:
    """``status.committed`` as the planner sees it."""
    raw = (pipeline.get("status") or {}).get("committed")
    if not raw:
        return None
    return Committed(
        version=int(raw["version"]),
        manifest_digest=str(raw["manifestDigest"]),
        sender_incarnation=str(raw.get("senderIncarnation") or ""),
        engine_digests={d["layout"]: d["digest"] for d in raw.get("engineDigests") or []},
    )


def ref_of(obj: Mapping[str, Any]) -> RoundRef:
    """One SyncRound as the planner sees it."""
    spec, status, meta = obj["spec"], obj.get("status") or {}, obj["metadata"]
    return RoundRef(
        name=meta["name"],
        uid=meta["uid"],
        version=int(spec["version"]),
        attempt=int(spec.get("attempt") or 1),
        sender_incarnation=str(spec.get("senderIncarnation") or ""),
        phase=str(status.get("phase") or "Pending"),
        created_ms=epoch_ms(meta["creationTimestamp"]),
        cancel=bool(spec.get("cancel")),
        deleting="deletionTimestamp" in meta,
        manifest_digest=spec.get("manifestDigest"),
        allow_rollback=bool(spec.get("allowRollback")),
        expected_committed=spec.get("expectedCommitted"),
        kind=str(spec.get("kind") or "Refresh"),
        engines=tuple(spec.get("engines") or ()),
    )


def record_of(status: Mapping[str, Any]) -> RoundRecord:
    """A round's status as the judge of tries sees it."""
    lease = status.get("lease") or {}
    return RoundRecord(
        phase=str(status.get("phase") or ""),
        holder=str(lease.get("holder") or ""),
        generation=int(lease.get("generation") or 0),
        applied=applied(status.get("attempts") or []),
    )


def slot_of(pipeline: Mapping[str, Any], status: Mapping[str, Any]) -> RoundRecord:
    """A pipeline's slot (its status) beside one round's status; the fence is its generation."""
    active = pipeline.get("activeOperation") or {}
    return RoundRecord(
        phase=str(status.get("phase") or ""),
        holder=str(active.get("holder") or ""),
        generation=int(pipeline.get("fence") or 0),
        slot=str(active.get("uid") or ""),
    )


def is_terminal(obj: Mapping[str, Any]) -> bool:
    """The round has ended; its phase never changes again."""
    return (obj.get("status") or {}).get("phase") in TERMINAL


def kind_of(obj: Mapping[str, Any]) -> str:
    """Refresh or CatchUp."""
    return str(obj["spec"].get("kind") or "Refresh")
