"""Between rounds: who is to be shut by a person's annotation, who is to sleep by spec.active and by what the trainer
demands; then one claim that sees to it.

Invariant: demands are recorded as grants before anything is done for them, and a round goes by what is recorded, so
that who is to sleep does not change under it. Grants follow from observation alone: nothing here is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.demand import answer, read_demand
from rlfleet.control.elastic.work import ElasticWork, Preempted, trouble_of
from rlfleet.control.pipeline_view import PipelineView
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.plan.demand import held_devices, progress_row
from rlfleet.plan.elastic import plan_elastic, unmoved
from rlfleet.plan.memory_gate import to_fence
from rlfleet.plan.quarantine import plan_quarantine, to_close, why_shut
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


async def _hear(ctx: Context, ledger: Ledger, view: PipelineView) -> None:
    """What the trainer says now: its progress, and its demands with what becomes of them."""
    says = await read_demand(ctx, ledger, train=view.sender.train.devices)
    view.progress = progress_row(says.progress, ledger.status.get("progress"))
    done = says.progress.completed / says.progress.target if says.progress is not None else None
    ctx.metrics.progress(ledger.namespace, ledger.name, done)
    view.grants = answer(says, ledger, view.fleet, view.sender)


async def step(ctx: Context, ledger: Ledger, view: PipelineView, preempted: Preempted) -> Step:
    """Take one step towards who is to sleep and who is to be awake."""
    fleet, now = view.fleet, ctx.clock.monotonic()
    await _hear(ctx, ledger, view)
    assert view.grants is not None
    fleet.held = held_devices(view.grants)
    fleet.rest()
    if [g.row() for g in view.grants] != list(ledger.status.get("grants") or ()):
        # Said before it is acted upon; what engines do next is decided with it.
        await view.write_if_changed(None)
        return Step(acted=True)
    cache_ready = has_weights(view.sender.status)
    engines = fleet.engines
    generation = int(ledger.status.get("fence") or 0)
    behind = to_fence(view.grants, engines.values(), generation=generation)
    plan = plan_elastic(list(engines.values()), pipeline=ledger.uid, cache_ready=cache_ready, behind=behind)
    shut = plan_quarantine(engines.values(), pipeline=ledger.uid)
    open_ones = {n: e for n, e in engines.items() if not e.gone and (unmoved(e) or to_close(e))}
    ctx.elastic.keep_only(ledger.uid, {e.pod_uid for e in open_ones.values()})
    out, later = ctx.elastic.due([engines[n] for n in shut], now)
    names, again = ctx.elastic.due([engines[n] for n in (*plan.shrink, *plan.wake) if n not in shut], now)
    again = min((s for s in (again, later) if s is not None), default=None)
    problems = {n: p for n, e in open_ones.items() if (p := ctx.elastic.problem(e.pod_uid)) is not None}
    view.unmoved = trouble_of(problems) or plan.trouble
    work = ElasticWork(ctx, ledger, view, fleet, cache_ready=cache_ready)
    if out:
        await work.shut(out, working=why_shut([engines[n] for n in out]), preempted=preempted)
        return Step(acted=True)
    if not names or plan.waits is None:
        return Step(working=plan.waits, again=again)
    if plan.shrink:
        await work.sleep(names, working=plan.waits, preempted=preempted)
    else:
        await work.wake(names, working=plan.waits, preempted=preempted)
    return Step(acted=True)
