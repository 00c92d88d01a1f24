"""The frozen plan of a round as its status holds it: written once, before the first side effect, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfleet.api import wire
from rlfleet.plan.rounds import Member, RoundPlan

#: Characters of a member's reason that the schema takes: a plan that it refuses would be made again for ever.
MAX_REASON = 256


def member_rows(plan: RoundPlan) -> list[dict[str, Any]]:
    """``status.plan.members``: compact, written once when the round is planned."""
    rows = []
    for m in plan.members:
        row: dict[str, Any] = {
            "engine": m.engine,
            "podUID": m.pod_uid,
            "incarnation": m.incarnation,
            "transport": m.transport.value,
            "worldSize": m.world_size,
        }
        if m.rank_offset is not None:
            row["rankOffset"] = m.rank_offset
        if m.reason:
            row["reason"] = m.reason[:MAX_REASON]
        rows.append(row)
    return rows


def plan_row(plan: RoundPlan) -> dict[str, Any]:
    """``status.plan`` of a round that was just frozen."""
    broadcast = plan.of(wire.Transport.BROADCAST)
    return {
        "worldSize": plan.world_size if broadcast else 0,
        "serialized": len(plan.of(wire.Transport.SERIALIZED)),
        "broadcast": len(broadcast),
        "checkpoint": len(plan.of(wire.Transport.CHECKPOINT)),
        "staging": plan.staging.value,
        "bucketMiB": plan.bucket_mib,
        "members": member_rows(plan),
        "silent": list(plan.silent),
        "blocked": list(plan.blocked),
    }


def summary(plan: RoundPlan) -> str:
    """How many members get their weights which way."""
    serialized, broadcast = plan.of(wire.Transport.SERIALIZED), plan.of(wire.Transport.BROADCAST)
    checkpoint = plan.of(wire.Transport.CHECKPOINT)
    said = f"{len(serialized)} serialized, {len(broadcast)} broadcast"
    if checkpoint:
        said = f"{len(checkpoint)} from a checkpoint"
    return said + (f", {len(plan.blocked)} can not take part" if plan.blocked else "")


def plan_of(status: Mapping[str, Any]) -> RoundPlan | None:
    """The plan that a round's status holds; None when it was never planned."""
    raw = status.get("plan")
    if not raw:
        return None
    members = tuple(
        Member(
            engine=str(r["engine"]),
            pod_uid=str(r["podUID"]),
            incarnation=str(r["incarnation"]),
            transport=wire.Transport(r["transport"]),
            world_size=int(r.get("worldSize") or 1),
            rank_offset=r.get("rankOffset"),
            reason=str(r.get("reason") or ""),
        )
        for r in raw.get("members") or []
    )
    return RoundPlan(
        members,
        int(raw.get("worldSize") or 1),
        tuple(raw.get("silent") or ()),
        tuple(raw.get("blocked") or ()),
        staging=wire.StagingMode(raw.get("staging") or wire.StagingMode.FULL),
        bucket_mib=int(raw.get("bucketMiB") or 0),
    )
