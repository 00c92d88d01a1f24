"""The operator's program: the executor's decisions between its effects, in the executor's order.

What follows an answer is local and happens in the same step. Every decision is the planner's own (tests/model/decide)
and every arithmetic of the fence is ``plan.claims``; here is only what comes after what, function by function:
control/pipeline._reconcile (``decide_top``), rounds/executor (``claimed`` .. ``load``), rounds/barrier in ``moving``;
here rounds/closing (``look``, ``reopen``), rounds/ending (``abort``, ``refuse``, ``settle``), rounds/healing (``hold``)
and, outside rounds, repair/engines (``orphan``) and elastic.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlfleet.plan.holding import Move
from rlfleet.plan.repair import Act
from rlfleet.plan.rounds import TERMINAL
from rlfleet.plan.verdicts import Next, Verdict
from tests.model import decide
from tests.model.gate import FENCE
from tests.model.hand import MARK, POLL, TRIES
from tests.model.moving import Moving
from tests.model.state import (
    CALL,
    CLOSE,
    ELASTIC,
    LOAD,
    NOT_OK,
    OPEN,
    PAUSE,
    RELEASE,
    RESUME,
    VERIFY,
    WAKE,
    Round,
)

#: What repair orders for whom, in this order.
MENDING = (
    (Act.SETTLE, PAUSE),
    (Act.SETTLE, CLOSE),
    (Act.CLOSE, PAUSE),
    (Act.CLOSE, CLOSE),
    (Act.RESUME, RESUME),
    (Act.OPEN, OPEN),
)


def COMMIT_FIRST() -> bool:
    """Nothing opens before the commit is written."""
    return True


def PAUSED_BEFORE_RELEASE() -> bool:
    """Only an engine that has left its router and is proven paused is asked to release its memory."""
    return True


def FENCES_WAKES() -> bool:
    """A slot in which a wake has no good end is freed under a higher generation."""
    return True


def GIVES_WAY() -> bool:
    """Work outside rounds makes room for a Refresh that could run, up to its first call that can not be taken back."""
    return True


class Run(Moving):
    """What an operator does when an answer has come."""

    __slots__ = ()

    # -------------------------------------------------------------------------------------- look, commit, reopen

    def look(self, where: str) -> None:
        """Observe everybody, fence whoever is not fenced, close who could serve something else, conclude."""
        self.set(barrier=(where,))
        self.see_pods()
        self.fan("looked", dict.fromkeys(decide.unfenced(self.views, self.op.generation), FENCE))

    def after_looked(self) -> None:
        serving = decide.could_serve(self.views, self.members, self.op.work, *self.target)
        self.set(barrier=(self.op.barrier[0], serving))
        self.fan("shut", dict.fromkeys(serving, PAUSE), again=1)

    def after_shut(self) -> None:
        self.fan("shut_polled", dict.fromkeys(self.op.barrier[1], POLL))

    def after_shut_polled(self) -> None:
        where, serving = self.op.barrier
        self.set(barrier=())
        if where == "nobody":
            # closing.commit_without_members: only if everybody is proven asleep or gone
            if decide.in_the_way(self.views):
                self.refuse("Failed")
            else:
                self.set(pc="rp", arg=("commit",))
            return
        still = decide.unfenced(self.views, self.op.generation)
        still = tuple(sorted({*still, *decide.not_paused(self.views, serving)}))
        limit = self.scope.max_unavailable
        outcome = decide.conclude(self.views, self.members, self.op.work, *self.target, still, limit)
        if where == "holding":
            self.hold(outcome.next, decide.numbers((*outcome.missing, *outcome.unfenced, *outcome.blocked)))
        elif outcome.next is Next.COMMIT:
            if COMMIT_FIRST():
                self.set(pc="rp", arg=("commit",))
            else:
                self.reopen()
        elif outcome.next is Next.ABORT:
            self.abort("Failed")
        else:
            self.set(pc="rp", arg=("hold",))  # Healing.hold begins with looking anew

    def committed(self) -> None:
        if any(m > 0 for m in self.members):
            self.reopen()
        else:
            self.settle("Succeeded")

    def reopen(self) -> None:
        if self.scope.drops:
            self.see_pods()
        resume, close, missing = decide.reopening(self.views, self.members, self.op.work, *self.target)
        ok = [i for i in self.named(Verdict.WHOLE) if i not in close and self.view(i).leaving]
        if ok:
            self.wrong(f"pods {[self.view(i).pod for i in ok]} are on their way out and count as Ok")
        self.set(barrier=(int(len(missing) > self.scope.max_unavailable),))
        for i in range(len(self.columns)):
            self.mine(i, "result", MARK if i in close else 0)
        self.fan("resumed", dict.fromkeys(resume, RESUME), keep=True, again=1)

    def after_resumed(self) -> None:
        self.phase("Committed", "said_committed")

    def said_committed(self) -> None:
        resumed = [i for i in range(len(self.columns)) if self.good(i) and not self.result(i) & MARK]
        bad = [i for i in range(len(self.columns)) if self.result(i) & NOT_OK]
        self.set(barrier=(int(bool(bad) or self.op.barrier[0]),))
        self.fan("whole_polled", dict.fromkeys(resumed, POLL), keep=True)

    def after_whole_polled(self) -> None:
        orders = {i: CLOSE for i in range(len(self.columns)) if self.result(i) & MARK}
        orders |= dict.fromkeys(self.unrouted(silent=True), OPEN)
        self.fan("opened", orders, keep=True)

    def after_opened(self) -> None:
        bad = [i for i in range(len(self.columns)) if self.result(i) & NOT_OK and not self.result(i) & MARK]
        self.settle("Failed" if bad or self.op.barrier[0] else "Succeeded")

    # -------------------------------------------------------------------------------------- hold

    def hold(self, after: Next, missing: tuple[int, ...]) -> None:
        self.set(barrier=(after, missing))
        if after is Next.HOLD and all(self.view(i).leaving for i in missing):
            self.wrong("a round holds because of pods that others have asked to go")
        if after in (Next.HOLD, Next.WAIT_FENCE) and self.op.round.phase != "Holding":
            self.phase("Holding", "holding")
        else:
            self.set(pc="rr", arg=("holding",))

    def held_on(self) -> None:
        if self.scope.demands:
            self.fan("heard", dict.fromkeys(self.live(), POLL))
        else:
            self.look("holding")

    def after_heard(self) -> None:
        """The trainer's demand is recorded in the middle of a round, too (``control.demand.hear_demands``)."""
        seen = self.op.seen
        rows = decide.grants(self.views, self.shared, seen.grants, self.world.demand, seen.fence)
        if rows != seen.grants:
            self.set(pc="wg", arg=(rows, "heard"))
        else:
            self.look("holding")

    def holding(self) -> None:
        """One turn: what others want of the round, and what can be done (``rr`` has read the round just now)."""
        after, missing = self.op.barrier
        self.set(barrier=())
        loaded = any(self.view(i).status[9][VERIFY] >> 2 < TRIES for i in self.named(Verdict.LOADED))
        can_heal = loaded or bool(self.unclear() or self.loadable())
        # Time is up when nothing is left to try: waiting longer changes nothing that is modelled.
        move = decide.turn(
            after,
            self.stopped(),
            not self.op.round.exists,
            self.superseded(),
            can_heal,
            not can_heal,
            self.scope.on_failure,
        )
        if move is Move.COMMIT:
            self.set(pc="rp", arg=("commit",))
        elif move in (Move.ABORT, Move.GONE, Move.SENDER_GONE):
            self.abort("Failed")
        elif move is Move.CANCEL:
            self.abort("Cancelled")
        elif move is Move.SUPERSEDE:
            self.settle("Superseded")
        elif move is Move.HEAL:
            self.fan("cleared", dict.fromkeys(self.unclear(), PAUSE), again=1)
        elif move is Move.REPLACE and (doomed := [i for i in missing if i in self.live()]):
            for i in doomed:
                self.mine(i, "todo", CALL)
            self.set(pc="delete")
        else:
            self.set(pc="rp", arg=("hold",))

    def superseded(self) -> bool:
        """A newer round can take over."""
        mine = self.scope.versions[self.op.work][0]
        newer = tuple(
            (i, r.phase, *self.scope.versions[i], bool(self.world.cancelled >> i & 1))
            for i, r in enumerate(self.world.rounds)
            if i != self.op.work and r.exists and r.phase not in TERMINAL and self.scope.versions[i][0] > mine
        )
        if not newer:
            return False
        said = (self.world.sender.incarnation, self.world.sender.hold)
        return decide.triage(newer, self.op.seen.committed, said, self.slots())[1] >= 0

    def unclear(self) -> list[int]:
        """Members with an order that has no known end, and tries left to clear that."""
        return [
            i
            for i, m in enumerate(self.members)
            if m > 0 and (s := self.view(i).status) and s[6] and not s[5] and s[9][PAUSE] >> 2 < TRIES
        ]

    def loadable(self) -> list[int]:
        judged = self.verdicts
        return [
            i
            for i, m in enumerate(self.members)
            if m > 0 and decide.can_load(self.view(i), m, judged[f"e{i}"], self.op.work, self.op.round.bytes)
        ]

    def after_cleared(self) -> None:
        self.fan("cleared_polled", dict.fromkeys(self.live(), POLL))

    def after_cleared_polled(self) -> None:
        again = self.loadable()
        if again:
            self.fan("reloaded", dict.fromkeys(again, LOAD), again=1)
        else:
            self.finish_loads("healed", again=1)

    def after_reloaded(self) -> None:
        self.finish_loads("healed", again=1)

    def after_healed(self) -> None:
        self.set(pc="rp", arg=("hold",))

    # -------------------------------------------------------------------------------------- abort, refuse, settle

    def abort(self, outcome: str) -> None:
        self.see_pods()
        self.set(barrier=(outcome,))
        polled = [i for i, m in enumerate(self.members) if m > 0 and i in self.live()]
        self.fan("abort_polled", dict.fromkeys(polled, POLL))

    def after_abort_polled(self) -> None:
        resume, close = decide.abort(self.views, self.members, self.op.work, self.op.seen.committed)
        self.resume(resume, close)

    def refuse(self, outcome: str) -> None:
        """Nothing was touched; engines inherited closed from an earlier round resume if they hold what is committed."""
        self.set(barrier=(outcome,))
        nobody = (0,) * len(self.columns)
        resume, _ = decide.abort(self.views, nobody, self.op.work, self.op.seen.committed)
        self.resume(resume, ())

    def resume(self, resume: Iterable[int], close: Iterable[int]) -> None:
        orders = dict.fromkeys(close, CLOSE)
        if self.op.seen.committed:
            orders |= dict.fromkeys(resume, RESUME)
        for i in range(len(self.columns)):
            self.mine(i, "result", MARK if orders.get(i) == CLOSE else 0)
        self.fan("abort_resumed", orders, keep=True, again=1)

    def after_abort_resumed(self) -> None:
        resumed = [i for i in range(len(self.columns)) if self.good(i) and not self.result(i) & MARK]
        self.fan("abort_resumed_polled", dict.fromkeys(resumed, POLL), keep=True)

    def after_abort_resumed_polled(self) -> None:
        orders = {i: OPEN for i in range(len(self.columns)) if i in self.unrouted()}
        self.fan("abort_opened", orders)

    def after_abort_opened(self) -> None:
        self.settle(self.op.barrier[0])

    def settle(self, outcome: str) -> None:
        self.set(pc="sender", arg=("release", outcome), barrier=())

    def settled(self) -> None:
        self.set(pc="wp", arg=("free",))

    # -------------------------------------------------------------------------------------- orphan

    def after_orphan_fenced(self) -> None:
        busy = [i for i in self.live() if self.view(i).status and self.view(i).status[5]]
        self.fan("orphan_waited", dict.fromkeys(busy, POLL))

    def after_orphan_waited(self) -> None:
        self.mend(0)

    def mend(self, step: int) -> None:
        """Settle, close, resume, route (``EngineRepair._apply``): each step on what the one before it left."""
        for n in range(step, len(MENDING)):
            act, kind = MENDING[n]
            due = [i for i, what in decide.needs(self.views, self.op.seen.committed) if what is act]
            if act is Act.CLOSE and kind == PAUSE:
                due = list(decide.not_paused(self.views, tuple(due)))
            if due and (act is not Act.RESUME or self.op.seen.committed):
                self.set(barrier=(n,))
                self.fan("mended", dict.fromkeys(due, kind), again=1)
                return
        self.set(pc="wp", arg=("free",), barrier=())

    def after_mended(self) -> None:
        self.fan("mended_polled", {i: POLL for i in range(len(self.columns)) if self.result(i)})

    def after_mended_polled(self) -> None:
        self.mend(self.op.barrier[0] + 1)

    # -------------------------------------------------------------------------------------- elastic/step, elastic/work

    def after_outside_seen(self) -> None:
        """Between rounds: repair, then the trainer's demand, then who is to be shut, to sleep or to wake."""
        seen = self.op.seen
        mend = self.scope.mends and decide.needs(self.views, seen.committed)
        if not mend and self.scope.demands:
            rows = decide.grants(self.views, self.shared, seen.grants, self.world.demand, seen.fence)
            if rows != seen.grants:
                self.set(pc="wg", arg=(rows, ""))
                return
        behind = decide.behind(self.views, self.shared, seen.grants, seen.fence) if self.scope.demands else ()
        shrink, wake = decide.elastic(self.views, behind)
        if mend or decide.shut(self.views) or shrink or wake:
            kind = "Mend" if mend else "Quarantine" if decide.shut(self.views) else "Offload" if shrink else "Wake"
            self.set(pc="claim", work=ELASTIC, round=Round(), round_fresh=0, arg=(kind, 0), takeover=0, barrier=())
        else:
            self.rest()

    def elastic(self) -> None:
        """Behind the barrier: who is still to be moved, as the gates answered under our generation."""
        shrink, wake = decide.elastic(self.views)
        kind = self.op.seen.active[0]
        if kind == "Over":
            self.set(pc="wp", arg=("free",))
        elif kind in ("Offload", "Quarantine"):
            out = shrink if kind == "Offload" else decide.shut(self.views)
            self.fan("sleepers_closed", dict.fromkeys(out, CLOSE), again=1)
        else:
            self.set(pc="preempted", arg=wake)

    def after_sleepers_closed(self) -> None:
        self.set(pc="preempted", arg=tuple(i for i in range(len(self.columns)) if self.good(i)))

    def preempted(self) -> None:
        """The last look before what can not be taken back: requests that are aborted, memory that is taken."""
        chosen, kind = self.op.arg, self.op.seen.active[0]
        waits = decide.triage(self.open_rounds(self.world.rounds), self.op.seen.committed, self.op.sender, self.slots())
        if waits[1] >= 0 and GIVES_WAY():
            self.set(pc="wp", arg=("free",))
            return
        if waits[1] >= 0:
            self.wrong(f"engines are put to sleep or woken although round {waits[1]} could run before that")
        if kind == "Mend":
            self.mend(0)
        elif kind == "Wake":
            self.fan("woken", dict.fromkeys(chosen, WAKE), again=1)
        else:
            self.fan("sleepers_paused", dict.fromkeys(chosen, PAUSE), again=1)

    def after_sleepers_paused(self) -> None:
        if self.op.seen.active[0] == "Quarantine":
            self.set(pc="wp", arg=("free",))
            return
        good = [i for i in range(len(self.columns)) if self.good(i)] if PAUSED_BEFORE_RELEASE() else self.live()
        self.fan("released", dict.fromkeys(good, RELEASE), again=1)

    def after_released(self) -> None:
        self.set(pc="wp", arg=("free",))

    def after_woken(self) -> None:
        if any(self.result(i) & NOT_OK for i in range(len(self.columns))) and FENCES_WAKES():
            self.set(pc="claim", arg=("Over", 0), takeover=0, barrier=())
        else:
            self.set(pc="wp", arg=("free",))
