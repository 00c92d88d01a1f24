"""Reading a pipeline's TrainerDemand: what its trainer asks for and reports now.

Invariant: what a trainer asked for counts until it withdraws it, or until its pod is proven gone. A trainer that merely
does not answer may be in the middle of a train step on these devices.
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
from rlfleet.plan.demand import Demand, Trainer, demands_of, grants_of, is_of, progress_of, trainer_of
from rlfleet.plan.topology import Device

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.rounds.ledger import Ledger


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
