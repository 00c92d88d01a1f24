"""Breadth-first search over all states of a scope, with shortest counterexamples, and the liveness check.

Only the hashes of visited states are kept (64 bits each; with n states the chance of a collision is about n^2 / 2^65,
one in a million at five million states), so a story is told by walking the hashes back and generating its states anew.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlfleet.plan.rounds import TERMINAL
from tests.model import accidents, calls, effects, gate
from tests.model.hand import KINDS
from tests.model.invariants import broken
from tests.model.program import Run
from tests.model.state import (
    OPEN,
    Column,
    Pipeline,
    Round,
    Scope,
    Sender,
    State,
    normal,
)

Step = tuple[str, State]


def successors(scope: Scope, state: State, *, faults: bool = True) -> Iterator[Step]:
    """Everything that can happen next: operators, the world, and (with ``faults``) one more fault."""
    world, _columns = state
    for who, op in enumerate(world.operators):
        if op.pc != "down":
            name = f"operator {who + 1}"
            thawed = who != world.leader
            if thawed and not world.budget.thaw:
                continue
            for label, after in effects.steps(scope, state, who):
                if thawed:
                    w = after[0]
                    after = (w._replace(budget=w.budget._replace(thaw=w.budget.thaw - 1)), after[1])
                if faults or after[0].budget == world.budget:
                    yield f"{name}{' (frozen, thaws)' if thawed else ''} {label}", after
    yield from _nature(scope, state)
    if faults and world.budget.total > 0:
        yield from _accidents(scope, state)


def _with(state: State, i: int, column: object) -> State:
    world, columns = state
    new = list(columns)
    new[i] = column  # type: ignore[call-overload]
    return normal(world, tuple(new))


def _nature(scope: Scope, state: State) -> Iterator[Step]:
    """What happens without anybody's fault."""
    world, columns = state
    for i, c in enumerate(columns):
        if i and c == columns[i - 1]:
            continue
        if c.alive:
            if c.pend >= 0 and (c.pend != OPEN or c.current == OPEN):
                yield f"pod {c.pod} ends {KINDS[c.pend]}", _with(state, i, gate.finish(c))
            if c.late and c.current != OPEN:
                yield (
                    f"the router carries out a late addition of pod {c.pod}",
                    _with(state, i, accidents.late_addition(c)),
                )
            if accidents.closes_unproven(c):
                yield (
                    f"the gate of pod {c.pod} closes it: nothing proves its weights",
                    _with(state, i, accidents.close(c)),
                )
            yield from _life(state, i)
            if not c.up:
                yield f"the gate of pod {c.pod} answers again", _with(state, i, c._replace(up=1))
            elif c.wire:
                for m in set(c.wire):
                    rest = list(c.wire)
                    rest.remove(m)
                    after, _ = gate.deliver(c._replace(wire=tuple(rest)), m)
                    run = Run(scope, world, columns, 0)
                    calls.changed(run, c, after, m)
                    run.columns[i] = after
                    what = KINDS[m[0]]
                    yield f"a late {what} of generation {m[2]} arrives at pod {c.pod}", run.state()
        else:
            number = world.pods + 1
            run = Run(scope, world._replace(pods=number), columns, 0)
            run.columns[i] = accidents.replaced(c, number)
            yield f"the pool replaces pod {c.pod} by pod {number}", run.state()
    for n, r in enumerate(world.rounds):
        if r.phase == "New":
            rounds = tuple(Round() if k == n else o for k, o in enumerate(world.rounds))
            yield f"the trainer orders round {n}", (world._replace(rounds=rounds), columns)
            break
    if sum(op.pc != "down" for op in world.operators) == 2:
        r = Run(scope, world, columns, 1 - world.leader)
        r.top()
        yield f"operator {2 - world.leader} learns that it does not lead, and ends", r.state()


def _life(state: State, i: int) -> Iterator[Step]:
    """What becomes of a pod that was asked to go, and of an engine that was restarted in place."""
    c = state[1][i]
    life = c.life
    if life.leaving:
        gone = c._replace(alive=0, admit=0, pend=-1, current=-1)
        yield f"pod {c.pod}, which was asked to go, is gone", _with(state, i, gone)
    if life.shown != life.process:
        seen = c._replace(life=life._replace(shown=life.process))
        yield f"the kubelet tells of another process in pod {c.pod}", _with(state, i, seen)
    elif life.booting:
        yield f"the new process in pod {c.pod} answers", _with(state, i, accidents.is_up(c))
    if life.told != life.shown and c.up and c.current < 0:
        yield f"the gate of pod {c.pod} is told of another process", _with(state, i, accidents.told(c))
    if life.process != life.about and c.up and gate.observe(c) != c:
        yield f"the gate of pod {c.pod} sees another label", _with(state, i, gate.observe(c))


def _accidents(scope: Scope, state: State) -> Iterator[Step]:
    world, columns = state
    b = world.budget

    def run() -> Run:
        return Run(scope, world, columns, 0)

    for who, op in enumerate(world.operators):
        if b.crash and op.pc not in ("down", "idle", "top"):
            r = run()
            r.who = who
            r.spend(crash=1)
            r.top()
            yield f"operator {who + 1} dies and starts again", r.state()
    other = 1 - world.leader
    if b.rival and world.operators[other].pc == "down":
        r = run()
        r.who = other
        r.spend(rival=1)
        r.world = r.world._replace(leader=other)
        r.top()
        yield f"the Lease of operator {world.leader + 1} ends while it is frozen; operator {other + 1} leads", r.state()
    for i, c in enumerate(columns):
        if (i and c == columns[i - 1]) or not c.alive:
            continue
        if b.gate and c.current >= 0:
            r = run()
            r.spend(gate=1)
            r.columns[i] = accidents.restart_gate(c)
            yield f"the gate of pod {c.pod} dies and starts again", r.state()
        if b.kill:
            r = run()
            r.spend(kill=1)
            r.columns[i] = c._replace(alive=0, admit=0, pend=-1, current=-1)
            yield f"pod {c.pod} dies", r.state()
        if b.silence and c.up:
            r = run()
            r.spend(silence=1)
            r.columns[i] = c._replace(up=0)
            yield f"the gate of pod {c.pod} falls silent", r.state()
    if b.wipe and world.pipeline != Pipeline(0, (), ()):
        r = run()
        r.spend(wipe=1)
        ops = tuple(o._replace(seen_fresh=0) for o in world.operators)
        r.world = r.world._replace(pipeline=Pipeline(0, (), ()), operators=ops)
        yield "the status of the pipeline is lost", r.state()
    if b.sender:
        r = run()
        r.spend(sender=1)
        r.world = r.world._replace(sender=Sender(world.sender.incarnation + 1))
        yield "the trainer is replaced by another process", r.state()
    if b.cancel:
        for n, one in enumerate(world.rounds):
            if one.phase not in TERMINAL and not world.cancelled >> n & 1:
                r = run()
                r.spend(cancel=1)
                r.world = r.world._replace(cancelled=world.cancelled | 1 << n)
                yield f"round {n} is cancelled", r.state()
    for i, c in enumerate(columns):
        if (i and c == columns[i - 1]) or not c.alive:
            continue
        life = c.life
        if b.evict and not life.leaving:
            r = run()
            r.spend(evict=1)
            r.columns[i] = c._replace(life=life._replace(leaving=1))
            yield f"pod {c.pod} is evicted", r.state()
        if b.restart and not life.booting:
            r = run()
            r.spend(restart=1)
            r.columns[i] = accidents.restart_engine(c)
            yield f"the engine of pod {c.pod} starts again in place", r.state()
        if b.shut:
            r = run()
            r.spend(shut=1)
            r.columns[i] = c._replace(life=life._replace(shut=1 - life.shut))
            yield f"a person {'releases' if life.shut else 'quarantines'} pod {c.pod}", r.state()
    if b.demand:
        r = run()
        r.spend(demand=1)
        steps = world.steps + (not world.demand)
        r.world = r.world._replace(demand=0 if world.demand else steps, steps=steps)
        yield (
            "the trainer " + ("gives its device back" if world.demand else f"demands its device, step {steps}"),
            r.state(),
        )
    if b.wish:
        for i, c in enumerate(columns):
            if (i == 0 or c != columns[i - 1]) and c.alive:
                r = run()
                r.spend(wish=1)
                r.columns[i] = c._replace(rest=1 - c.rest)
                yield f"pod {c.pod} is to {'be awake' if c.rest else 'sleep'} now", r.state()
    if b.remove:
        for n, one in enumerate(world.rounds):
            if one.exists:
                r = run()
                r.spend(remove=1)
                rounds = tuple(o._replace(exists=0) if k == n else o for k, o in enumerate(world.rounds))
                ops = tuple(o._replace(round_fresh=0) if o.work == n else o for o in world.operators)
                r.world = r.world._replace(rounds=rounds, operators=ops)
                yield f"the object of round {n} is removed by force", r.state()


# ------------------------------------------------------------------------------------------------ search


@dataclass
class Report:
    """What a search found. ``story``: the shortest way to a broken invariant; empty: there is none."""

    scope: str
    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    depth: int = 0
    exhausted: bool = False
    broken: str = ""
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{self.scope}: {self.states:,} states, {self.transitions:,} transitions, depth {self.depth}, "
            f"{self.seconds:.1f} s, {'exhausted' if self.exhausted else 'not exhausted'}"
        )
        if not self.broken:
            return head
        lines = [f"{i:3d}. {line}" for i, line in enumerate(self.story, 1)]
        return "\n".join([head, f"BROKEN: {self.broken}", *lines])


def explore(scope: Scope, *, limit: int = 10**9, seconds: float = 1e9) -> Report:
    """Visit every state of a scope, nearest first, until an invariant breaks or a limit is reached."""
    began = time.monotonic()
    report = Report(scope.name)
    first = scope.initial()
    parents: dict[int, int] = {hash(first): 0}
    frontier = [first]
    while frontier:
        found: list[State] = []
        for state in frontier:
            here = hash(state)
            for _label, after in successors(scope, state):
                report.transitions += 1
                key = hash(after)
                if key in parents:
                    continue
                parents[key] = here
                why = broken(after)
                if why:
                    report.broken = why
                    report.story = _story(scope, parents, key)
                    report.states = len(parents)
                    report.seconds = time.monotonic() - began
                    return report
                found.append(after)
            if len(parents) > limit or (report.transitions & 1023 < 8 and time.monotonic() - began > seconds):
                report.states, report.seconds = len(parents), time.monotonic() - began
                return report
        frontier = found
        report.depth += 1
    report.exhausted = True
    report.states, report.seconds = len(parents), time.monotonic() - began
    return report


def _story(scope: Scope, parents: dict[int, int], key: int) -> list[str]:
    """The labels from the beginning to a state."""
    chain = []
    while key:
        chain.append(key)
        key = parents[key]
    chain.reverse()
    state = scope.initial()
    lines = []
    for wanted in chain[1:]:
        label, state = next((la, s) for la, s in successors(scope, state) if hash(s) == wanted)
        lines.append(f"{label}  [{summary(state)}]")
    return lines


def _doors(c: Column) -> str:
    if not c.alive:
        return "dead"
    if c.memory:
        return ("", "releasing", "asleep", "waking")[c.memory] + ("!" if c.admit else "")
    return ("serves" if c.routed else "open") if c.admit else "shut"


def summary(state: State) -> str:
    """One line about a state: the status, the rounds, and each engine that is there."""
    world, columns = state
    p = world.pipeline
    rounds = " ".join(f"{r.phase}@{r.lease}" if r.exists else "(removed)" for r in world.rounds)
    engines = " ".join(f"{c.pod}:{_doors(c)}/b{c.bytes}/g{c.fence[0]}" for c in columns)
    return f"fence {p.fence}, committed {p.committed[1] if p.committed else '-'}, {rounds} | {engines}"


# ------------------------------------------------------------------------------------------------ liveness


def ended(state: State) -> bool:
    """Every round has ended and the slot is free."""
    world, _ = state
    return not world.pipeline.active and all(not r.exists or r.phase in TERMINAL for r in world.rounds)


def stuck(scope: Scope, *, limit: int = 10**9) -> tuple[Report, list[str]]:
    """From every reachable state, without further faults, the end can be reached; else the way to one where it can not.

    With fair scheduling that is "every round ends": the faultless graph is finite, so a run that never ends would have
    to stay in states from which the end is no longer reachable, or to avoid for ever a step that is always possible.
    """
    began = time.monotonic()
    report = Report(scope.name)
    first = scope.initial()
    ids: dict[State, int] = {first: 0}
    came: list[int] = [-1]
    order = [first]
    back: list[list[int]] = [[]]
    good: list[int] = []
    at = 0
    while at < len(order):
        state = order[at]
        if ended(state) and (not scope.mends or effects.content(scope, state)):
            good.append(at)
        for _, after in successors(scope, state):
            report.transitions += 1
            n = ids.get(after)
            if n is None:
                n = ids[after] = len(order)
                order.append(after)
                came.append(at)
                back.append([])
            if after[0].budget == state[0].budget:
                back[n].append(at)
        at += 1
        if len(order) > limit:
            break
    report.exhausted = at == len(order)
    seen = bytearray(len(order))
    todo = good[:]
    for n in todo:
        seen[n] = 1
    while todo:
        for m in back[todo.pop()]:
            if not seen[m]:
                seen[m] = 1
                todo.append(m)
    report.states, report.seconds = len(order), time.monotonic() - began
    lost = next((n for n in range(at) if not seen[n]), -1)
    if lost < 0:
        return report, []
    chain = []
    n = lost
    while n >= 0:
        chain.append(n)
        n = came[n]
    chain.reverse()
    lines = []
    for a, b in itertools.pairwise(chain):
        label = next(la for la, s in successors(scope, order[a]) if s == order[b])
        lines.append(f"{label}  [{summary(order[b])}]")
    report.broken, report.story = "no way to the end from here", lines
    return report, lines
