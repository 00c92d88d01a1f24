"""Giving the engine's device memory back, and taking it again: the orders Release and Wake.

Invariants:
- the proof of the engine's weights is withdrawn, durably, before the first tag is released;
- "asked for" is durable before each call and "answered" after it (gate/tags.py), so a gate that dies at any instruction
  knows what is gone, what is here, and that it does not know about at most one tag;
- an engine's 200 says that a tag was given back, never that memory is free: that is read from the device, and an
  unreadable device is said to be unreadable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rlfleet.api.wire import (
    DeviceReport,
    ErrorReason,
    MemoryTag,
    OperationRequest,
    ReleaseOrder,
    WakeOrder,
)
from rlfleet.calls import CallError, NotSent, Refused
from rlfleet.engine import Capability, Facts
from rlfleet.gate import tags
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import EffectUnknown, GateError
from rlfleet.gate.links import STATUS_SECONDS
from rlfleet.gate.order import MIN_SECONDS, Result, engine_failure
from rlfleet.gate.pausing import is_paused
from rlfleet.gate.tags import TagState

log = logging.getLogger(__name__)

#: Seconds for all of an order that gives none.
BUDGET_SECONDS = 120.0
#: Seconds during which a flush is tried again while the engine refuses it.
FLUSH_SECONDS = 20.0
#: Seconds between two looks at memory that the engine said it has given back.
LOOK_SECONDS = 0.1


async def _facts(ctx: GateContext) -> Facts:
    facts = await ctx.engine.facts()
    if facts is None:
        raise GateError(ErrorReason.ENGINE_UNREACHABLE, "the engine has not told yet what it can do")
    if Capability.OFFLOAD not in facts.capabilities:
        raise GateError(
            ErrorReason.UNSUPPORTED,
            f"{ctx.engine.adapter.type} {facts.version} was not started so that it can give memory back; "
            f"{ctx.engine.adapter.offload_remedy}",
        )
    return facts


def _wanted(facts: Facts, order: ReleaseOrder) -> list[MemoryTag]:
    unknown = [tag for tag in order.tags or () if tag not in facts.memory_tags]
    if unknown:
        raise GateError(ErrorReason.UNSUPPORTED, f"tags: this engine has no {', '.join(unknown)}")
    wanted = set(order.tags if order.tags is not None else facts.memory_tags)
    return [tag for tag in tags.RELEASE_ORDER if tag in wanted]


async def _may_release(ctx: GateContext) -> None:
    view, routed = await asyncio.gather(ctx.engine.adapter.view(STATUS_SECONDS), ctx.routers.routed())
    tags.may_release(
        paused=ctx.engine.paused(view),
        running=view.running,
        waiting=view.waiting,
        routed=routed,
        late_add=bool(routed) and ctx.store.router_add_since_ms is not None,
    )


async def check_release(ctx: GateContext, request: OperationRequest) -> None:
    """Refuse an engine that can not, that may serve, or of which a tag is in between."""
    order = request.order
    assert isinstance(order, ReleaseOrder)
    adapter, wanted = ctx.engine.adapter, _wanted(await _facts(ctx), order)
    tags.nothing_in_between(ctx.store.memory)
    tags.goes_along(wanted, ctx.store.memory, adapter.released_before, adapter.type)
    await _may_release(ctx)


async def release(ctx: GateContext, request: OperationRequest) -> Result:
    """Flush, withdraw the proof, release tag by tag, then look at the devices until they are below the limit."""
    order = request.order
    assert isinstance(order, ReleaseOrder)
    ends = _ends(order.budget_seconds)
    missing = [tag for tag in _wanted(await _facts(ctx), order) if tag not in ctx.store.memory.tags]
    if missing:
        await _flush(ctx, ends)
        await _withdraw(ctx)
    for tag in missing:
        # Again before each: whoever let it run meanwhile, releasing under a request kills the engine.
        await _may_release(ctx)
        await _move(ctx, tag, TagState.RELEASING, TagState.RELEASED, ctx.engine.adapter.release_memory, ends)
    report = await _settle_down(ctx, order.residual_bytes, ends)
    ctx.store.memory = ctx.store.memory.measured(report.memory)
    residual = tags.judge(report.memory, order.residual_bytes)
    if residual == "High":
        log.warning("memory is still in use after a release", extra={"devices": report.wire()})
    return {
        "released": [tag.value for tag in ctx.store.memory.released],
        "memory": None if report.memory is None else {u: m.wire() for u, m in report.memory.items()},
        "residual": residual,
    }


async def _flush(ctx: GateContext, ends: float) -> None:
    seconds = min(FLUSH_SECONDS, ends - time.monotonic())
    if seconds <= 0:
        raise GateError(ErrorReason.DEADLINE_EXCEEDED, "no time is left of budgetSeconds: nothing was released")
    try:
        await ctx.engine.adapter.flush(seconds)
    except CallError as e:
        # A flush drops what nobody may need any more, whenever it comes: its end need not be known.
        raise GateError(ErrorReason.ENGINE_REFUSED, f"flush before the release: {e}") from e


async def _withdraw(ctx: GateContext) -> None:
    """From here on nothing proves this engine's weights; and what it was loaded with is nobody's evidence any more."""
    report = await ctx.devices.report(fresh=True)
    store, latest = ctx.store, ctx.store.latest_load()
    with store.transaction():
        store.holds = None
        if latest is not None:
            store.put_load(latest[0], latest[1].model_copy(update={"released": True}))
        if store.memory.all_here:
            store.memory = store.memory.measured(report.memory)


async def _move(
    ctx: GateContext,
    tag: MemoryTag,
    during: TagState,
    after: TagState | None,
    call: Callable[..., Awaitable[None]],
    ends: float,
) -> None:
    """One tag, one call. What was certainly not asked is put back; anything else without a yes stays in between."""
    before = ctx.store.memory.tags.get(tag)
    seconds = ends - time.monotonic()
    if seconds <= 0:
        raise GateError(ErrorReason.DEADLINE_EXCEEDED, f"no time is left of budgetSeconds before tag {tag}")
    ctx.store.memory = ctx.store.memory.with_tag(tag, during)
    try:
        await call(tag, seconds=max(seconds, MIN_SECONDS))
    except CallError as e:
        what = f"{during.value} {tag}"
        if isinstance(e, NotSent):
            ctx.store.memory = ctx.store.memory.with_tag(tag, before)
            raise engine_failure(what, e) from e
        # A refusal is no proof either: the same 400 comes before the work and after it.
        raise EffectUnknown(
            ErrorReason.ENGINE_REFUSED if isinstance(e, Refused) else ErrorReason.DEADLINE_EXCEEDED, f"{what}: {e}"
        ) from e
    ctx.store.memory = ctx.store.memory.with_tag(tag, after)
    log.info("device memory", extra={"tag": tag.value, "state": after.value if after else "Here"})


async def _settle_down(ctx: GateContext, limit: int | None, ends: float) -> DeviceReport:
    """Look until every device is at or below the limit, or time is over: engines answer before memory is free."""
    while True:
        report = await ctx.devices.report(fresh=True)
        if tags.judge(report.memory, limit) != "High" or time.monotonic() >= ends:
            return report
        await asyncio.sleep(min(LOOK_SECONDS, max(0.0, ends - time.monotonic())))


async def check_wake(ctx: GateContext, request: OperationRequest) -> None:
    """Refuse an engine that is not proven paused, or of which a tag is in between."""
    assert isinstance(request.order, WakeOrder)
    await _facts(ctx)
    tags.nothing_in_between(ctx.store.memory)
    if await is_paused(ctx) is not True:
        raise GateError(ErrorReason.NOT_PROVEN, "the engine is not proven paused; Pause comes before Wake")


async def wake(ctx: GateContext, request: OperationRequest) -> Result:
    """Take back what is recorded as released, weights first; it stays paused, and nothing proves its weights."""
    order = request.order
    assert isinstance(order, WakeOrder)
    ends = _ends(order.budget_seconds)
    asleep = list(reversed(ctx.store.memory.released))
    if asleep:
        await _see_room(ctx)
    for tag in asleep:
        await _move(ctx, tag, TagState.WAKING, None, ctx.engine.adapter.resume_memory, ends)
        report = await ctx.devices.report(fresh=True)
        if not ctx.store.memory.all_here:
            # Should this wake break off here, the next one needs less room.
            ctx.store.memory = ctx.store.memory.measured(report.memory)
    return {"awake": [tag.value for tag in asleep]}


async def _see_room(ctx: GateContext) -> None:
    """An engine that runs out of memory while it wakes dies or hangs, and can not be asked again: look first."""
    report = await ctx.devices.report(fresh=True)
    short = tags.lacking(ctx.store.memory.needs(), report.memory)
    if not short:
        return
    users = ", ".join(f"pid {p.pid} {p.name or '(no name)'}: {p.used_bytes} bytes" for p in report.processes)
    raise GateError(
        ErrorReason.INSUFFICIENT_MEMORY,
        f"{'; '.join(short)}. Free them and wake again. Other processes there: {users or 'none that can be seen'}",
    )


def _ends(budget_seconds: float | None) -> float:
    return time.monotonic() + (BUDGET_SECONDS if budget_seconds is None else budget_seconds)
