"""ResourceClaims of a pipeline's train blocks: made before any pod needs them, removed when the spec has them no more.

Invariant: each step looks at what is there and does what is missing, so an operator that dies between any two of them
leaves nothing to clean up; a claim is deleted under its UID, and only if this pipeline controls it. Its pods keep it
until they end (the API's own protection); the garbage collector removes it with its pipeline.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.control.claims import list_claims
from rlfleet.control.queue import Kind, QueueKey
from rlfleet.kube.errors import AlreadyExists, Conflict, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import RESOURCECLAIMS
from rlfleet.plan.blocks import blocks_of, plan_claims, usable
from rlfleet.plan.dra import claim_name
from rlfleet.plan.template import is_claims
from rlfleet.plan.validate import Violation

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]


async def ensure_claims(ctx: Context, pipeline: Obj, pools: list[Obj]) -> tuple[Violation, ...]:
    """Make and remove claims; what keeps a block from having one. ``pools`` that wait for a claim look again."""
    namespace = pipeline["metadata"]["namespace"]
    if not blocks_of(pipeline) and not (pipeline.get("status") or {}).get("blocks"):
        return ()
    plan = plan_claims(pipeline, await list_claims(ctx, namespace))
    kube = ctx.kube.at(Priority.SCALE, field_manager=labels.PIPELINE_MANAGER)
    for claim in plan.create:
        try:
            await kube.create(RESOURCECLAIMS, namespace, claim, timeout=ctx.settings.api_timeout)
        except AlreadyExists:
            continue  # whose it is shows at the next look
        ctx.metrics.write(RESOURCECLAIMS.plural)
        log.info("claim of a train block made", extra={"claim": f"{namespace}/{claim['metadata']['name']}"})
    if plan.create:
        _wake(ctx, pipeline, pools)
    for name, uid in plan.delete:
        try:
            await kube.delete(RESOURCECLAIMS, namespace, name, uid=uid, timeout=ctx.settings.api_timeout)
        except (NotFound, Conflict):
            continue  # gone, or another one by now
        ctx.metrics.write(RESOURCECLAIMS.plural)
    return tuple(
        Violation(
            Reason.BLOCK_CLAIM_TAKEN,
            f"ResourceClaim {name} is not this pipeline's, so its train block has none; delete it, or rename the block",
        )
        for name in plan.taken
    )


async def missing_claims(ctx: Context, pool: Obj, pipeline: Obj) -> tuple[str, ...]:
    """Names of the claims that a pool needs and that can not be used (yet); none where it needs none."""
    if not is_claims(pool):
        return ()
    meta = pipeline["metadata"]
    wanted = [claim_name(meta["name"], b) for b in pool["spec"]["placement"].get("blocks") or []]
    known = {c["metadata"]["name"]: c for c in await list_claims(ctx, meta["namespace"])}
    return tuple(n for n in wanted if not usable(known.get(n), meta["uid"]))


def _wake(ctx: Context, pipeline: Obj, pools: list[Obj]) -> None:
    for pool in pools:
        if pool["spec"].get("pipeline") == pipeline["metadata"]["name"] and pool["spec"]["placement"].get("blocks"):
            ctx.enqueue(QueueKey(Kind.POOL, pool["metadata"]["namespace"], pool["metadata"]["name"]))
