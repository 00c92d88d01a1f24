"""The terminal status of a round as it is written: outcome, failure, conditions, members. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from rlfleet.api.condition_list import set_condition
from rlfleet.api.conditions import ConditionStatus, Reason, RoundCondition
from rlfleet.api.timestamps import rfc3339
from rlfleet.plan.verdicts import Verdict

if TYPE_CHECKING:
    from rlfleet.control.rounds.fleet import Fleet
    from rlfleet.control.rounds.transfer import Transfer

MAX_LISTED = 64
#: Phases in which a cancel is recorded and nothing more (in Holding it is an exit).
MOVING = ("Transferring", "Committed")

_RESULT = {
    Verdict.WHOLE: "Ok",
    Verdict.LOADED: "Unknown",
    Verdict.UNTOUCHED: "Failed",
    Verdict.POISONED: "Unknown",
    Verdict.UNKNOWN: "Unknown",
    Verdict.LOST: "Lost",
    Verdict.DROPPED: "Dropped",
}


class StatusOf(Protocol):
    """Makes the pipeline's status from an observed fleet (control.pipeline_view.PipelineView)."""

    def bind(self, fleet: Fleet) -> Any:
        """Look at this fleet."""

    def __call__(
        self, *, trouble: tuple[Reason, str] | None, working: tuple[Reason, str] | None = None
    ) -> dict[str, Any]:
        """The status fields. ``trouble``: what a person should see; ``working``: what runs or waits now."""


def settled(
    obj: dict[str, Any],
    *,
    outcome: str,
    reason: Reason,
    message: str,
    now_ms: int,
    stage: str | None = None,
    committed: bool | None = None,
) -> dict[str, Any]:
    """The terminal status of a round, whether or not it was ever claimed.

    ``stage``: where it failed (None: in the phase that it is in); ``committed``: whether its version was committed by
    it (None: what its status says, for a commit is never taken back).
    """
    known = obj.get("status") or {}
    stage = str(known.get("phase") or "Pending") if stage is None else stage
    committed = bool(known.get("committed")) if committed is None else committed
    now = rfc3339(now_ms)
    meta = obj.get("metadata") or {}
    generation = int(meta.get("generation") or 0)
    conditions: list[dict[str, Any]] = list((obj.get("status") or {}).get("conditions") or [])
    succeeded = outcome == "Succeeded"
    for kind, value in (
        (RoundCondition.COMPLETE, succeeded),
        (RoundCondition.FAILED, outcome in ("Failed", "Expired")),
        (RoundCondition.PROGRESSING, False),
    ):
        conditions = set_condition(conditions, kind, ConditionStatus.of(value), reason, message, generation, now)
    if outcome != "Cancelled":
        conditions = with_late_cancel(conditions, obj, now)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "phase": outcome,
        "outcome": outcome,
        "committed": committed,
        "conditions": conditions,
        "finishedAt": now,
    }
    if not succeeded:
        # Numbers and names differ from failure to failure of one kind; stage and reason do not.
        digest = hashlib.sha256(f"{stage}\0{reason.value}".encode()).hexdigest()[:16]
        status["failure"] = {"stage": stage, "reason": reason.value, "digest": digest, "message": message[:1024]}
    return status


def with_late_cancel(conditions: list[dict[str, Any]], obj: dict[str, Any], now: str) -> list[dict[str, Any]]:
    """Record a cancel (or deletion) that came when weights were moving already: the evidence of the members decides."""
    meta = obj.get("metadata") or {}
    phase = (obj.get("status") or {}).get("phase")
    asked = (obj.get("spec") or {}).get("cancel") or "deletionTimestamp" in meta
    if not asked or phase not in MOVING:
        return conditions
    return set_condition(
        conditions,
        RoundCondition.CANCEL_REQUESTED,
        ConditionStatus.TRUE,
        Reason.CANCEL_TOO_LATE,
        "asked for after weights began to move: the round ends by what its engines hold",
        int(meta.get("generation") or 0),
        now,
    )


def member_results(transfer: Transfer | None, verdicts: dict[str, Verdict]) -> list[dict[str, Any]]:
    """``status.members``: what became of each member."""
    # Up to 64 members everyone is listed; in larger rounds only the exceptions, so that status stays small.
    listed = {e: v for e, v in verdicts.items() if len(verdicts) <= MAX_LISTED or v is not Verdict.WHOLE}
    members = transfer.plan.members if transfer is not None else ()
    disrupted = {m.engine for m in members if transfer is not None and transfer.fleet.departure(m.pod_uid)}
    rows = []
    for engine, v in sorted(listed.items()):
        row = {"engine": engine, "result": _RESULT[v]}
        known = transfer.trouble.by_engine.get(engine) if transfer is not None else None
        if v is Verdict.LOST:
            row["reason"] = Reason.LOST.value
        elif v is Verdict.DROPPED:
            row["reason"] = (Reason.DISRUPTED if engine in disrupted else Reason.DROPPED).value
        elif v is not Verdict.WHOLE and known is not None:
            row["reason"] = known[0].value
        elif v is Verdict.POISONED:
            row["reason"] = Reason.POISONED.value
        rows.append(row)
    return rows[:MAX_LISTED]
