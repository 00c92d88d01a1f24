"""What a round that ended comes to, and what a pipeline's status says in numbers: for metrics and the ledger. Pure.

Invariant: everything here is read from the objects as they were written, so two operators that tell of one round tell
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api.metrics import PARTS
from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.v1alpha1.syncround_status import MemberOutcome
from rlfleet.plan.quiesce import drain_allowance
from rlfleet.plan.rounds import TERMINAL

Obj = Mapping[str, Any]

_TRANSPORTS: Final = (("serialized", "Serialized"), ("broadcast", "Broadcast"), ("checkpoint", "Checkpoint"))
_NUMBER: Final = {"True": 1, "False": 0}


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One ended round. Times in seconds."""

    outcome: str
    kind: str
    transport: str
    reason: str
    """Why it ended without success; empty for a success."""
    parts: Mapping[str, float]
    """Duration of each part (api.metrics.PARTS) that happened."""
    duration: float | None
    """From the first claim to the end; None: it was never claimed."""
    members: Mapping[str, int]
    """Members by result."""
    ended_at: float
    """When it ended, in seconds since the epoch."""


def transport_of(status: Obj) -> str:
    """How a round's weights travelled (label ``transport``)."""
    plan = status.get("plan") or {}
    used = [word for field, word in _TRANSPORTS if plan.get(field)]
    return "Mixed" if len(used) > 1 else used[0] if used else "None"


def summarize(obj: Obj) -> RoundSummary:
    """The summary of a SyncRound with a terminal status."""
    status = obj.get("status") or {}
    timings = status.get("timings") or {}
    members: Counter[str] = Counter(str(m["result"]) for m in status.get("members") or ())
    planned = len((status.get("plan") or {}).get("members") or ())
    # Beyond 64 members only those that are not Ok are listed.
    if members and planned > sum(members.values()):
        members[MemberOutcome.OK.value] += planned - sum(members.values())
    started, finished = status.get("startedAt"), status.get("finishedAt")
    total = timings.get("totalMs") or 0
    if started and finished:
        # totalMs is of the last claim; times in status are whole seconds, but over all of them.
        span = epoch_ms(finished) - epoch_ms(started)
        total = span if span > total + 2000 else total
    return RoundSummary(
        outcome=str(status.get("outcome") or status.get("phase") or ""),
        kind=str(obj["spec"].get("kind") or "Refresh"),
        transport=transport_of(status),
        reason=str((status.get("failure") or {}).get("reason") or ""),
        parts={part: timings[f"{part}Ms"] / 1000 for part in PARTS if timings.get(f"{part}Ms") is not None},
        duration=total / 1000 if started else None,
        members=dict(members),
        ended_at=epoch_ms(finished) / 1000 if finished else 0.0,
    )


def ledger_row(obj: Obj) -> dict[str, Any]:
    """All that is known of an ended round, as one flat object whose last field is its whole status."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    return {
        "pipeline": f"{meta['namespace']}/{spec['pipeline']}",
        "round": meta["name"],
        "roundUID": meta["uid"],
        "generation": int((status.get("lease") or {}).get("generation") or 0),
        "kind": str(spec.get("kind") or "Refresh"),
        "version": int(spec["version"]),
        "outcome": str(status.get("outcome") or status.get("phase") or ""),
        "transport": transport_of(status),
        "createdAt": meta.get("creationTimestamp"),
        "spec": dict(spec),
        "status": dict(status),
    }


def condition_numbers(conditions: Sequence[Obj]) -> dict[tuple[str, str], int]:
    """1, 0 or -1 by (condition, reason)."""
    return {(str(c["type"]), str(c["reason"])): _NUMBER.get(str(c["status"]), -1) for c in conditions}


@dataclass(frozen=True, slots=True)
class PipelineNumbers:
    """An RLPipeline's status in numbers; None: there is no such number now."""

    conditions: Mapping[tuple[str, str], int]
    fence: int | None
    committed: int | None
    published: int | None
    round_seconds: int | None
    """Seconds that spec.sync gives a claimed round, without those in Holding."""

    @property
    def lag(self) -> int | None:
        """Published minus committed; a rollback does not make it negative."""
        if self.committed is None or self.published is None:
            return None
        return max(0, self.published - self.committed)


def pipeline_numbers(pipeline: Obj) -> PipelineNumbers:
    """The numbers of an RLPipeline as last read."""
    status = pipeline.get("status") or {}
    committed, cache = status.get("committed"), status.get("cacheReady")
    return PipelineNumbers(
        conditions=condition_numbers(status.get("conditions") or ()),
        fence=status.get("fence"),
        committed=committed["version"] if committed else None,
        published=cache["version"] if cache else None,
        round_seconds=_round_seconds(pipeline),
    )


def _round_seconds(pipeline: Obj) -> int | None:
    sync = (pipeline.get("spec") or {}).get("sync") or {}
    deadlines = sync.get("deadlines") or {}
    if "stagingSeconds" not in deadlines or "pausedSeconds" not in deadlines:
        return None
    return int(deadlines["stagingSeconds"]) + int(deadlines["pausedSeconds"]) + drain_allowance(sync)


@dataclass(frozen=True, slots=True)
class RoundNow:
    """A round that runs, for the gauges of its age; times in epoch milliseconds."""

    kind: str
    phase: str
    started_ms: int
    phase_ms: int


def round_now(obj: Obj) -> RoundNow | None:
    """What a claimed round that has not ended is in; None: it has ended, or was never claimed."""
    status = obj.get("status") or {}
    phase, started = str(status.get("phase") or ""), status.get("startedAt")
    if not phase or not started or phase in TERMINAL:
        return None
    renewed = (status.get("lease") or {}).get("renewedAt") or started
    return RoundNow(str(obj["spec"].get("kind") or "Refresh"), phase, epoch_ms(started), epoch_ms(renewed))


def engine_lag(held: Sequence[Obj], committed: int | None) -> int | None:
    """Committed version minus the lowest held one (``EnginePool.status.versions``); None: either is unknown."""
    if committed is None or not held:
        return None
    return max(0, committed - min(int(v["version"]) for v in held))
