"""Reconciling one RLPipeline: pick the round that runs, execute it, keep the pipeline's status true.

Numbered as it happens: (1) read the pipeline, its rounds and pools live; (2) the repair rules that need nobody; (3)
find the sender, look at the engines; (4) finish what is claimed, whoever claimed it; (5) settle rounds that can not
run, execute the newest that can; (6) repair engines; (7) put engines to sleep or wake them; (8) bring those that missed
a round to what is committed; (9) sweep the history, write status if it changed. While a round waits, for its version
or for a rolling update, all of this goes on, but that it takes along whoever could be caught up.

Invariants: repair rules are isolated (control.repair.rules), so none that fails keeps a round or another rule waiting;
one reconcile of a pipeline runs at a time (the queue sees to it), and it is the only writer of RLPipeline.status and
SyncRound.status, but for what a deleting pipeline says of the round that it waits for (control.deletion).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels
from rlfleet.api.conditions import ConditionStatus, Reason, RoundCondition
from rlfleet.control import catchup
from rlfleet.control.deletion import bury, end_pipeline
from rlfleet.control.elastic.step import step as elastic_step
from rlfleet.control.identity import (
    finish,
    interrupted,
    poisoned_fence,
    recover,
    settle_outlived,
    shown_above,
    take_over,
)
from rlfleet.control.pipeline_view import PipelineView
from rlfleet.control.queue import After, Done, Result, Retry
from rlfleet.control.repair.engines import ROUND_KINDS, EngineRepair, trouble_of
from rlfleet.control.repair.history import let_ended_go, release_ceilings, settle_abandoned, sweep_history
from rlfleet.control.repair.pods import replace_closed, replace_strangers
from rlfleet.control.repair.rules import RuleName, Rules
from rlfleet.control.room import make_room, open_room
from rlfleet.control.rounds.catchup import CatchUp
from rlfleet.control.rounds.executor import Executor
from rlfleet.control.rounds.ledger import API_SECONDS, FenceLost, Ledger, RoundGone, RoundStatusLost
from rlfleet.control.rounds.objects import is_terminal, kind_of, ref_of
from rlfleet.control.rounds.plan_record import plan_of
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.control.rounds.settling import end_round
from rlfleet.control.saying import say, with_condition
from rlfleet.control.sorting import triage_now
from rlfleet.control.train_blocks import ensure_claims
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, RLPIPELINES, SYNCROUNDS
from rlfleet.logkeys import bound
from rlfleet.plan.catchup import triage_catch_ups
from rlfleet.plan.deletion import belongs, is_deleting
from rlfleet.plan.elastic import wanted_pods
from rlfleet.plan.identity import poisoned_gates, strays
from rlfleet.plan.rounds import RoundRef
from rlfleet.plan.triage import Triage
from rlfleet.plan.validate import Violation
from rlfleet.plan.verdicts import is_stuck

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]

#: Seconds between two looks at the sender while a round waits for its version.
WAIT_SECONDS = 0.2
#: Seconds in which gates should answer before claimed work is taken up: only to see whether the status was set back.
GLANCE_SECONDS = 1.0


async def reconcile_pipeline(ctx: Context, namespace: str, name: str) -> Result:
    """Move one pipeline on."""
    try:
        return await _reconcile(ctx, namespace, name)
    except FenceLost as e:
        # Not an error of ours: somebody with a higher fence acts. Looking again at once would only take the fence from
        # them in turn, so each loss waits longer than the one before; the next look sees what they left.
        log.warning("fence lost", extra={"pipeline": f"{namespace}/{name}", "why": str(e)})
        raise Retry(f"fence lost: {e}") from e
    except RoundStatusLost as e:
        log.warning("status of a round lost", extra={"pipeline": f"{namespace}/{name}", "why": str(e)})
        raise Retry(f"status of a round lost: {e}") from e
    except RoundGone as e:
        log.warning("round vanished", extra={"pipeline": f"{namespace}/{name}", "round": str(e)})
        raise Retry(f"round vanished: {e}") from e


async def _reconcile(ctx: Context, namespace: str, name: str) -> Result:
    kube = ctx.kube.at(Priority.ROUND, field_manager=labels.PIPELINE_MANAGER)
    # 1. live reads
    listed = await kube.list(SYNCROUNDS, namespace, timeout=API_SECONDS)
    rounds = [r for r in listed.items if r["spec"]["pipeline"] == name]
    try:
        pipeline = await kube.get(RLPIPELINES, namespace, name, timeout=API_SECONDS)
    except NotFound:
        await bury(ctx, namespace, rounds)
        await _say_no_pipeline(ctx, namespace, name, rounds)
        ctx.repairs.forget(namespace, name)
        ctx.metrics.pipeline(namespace, name, None)
        ctx.metrics.claims_leaked(namespace, name, None)
        ctx.metrics.progress(namespace, name, None)
        return Done()
    await bury(ctx, namespace, [r for r in rounds if not belongs(r, pipeline=pipeline["metadata"]["uid"])])
    rounds = [r for r in rounds if belongs(r, pipeline=pipeline["metadata"]["uid"])]
    pools = await kube.list(ENGINEPOOLS, namespace, timeout=API_SECONDS)
    expected = sum(wanted_pods(p) for p in pools.items if p["spec"]["pipeline"] == name)

    # 2. repair first: what needs neither the slot nor anybody's answer
    ledger = Ledger(ctx, pipeline, holder=ctx.settings.identity)
    active = (pipeline.get("status") or {}).get("activeOperation")
    ctx.metrics.pipeline(namespace, name, pipeline)
    owner = next((r for r in rounds if r["metadata"]["uid"] == (active or {}).get("uid")), None)
    ctx.metrics.round_moved(namespace, name, owner)
    rules = Rules(ctx, pipeline)
    await rules.run(RuleName.FINALIZER_CEILINGS, lambda: release_ceilings(ctx, pipeline, rounds))
    await rules.run(RuleName.ENDED_ROUNDS, lambda: let_ended_go(ledger, rounds, claimed=(active or {}).get("uid")))

    taken: tuple[Violation, ...] = ()
    if not is_deleting(pipeline):
        taken = await rules.run(RuleName.TRAIN_BLOCKS, lambda: ensure_claims(ctx, pipeline, pools.items)) or ()

    # 3. the sender and the engines
    sender = SenderLink(ctx, namespace, name, pipeline["metadata"]["uid"])
    await sender.find(pipeline["spec"])
    view = PipelineView(ctx, ledger, sender, expected, rules)
    view.taken = taken
    await view.observe(GLANCE_SECONDS if active else None)
    await rules.run(RuleName.PORT_CLAIMS, view.judge_claims)

    # 4. what is claimed
    blocked = poisoned_fence(ctx, ledger)
    if is_deleting(pipeline) and (not active or blocked or active["uid"] == ledger.uid):
        return await end_pipeline(ctx, ledger, view, rounds, blocked=blocked)
    shown = None if blocked else shown_above(ctx, ledger, view)
    if shown is not None:
        ledger.round = interrupted(rounds, shown)
        if ledger.round is None:
            await recover(ctx, ledger, view, shown)
        else:
            await _execute(ctx, ledger, sender, view)
        return After(0.0, Priority.ROUND)
    if active and not blocked and active["uid"] == ledger.uid:
        await finish(ctx, ledger, view)
        return After(0.0, Priority.ROUND)
    if active and not blocked:
        ledger.round = next((r for r in rounds if r["metadata"]["uid"] == active["uid"]), None)
        lost = ledger.round is not None and active.get("committed") and plan_of(ledger.round_status) is None
        if active["kind"] in ROUND_KINDS and ledger.round is not None and not (lost and not is_terminal(ledger.round)):
            await _execute(ctx, ledger, sender, view)
        else:
            # Work outside rounds, or the round is gone, or its status is (restored without it): what it was about to
            # do is not known any more.
            await EngineRepair(ctx, ledger, view, view.fleet).take_over(sender)
        return After(0.0, Priority.ROUND)

    # 5. the unclaimed
    open_rounds = {r["metadata"]["uid"]: r for r in rounds if not is_terminal(r)}
    replaced: frozenset[str] = frozenset()
    if not active:
        await rules.run(RuleName.HOLDS, sender.end_left_hold)
    if blocked is None:
        outlived = await rules.run(
            RuleName.OUTLIVED_ROUNDS, lambda: settle_outlived(ctx, ledger, view, open_rounds.values())
        )
        for uid in outlived or ():
            del open_rounds[uid]
        left = await rules.run(
            RuleName.ABANDONED_ROUNDS, lambda: settle_abandoned(ctx, ledger, list(open_rounds.values()))
        )
        for facts, _ in left.settle if left is not None else ():
            del open_rounds[facts.uid]
        if left is not None and left.resume is not None:
            ledger.round = open_rounds[left.resume.uid]
            await _execute(ctx, ledger, sender, view)
            return After(0.0, Priority.ROUND)
        replaced = await rules.run(RuleName.STRANGERS, lambda: _strangers(ctx, ledger, view)) or replaced
    elif active:
        open_rounds.pop(active["uid"], None)
    todo = _triage(ctx, view, open_rounds.values(), replaced, blocked)
    catch_ups = [ref_of(r) for r in open_rounds.values() if kind_of(r) == "CatchUp"]
    ends, behind = triage_catch_ups(catch_ups, refresh=todo.run, committed=ledger.committed, sender=sender.status)
    for end in (*todo.settle, *ends):
        await end_round(
            ledger,
            open_rounds[end.round.uid],
            outcome=end.outcome,
            stage="Pending",
            reason=end.reason,
            message=end.message,
            committed=end.outcome == "Succeeded",
        )
    todo, room = make_room(ctx, view, todo)
    if room is not None and await open_room(view, room):
        return After(0.0, Priority.ROUND)
    if todo.run is not None:
        ledger.round = open_rounds[todo.run.uid]
        await _execute(ctx, ledger, sender, view)
        return After(0.0, Priority.ROUND)

    # 6. engines, by work outside rounds: only when no round could go first
    async def preempted() -> str | None:
        listed = await kube.list(SYNCROUNDS, namespace, timeout=API_SECONDS)
        await sender.ask()
        mine = [r for r in listed.items if r["spec"]["pipeline"] == name and belongs(r, pipeline=ledger.uid)]
        run = _triage(ctx, view, [r for r in mine if not is_terminal(r)], frozenset(), None).run
        makes_room = room is not None and room.lasts(ctx.now_ms())
        return run.name if run is not None and not makes_room else None

    # A finished round says what is wrong until the next one: its trouble outlives the write that ended it.
    view.trouble = blocked or _trouble(ctx, view, pipeline, rounds)
    soon = None
    if blocked is None:
        soon = await rules.run(RuleName.ENGINES, lambda: _repair_engines(ctx, ledger, view, preempted))
        if soon == 0.0:
            return After(0.0, Priority.ROUND)
    if todo.waiting is not None and todo.why is not None:
        ledger.round = open_rounds[todo.waiting.uid]
        await _say_waiting(ctx, ledger, todo.waiting, todo.why)

    # 7. engines that are to sleep or to wake
    moved = None
    if blocked is None:
        moved = await rules.run(RuleName.ELASTIC, lambda: elastic_step(ctx, ledger, view, preempted))
        if moved is not None and moved.acted:
            return After(0.0, Priority.ROUND)
    working = todo.why or (moved.working if moved is not None else None)

    # 8. engines that missed a round
    waits = todo.waiting is not None
    plan = catchup.plan(ctx, ledger, sender, view.fleet, rounds, pools.items, refresh_waits=waits)
    view.trouble = blocked or view.unrepaired or view.unmoved or view.trouble or plan.trouble
    view.awaiting = plan.awaiting
    if behind is not None and blocked is None:
        ledger.round = open_rounds[behind.uid]
        await _execute(ctx, ledger, sender, view)
        return After(0.0, Priority.ROUND)
    if blocked is None:
        await rules.run(RuleName.CLOSED_ENGINES, lambda: replace_closed(ctx, ledger, view.fleet, plan.replace))

    # 9. history, after every rule that may still need it as evidence; then what all of this comes to
    await rules.run(RuleName.HISTORY, lambda: sweep_history(ctx, ledger, rounds, list(view.fleet.engines.values())))
    await view.write_if_changed(working)
    if blocked is None and plan.open:
        ledger.round = await catchup.open_round(ledger, sender, plan.open, rounds)
        if ledger.round is not None:
            await _execute(ctx, ledger, sender, view)
        return After(0.0, Priority.ROUND)
    if todo.waiting is not None:
        return After(WAIT_SECONDS, Priority.ROUND)
    if rules.failed or rules.again:
        raise Retry(f"repair goes again: {', '.join(n.value for n in rules.failed) or 'lost a race'}")
    again = min(ctx.settings.poll_seconds, soon or ctx.settings.poll_seconds)
    if moved is not None and moved.again is not None:
        again = min(again, max(0.1, moved.again))
    if plan.again_ms is not None:
        again = min(again, max(0.1, (plan.again_ms - ctx.now_ms()) / 1000))
    return After(again)


def _triage(
    ctx: Context,
    view: PipelineView,
    rounds: Iterable[Obj],
    replaced: frozenset[str],
    blocked: tuple[Reason, str] | None,
) -> Triage:
    """Sort the unclaimed rounds by what is observed now; engines in ``replaced`` take part in nothing."""
    return triage_now(
        ctx,
        view.ledger,
        view.sender,
        view.fleet.engines.values(),
        [ref_of(r) for r in rounds if kind_of(r) == "Refresh"],
        expected=view.expected,
        blocked=blocked,
        replaced=replaced,
    )


async def _strangers(ctx: Context, ledger: Ledger, view: PipelineView) -> frozenset[str]:
    """Take over or replace the engines of a deleted pipeline of our name; the names of those that are replaced."""
    found = strays(view.fleet.engines.values(), pipeline=ledger.uid, now_ms=ctx.now_ms())
    stubborn = await take_over(ctx, ledger, view, found) if found.closed else frozenset()
    return await replace_strangers(ctx, ledger, view.fleet, {*found.open, *stubborn})


async def _repair_engines(
    ctx: Context,
    ledger: Ledger,
    view: PipelineView,
    preempted: Callable[[], Awaitable[str | None]],
) -> float | None:
    """See to engines that need it: 0 when something was done, else the seconds until the next one is due."""
    work = EngineRepair(ctx, ledger, view, view.fleet)
    wanted = work.needs()
    due, soon = view.memory.due(wanted, ctx.clock.monotonic())
    if due:
        await work.repair(due, view.memory, preempted=preempted)
        return 0.0
    problems = view.memory.problems(wanted)
    problems |= {
        n: "an operation has no known end, and its engine does not prove to be idle: delete the pod"
        for n, e in view.fleet.engines.items()
        if not e.gone and not e.leaving and e.status is not None and is_stuck(e.status)
    }
    view.unrepaired = trouble_of(problems)
    return soon


async def _execute(ctx: Context, ledger: Ledger, sender: SenderLink, view: PipelineView) -> None:
    assert ledger.round is not None
    meta = ledger.round["metadata"]
    run = CatchUp(ctx, ledger, sender) if kind_of(ledger.round) == "CatchUp" else Executor(ctx, ledger, sender)
    run.pipeline_status = view.bind(run.fleet)
    with bound(round=meta["name"], roundUID=meta["uid"]):
        await run.execute(view.sender_status())


async def _say_waiting(ctx: Context, ledger: Ledger, waiting: RoundRef, why: tuple[Reason, str]) -> None:
    assert ledger.round is not None
    kind = RoundCondition.PROGRESSING
    conditions = with_condition(ctx, ledger.round, kind, ConditionStatus.TRUE, *why)
    if ledger.round_status.get("phase") != "Pending" or conditions is not None:
        conditions = conditions or ledger.round_status["conditions"]
        await ledger.write_round({"phase": "Pending", "conditions": conditions})


def _last_trouble(pipeline: Obj, rounds: list[Obj]) -> tuple[Reason, str] | None:
    last = (pipeline.get("status") or {}).get("lastRound")
    obj = next((r for r in rounds if r["metadata"]["name"] == last), None)
    failure = ((obj or {}).get("status") or {}).get("failure")
    if not failure or (obj or {}).get("status", {}).get("outcome") != "Failed":
        return None
    return Reason.parse(failure["reason"]), f"round {last} failed in {failure['stage']}: {failure['message']}"


def _trouble(ctx: Context, view: PipelineView, pipeline: Obj, rounds: list[Obj]) -> tuple[Reason, str] | None:
    poisoned = poisoned_gates(view.fleet.engines.values(), now_ms=ctx.now_ms())
    if poisoned:
        return (
            Reason.FENCE_POISONED,
            f"the gates of {', '.join(poisoned[:4])} hold a fence more than a day ahead of the clock and refuse every "
            "order: delete these pods",
        )
    return _last_trouble(pipeline, rounds)


async def _say_no_pipeline(ctx: Context, namespace: str, name: str, rounds: list[Obj]) -> None:
    """A round for a pipeline that does not exist says so; creating the pipeline sets it going."""
    kube = ctx.kube.at(Priority.RESYNC)
    message = (
        f"there is no RLPipeline {name!r} in namespace {namespace!r}: create it, or delete this round and name another "
        "one in spec.pipeline"
    )
    kind, reason = RoundCondition.PROGRESSING, Reason.PIPELINE_NOT_FOUND
    for r in rounds:
        if is_terminal(r) or "deletionTimestamp" in r["metadata"] or r["metadata"].get("ownerReferences"):
            continue
        await say(ctx, kube, SYNCROUNDS, r, kind, ConditionStatus.FALSE, reason, message, phase="Pending")
