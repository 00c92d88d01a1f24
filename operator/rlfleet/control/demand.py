"""A pipeline's TrainerDemand: what its trainer asks for and reports now, and what becomes of it.

Invariants:
- what a trainer asked for counts until it withdraws it, or until its pod is proven gone. A trainer that merely does not
  answer may be in the middle of a train step on these devices;
- a demand is recorded as a grant, granted or not, before anything is done for it; also while a round holds the engines,
  for that may last until somebody acts, and the trainer must hear of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlfleet.api.progress import Progress
from rlfleet.control.rounds.pods import is_gone
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS, TRAINERDEMANDS
from rlfleet.plan.demand import (
    Demand,
    Grant,
    Trainer,
    demands_of,
    grants_of,
    held_devices,
    is_of,
    progress_of,
    trainer_of,
    while_held,
)
from rlfleet.plan.elastic import DEFAULT_RESIDUAL_GIB, GIB, ceiling, keeps_devices, limits_of
from rlfleet.plan.memory_gate import decide_grants, readings
from rlfleet.plan.topology import Device

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.control.rounds.fleet import Fleet
    from rlfleet.control.rounds.ledger import Ledger
    from rlfleet.control.rounds.sender_link import SenderLink


@dataclass(frozen=True, slots=True)
class TrainerSays:
    """What the trainer says; nothing at all where there is no TrainerDemand, or its trainer is proven gone."""

    demands: tuple[Demand, ...] = ()
    progress: Progress | None = None


async def read_demand(ctx: Context, ledger: Ledger, *, train: frozenset[Device] | None) -> TrainerSays:
    """Read the TrainerDemand live. ``train``: the train pool, None when unknown."""
    kube = ctx.kube.at(Priority.ROUND)
    try:
        found = await kube.get(TRAINERDEMANDS, ledger.namespace, ledger.name, timeout=ctx.settings.api_timeout)
    except NotFound:
        return TrainerSays()
    if not is_of(found, ledger.uid) or await _gone(ctx, ledger.namespace, trainer_of(found)):
        return TrainerSays()
    before = grants_of(ledger.status)
    return TrainerSays(demands_of(found, train=train, before=before), progress_of(found))


async def _gone(ctx: Context, namespace: str, trainer: Trainer) -> bool:
    if not trainer.pod_name:
        return False
    kube = ctx.kube.at(Priority.ROUND)
    try:
        pod: Mapping[str, Any] = await kube.get(PODS, namespace, trainer.pod_name, timeout=ctx.settings.api_timeout)
    except NotFound:
        return True
    return pod["metadata"]["uid"] != trainer.pod_uid or is_gone(pod)


def answer(says: TrainerSays, ledger: Ledger, fleet: Fleet, sender: SenderLink) -> tuple[Grant, ...]:
    """The trainer's demands, each granted or with what stands in its way, by what is observed of the engines."""
    before = grants_of(ledger.status)
    if not says.demands and not before:
        return ()
    pools = {n: p for n, p in fleet.pools.items() if p["spec"]["pipeline"] == ledger.name}
    ceilings = {n: ceiling(p) for n, p in pools.items()}
    engines = list(fleet.engines.values())
    reports = [e.status.devices for e in engines if e.status is not None and not e.gone]
    if sender.status is not None:
        reports.append(sender.status.devices)
    return decide_grants(
        says.demands,
        before,
        engines=engines,
        shared=frozenset(d for c in ceilings.values() for d in c.devices),
        limits=limits_of(engines, ceilings),
        default_limit=min((c.residual_bytes for c in ceilings.values()), default=int(DEFAULT_RESIDUAL_GIB * GIB)),
        memory=readings(reports),
        keepers=frozenset(n for n, p in pools.items() if keeps_devices(p)),
        generation=int(ledger.status.get("fence") or 0),
    )


async def hear_demands(run: Executor) -> None:
    """Record the trainer's demands in the middle of a round that holds engines, for as long as that may take.

    From then on engines on demanded devices are to sleep: missing ones are dropped, so nothing waits for them any more,
    and whole ones stay closed when the round ends.
    """
    ledger, fleet = run.ledger, run.fleet
    says = await read_demand(run.ctx, ledger, train=run.sender.train.devices)
    recorded = list(ledger.status.get("grants") or ())
    if not says.demands and not recorded:
        return
    await fleet.poll()
    assert ledger.round is not None
    grants = while_held(answer(says, ledger, fleet, run.sender), ledger.round["metadata"]["name"])
    rows = [g.row() for g in grants]
    if rows != recorded:
        await ledger.write_pipeline({"grants": rows or None})
    fleet.held = held_devices(grants)
    fleet.rest()
