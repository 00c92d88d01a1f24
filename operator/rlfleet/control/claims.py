"""ResourceClaims of a namespace, read live and joined with the ResourceSlices of the nodes that they were given.

Invariant: what the apiserver does not serve or does not let us read is unknown with that reason, never "no devices";
any other failure to read is an error of the reconcile, as for pods.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlfleet.kube.errors import Forbidden, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import RESOURCECLAIMS, RESOURCESLICES
from rlfleet.plan.dra import Allocation, DeviceKey, allocation_of, device_table, node_of, results_of
from rlfleet.plan.topology import Device

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]


async def list_claims(ctx: Context, namespace: str) -> list[Obj]:
    """All ResourceClaims of a namespace. NotFound: the apiserver serves no resource.k8s.io/v1."""
    listed = await ctx.kube.at(Priority.ROUND).list(RESOURCECLAIMS, namespace, timeout=ctx.settings.api_timeout)
    ctx.claims.keep(namespace, {c["metadata"]["uid"] for c in listed.items})
    return listed.items


async def read_allocations(ctx: Context, namespace: str, names: Iterable[str]) -> dict[str, Allocation]:
    """The named ResourceClaims, joined. One that does not exist is left out. No name: nothing is asked."""
    wanted = set(names) - {""}
    if not wanted:
        return {}
    try:
        claims = [c for c in await list_claims(ctx, namespace) if c["metadata"]["name"] in wanted]
    except (NotFound, Forbidden) as e:
        return {n: Allocation(n, "", "", None, f"ResourceClaims can not be read: {e.message[:200]}") for n in wanted}
    return await join(ctx, namespace, claims)


async def join(ctx: Context, namespace: str, claims: Iterable[Obj]) -> dict[str, Allocation]:
    """Allocations of these claims by name."""
    found: dict[str, Allocation] = {}
    fresh: list[Obj] = []
    for claim in claims:
        meta = claim["metadata"]
        known = ctx.claims.get(namespace, meta["uid"], meta["resourceVersion"])
        if known is not None:
            found[meta["name"]] = known
        else:
            fresh.append(claim)
    table, why = await _table(ctx, fresh)
    for claim in fresh:
        joined = allocation_of(claim, table, why)
        ctx.claims.put(namespace, claim["metadata"]["resourceVersion"], joined)
        found[joined.claim] = joined
    return found


async def _table(ctx: Context, claims: Iterable[Obj]) -> tuple[dict[DeviceKey, Device], str]:
    """Devices of the drivers and nodes that the claims name, and why there are none if they may not be read."""
    places = {(str(r.get("driver") or ""), node_of(c)) for c in claims for r in results_of(c) or []}
    slices: list[Obj] = []
    kube = ctx.kube.at(Priority.ROUND)
    for driver, node in sorted(places):
        fields = f"spec.driver={driver}" + (f",spec.nodeName={node}" if node else "")
        try:
            listed = await kube.list(RESOURCESLICES, field_selector=fields, timeout=ctx.settings.api_timeout)
        except (NotFound, Forbidden) as e:
            log.info("ResourceSlices can not be read: %s", e)
            return {}, f"ResourceSlices can not be read: {e.message[:200]}"
        slices += listed.items
    return device_table(slices), ""
