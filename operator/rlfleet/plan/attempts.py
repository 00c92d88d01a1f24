"""Tries to move a round: which one is applied, which one is a replay, which one is refused, and why.

Invariants ([rounds] B2, R3 to R5):
- the reasons form a closed list and are checked in its order, so equal situations are always told in the same word;
- the very same request once more is a success (Duplicate) and changes nothing; another end of an ended round is not;
- only a claim or a hand-off brings a new generation; everything else must present the one that owns the round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api.v1alpha1.syncround_status import MAX_ATTEMPTS, AttemptOp, AttemptResult, RefusalReason
from rlfleet.plan.rounds import TERMINAL

_MOVES_OWNER = frozenset({AttemptOp.CLAIM, AttemptOp.HANDOFF})


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What the durable objects say of a round when somebody tries to move it."""

    exists: bool = True
    phase: str = ""
    holder: str = ""
    """Who owns the round, or the pipeline's slot, whichever was read; empty: nobody has claimed it."""
    generation: int = 0
    """The generation of that owner; 0: never claimed."""
    slot: str = ""
    """UID of the operation that owns the pipeline's slot; empty: free, or not read."""
    applied: frozenset[str] = frozenset()
    """Ids of the requests that are recorded as applied."""


@dataclass(frozen=True, slots=True)
class Presented:
    """One try."""

    op: AttemptOp
    request_id: str
    round_uid: str
    holder: str
    generation: int
    outcome: str = ""
    """Settle: the terminal phase that is asked for."""


@dataclass(frozen=True, slots=True)
class Applied:
    """It may be done."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """It has been done already: a success, and nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """It must not be done."""

    reason: RefusalReason


Decision = Applied | Duplicate | Rejected


def request_id(op: AttemptOp, generation: int, what: str) -> str:
    """The id of a request: the same try of the same owner has the same id, so that a replay is recognised."""
    return f"{op.value}-{generation}-{what}"[:128]


def decide(record: RoundRecord, asked: Presented) -> Decision:
    """Judge one try by what is durable. The reasons are checked in the order of the closed list."""
    if not record.exists:
        return Rejected(RefusalReason.UNKNOWN_ROUND)
    ended = record.phase in TERMINAL
    if asked.request_id in record.applied:
        return Duplicate()
    if ended and asked.op is not AttemptOp.SETTLE:
        return Rejected(RefusalReason.NOT_OPEN)
    moves = asked.op in _MOVES_OWNER
    newer = asked.generation > record.generation
    if not moves and not newer and record.holder and asked.holder != record.holder:
        return Rejected(RefusalReason.NOT_OWNER)
    if asked.generation < record.generation or (moves and record.generation > 0 and not newer):
        return Rejected(RefusalReason.STALE_FENCE)
    if ended:
        # A successor that finds the end which it would have written has nothing to settle: that is the same settle.
        return Duplicate() if asked.outcome == record.phase else Rejected(RefusalReason.ALREADY_SETTLED)
    if record.slot not in ("", asked.round_uid):
        return Rejected(RefusalReason.EXCLUDED)
    return Applied()


def row(asked: Presented, decision: Decision, at: str) -> dict[str, Any]:
    """``status.attempts[]`` of one try; ``at`` in RFC 3339."""
    result = {Applied: AttemptResult.APPLIED, Duplicate: AttemptResult.DUPLICATE, Rejected: AttemptResult.REJECTED}
    entry: dict[str, Any] = {
        "requestId": asked.request_id,
        "op": asked.op.value,
        "result": result[type(decision)].value,
        "generation": asked.generation,
        "at": at,
    }
    if isinstance(decision, Rejected):
        entry["reason"] = decision.reason.value
    return entry


def append(rows: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The list with ``new`` behind it: bounded, the newest kept; what is there already is not added twice."""
    kept = [dict(r) for r in rows]
    kept += [dict(n) for n in new if not any(_same(n, r) for r in kept)]
    return kept[-MAX_ATTEMPTS:]


def applied(rows: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Ids of the requests that these rows say to have been applied."""
    return frozenset(str(r["requestId"]) for r in rows if r.get("result") == AttemptResult.APPLIED.value)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(k) == b.get(k) for k in ("requestId", "op", "result", "reason"))
