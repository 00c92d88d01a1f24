"""What is wrong between rounds and what puts it right: the decisions of the repair pass (DESIGN section 5).

Invariants:
- an engine is resumed or routed for one reason only: its gate's own record proves the committed weights;
- what is not known (a silent gate, an engine that does not answer) is left alone: silence is no evidence;
- a round that is the only evidence of what an engine went through is never swept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlfleet.api.wire import EngineState, Held, SenderStatus
from rlfleet.plan.allowance import caught_up
from rlfleet.plan.drops import is_closed
from rlfleet.plan.rounds import TERMINAL, Committed, Engine
from rlfleet.plan.verdicts import at_committed

#: Phases in which engines of a round may have been touched.
TOUCHED = frozenset({"Quiescing", "Transferring", "Holding", "Committed"})


class Act(StrEnum):
    """What puts one engine right."""

    SETTLE = "Settle"  # an operation has no known end: a verified pause proves the engine idle
    CLOSE = "Close"  # open or routed although nothing proves the committed weights: pause it, take it out
    RESUME = "Resume"  # proven at the committed weights, closed by nobody's order: let it serve
    OPEN = "Open"  # serves, but a router does not list it


@dataclass(frozen=True, slots=True)
class Need:
    """One engine that is not as it should be. ``doubtful``: a passing state can look like this, so look twice."""

    engine: str
    pod_uid: str
    incarnation: str
    act: Act
    doubtful: bool = False


def needs(engines: Iterable[Engine], committed: Committed | None, *, pipeline: str) -> tuple[Need, ...]:
    """What the engines of a pipeline (by UID) need while no operation owns them.

    Those that their pool takes out of service or puts to sleep are closed where they must be, never opened. Without
    anything committed a proven engine is left as it is: that what it serves is wrong is not known either.
    """
    found = []
    for e in sorted(engines, key=lambda e: e.name):
        need = _need(e, committed, pipeline=pipeline)
        if need is not None:
            found.append(Need(e.name, e.pod_uid, e.incarnation, *need))
    return tuple(found)


def left_hold(sender: SenderStatus | None, *, pipeline: str) -> Held | None:
    """The fence under which a sender holds weights for an operation that has ended; None: there is no such hold.

    Only while nobody owns the pipeline (by UID): every operation that held has ended then. The hold is ended in its
    operation's own name and under its own generation, so the sender refuses that once anybody newer was there; one
    that a newer operation has overtaken without a hold of its own is left to its deadline.
    """
    if sender is None or sender.hold is None:
        return None
    fence = sender.fence
    return fence if (fence.pipeline, fence.operation) == (pipeline, sender.hold.operation) else None


def _need(e: Engine, committed: Committed | None, *, pipeline: str) -> tuple[Act, bool] | None:
    s = e.status
    if e.gone or e.leaving or s is None or not s.enrolled or s.incarnation is None or s.pipeline not in ("", pipeline):
        return None
    if s.in_flight or s.engine.state is not EngineState.READY:
        return None
    if s.uncertain:
        # Settling pauses it; one that leaves keeps serving what it has until its pool takes it away.
        return None if e.unwanted and e.owned else (Act.SETTLE, False)
    listed = any(s.routed.values())
    # A pause that is neither proven nor disproved: paused past its gate, or a health check failed just now.
    doubtful = s.engine.paused is None
    if e.unwanted and not e.owned:
        # Nobody deletes its pod, so it does not go by itself: it is left closed.
        return None if is_closed(e) else (Act.CLOSE, doubtful)
    if at_committed(e, committed):
        if e.unwanted or e.resting or e.shut or e.undiscovered or not caught_up(e, committed):
            return None  # plan.elastic or plan.quarantine sees to it; another checksum is a CatchUp's business
        if s.engine.paused is not False:
            return Act.RESUME, doubtful
        if e.draining:
            return None  # routed again it would get requests until its pod is evicted
        return (Act.OPEN, False) if any(v is False for v in s.routed.values()) else None
    if s.holds is None:
        # Its gate keeps an engine paused that nothing proves; what is left to do is its routing.
        return (Act.CLOSE, False) if listed else None
    if committed is None:
        return None
    if s.engine.paused is not True:
        return Act.CLOSE, doubtful
    return (Act.CLOSE, False) if listed else None


# ------------------------------------------------------------------------------------------------ rounds


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What repair and sweep need of one SyncRound."""

    name: str
    uid: str
    phase: str
    version: int
    generation: int = 0
    """Of its lease: the highest fence under which anybody moved it; 0: nobody ever did."""
    planned: bool = False
    allow_rollback: bool = False
    created_ms: int = 0
    finished_ms: int | None = None
    deleting: bool = False
    members: frozenset[str] = frozenset()
    """Pod UIDs of its members."""
    kind: str = "Refresh"

    @property
    def ended(self) -> bool:
        """It has a verdict."""
        return self.phase in TERMINAL


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Rounds that moved engines and that no claim names any more: one to go on with, the others to settle."""

    resume: RoundFacts | None = None
    settle: tuple[tuple[RoundFacts, str], ...] = ()
    """With why, for people."""


def abandoned(rounds: Iterable[RoundFacts], committed: Committed | None) -> Abandoned:
    """Sort the rounds that are in mid-air although the slot is free (a status that was lost, or set back by hand).

    Their holders are deposed: whoever leads now raises the fence. The one that moved last goes on by evidence where its
    plan is still there and nothing newer was committed; the others end.
    """
    left = [r for r in rounds if not r.ended and r.phase in TOUCHED]
    if not left:
        return Abandoned()
    last = max(left, key=lambda r: (r.generation, r.created_ms, r.name))
    settle = [(r, "another operation took its engines over") for r in left if r is not last]
    if not last.planned:
        return Abandoned(None, (*settle, (last, "its claim and its plan were lost")))
    if committed is not None and committed.version > last.version and not last.allow_rollback:
        return Abandoned(None, (*settle, (last, f"its claim was lost and version {committed.version} is committed")))
    return Abandoned(last, tuple(settle))


# ------------------------------------------------------------------------------------------------ sweep


@dataclass(frozen=True, slots=True)
class Keep:
    """Rounds that no sweep may take."""

    uids: frozenset[str]
    members: frozenset[str]
    """Pod UIDs of engines that can not be asked now: every round they were members of may be their only evidence."""


def evidence(engines: Iterable[Engine]) -> Keep:
    """Which rounds explain engines that are not resolved: those named by a load that is not proven whole."""
    uids: set[str] = set()
    members: set[str] = set()
    for e in engines:
        if e.gone or e.unborn:
            continue
        if e.status is None:
            members.add(e.pod_uid)
            continue
        loads = e.status.loads
        if loads and (e.status.uncertain or e.status.in_flight or e.status.holds is None or not loads[-1].published):
            uids.add(loads[-1].operation)
    return Keep(frozenset(uids), frozenset(members))


def sweep(
    rounds: Sequence[RoundFacts], keep: Keep, *, now_ms: int, ttl_ms: int, limit: int, last: str | None
) -> tuple[RoundFacts, ...]:
    """Ended rounds to delete: those older than ``ttl_ms`` and, oldest first, those beyond ``limit`` of their kind.

    Kept in any case: the one that ended last (by name), the one of each kind that holds the highest fence, and
    evidence. They count towards the limit.
    """
    chosen: dict[str, RoundFacts] = {}
    # Each kind for itself: engines that come and go must not push out what is known of the trainer's rounds.
    for kind in sorted({r.kind for r in rounds}):
        mine = [r for r in rounds if r.kind == kind]
        highest = max(r.generation for r in mine)
        ended = sorted((r for r in mine if r.ended and not r.deleting), key=lambda r: (r.created_ms, r.name))
        free = [
            r
            for r in ended
            if r.name != last
            and not (r.generation and r.generation == highest)
            and r.uid not in keep.uids
            and not r.members & keep.members
        ]
        excess = max(0, len(ended) - max(1, limit))
        old = [r for r in free if r.finished_ms is not None and r.finished_ms + ttl_ms <= now_ms]
        chosen |= {r.uid: r for r in [*free[:excess], *old]}
    return tuple(chosen.values())
