"""A working copy of one state for one step of one operator: reading, writing, and what the operator knows.

Every write marks what others have read as stale: that is the resourceVersion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from rlfleet.plan.rounds import TERMINAL
from rlfleet.plan.verdicts import Verdict
from tests.model import decide
from tests.model.state import (
    ELASTIC,
    STEPS,
    Column,
    Operator,
    Pipeline,
    Round,
    Scope,
    State,
    View,
    World,
    normal,
)

POLL = 11
KINDS = (*STEPS, "Fence", "Stage", "Poll")
#: A column that a second fan-out is to close, and the bytes that a verification found, in ``Column.result``.
MARK, FOUND = 4, 8
#: Tries of one step while a round holds (control.rounds.healing.LOAD_TRIES).
TRIES = 3
Step_ = tuple[str, State]


class Hand:
    """A working copy of one state for one step of one operator."""

    __slots__ = ("columns", "scope", "who", "world")

    def __init__(self, scope: Scope, world: World, columns: Iterable[Column], who: int) -> None:
        self.scope = scope
        self.world = world
        self.columns = list(columns)
        self.who = who

    def copy(self) -> Self:
        return type(self)(self.scope, self.world, self.columns, self.who)

    def state(self) -> State:
        return normal(self.world, tuple(self.columns))

    # -------------------------------------------------------------------------------------- reading and writing

    @property
    def op(self) -> Operator:
        return self.world.operators[self.who]

    def set(self, **changes: Any) -> None:
        ops = list(self.world.operators)
        ops[self.who] = ops[self.who]._replace(**changes)
        self.world = self.world._replace(operators=tuple(ops))

    def spend(self, **kinds: int) -> None:
        b = self.world.budget
        self.world = self.world._replace(
            budget=b._replace(total=b.total - 1, **{k: getattr(b, k) - n for k, n in kinds.items()})
        )

    def wrong(self, what: str) -> None:
        if not self.world.wrong:
            self.world = self.world._replace(wrong=what)

    def column(self, i: int, **changes: Any) -> None:
        self.columns[i] = self.columns[i]._replace(**changes)

    def mine(self, i: int, field: str, value: Any) -> None:
        """Set this operator's part of a per-operator field of a column."""
        old = list(getattr(self.columns[i], field))
        old[self.who] = value
        self.columns[i] = self.columns[i]._replace(**{field: tuple(old)})

    def view(self, i: int) -> View:
        return self.columns[i].views[self.who]

    def result(self, i: int) -> int:
        return self.columns[i].result[self.who]

    def write_pipeline(self, new: Pipeline) -> None:
        ops = [o._replace(seen_fresh=0) if o.seen_fresh else o for o in self.world.operators]
        ops[self.who] = ops[self.who]._replace(seen=new, seen_fresh=1)
        self.world = self.world._replace(pipeline=new, operators=tuple(ops))

    def write_round(self, n: int, new: Round) -> None:
        old = self.world.rounds[n]
        if self.op.generation < self.world.decided and self.op.arg[0] != "unclaimed":
            self.wrong(f"a deposed operator wrote to round {n} after its successor had begun to decide")
        if old.phase in TERMINAL and new.phase != old.phase:
            self.wrong(f"round {n} was {old.phase} and became {new.phase}")
        rounds = list(self.world.rounds)
        rounds[n] = new
        ops = [o._replace(round_fresh=0) if o.round_fresh and o.work == n else o for o in self.world.operators]
        ops[self.who] = ops[self.who]._replace(round=new, round_fresh=1)
        self.world = self.world._replace(rounds=tuple(rounds), operators=tuple(ops))

    def see_pods(self) -> None:
        """A live list of pods; what a gate said stays with the same pod."""
        for i, c in enumerate(self.columns):
            v = c.views[self.who]
            status, refused = (v.status, v.refused) if v.pod == c.pod else ((), 0)
            life = c.life
            new = View(c.pod, 1 - c.alive, status, refused, c.rest, life.leaving, life.shut, life.shown)
            if new != v:
                self.mine(i, "views", new)
        self.rest_all()

    def rest_all(self) -> None:
        """Who is to sleep by what is recorded of the trainer's demand (``Fleet.rest``)."""
        if not self.scope.demands:
            return
        resting = decide.resting(self.views, self.shared, self.op.seen.grants)
        for i, c in enumerate(self.columns):
            v = self.view(i)
            if v.pod >= 0 and v.rest != int(c.rest or i in resting):
                self.mine(i, "views", v._replace(rest=int(c.rest or i in resting)))

    @property
    def shared(self) -> tuple[int, ...]:
        """Columns that lie on the device that the trainer demands."""
        return tuple(i for i, c in enumerate(self.columns) if c.life.shared)

    # -------------------------------------------------------------------------------------- facts

    @property
    def views(self) -> decide.Views:
        return decide.views_of(self.columns, self.who)

    @property
    def members(self) -> decide.Members:
        return decide.members_of(self.columns, self.op.work)

    @property
    def target(self) -> tuple[int, int]:
        if self.op.work == ELASTIC:
            return 0, 0  # no weights are asked for
        return self.scope.versions[self.op.work][0], self.op.round.bytes

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return decide.verdicts(self.views, self.members, self.op.work, *self.target)

    def named(self, *kinds: Verdict) -> list[int]:
        return [int(n[1:]) for n, v in self.verdicts.items() if v in kinds]

    def slots(self) -> tuple[tuple[int, int], ...]:
        s = self.world.sender.incarnation
        return tuple((v, b) for (made_by, v), b in self.scope.bytes_of if made_by == s)
