"""Pausing an engine and letting it go on: a pause is proven before it is recorded, a resume only follows a proof.

Invariants:
- a pause counts once the engine was seen to admit requests before it and does not admit any after it, in one process;
- the record of a pause goes before the engine is resumed: a crash in between leaves "unknown", not "paused".
"""

from __future__ import annotations

import logging
import time

from rlfleet.api.wire import ErrorReason, OperationRequest, PauseMode, PauseOrder, ResumeOrder
from rlfleet.calls import CallError
from rlfleet.engine import Capability
from rlfleet.gate import rules
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import GateError
from rlfleet.gate.links import STATUS_SECONDS
from rlfleet.gate.order import ENGINE_SECONDS, MIN_SECONDS, Result, engine_failure, seen
from rlfleet.gate.tags import MEMORY_KINDS

#: Seconds to see the engine admit requests before a pause (its own health check takes at least one).
HEAL_SECONDS = 20.0
#: The same for an engine that was seen to admit requests earlier; a paused one lets its health check hang.
HEAL_AGAIN_SECONDS = 3.0
#: Seconds that a pause may take beyond draining: mode abort repeats its aborts each second until nothing runs.
PAUSE_SECONDS = 20.0

log = logging.getLogger(__name__)


async def is_paused(ctx: GateContext) -> bool | None:
    """Whether the engine is paused now, proven; None: unknown."""
    return ctx.engine.paused(await ctx.engine.adapter.view(STATUS_SECONDS))


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
    view = await seen(ctx, lambda v: v.label is not None)
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
