"""What each order does: pause, resume, publish, routing, staging. Loading is in loads.py, device memory in memory.py.

Every action has a ``check`` that refuses before anything is logged or touched, and a ``run`` that ends with a result
or raises. Invariants:
- the durable record never claims more than was observed: proof is written after the read-back, and what could become
  untrue is withdrawn before the call that could make it untrue;
- only a resume or open that the store's own proof allows is carried out, whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlfleet.api.wire import (
    CloseOrder,
    DiscardOrder,
    ErrorReason,
    HoldsRecord,
    OpenOrder,
    OperationRequest,
    PauseMode,
    PauseOrder,
    PrepareOrder,
    ProbeOrder,
    PublishOrder,
    ResumeOrder,
    RouterEndpoint,
    StagingMode,
    Transport,
)
from rlfleet.calls import CallError, NoAnswer, NotSent
from rlfleet.engine import Capability, View
from rlfleet.gate import rules
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import EffectUnknown, GateError
from rlfleet.gate.links import STATUS_SECONDS, now_ms
from rlfleet.gate.reading import read_checkpoint
from rlfleet.gate.staging import Staging
from rlfleet.gate.tags import MEMORY_KINDS

#: Seconds to see the engine admit requests before a pause (its own health check takes at least one).
HEAL_SECONDS = 20.0
#: The same for an engine that was seen to admit requests earlier; a paused one lets its health check hang.
HEAL_AGAIN_SECONDS = 3.0
#: Seconds for one call that passes the engine's scheduler while nothing else keeps it busy.
ENGINE_SECONDS = 10.0
#: Seconds that a pause may take beyond draining: mode abort repeats its aborts each second until nothing runs.
PAUSE_SECONDS = 20.0
#: Least seconds for a call that is made at all: enough for an engine that is well.
MIN_SECONDS = 1.0
READ_BACK_SECONDS = 0.25
#: How often an engine is looked at before it counts as one that does not tell.
LOOKS = 3

log = logging.getLogger(__name__)

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """How one kind of order is checked and carried out."""

    check: Callable[[GateContext, OperationRequest], Awaitable[None]]
    run: Callable[[GateContext, OperationRequest], Awaitable[Result]]


async def no_check(_: GateContext, __: OperationRequest) -> None:
    """Nothing to refuse."""


def engine_failure(what: str, error: CallError) -> GateError:
    """Translate a failed engine call; no answer to an order means that its effect is unknown."""
    if isinstance(error, NotSent):
        return GateError(ErrorReason.ENGINE_UNREACHABLE, f"{what}: {error}")
    if isinstance(error, NoAnswer):
        return EffectUnknown(ErrorReason.DEADLINE_EXCEEDED, f"{what}: {error}")
    return GateError(ErrorReason.ENGINE_REFUSED, f"{what}: {error}")


async def is_paused(ctx: GateContext) -> bool | None:
    """Whether the engine is paused now, proven; None: unknown."""
    return ctx.engine.paused(await ctx.engine.adapter.view(STATUS_SECONDS))


# ---------------------------------------------------------------------------------------------- pause, resume


async def check_pause(ctx: GateContext, request: OperationRequest) -> None:
    """Refuse a mode that the engine lacks before anything is touched."""
    order = request.order
    assert isinstance(order, PauseOrder)
    facts = await ctx.engine.facts()
    if order.mode is None or facts is None or Capability.of_pause(order.mode) in facts.capabilities:
        return
    raise GateError(
        ErrorReason.UNSUPPORTED,
        f"{ctx.engine.adapter.type} {facts.version} has no pause of mode {order.mode.value} after which its cache can "
        "be flushed; use another spec.sync.quiesce.mode",
    )


async def pause(ctx: GateContext, request: OperationRequest) -> Result:
    """Pause and verify; then operations whose effect was unknown are settled, if the engine is proven idle."""
    order = request.order
    assert isinstance(order, PauseOrder)
    if order.withdraw_proof:
        _withdraw_proof(ctx)
    mode = order.mode or ctx.engine.adapter.default_pause
    await pause_engine(ctx, mode, drain_seconds=order.drain_seconds, budget=order.budget_seconds)
    await _settle_by_pause(ctx)
    return {"paused": True}


def _withdraw_proof(ctx: GateContext) -> None:
    """Before the engine is asked: whatever comes of the pause, nobody may resume it from this record."""
    latest = ctx.store.latest_load()
    with ctx.store.transaction():
        ctx.store.holds = None
        if latest is not None:
            op_id, load = latest
            ctx.store.put_load(op_id, load.model_copy(update={"verified": False, "published": False}))
    log.error("the proof of this engine's weights is withdrawn: its peers show that they are not those")


async def pause_engine(ctx: GateContext, mode: PauseMode, *, drain_seconds: float, budget: float | None = None) -> None:
    """Pause and verify, then record it. ``budget``: seconds for all of it, draining included; None: not limited."""
    ends = float("inf") if budget is None else time.monotonic() + budget
    try:
        await _see_admitting(ctx, ends)
        # Other modes do not drain, and must not give their time away to it.
        drain = min(drain_seconds, max(0.0, ends - time.monotonic())) if mode is PauseMode.WAIT else 0.0
        seconds = max(min(PAUSE_SECONDS, ends - time.monotonic() - drain), MIN_SECONDS)
        watched = ctx.engine.listener()

        def still() -> None:
            if ctx.engine.listener() != watched:
                raise GateError(ErrorReason.ENGINE_UNREACHABLE, "the engine's process ended while it drained")

        await ctx.engine.adapter.pause(mode, drain_seconds=drain, seconds=seconds, still=still)
    except CallError as e:
        raise engine_failure("pause", e) from e
    listener = ctx.engine.listener()
    recorded = listener in (None, ctx.store.engine_listener)
    # Of another process, what does not admit requests is one that still starts, unless it was seen to admit them.
    if recorded or ctx.store.seen_listener == listener:
        ctx.store.put_paused(True, listener)
    if not recorded:
        raise GateError(ErrorReason.ENGINE_UNREACHABLE, "another engine process listens than the one that was to pause")


async def _see_admitting(ctx: GateContext, ends: float) -> None:
    """See the engine admit requests before it is paused, where that is possible: the change is what proves a pause.

    An engine that this gate paused, or was about to resume or pause when the gate died, does not admit any; that it
    did once, before, is then enough. One that never did can not be told from one that is ill.
    """
    before = ctx.engine.listener()
    view = await ctx.engine.adapter.view(STATUS_SECONDS)
    if view.admitting is False and (ctx.store.paused or ctx.engine.adapter.tells_pause):
        _still_listens(ctx, before)
        return
    seen = ctx.store.seen_admitting
    if seen and view.reachable and not ctx.store.memory.all_here:
        _still_listens(ctx, before)
        return  # healing may generate a token, which an engine without its memory does not survive
    heal = max(min(HEAL_AGAIN_SECONDS if seen else HEAL_SECONDS, ends - time.monotonic()), MIN_SECONDS)
    if view.admitting or await ctx.engine.adapter.heal_readiness(heal):
        listener = ctx.engine.listener()
        _still_listens(ctx, before or listener)
        if not seen or listener not in (None, ctx.store.engine_listener):
            ctx.store.saw_admitting(listener)
    elif not seen or not view.reachable:
        raise GateError(
            ErrorReason.ENGINE_UNREACHABLE, "the engine has never been ready, so a pause could not be told from that"
        )
    else:
        _still_listens(ctx, before)


def _still_listens(ctx: GateContext, before: str | None) -> None:
    """Which of two processes was seen is not known, and a pause would reach the other one."""
    if ctx.engine.listener() != before:
        raise GateError(ErrorReason.ENGINE_UNREACHABLE, "the engine's process ended just now")


async def _settle_by_pause(ctx: GateContext) -> None:
    memory = ctx.store.memory
    unsettled = [
        r.id
        for r in ctx.store.unsettled()
        if r.kind not in rules.ROUTING_KINDS and not (r.kind in MEMORY_KINDS and memory.in_between)
    ]
    if unsettled and await ctx.engine.adapter.idle(ENGINE_SECONDS, memory_here=memory.all_here):
        ctx.store.settle(unsettled)


async def check_resume(ctx: GateContext, request: OperationRequest) -> None:
    """Refuse what the store does not prove."""
    order = request.order
    assert isinstance(order, ResumeOrder)
    rules.may_resume(ctx.store.holds, order)


async def resume(ctx: GateContext, request: OperationRequest) -> Result:
    """Read the label once more, then resume. The pause record goes first: a crash leaves "unknown", not "paused"."""
    await check_resume(ctx, request)
    view = await _seen(ctx, lambda v: v.label is not None)
    if view.label is None:
        raise GateError(ErrorReason.ENGINE_UNREACHABLE, "the engine does not tell its weight label")
    await check_resume(ctx, request)  # the label may just have voided the proof
    rules.same_instance(ctx.store.engine_instance, view.instance)
    ctx.store.put_paused(False)
    try:
        await ctx.engine.adapter.resume()
    except CallError as e:
        raise engine_failure("resume", e) from e
    return {}


async def _seen(ctx: GateContext, told: Callable[[View], bool]) -> View:
    """The engine now. One that just went on with all its requests may be too busy to answer the first question."""
    for _ in range(LOOKS - 1):
        view, _report = await ctx.engine.observe(busy=False)
        if told(view):
            return view
        await asyncio.sleep(READ_BACK_SECONDS)
    view, _report = await ctx.engine.observe(busy=False)
    return view


# ---------------------------------------------------------------------------------------------- publish


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
    view = await _seen(ctx, lambda v: v.admitting is not None)
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
