"""Calls to gates, one of a fan-out per step, with every fault that can befall it.

A call that gets no answer is given up at once: asking again under the same id is what a duplicated message does, which
is a fault of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model import decide, gate
from tests.model.gate import FENCE, STAGE
from tests.model.hand import FOUND, KINDS, MARK, POLL, Step_
from tests.model.program import Run
from tests.model.state import (
    AWAIT,
    CLOSE,
    DONE,
    FAILED,
    IDLE,
    LOAD,
    NOT_OK,
    OK,
    OPEN,
    RESUME,
    RUNNING,
    VERIFY,
    WAKE,
    Column,
)


def fan(run: Run) -> Iterator[Step_]:
    """One call of a fan-out, whichever comes next, and every fault that can befall it."""
    scope, budget, who = run.scope, run.world.budget, run.who
    name, again = run.op.arg
    seen_before = set()
    for i, c in enumerate(run.columns):
        todo = c.todo[who]
        if not todo:
            continue
        if c in seen_before:
            continue  # an equal column: the same step by symmetry
        seen_before.add(c)
        kind, how = todo >> 2, todo & 3
        if how == AWAIT:
            yield from _await(run, i, kind)
            continue
        if kind == POLL:
            yield from _poll(run, i)
            break  # a poll changes nothing, so the order of polls does not matter
        op, v = run.op, c.views[who]
        version, content = op.seen.committed if kind == RESUME and name != "resumed" else run.target
        known = v.status[9][kind] >> 2 if kind < FENCE and v.status and v.status[1][1] == op.work else 0
        attempt = 0 if kind >= FENCE else (known + 1 if again and kind not in (CLOSE, OPEN) else max(1, known))
        whom = v.pod if kind == FENCE else decide.addressed(v)
        m = (kind, op.work, op.generation, whom, attempt, version, content)
        if kind in (RESUME, OPEN) and (v.leaving or v.shut or v.rest):
            run.wrong(f"pod {v.pod} is opened although it is to go, to sleep or to be shut")
        what = f"{KINDS[kind]} at pod {v.pod}"
        if not c.up or not c.alive or (kind == STAGE and run.world.sender.incarnation != scope.versions[op.work][1]):
            one = run.copy()
            _answered(one, i, kind, None)
            yield f"{what}: no answer", one.state()
            continue
        # as it should go
        after, answer = gate.deliver(c, m)
        if answer == ("busy",):
            one = run.copy()
            _answered(one, i, kind, ("no",))
            yield f"{what}: busy until the deadline", one.state()
            continue
        one = run.copy()
        one.columns[i] = after
        changed(one, c, after, m)
        _answered(one, i, kind, answer)
        yield f"{what}: {answer[0]}", one.state()
        if not budget.total:
            continue
        if budget.lost:
            one = run.copy()
            one.spend(lost=1)
            _answered(one, i, kind, None)
            yield f"{what}: the request is lost", one.state()
            if after != c:
                one = run.copy()
                one.columns[i] = after
                one.spend(lost=1)
                changed(one, c, after, m)
                _answered(one, i, kind, None)
                yield f"{what}: {answer[0]}, but the answer is lost", one.state()
        if budget.duplicate:
            one = run.copy()
            one.columns[i] = after._replace(wire=(*after.wire, m))
            one.spend(duplicate=1)
            _answered(one, i, kind, answer)
            yield f"{what}: {answer[0]}, and a second copy travels on", one.state()
        if budget.delay:
            one = run.copy()
            one.columns[i] = c._replace(wire=(*c.wire, m))
            one.spend(delay=1)
            _answered(one, i, kind, None)
            yield f"{what}: the request is delayed", one.state()
        started = kind < FENCE and answer[0] in ("ok", "no") and after.log[kind] != c.log[kind]
        if budget.slow and kind in scope.slow_steps and started:
            late, answer = gate.deliver(c, m, slow=True)
            one = run.copy()
            one.columns[i] = late
            one.spend(slow=1)
            _answered(one, i, kind, answer)
            yield f"{what} begins and takes its time", one.state()
        if budget.bad and kind == LOAD and started:
            for trouble in scope.bad_loads:
                bad, answer = gate.deliver(c, m, trouble)
                one = run.copy()
                one.columns[i] = bad
                one.spend(bad=1)
                _answered(one, i, kind, answer)
                yield f"{what} goes wrong: {trouble}", one.state()


def changed(run: Run, before: Column, after: Column, m: gate.Message) -> None:
    """No stale actor changes an engine: what a gate did was asked under the highest generation that it ever stored."""
    if m[2] < before.fence[0] and after._replace(fence=before.fence, wire=before.wire) != before:
        run.wrong(f"generation {m[2]} changed pod {before.pod}, which holds generation {before.fence[0]}")
    life = before.life
    done = m[0] in (RESUME, OPEN) and after.log[m[0]] & 3 == DONE and after.log != before.log
    if done and life.process != life.about:
        run.wrong(f"pod {before.pod} is opened by what was proven of an earlier process")
    granted = (run.world.demand, 1) in run.world.pipeline.grants
    if m[0] == WAKE and after.memory != before.memory and life.shared and granted:
        run.wrong(f"pod {before.pod} is woken while the trainer uses its device")
    if run.scope.strict and m[2] < run.world.decided and after._replace(wire=before.wire) != before:
        run.wrong(f"generation {m[2]} changed pod {before.pod} after its successor had begun to decide")


def _answered(run: Run, i: int, kind: int, answer: tuple[Any, ...] | None) -> None:
    """Remember an answer; the last one of a fan-out lets the program go on."""
    v = run.view(i)
    if kind in (FENCE, POLL):
        if answer is not None and answer[0] == "status":
            run.mine(i, "views", v._replace(status=answer[1], refused=0))
        else:
            refused = answer[1] if answer is not None and answer[0] == "held" else 0
            run.mine(i, "views", v._replace(status=(), refused=refused))
    elif answer is not None and answer[0] == "running":
        run.mine(i, "todo", kind << 2 | AWAIT)
        return
    else:
        fine = answer is not None and answer[0] == "ok"
        kept = run.result(i) & MARK
        run.mine(i, "result", kept | (OK | (answer[1] * FOUND if answer and kind == VERIFY else 0) if fine else NOT_OK))
        if kind == STAGE and fine and v.status:
            staged = (run.op.work, run.op.round.bytes)
            run.mine(i, "views", v._replace(status=(*v.status[:7], staged, *v.status[8:])))
    run.mine(i, "todo", IDLE)
    if not any(c.todo[run.who] for c in run.columns):
        name = run.op.arg[0]
        run.fanned(name)


def _await(run: Run, i: int, kind: int) -> Iterator[Step_]:
    """A long operation: its recorded end, or the deadline."""
    c = run.columns[i]
    state = c.log[kind] & 3
    known_here = c.up and c.alive and c.views[run.who].pod == c.pod
    one = run.copy()
    if known_here and state not in (RUNNING,):
        _answered(one, i, kind, ("no",) if state == FAILED else ("ok", c.bytes))
        yield f"sees the end of {KINDS[kind]} at pod {c.pod}", one.state()
    else:
        _answered(one, i, kind, None)
        yield f"waits for {KINDS[kind]} at pod {c.pod} until the deadline", one.state()


def _poll(run: Run, i: int) -> Iterator[Step_]:
    c = run.columns[i]
    v = c.views[run.who]
    if c.up and c.alive and v.pod == c.pod:
        one = run.copy()
        after, said = gate.status(c)
        one.columns[i] = after
        _answered(one, i, POLL, ("status", said))
        yield f"polls pod {c.pod}", one.state()
        if run.world.budget.total and run.world.budget.lost:
            one = run.copy()
            one.spend(lost=1)
            _answered(one, i, POLL, None)
            yield f"polls pod {c.pod}: no answer", one.state()
    else:
        one = run.copy()
        _answered(one, i, POLL, None)
        yield f"polls pod {v.pod}: no answer", one.state()
