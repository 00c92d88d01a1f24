"""What orders do besides pausing and loading: publish, probe, routing, staging.

Pausing is in pausing.py, loading in loads.py, device memory in memory.py. Invariants:
- the durable record never claims more than was observed: proof is written after the read-back, and what could become
  untrue is withdrawn before the call that could make it untrue;
- only an open that the store's own proof allows is carried out, whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlfleet.api.wire import (
    CloseOrder,
    DiscardOrder,
    ErrorReason,
    HoldsRecord,
    OpenOrder,
    OperationRequest,
    PrepareOrder,
    ProbeOrder,
    PublishOrder,
    RouterEndpoint,
    StagingMode,
    Transport,
)
from rlfleet.calls import CallError, NoAnswer
from rlfleet.engine import Capability
from rlfleet.gate import rules
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import GateError
from rlfleet.gate.links import now_ms
from rlfleet.gate.order import ENGINE_SECONDS, READ_BACK_SECONDS, Result, engine_failure, seen
from rlfleet.gate.pausing import is_paused
from rlfleet.gate.reading import read_checkpoint
from rlfleet.gate.staging import Staging

log = logging.getLogger(__name__)


async def check_publish(ctx: GateContext, request: OperationRequest) -> None:
    """Only what was loaded, flushed and checked last may be published."""
    order = request.order
    assert isinstance(order, PublishOrder)
    latest = ctx.store.latest_load()
    rules.may_publish(None if latest is None else latest[1], order)


async def publish(ctx: GateContext, request: OperationRequest) -> Result:
    """Write the label once, read it back, and only then record the proof."""
    order = request.order
    assert isinstance(order, PublishOrder)
    await check_publish(ctx, request)
    latest = ctx.store.latest_load()
    assert latest is not None
    op_id, load = latest
    label = str(order.version)
    try:
        read_back = await ctx.engine.adapter.write_label(label, ENGINE_SECONDS)
    except CallError as e:
        raise engine_failure("publish", e) from e
    if read_back != label:
        raise GateError(ErrorReason.ENGINE_REFUSED, f"wrote label {label!r}, the engine reads {read_back!r}")
    with ctx.store.transaction():
        ctx.store.put_load(op_id, load.model_copy(update={"published": True}))
        ctx.store.holds = HoldsRecord(
            version=order.version, manifest_digest=order.manifest_digest, engine_digest=load.engine_digest
        )
    return {"label": read_back}


# ---------------------------------------------------------------------------------------------- probe


async def check_probe(ctx: GateContext, _: OperationRequest) -> None:
    """Only an engine that may serve is probed: a paused one would let the probe wait."""
    rules.may_open(ctx.store.holds)
    if await is_paused(ctx) is not False:
        raise GateError(ErrorReason.NOT_PROVEN, "the engine does not admit requests; Resume comes before Probe")


async def probe(ctx: GateContext, request: OperationRequest) -> Result:
    """One greedy token. It changes nothing, so an answer that does not come is a failure and leaves nothing unknown."""
    order = request.order
    assert isinstance(order, ProbeOrder)
    try:
        answer = await ctx.engine.adapter.probe(order.deadline_seconds)
    except NoAnswer as e:
        raise GateError(ErrorReason.DEADLINE_EXCEEDED, f"probe: {e}") from e
    except CallError as e:
        raise engine_failure("probe", e) from e
    holds = ctx.store.holds
    if holds is not None and rules.voids_proof(answer.label, holds):
        raise GateError(
            ErrorReason.ENGINE_REFUSED, f"probe: the token is of version {answer.label}, proven is {holds.version}"
        )
    return {"token": answer.token}


# ---------------------------------------------------------------------------------------------- routers


async def check_open(ctx: GateContext, _: OperationRequest) -> None:
    """Only an engine with proven weights may be opened."""
    rules.may_open(ctx.store.holds)


async def open_routes(ctx: GateContext, request: OperationRequest) -> Result:
    """Add our URL to every router and wait for the routers' own jobs."""
    order = request.order
    assert isinstance(order, OpenOrder)
    view = await seen(ctx, lambda v: v.admitting is not None)
    await check_open(ctx, request)
    if view.admitting is not True:
        raise GateError(ErrorReason.NOT_PROVEN, "the engine does not admit requests; Resume comes before Open")
    routers = ctx.routers.endpoints()
    if not routers:
        return {}
    # Until every job has a known end, a Close must reckon with a late one.
    ctx.store.router_add_since_ms = ctx.store.router_add_since_ms or now_ms()
    await _at_each(routers, lambda r: _add(ctx, r, order.deadline_seconds))
    ctx.store.router_add_since_ms = None
    return {}


async def close_routes(ctx: GateContext, request: OperationRequest) -> Result:
    """Remove our URL from every router and read that back.

    With an addition whose end is unknown, the lists must stay empty for as long as such a job may take.
    """
    order = request.order
    assert isinstance(order, CloseOrder)
    routers = ctx.routers.endpoints()
    deadline = time.monotonic() + order.deadline_seconds
    quiet_since = time.monotonic()
    while True:
        before = time.monotonic()
        removed = await _at_each(routers, lambda r: _remove(ctx, r, order.deadline_seconds))
        if any(removed):
            quiet_since = before
        pending = bool(routers) and ctx.store.router_add_since_ms is not None
        quiet = time.monotonic() - quiet_since
        if rules.quiet_enough(pending=pending, quiet_seconds=quiet, needed_seconds=ctx.config.router_quiet_seconds):
            break
        if time.monotonic() > deadline:
            raise GateError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"an earlier addition may still reach a router; the lists must stay empty for "
                f"{ctx.config.router_quiet_seconds:g} s",
            )
        await asyncio.sleep(READ_BACK_SECONDS)
    with ctx.store.transaction():
        ctx.store.router_add_since_ms = None
        ctx.store.settle([r.id for r in ctx.store.unsettled() if r.kind in rules.ROUTING_KINDS])
    return {}


async def _add(ctx: GateContext, router: RouterEndpoint, seconds: float) -> None:
    """Have one router list our URL."""
    async with ctx.routers.using(router) as adapter:
        await adapter.add(ctx.routers.own_url, seconds=seconds)


async def _remove(ctx: GateContext, router: RouterEndpoint, seconds: float) -> bool:
    """Remove our URL from one router; whether it was listed."""
    async with ctx.routers.using(router) as adapter:
        listed = await adapter.lists(ctx.routers.own_url, seconds)
        if listed:
            await adapter.remove(ctx.routers.own_url, seconds=seconds)
    return listed


async def _at_each(routers: list[RouterEndpoint], call: Callable[[RouterEndpoint], Awaitable[Any]]) -> list[Any]:
    """Call every router at once; all are tried before the first failure is raised."""
    answers = await asyncio.gather(*(call(r) for r in routers), return_exceptions=True)
    for router, answer in zip(routers, answers, strict=True):
        if isinstance(answer, CallError):
            raise GateError(ErrorReason.ROUTER_UNREACHABLE, f"router {router.name}: {answer}")
        if isinstance(answer, BaseException):
            raise answer
    return answers


# ---------------------------------------------------------------------------------------------- staging


async def prepare(ctx: GateContext, request: OperationRequest) -> Result:
    """Make room and expect the manifest, or hash a checkpoint. What an earlier round staged is deleted first."""
    order = request.order
    assert isinstance(order, PrepareOrder)
    facts = await ctx.engine.facts()
    # A checkpoint is loaded from a directory, as what was pushed is.
    needed = Capability.SERIALIZED if order.transport is Transport.CHECKPOINT else Capability(order.transport.value)
    if facts is not None and needed not in facts.capabilities:
        why = f": {facts.refused}" if facts.refused else ""
        raise GateError(
            ErrorReason.UNSUPPORTED,
            f"{ctx.engine.adapter.type} {facts.version} can not take {order.transport} weights{why}",
        )
    streams = order.transport is Transport.SERIALIZED and order.staging is StagingMode.BUCKET
    if facts is not None and streams and Capability.PARTS not in facts.capabilities:
        raise GateError(
            ErrorReason.UNSUPPORTED,
            f"{ctx.engine.adapter.type} {facts.version} can not take weights bucket by bucket: it was not started with "
            "rlfleet's weight transfer plug-in; add that, or use spec.transport.staging Full",
        )
    staging = Staging.of(request.operation, order)
    if ctx.area.staging is None or not ctx.area.staging.same(staging):
        ctx.store.staging = None
    await ctx.area.prepare(staging)
    ctx.store.staging = staging.durable()
    if order.transport is Transport.CHECKPOINT and ctx.area.staging is not None:
        await read_checkpoint(ctx, request.operation, ctx.area.staging, order)
    ctx.metrics.staged_bytes.set(ctx.area.staging.received_bytes if ctx.area.staging else 0)
    return {"capacityBytes": ctx.area.usable_bytes}


async def discard(ctx: GateContext, request: OperationRequest) -> Result:
    """Drop staged bytes and end receives that wait for more."""
    assert isinstance(request.order, DiscardOrder)
    ctx.store.staging = None
    await ctx.area.discard()
    ctx.metrics.staged_bytes.set(0)
    return {}
