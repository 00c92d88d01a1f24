"""What a round in Holding does next (DESIGN section 5, Holding). Pure: one look at the world in, one move out.

Invariants:
- nothing opens while too many are missing; every look is judged anew, nothing is remembered;
- there is always an exit, and none of them depends on what is blocked: time that is spent ends in replaced pods or in a
  condition that asks for a person, who can cancel, and a newer round takes over whatever this one holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlfleet.plan.rounds import Committed, Engine, RoundPlan
from rlfleet.plan.verdicts import Next, at_committed

#: How often a round that was refused while it holds inherited engines starts over.
START_OVERS = 3
#: Seconds for which an engine must be in the way without a break before its pod is replaced, once time is spent: that
#: one answer was lost is no reason.
LASTING_SECONDS = 2.0
#: The same for a pod that came after the round was planned. It had no share of pausedSeconds, and its gate must start
#: before it can be fenced: replaced any sooner, each new pod would only make room for the next one.
NEWCOMER_SECONDS = 60.0


class Move(StrEnum):
    """What to do now."""

    COMMIT = "Commit"  # healed enough
    ABORT = "Abort"  # no member is whole (any more), or nothing is held any more: by the resume rule
    GONE = "Gone"  # the round's object vanished: by the resume rule
    CANCEL = "Cancel"  # somebody asked for it: by the resume rule
    SUPERSEDE = "Supersede"  # a newer Refresh inherits the closed engines
    SENDER_GONE = "SenderGone"  # what is missing can come from nowhere: by the resume rule
    HEAL = "Heal"  # stage, load, verify or publish again
    START_OVER = "StartOver"  # what refused the round does not apply any more
    REPLACE = "Replace"  # the allowance is spent: make room for new pods
    ASK = "Ask"  # the allowance is spent and nothing may be deleted: a person must act
    WAIT = "Wait"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What others want of a round in Holding, and what is known of its sender."""

    vanished: bool = False
    cancelled: bool = False
    superseded: bool = False
    sender_gone: bool = False
    """Its pod is proven gone, and no other sender has come."""
    sender_replaced: bool = False
    """Another sender process is reported, which counts its versions anew: a Refresh of it is to be expected."""


def on_failure_of(names: Iterable[str], engines: Mapping[str, Engine], *, asked: str) -> tuple[str, str]:
    """What becomes of these engines in the end (Replace or Hold), and why, for people.

    ``asked``: spec.sync.onFailure. Pods that somebody else makes are not replaced, nor those that a person keeps in
    quarantine: where no other is left, a person must act.
    """
    left = [engines[n] for n in names if n in engines and not engines[n].gone]
    adopted = sorted(e.name for e in left if not e.owned)
    kept = sorted(e.name for e in left if e.owned and e.quarantined)
    if asked == "Replace" and left and len(adopted) + len(kept) == len(left):
        whose = f"{', '.join(adopted[:4])}: nobody but its maker replaces an adopted pod" if adopted else ""
        whom = f"{', '.join(kept[:4])}: in quarantine, which keeps the pod" if kept else ""
        return "Hold", "; ".join(why for why in (whose, whom) if why)
    return asked, f"onFailure is {asked}"


def may_replace_pod(e: Engine) -> bool:
    """The last resort may delete the engine's pod: it is there, ours, and in nobody's quarantine."""
    return e.owned and not e.gone and not e.leaving and not e.quarantined


@dataclass(frozen=True, slots=True)
class Turn:
    """One look of a round that has whole members."""

    next: Next
    wishes: Wishes
    can_heal: bool
    """Something can be staged, loaded, verified or published now, from what is there."""
    spent: bool
    """pausedSeconds are over, or every missing member has used up its tries."""
    on_failure: str


def turn(t: Turn) -> Move:
    """The next move of a round in Holding after its transfer."""
    if t.wishes.vanished:
        return Move.GONE
    if t.next is Next.COMMIT:
        return Move.COMMIT
    if t.next is Next.ABORT:
        return Move.ABORT
    if t.wishes.cancelled:
        return Move.CANCEL
    if t.wishes.superseded:
        return Move.SUPERSEDE
    if t.can_heal and not t.spent:
        return Move.HEAL
    # A round that only waits for somebody to be fenced needs nothing of its sender any more.
    lost = t.wishes.sender_gone or (t.wishes.sender_replaced and t.spent)
    if lost and t.next is Next.HOLD:
        return Move.SENDER_GONE
    if t.spent:
        return Move.REPLACE if t.on_failure == "Replace" else Move.ASK
    return Move.WAIT


@dataclass(frozen=True, slots=True)
class RefusedTurn:
    """One look of a round that was refused before its transfer, but inherited closed engines."""

    closed: int
    """Inherited engines that live and do not hold what is committed: without this round nobody would own them."""
    wishes: Wishes
    can_start: bool
    """Planning would succeed now, and stagingSeconds are not over."""
    start_overs: int
    spent: bool
    on_failure: str


def refused_turn(t: RefusedTurn) -> Move:
    """The next move of a refused round that holds inherited engines."""
    if t.wishes.vanished:
        return Move.GONE
    if t.wishes.cancelled:
        return Move.CANCEL
    if t.wishes.superseded:
        return Move.SUPERSEDE
    if t.closed == 0:
        return Move.ABORT
    if t.can_start and not t.spent and t.start_overs < START_OVERS:
        return Move.START_OVER
    if t.wishes.sender_gone or (t.wishes.sender_replaced and t.spent):
        return Move.SENDER_GONE
    if t.spent:
        return Move.REPLACE if t.on_failure == "Replace" else Move.ASK
    return Move.WAIT


def planned_pods(plan: RoundPlan, engines: Iterable[Engine]) -> frozenset[str]:
    """UIDs of the pods that the round's plan names in any way."""
    silent = {e.pod_uid for e in engines if e.name in plan.silent}
    return frozenset({*(m.pod_uid for m in plan.members), *plan.blocked, *silent})


def overdue(since: Mapping[str, float], *, planned: Collection[str], now: float) -> frozenset[str]:
    """Of the pods in the way those to replace when time is spent. ``since``: from when on each has been in the way."""
    return frozenset(
        uid for uid, at in since.items() if now - at >= (LASTING_SECONDS if uid in planned else NEWCOMER_SECONDS)
    )


def left_closed(ended: Mapping[str, Any]) -> frozenset[str]:
    """UIDs of the pods that an ended round left closed for its successor: it was superseded while it held them.

    ``ended``: the SyncRound. What it had inherited itself goes on to the next one.
    """
    status = ended.get("status") or {}
    if status.get("outcome") != "Superseded" or (status.get("failure") or {}).get("stage") != "Holding":
        return frozenset()
    members = {str(m["podUID"]) for m in (status.get("plan") or {}).get("members") or []}
    return frozenset(members | {str(uid) for uid in (status.get("refused") or {}).get("podUIDs") or []})


def inherited(engines: Iterable[Engine], uids: frozenset[str], committed: Committed | None) -> tuple[str, ...]:
    """Engines out of ``uids`` that nobody would own if the round ended now: alive, and not proven at ``committed``.

    One whose gate is silent counts: what it holds is unknown.
    """
    return tuple(sorted(e.name for e in engines if e.pod_uid in uids and not e.gone and not at_committed(e, committed)))
