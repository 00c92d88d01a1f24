"""The operator's effects: one read, write or call per step, with every fault that can befall it.

Calls to gates are in ``calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlfleet.api import fencing
from rlfleet.api.fencing import Fence
from rlfleet.plan import attempts, claims
from rlfleet.plan.rounds import TERMINAL
from tests.model import decide
from tests.model.calls import fan
from tests.model.gate import PIPELINE
from tests.model.hand import Step_
from tests.model.program import Run
from tests.model.state import (
    BASE,
    IDLE,
    RELEASED,
    Column,
    Round,
    Scope,
    State,
    World,
)


def steps(scope: Scope, state: State, who: int) -> Iterator[Step_]:
    """Every way in which this operator's next effect can go, with what the story says of it."""
    world, columns = state
    pc = world.operators[who].pc
    effect = EFFECTS.get(pc)
    if effect is not None:
        yield from effect(Run(scope, world, columns, who))


def _top(run: Run) -> Iterator[Step_]:
    run.set(pc="pipeline", arg=run.world.rounds)
    yield "lists rounds", run.state()


def _pipeline(run: Run) -> Iterator[Step_]:
    s = run.world.sender
    rounds = run.op.arg
    run.set(seen=run.world.pipeline, seen_fresh=1, sender=(s.incarnation, s.hold), arg=())
    run.decide_top(rounds)
    yield "reads the pipeline and asks the sender", run.state()


def _idle(run: Run) -> Iterator[Step_]:
    world = run.world
    unmoved = run.scope.watches and not content(run.scope, run.state())
    if world.pipeline.active or unmoved or any(r.exists and r.phase not in TERMINAL for r in world.rounds):
        run.top()
        yield from _top(run)


def content(scope: Scope, state: State) -> bool:
    """Between rounds nothing is left to be done: for who is to sleep, for a quarantine, for the trainer's demand."""
    world, columns = state
    grants, wanted = world.pipeline.grants, world.demand
    if scope.demands and grants != (((wanted, 1),) if wanted else ()):
        return False
    for c in columns:
        if not c.alive:
            continue
        rest = bool(c.rest or (c.life.shared and grants))
        if rest != (c.memory == RELEASED) and not (c.life.shut and rest):
            return False
        awake = not rest and not c.life.leaving and not c.life.booting
        if scope.mends and awake and c.life.shut and (c.admit or c.routed):
            return False
        if scope.mends and awake and not c.life.shut and proven(world, c) and not (c.admit and c.routed):
            return False
    return True


def proven(world: World, c: Column) -> bool:
    """Its gate's record says that it holds what is committed."""
    return bool(c.holds) and c.holds[:2] == world.pipeline.committed


def _write_grants(run: Run) -> Iterator[Step_]:
    """The trainer's demand is recorded under the resourceVersion that was read, with what becomes of it."""
    op = run.op
    rows, then = op.arg
    if not CONDITIONAL(op.seen_fresh):
        run.top()
        yield "writes the grants: conflict", run.state()
        return
    if (run.world.demand, 1) in rows and rows != op.seen.grants:
        awake = [c.pod for c in run.columns if c.alive and c.life.shared and c.memory != RELEASED]
        if awake:
            run.wrong(f"the trainer is granted its device although pods {awake} on it are awake")
    run.write_pipeline(op.seen._replace(grants=rows))
    if then == "heard":
        run.rest_all()
        run.look("holding")
    else:
        run.top()
    yield f"writes the grants {rows}", run.state()


def _claim(run: Run) -> Iterator[Step_]:
    op = run.op
    kind, above = op.arg
    date = run.world.highest + 1 if run.scope.clock else 0
    fence = claims.next_fence(op.seen.fence, above, date)
    carried = op.seen.active[4] if op.seen.active and op.seen.active[1] == op.work else 0
    active = (kind, op.work, fence, run.who, carried)
    if not CONDITIONAL(op.seen_fresh):
        run.top()
        yield f"claims generation {fence}: conflict", run.state()
        return
    if run.world.budget.total and run.world.budget.lost:
        lost = run.copy()
        lost.spend(lost=1)
        _write_claim(lost, fence, active)
        lost.set(pc="claimrb", arg=(kind, active), seen=op.seen, seen_fresh=0)
        yield f"claims generation {fence}; the answer is lost", lost.state()
        lost = run.copy()
        lost.spend(lost=1)
        lost.set(pc="claimrb", arg=(kind, active), seen=op.seen, seen_fresh=0)
        yield f"claims generation {fence}; the request is lost", lost.state()
    _write_claim(run, fence, active)
    run.set(generation=fence)
    run.claimed()
    yield f"claims generation {fence} for round {op.work} ({kind})", run.state()


def CONDITIONAL(fresh: int) -> bool:
    """The apiserver takes a claim only if nothing was written since the pipeline was read."""
    return bool(fresh)


def _write_claim(run: Run, fence: int, active: tuple[Any, ...]) -> None:
    if fence <= run.world.highest:
        run.wrong(f"generation {fence} was claimed twice")
    run.world = run.world._replace(highest=max(run.world.highest, fence))
    run.write_pipeline(run.world.pipeline._replace(fence=fence, active=active))


def _claimrb(run: Run) -> Iterator[Step_]:
    kind, active = run.op.arg
    live = run.world.pipeline
    if claims.claim_landed(live.active, active):
        run.set(seen=live, seen_fresh=1, generation=active[2], arg=(kind, 0))
        run.claimed()
    else:
        run.top()
    yield "reads back whether its claim was written", run.state()


def _read_round(run: Run) -> Iterator[Step_]:
    then = run.op.arg
    live = run.world.rounds[run.op.work]
    run.set(round=live, round_fresh=1)
    if not live.exists and then[0] != "holding":
        run.top()
    elif len(then) > 1:
        run.set(pc="wr")
    else:
        getattr(run, then[0])()
    yield f"reads round {run.op.work if run.op.work >= 0 else ''}", run.state()


def _write_round(run: Run) -> Iterator[Step_]:
    op = run.op
    then, phase = op.arg[:2]
    old = op.round
    n = op.work
    may = decide.round_write(old.phase, old.lease, phase, op.generation)
    if isinstance(may, attempts.Rejected):
        run.top()
        yield f"may not write {phase} to round {n}: {may.reason.value}", run.state()
        return
    if isinstance(may, attempts.Duplicate) and len(op.arg) > 2:
        _wrote(run, then)
        yield f"finds {phase} in round {n}: its answer was lost", run.state()
        return
    if not op.round_fresh:
        run.set(pc="rr", arg=(then, phase, 1))
        yield f"writes {phase} to round {n}: conflict", run.state()
        return
    content = old.bytes
    if then == "planned":
        frozen = decide.freeze(run.views, op.sender[0], run.slots(), run.scope.max_unavailable)
        unfit = [v.pod for v, m in zip(run.views, frozen, strict=True) if m > 0 and (v.leaving or v.shut or v.rest)]
        if unfit:
            run.wrong(f"pods {unfit} are members of a round although they are to go, to sleep or to be shut")
        content = run.scope.content(op.sender[0], run.scope.versions[n][0]) or BASE
        for i, c in enumerate(run.columns):
            member = list(c.member)
            member[n] = frozen[i]
            run.column(i, member=tuple(member))
    new = Round(phase, op.generation, content)
    if phase == "Succeeded" != old.phase and then != "unclaimed":
        _check_success(run, content)
    if run.world.budget.total and run.world.budget.lost:
        lost = run.copy()
        lost.spend(lost=1)
        lost.write_round(n, new)
        lost.set(pc="rr", arg=(then, phase, 1), round=old, round_fresh=0)
        yield f"writes {phase} to round {n}; the answer is lost", lost.state()
    run.write_round(n, new)
    _wrote(run, then)
    yield f"writes {phase} to round {n}", run.state()


def _wrote(run: Run, then: str) -> None:
    if then == "barrier":
        run.barrier(claims.Barrier(*run.op.barrier), written=True)
    elif then == "unclaimed":
        run.top()
    else:
        getattr(run, then)()


def _check_success(run: Run, content: int) -> None:
    if run.world.truth != content:
        run.wrong("a round is Succeeded although its bytes are not committed")
    away = [
        c.pod
        for c in run.columns
        if c.alive
        and c.holds
        and c.holds[1] == content
        and not (c.admit and c.routed)
        and not intended(run, c)
        and c.member[run.op.work] == c.identity
    ]
    if len(away) > run.scope.max_unavailable:
        run.wrong(f"a round is Succeeded although pods {away}, which are whole, can not be reached")


def intended(run: Run, c: Column) -> bool:
    """It is dropped on purpose, or lost: another process stands in its place."""
    v, life = c.views[run.who], c.life
    return bool(c.rest or v.rest or life.leaving or v.leaving or life.shut or v.shut or life.process != life.about)


def _read_pipeline(run: Run) -> Iterator[Step_]:
    then = run.op.arg
    live = run.world.pipeline
    run.set(seen=live, seen_fresh=1)
    deposed = claims.is_deposed(live.fence, run.op.generation)
    if then[0] == "shown":
        run.barrier(claims.Barrier(*run.op.barrier), fence=live.fence)
    elif deposed:
        run.top()
    elif then[0] == "hold":
        run.held_on()
    else:
        run.set(pc="wp")
    yield "reads the pipeline" + (": deposed" if deposed else ""), run.state()


def _write_pipeline(run: Run) -> Iterator[Step_]:
    op = run.op
    what = op.arg[0]
    if claims.is_deposed(op.seen.fence, op.generation):
        run.top()
        yield f"may not write {what}: deposed", run.state()
        return
    if not op.seen_fresh:
        run.set(pc="rp")
        yield f"writes {what}: conflict", run.state()
        return
    if what == "commit":
        new = op.seen._replace(committed=run.target, active=(*op.seen.active[:4], 1))
        _check_commit(run)
        run.world = run.world._replace(truth=run.target[1])
    else:
        new = op.seen._replace(active=())
    if run.world.budget.total and run.world.budget.lost:
        lost = run.copy()
        lost.spend(lost=1)
        lost.write_pipeline(new)
        lost.set(pc="rp", seen=op.seen, seen_fresh=0)
        yield f"writes {what}; the answer is lost", lost.state()
    if op.generation < run.world.pipeline.fence:
        run.wrong("a deposed operator wrote the pipeline")
    run.write_pipeline(new)
    if what == "commit":
        run.committed()
    else:
        run.top()
    yield "commits" if what == "commit" else "frees the slot", run.state()


def _check_commit(run: Run) -> None:
    """Everyone is fenced: no live engine that could serve other weights still takes orders of an older generation."""
    n = run.op.work
    if not any(c.member[n] > 0 for c in run.columns):
        awake = [c.pod for c in run.columns if c.alive and c.memory != RELEASED]
        if awake:
            run.wrong(f"committed with nobody in the round although pods {awake} are not asleep")
    elif not any(c.holds[:2] == run.target for c in run.columns):
        run.wrong("committed although no engine is proven at the target")
    ours = [c for c in run.columns if c.alive and c.member[n] in (c.identity, decide.BLOCKED - c.pod)]
    absent = [c.pod for c in ours if c.holds[:2] != run.target and not intended(run, c)]
    if len(absent) > run.scope.max_unavailable:
        run.wrong(f"committed although pods {absent} of the round are not whole")
    for c in run.columns:
        if c.alive and c.admit and c.routed and c.bytes != run.target[1] and not c.life.fresh:
            run.wrong(f"committed while pod {c.pod} serves other bytes")
        if c.alive and c.holds and c.fence[0] < run.op.generation:
            run.wrong(f"committed while pod {c.pod} has not stored the generation")


def _sender(run: Run) -> Iterator[Step_]:
    """Calls to the sender: fence, hold, release. Its fence is in memory: another process has none."""
    op, s = run.op, run.world.sender
    what = op.arg[0]
    held = Fence(PIPELINE, f"r{s.fence[1]}", s.fence[0]) if s.fence[0] else Fence()
    asked = Fence(PIPELINE, f"r{op.work}", op.generation)
    allowed = fencing.admit(held, asked, now_ms=0, closed=s.hold < 0) is fencing.Admission.ACCEPT
    if run.world.budget.total and run.world.budget.lost:
        lost = run.copy()
        lost.spend(lost=1)
        _asked_sender(lost, op.arg, None, 0)
        yield f"asks the sender to {what}; nothing comes back", lost.state()
    said: tuple[int, int] | None = None
    if allowed:
        version = run.scope.versions[op.work][0]
        content = run.scope.content(s.incarnation, version)
        hold = s.hold
        if what == "hold" and content is not None:
            hold = op.work
        elif what == "release" and hold == op.work:
            hold = -1
        run.world = run.world._replace(sender=s._replace(fence=(op.generation, op.work), hold=hold))
        said = (s.incarnation, hold)
    _asked_sender(run, op.arg, said, 0 if allowed else s.fence[0])
    yield f"asks the sender to {what}" + ("" if allowed else ": 412"), run.state()


def _asked_sender(run: Run, arg: tuple[Any, ...], said: tuple[int, int] | None, shown: int) -> None:
    if arg[0] == "fence":
        run.set(sender=said or ())
        shown = max(shown, *(run.view(i).refused for i in range(len(run.columns))))
        run.barrier(claims.Barrier(*run.op.barrier), fenced=True, shown=shown)
    elif arg[0] == "hold":
        if said is None or said[1] != run.op.work:
            run.refuse("Failed")
        else:
            run.set(sender=said)
            run.held()
    else:
        run.phase(arg[1], "settled")


def _delete(run: Run) -> Iterator[Step_]:
    """Delete pods that do not heal, each under the UID that was seen."""
    for i, c in enumerate(run.columns):
        if c.todo[run.who]:
            one = run.copy()
            one.mine(i, "todo", IDLE)
            if PRECONDITION(one.view(i).pod, c.pod):
                if one.view(i).pod != c.pod:
                    one.wrong(f"deleted pod {c.pod} although the decision was about pod {one.view(i).pod}")
                one.columns[i] = one.columns[i]._replace(alive=0, admit=0, up=0, pend=-1, current=-1)
            if not any(k.todo[one.who] for k in one.columns):
                one.set(pc="rp", arg=("hold",))
            yield f"deletes pod {c.pod}", one.state()


def PRECONDITION(decided: int, live: int) -> bool:
    """The apiserver deletes only the pod of the UID that the decision was about."""
    return decided == live


def _preempted(run: Run) -> Iterator[Step_]:
    """Lists rounds and asks the sender, in the middle of work outside rounds."""
    run.set(sender=(run.world.sender.incarnation, run.world.sender.hold))
    run.preempted()
    yield "looks for a Refresh" + (", and makes room for it" if run.op.pc == "wp" else ""), run.state()


EFFECTS: dict[str, Callable[[Run], Iterator[Step_]]] = {
    "top": _top,
    "pipeline": _pipeline,
    "idle": _idle,
    "claim": _claim,
    "claimrb": _claimrb,
    "rr": _read_round,
    "wr": _write_round,
    "rp": _read_pipeline,
    "wp": _write_pipeline,
    "wg": _write_grants,
    "sender": _sender,
    "delete": _delete,
    "preempted": _preempted,
    "fan": fan,
}
