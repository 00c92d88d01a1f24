"""Between rounds: who is to sleep by spec.active and by what the trainer demands; then one claim that sees to it.

Invariant: demands are recorded as grants before anything is done for them, and a round goes by what is recorded, so
that who is to sleep does not change under it. Grants follow from observation alone: nothing here is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.demand import read_demand
from rlfleet.control.elastic.work import ElasticWork, Preempted, trouble_of
from rlfleet.control.pipeline_view import PipelineView
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.plan.demand import Grant, grants_of, held_devices, progress_row
from rlfleet.plan.elastic import DEFAULT_RESIDUAL_GIB, GIB, ceiling, limits_of, plan_elastic, unmoved
from rlfleet.plan.memory_gate import decide_grants, readings
from rlfleet.plan.rounds import has_weights

if TYPE_CHECKING:
    from rlfleet.control.context import Context


@dataclass(frozen=True, slots=True)
class Step:
    """What a look at sleeping and waking came to."""

    acted: bool = False
    """Something was done, so everything is looked at anew."""
    working: tuple[Reason, str] | None = None
    """What is going on or waited for."""
    again: float | None = None
    """Seconds until something is due."""


async def grants_now(ctx: Context, ledger: Ledger, view: PipelineView) -> tuple[Grant, ...]:
    """The trainer's demands, each granted or with what stands in its way."""
    before = grants_of(ledger.status)
    says = await read_demand(ctx, ledger, train=view.sender.train.devices)
    view.progress = progress_row(says.progress, ledger.status.get("progress"))
    done = says.progress.completed / says.progress.target if says.progress is not None else None
    ctx.metrics.progress(ledger.namespace, ledger.name, done)
    demands = says.demands
    if not demands and not before:
        return ()
    fleet = view.fleet
    pools = {n: ceiling(p) for n, p in fleet.pools.items() if p["spec"]["pipeline"] == ledger.name}
    engines = list(fleet.engines.values())
    reports = [e.status.devices for e in engines if e.status is not None and not e.gone]
    if view.sender.status is not None:
        reports.append(view.sender.status.devices)
    return decide_grants(
        demands,
        before,
        engines=engines,
        shared=frozenset(d for p in pools.values() for d in p.devices),
        limits=limits_of(engines, pools),
        default_limit=min((p.residual_bytes for p in pools.values()), default=int(DEFAULT_RESIDUAL_GIB * GIB)),
        memory=readings(reports),
    )


async def step(ctx: Context, ledger: Ledger, view: PipelineView, preempted: Preempted) -> Step:
    """Take one step towards who is to sleep and who is to be awake."""
    fleet, now = view.fleet, ctx.clock.monotonic()
    view.grants = await grants_now(ctx, ledger, view)
    fleet.held = held_devices(view.grants)
    fleet.rest()
    if [g.row() for g in view.grants] != list(ledger.status.get("grants") or ()):
        # Said before it is acted upon; what engines do next is decided with it.
        await view.write_if_changed(None)
        return Step(acted=True)
    cache_ready = has_weights(view.sender.status)
    engines = fleet.engines
    plan = plan_elastic(list(engines.values()), pipeline=ledger.uid, cache_ready=cache_ready)
    open_ones = {n: e for n, e in engines.items() if not e.gone and unmoved(e)}
    ctx.elastic.keep_only(ledger.uid, {e.pod_uid for e in open_ones.values()})
    names, again = ctx.elastic.due([engines[n] for n in (*plan.shrink, *plan.wake)], now)
    problems = {n: p for n, e in open_ones.items() if (p := ctx.elastic.problem(e.pod_uid)) is not None}
    view.unmoved = trouble_of(problems) or plan.trouble
    if not names or plan.waits is None:
        return Step(working=plan.waits, again=again)
    work = ElasticWork(ctx, ledger, view, fleet, cache_ready=cache_ready)
    if plan.shrink:
        await work.sleep(names, working=plan.waits, preempted=preempted)
    else:
        await work.wake(names, working=plan.waits, preempted=preempted)
    return Step(acted=True)
