"""The operator's program from the first look to members that can be judged.

Pick, claim, barrier, plan, stage, quiesce, load, verify; see ``program`` for the rest, and for what is real.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlfleet.plan import claims
from rlfleet.plan import verdicts as judging
from rlfleet.plan.claims import Step
from rlfleet.plan.rounds import TERMINAL
from rlfleet.plan.verdicts import Entry, Verdict
from tests.model import decide
from tests.model.gate import FENCE, STAGE
from tests.model.hand import FOUND, MARK, POLL, Hand
from tests.model.state import (
    CALL,
    ELASTIC,
    IDLE,
    LOAD,
    NOT_OK,
    OK,
    OUTSIDE,
    PAUSE,
    PUBLISH,
    VERIFY,
    Operator,
    Round,
    View,
)

#: The call of the barrier's third step; the mutation suite only polls instead.
FENCING = FENCE


def PAUSED_FIRST() -> bool:
    """Weights move only when every member is proven paused."""
    return True


class Moving(Hand):
    """What an operator does when an answer has come, until its members can be judged."""

    __slots__ = ()

    # -------------------------------------------------------------------------------------- beginnings

    def top(self) -> None:
        """Give up what was going on and look anew."""
        self.forget()
        # Who does not lead gets no token for a new reconcile; what it had begun it may still carry on with.
        self.set(**Operator(pc="top" if self.who == self.world.leader else "down")._asdict())

    def forget(self) -> None:
        """Nothing of what was seen and asked is remembered."""
        who = self.who
        for i, c in enumerate(self.columns):
            if c.todo[who] or c.result[who] or c.views[who] != View():
                self.mine(i, "todo", IDLE)
                self.mine(i, "result", 0)
                self.mine(i, "views", View())

    def fan(self, name: str, orders: dict[int, int], *, keep: bool = False, again: int = 0) -> None:
        """Call several gates, in any order: ``orders`` maps columns to the kind of call."""
        for i in range(len(self.columns)):
            if self.result(i) and not keep:
                self.mine(i, "result", 0)
        for i, kind in orders.items():
            v = self.view(i)
            if v.pod < 0 or v.gone:
                self.mine(i, "result", NOT_OK | (self.result(i) & MARK))
            else:
                self.mine(i, "todo", kind << 2 | CALL)
        self.set(pc="fan", arg=(name, again))
        if not any(c.todo[self.who] for c in self.columns):
            self.fanned(name)

    def fanned(self, name: str) -> None:
        getattr(self, f"after_{name}")()

    def unrouted(self, *, silent: bool = False) -> list[int]:
        """Engines that resumed and are not in their router; ``silent``: nor is it known of those that do not answer."""
        return [
            i
            for i in range(len(self.columns))
            if self.good(i) and not self.result(i) & MARK and (not s[8] if (s := self.view(i).status) else silent)
        ]

    def good(self, i: int) -> bool:
        return bool(self.result(i) & OK)

    def phase(self, phase: str, then: str) -> None:
        """Write a durable phase before its first side effect."""
        self.set(pc="wr", arg=(then, phase))

    # -------------------------------------------------------------------------------------- decisions

    def decide_top(self, rounds: tuple[Round, ...]) -> None:
        op = self.op
        active = op.seen.active
        if active and active[1] == ELASTIC:
            # No round stands for it: the resume rule for all engines (repair/engines.take_over).
            self.set(pc="claim", work=ELASTIC, round=Round(), round_fresh=0, arg=("Repair", 0), takeover=1)
            return
        if active:
            n = active[1]
            planned = rounds[n].bytes >= 0
            if not rounds[n].exists or (active[4] and not planned and rounds[n].phase not in TERMINAL):
                self.set(pc="claim", work=n, round=rounds[n], round_fresh=0, arg=("Repair", 0), takeover=1)
            else:
                self.begin(n, rounds, takeover=1)
            return
        known = self.open_rounds(rounds)
        ends, chosen = decide.triage(known, op.seen.committed, op.sender, self.slots() if op.sender else ())
        if ends:
            n, outcome = ends[0]
            self.set(
                pc="wr",
                work=n,
                round=rounds[n],
                round_fresh=int(self.world.rounds[n] == rounds[n]),
                generation=rounds[n].lease,
                arg=("unclaimed", outcome),
            )
        elif chosen >= 0:
            self.begin(chosen, rounds, takeover=0)
        elif self.scope.watches:
            self.see_pods()
            self.fan("outside_seen", dict.fromkeys(self.live(), POLL))
        else:
            self.rest()

    def open_rounds(self, rounds: tuple[Round, ...]) -> tuple[tuple[int, str, int, int, bool], ...]:
        """What triage is told of the rounds that have not ended."""
        return tuple(
            (i, r.phase, *self.scope.versions[i], bool(self.world.cancelled >> i & 1))
            for i, r in enumerate(rounds)
            if r.exists and r.phase not in TERMINAL
        )

    def rest(self) -> None:
        """Nothing is to be done."""
        self.top()
        if self.op.pc == "top":
            self.set(pc="idle")

    def begin(self, n: int, rounds: tuple[Round, ...], takeover: int) -> None:
        fresh = int(self.world.rounds[n] == rounds[n])
        self.set(
            pc="claim",
            work=n,
            round=rounds[n],
            round_fresh=fresh,
            arg=("Refresh", 0),
            takeover=int(takeover or rounds[n].lease > 0),
        )

    def claimed(self) -> None:
        op = self.op
        if op.generation > self.world.highest:
            self.wrong(f"generation {op.generation} is used and was never claimed")
            return
        if op.seen.active[0] in OUTSIDE:
            old = claims.Barrier(*op.barrier) if op.barrier else None
            self.barrier(claims.Barrier(op.generation, False, claims=old.claims + 1 if old else 1))
        elif op.seen.active[0] == "Repair":
            self.see_pods()
            self.fan("orphan_fenced", dict.fromkeys(self.live(), FENCE))
        elif op.round.phase in TERMINAL:
            self.phase(op.round.phase, "settled")  # a predecessor died before it freed the slot: the same settle
        elif op.barrier:
            old = claims.Barrier(*op.barrier)
            self.barrier(claims.Barrier(op.generation, old.needs_round, claims=old.claims + 1))
        else:
            self.barrier(claims.Barrier(op.generation, bool(op.takeover or op.round.lease)))

    def live(self) -> list[int]:
        return [i for i in range(len(self.columns)) if self.view(i).pod >= 0 and not self.view(i).gone]

    def barrier(self, at: claims.Barrier, **changes: Any) -> None:
        at = replace(at, **changes)
        self.set(
            barrier=(at.generation, at.needs_round, at.written, at.fenced, at.shown, at.fence, at.claims, at.waited)
        )
        step = claims.barrier_step(at)
        if step is Step.WRITE_ROUND:
            self.phase(self.op.round.phase, "barrier")
        elif step is Step.FENCE:
            self.see_pods()
            self.fan("fenced", dict.fromkeys(self.live(), FENCING))
        elif step is Step.READ_PIPELINE:
            self.set(pc="rp", arg=("shown",))
        elif step is Step.CLAIM_ABOVE:
            self.set(pc="claim", arg=(self.op.seen.active[0], at.shown))
        elif step is Step.WAIT:
            busy = [i for i in self.live() if self.view(i).status and self.view(i).status[5]]
            self.fan("waited", dict.fromkeys(busy, POLL))
        elif step is Step.DEPOSED:
            self.top()
        else:
            self.set(barrier=())
            self.world = self.world._replace(decided=max(self.world.decided, self.op.generation))
            self.enter()

    def after_fenced(self) -> None:
        if self.op.work == ELASTIC:  # the sender is left alone
            shown = max((self.view(i).refused for i in range(len(self.columns))), default=0)
            self.barrier(claims.Barrier(*self.op.barrier), fenced=True, shown=shown)
            return
        self.set(pc="sender", arg=("fence",))

    def after_waited(self) -> None:
        self.barrier(claims.Barrier(*self.op.barrier), waited=True)

    def enter(self) -> None:
        op = self.op
        if op.work == ELASTIC:
            self.elastic()
            return
        entry = judging.enter(op.round.phase, committed=bool(op.seen.active[4]), planned=op.round.bytes >= 0)
        if entry is Entry.PLAN:
            if op.takeover and self.stopped():
                self.refuse("Cancelled")
            elif op.sender:
                self.set(pc="sender", arg=("hold",))
            else:
                self.refuse("Failed")
        elif entry is Entry.QUIESCE:
            self.phase("Quiescing", "quiesce")
        elif entry is Entry.JUDGE:
            self.finish_loads("judged", again=1)
        else:
            self.reopen()

    # -------------------------------------------------------------------------------------- plan .. load

    def held(self) -> None:
        op = self.op
        made_by = self.scope.versions[op.work][1]
        if op.sender[0] != made_by:
            self.refuse("Failed")
            return
        frozen = decide.freeze(self.views, op.sender[0], self.slots(), self.scope.max_unavailable)
        if frozen is None or not (any(m > 0 for m in frozen) or self.scope.watches):
            self.refuse("Failed")  # an empty fleet is not modelled, one that sleeps is
            return
        self.phase("Planned", "planned")

    def planned(self) -> None:
        if any(m > 0 for m in self.members):
            self.phase("Staging", "stage")
        else:
            self.look("nobody")

    def stage(self) -> None:
        self.fan("staged", {i: STAGE for i, m in enumerate(self.members) if m > 0})

    def after_staged(self) -> None:
        self.set(pc="rr", arg=("staging",))

    def known(self) -> int:
        """What whole members of the round are proven to have; -1: none is whole."""
        proofs = [self.view(i).status[3] for i in self.named(Verdict.WHOLE)]
        return max((p[2] for p in proofs if p), default=-1)

    def is_staged(self, i: int) -> bool:
        said = self.view(i).status
        return bool(said) and said[7] == (self.op.work, self.op.round.bytes)

    def staging(self) -> None:
        if self.stopped():
            self.refuse("Cancelled")
            return
        members = [i for i, m in enumerate(self.members) if m > 0]
        missing = [i for i in members if not self.is_staged(i)]
        blocked = sum(m <= decide.BLOCKED for m in self.members)
        if len(missing) + blocked > self.scope.max_unavailable or len(missing) == len(members):
            self.refuse("Failed")
        else:
            self.phase("Quiescing", "quiesce")

    def taking_part(self) -> list[int]:
        """Members that are neither to sleep nor to be shut by now (``Executor._takes_part``)."""
        return [i for i, m in enumerate(self.members) if m > 0 and not (self.view(i).rest or self.view(i).shut)]

    def stopped(self) -> bool:
        return bool(self.world.cancelled >> self.op.work & 1)

    def quiesce(self) -> None:
        if self.scope.drops:
            self.see_pods()  # who is to sleep, to go or to be shut by now is dropped
        self.fan("paused", dict.fromkeys(self.taking_part(), PAUSE), again=self.op.takeover)

    def after_paused(self) -> None:
        failed = [i for i in self.taking_part() if not self.good(i)] if PAUSED_FIRST() else []
        if failed:
            self.see_pods()
            failed = [i for i in failed if i in self.live()]
        if failed:
            self.abort("Failed")
        else:
            self.set(pc="rr", arg=("quiesced",))

    def quiesced(self) -> None:
        if self.stopped():
            self.abort("Cancelled")
        else:
            self.phase("Transferring", "load")

    def load(self) -> None:
        self.fan("loaded", {i: LOAD for i in self.taking_part() if self.is_staged(i)})

    def after_loaded(self) -> None:
        self.finish_loads("judged", again=0)

    # -------------------------------------------------------------------------------------- verify, publish

    def finish_loads(self, then: str, *, again: int) -> None:
        self.set(barrier=(then, again))
        self.fan("polled", dict.fromkeys(self.live(), POLL))

    def after_polled(self) -> None:
        then, again = self.op.barrier
        loaded = self.named(Verdict.LOADED)
        if loaded:
            self.fan("verified", dict.fromkeys(loaded, VERIFY), again=again)
        else:
            self.set(barrier=())
            self.fanned(then)

    def after_verified(self) -> None:
        _, again = self.op.barrier
        found = tuple((i, self.result(i) // FOUND) for i in range(len(self.columns)) if self.good(i))
        others = sum(self.is_staged(i) for i in self.named(Verdict.UNTOUCHED)) if again else 0
        known = self.known()
        chosen = decide.agreed(found, self.op.seen.committed, self.op.round.bytes, known, others)
        self.fan("published", dict.fromkeys(chosen, PUBLISH), again=again)

    def after_published(self) -> None:
        self.fan("polled_again", dict.fromkeys(self.live(), POLL))

    def after_polled_again(self) -> None:
        then, _ = self.op.barrier
        self.set(barrier=())
        self.fanned(then)

    def after_judged(self) -> None:
        self.look("transferred")
