"""Loading weights into the engine, and verifying what it then holds.

Invariants:
- a load record is durable, and the proof of earlier weights withdrawn, before the first call that can touch a weight.
  Joining the broadcast group comes before that: a rendezvous that fails leaves the engine provably untouched;
- serialized bytes were hashed by this gate before the load is allowed; with staging Bucket each bucket before it is
  loaded, and the load has ended well only when every bucket of the manifest was loaded once;
- a checkpoint was hashed before, and its files are looked at once more after the load, since others can write to them;
- an unchanged checksum is judged only against weights that were proven before; for a fresh engine it says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rlfleet.api.budgets import Bounds, Split
from rlfleet.api.wire import (
    ErrorReason,
    LoadOrder,
    LoadRecord,
    OperationRequest,
    OperationState,
    Transport,
    VerifyOrder,
)
from rlfleet.calls import CallError, NoAnswer, NotSent, Refused
from rlfleet.engine import Bucket, Checksum
from rlfleet.gate import rules
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import EffectUnknown, GateError
from rlfleet.gate.order import ENGINE_SECONDS, MIN_SECONDS, Result, engine_failure
from rlfleet.gate.pausing import is_paused
from rlfleet.gate.staging import Staging

log = logging.getLogger(__name__)

#: Least seconds to join a group: an order that comes with nothing left must not be taken for a wedged engine at once.
MIN_RENDEZVOUS_SECONDS = 0.25
#: Seconds during which a flush is tried again while the engine refuses it.
FLUSH_SECONDS = 20.0


def _staged(ctx: GateContext, request: OperationRequest, order: LoadOrder) -> Staging:
    """The staged bytes that this order names; NotStaged when they are others, or not all here."""
    staging = ctx.area.staging
    if staging is None:
        raise GateError(ErrorReason.NOT_STAGED, "nothing is staged; Prepare and push first")
    wanted = (request.operation, order.transport, order.version, order.manifest_digest)
    if (staging.operation, staging.transport, staging.version, staging.manifest_digest) != wanted:
        raise GateError(
            ErrorReason.NOT_STAGED,
            f"staged is {staging.transport} version {staging.version} ({staging.manifest_digest}) of operation "
            f"{staging.operation}, not what the order names",
        )
    if not staging.is_complete:
        what = "no manifest" if staging.manifest is None else f"{staging.received_bytes} of {staging.total_bytes} bytes"
        raise GateError(ErrorReason.NOT_STAGED, f"not all is here yet: {what}")
    return staging


async def _unchanged(staging: Staging) -> None:
    """The files of a checkpoint are still those that were hashed; what was pushed nobody else can write to."""
    if staging.checked is None:
        return
    changed = await asyncio.to_thread(staging.checked.changed)
    if changed is not None:
        staging.checked = None
        raise GateError(
            ErrorReason.HASH_MISMATCH, f"the checkpoint is not what was hashed any more: {changed}; write each once"
        )


async def check_load(ctx: GateContext, request: OperationRequest) -> None:
    """Refuse a load without its bytes, without its group, or into an engine that is not proven paused."""
    order = request.order
    assert isinstance(order, LoadOrder)
    if order.transport is Transport.BROADCAST and (order.group is None or order.rank_offset is None):
        raise GateError(ErrorReason.INVALID, "transport Broadcast needs group and rankOffset")
    await _unchanged(_staged(ctx, request, order))
    rules.may_load(await is_paused(ctx))


async def load(ctx: GateContext, request: OperationRequest) -> Result:
    """Load; the result tells the checksum before, the duration and the bytes."""
    order = request.order
    assert isinstance(order, LoadOrder)
    started = time.monotonic()
    bounds = _bounds(order, started)
    staging = _staged(ctx, request, order)
    before = await _checksum_before(ctx, bounds)
    log.info("checksum before the load", extra={"checksum": before.digest if before else None})
    if time.monotonic() >= bounds.ends:
        raise GateError(
            ErrorReason.DEADLINE_EXCEEDED, "no time is left of the order's budgetSeconds: nothing was loaded"
        )
    run = _directory
    if order.transport is Transport.BROADCAST:
        run = _broadcast
    elif staging.is_streamed:
        run = _buckets
    await run(ctx, request, order, staging, before, bounds)
    return {
        "checksumBefore": before.digest if before else None,
        "loadMs": round((time.monotonic() - started) * 1000),
        "bytes": staging.total_bytes or staging.received_bytes,
    }


async def _checksum_before(ctx: GateContext, bounds: Bounds) -> Checksum | None:
    """What the engine's parameters hash to now; None where it has no hash, or a load that failed left none to have."""
    engine = ctx.engine.adapter
    try:
        return await engine.checksum(bounds.left(time.monotonic(), ENGINE_SECONDS))
    except CallError as e:
        latest = ctx.store.latest_load()
        if not isinstance(e, Refused) or latest is None or latest[1].state is OperationState.SUCCEEDED:
            # Nothing was asked of the weights yet: this is a failed load that left no trace.
            raise GateError(ErrorReason.ENGINE_UNREACHABLE, f"checksum before the load: {e}") from e
    try:
        await engine.recover(bounds.left(time.monotonic(), ENGINE_SECONDS))
    except CallError as e:
        raise engine_failure("clearing what an earlier load left behind", e) from e
    return None


def _bounds(order: LoadOrder, started: float) -> Bounds:
    split = Split(order.rendezvous_seconds, order.transport_seconds, order.collective_seconds, order.teardown_seconds)
    return Bounds.counted_from(started, split, order.budget_seconds)


class _Begun:
    """The durable record around the calls that touch weights."""

    def __init__(self, ctx: GateContext, request: OperationRequest, order: LoadOrder, before: Checksum | None) -> None:
        self._ctx = ctx
        self._id = request.id
        self._record = LoadRecord(
            operation=request.operation,
            version=order.version,
            manifest_digest=order.manifest_digest,
            state=OperationState.RUNNING,
        )
        previous = ctx.store.holds
        with ctx.store.transaction():
            ctx.store.put_load(self._id, self._record)
            ctx.store.load_context = {
                "load": self._id,
                "checksumBefore": before.digest if before else None,
                "provenBefore": previous.manifest_digest if previous else None,
            }
            ctx.store.holds = None

    def end(self, state: OperationState) -> None:
        """Record how the load ended."""
        self._ctx.store.put_load(self._id, self._record.model_copy(update={"state": state}))

    async def guard(self, what: str, call: Awaitable[None]) -> None:
        """Make one call; a failure ends the record as Failed, or Unknown where no answer came."""
        try:
            await call
        except CallError as e:
            self.end(OperationState.UNKNOWN if isinstance(e, NoAnswer) else OperationState.FAILED)
            raise engine_failure(what, e) from e


async def _directory(
    ctx: GateContext,
    request: OperationRequest,
    order: LoadOrder,
    staging: Staging,
    before: Checksum | None,
    bounds: Bounds,
) -> None:
    await _unchanged(staging)
    begun = _Begun(ctx, request, order, before)
    path = str(ctx.area.directory)
    seconds = bounds.left(time.monotonic(), order.transport_seconds)
    await begun.guard("load", ctx.engine.adapter.load_directory(path, seconds=seconds))
    try:
        await _unchanged(staging)
    except GateError:
        begun.end(OperationState.FAILED)  # what the engine read in between nobody knows
        raise
    begun.end(OperationState.SUCCEEDED)


async def _buckets(
    ctx: GateContext,
    request: OperationRequest,
    order: LoadOrder,
    staging: Staging,
    before: Checksum | None,
    bounds: Bounds,
) -> None:
    """Load bucket by bucket as the sender brings them. Until the first is here nothing is touched or recorded."""
    ctx.area.drop_loaded()
    stream = staging.open_stream(request.generation)
    begun: _Begun | None = None
    until = bounds.transport_until(time.monotonic())
    count = len(staging.buckets)
    engine = ctx.engine.adapter
    try:
        for index in range(count):
            try:
                await stream.bucket(until - time.monotonic())
            except GateError:
                if begun is not None:
                    begun.end(OperationState.FAILED)
                raise
            if begun is None:
                begun = _Begun(ctx, request, order, before)
                await begun.guard("opening the load", engine.begin_parts(bounds.left(time.monotonic(), ENGINE_SECONDS)))
            seconds = bounds.left(time.monotonic(), order.collective_seconds + order.teardown_seconds)
            load_one = engine.load_part(str(ctx.area.directory), seconds=seconds)
            await begun.guard(f"load of bucket {index} of {count}", load_one)
            ctx.area.drop_loaded()
            if index == count - 1:
                # Before the sender hears that its last bucket is loaded: the engine may still find something missing.
                seconds = bounds.left(time.monotonic(), order.teardown_seconds)
                await begun.guard("closing the load", engine.end_parts(seconds))
            await stream.done()
    except GateError as e:
        await stream.fail(e)
        raise
    finally:
        staging.close_stream()
        ctx.area.drop_loaded()
    assert begun is not None  # a manifest has at least one bucket
    begun.end(OperationState.SUCCEEDED)


async def _broadcast(
    ctx: GateContext,
    request: OperationRequest,
    order: LoadOrder,
    staging: Staging,
    before: Checksum | None,
    bounds: Bounds,
) -> None:
    group, rank, engine = order.group, order.rank_offset, ctx.engine.adapter
    assert group is not None
    assert rank is not None
    try:
        seconds = max(bounds.rendezvous_until - time.monotonic(), MIN_RENDEZVOUS_SECONDS)
        await engine.join_group(group, rank=rank, seconds=seconds)
    except NoAnswer as e:
        # The engine's scheduler still waits for the others, and will not hear of anything else until it gives up.
        raise EffectUnknown(ErrorReason.RENDEZVOUS_TIMEOUT, f"joining the group: {e}") from e
    except NotSent as e:
        raise GateError(ErrorReason.ENGINE_UNREACHABLE, f"joining the group: {e}") from e
    except CallError as e:
        raise GateError(ErrorReason.TRANSPORT_FAILED, f"joining the group: {e}") from e
    begun = _Begun(ctx, request, order, before)
    until = bounds.transport_until(time.monotonic())
    try:
        seconds = bounds.left(time.monotonic(), ENGINE_SECONDS)
        await begun.guard("opening the update session", engine.begin_update(seconds))
        for index, tensors in enumerate(staging.buckets):
            bucket = Bucket(
                names=[t.name for t in tensors], dtypes=[t.dtype for t in tensors], shapes=[t.shape for t in tensors]
            )
            if not bounds.collective(time.monotonic(), until):
                begun.end(OperationState.FAILED)
                raise GateError(
                    ErrorReason.TRANSPORT_FAILED,
                    f"transportSeconds ({order.transport_seconds:g} s, or what was left of budgetSeconds) passed "
                    f"before bucket {index} of {len(staging.buckets)}",
                )
            # A little longer than the sender allows one collective: when it gives up, the engine answers for itself.
            seconds = bounds.left(time.monotonic(), order.collective_seconds + order.teardown_seconds)
            await begun.guard("receiving weights", engine.receive(bucket, group=group.group_name, seconds=seconds))
        seconds = bounds.left(time.monotonic(), order.teardown_seconds)
        await begun.guard("closing the update session", engine.end_update(seconds))
        seconds = bounds.left(time.monotonic(), order.teardown_seconds)
        await begun.guard("leaving the group", engine.leave_group(group.group_name, seconds))
    except EffectUnknown as e:
        raise EffectUnknown(ErrorReason.TRANSPORT_FAILED, e.message) from e
    except GateError as e:
        # The engine said no, so it listens: leave it without an open session or group for the next load.
        left = max(bounds.left(time.monotonic(), order.teardown_seconds), MIN_SECONDS)
        await _tidy("end_update", lambda: engine.end_update(left))
        await _tidy("leave_group", lambda: engine.leave_group(group.group_name, left))
        raise GateError(ErrorReason.TRANSPORT_FAILED, e.message) from e
    begun.end(OperationState.SUCCEEDED)


async def _tidy(what: str, call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except CallError as e:
        log.warning("%s after a failed transfer: %s", what, e)


def _loaded(ctx: GateContext, order: VerifyOrder) -> tuple[str, LoadRecord]:
    """The latest load, if it ended well and is the one to verify."""
    latest = ctx.store.latest_load()
    record = rules.may_verify(None if latest is None else latest[1], order)
    assert latest is not None
    return latest[0], record


async def check_verify(ctx: GateContext, request: OperationRequest) -> None:
    """Only a load that ended well can be verified."""
    assert isinstance(request.order, VerifyOrder)
    _loaded(ctx, request.order)


async def verify(ctx: GateContext, request: OperationRequest) -> Result:
    """Flush caches, read the checksum, compare it with the one before and with the expected one."""
    order = request.order
    assert isinstance(order, VerifyOrder)
    op_id, record = _loaded(ctx, order)
    try:
        await ctx.engine.adapter.flush(FLUSH_SECONDS)
        after = await ctx.engine.adapter.checksum(ENGINE_SECONDS)
    except CallError as e:
        raise engine_failure("verify", e) from e
    usable = after is not None and after.meaningful
    digest = after.digest if after is not None and after.meaningful else None
    changed = _changed(ctx, op_id, digest, order.manifest_digest)
    if changed is False:
        raise GateError(
            ErrorReason.CHECKSUM_UNCHANGED,
            "the engine's checksum is what it was before the load, although other weights were proven then: "
            "it answered success and loaded nothing",
        )
    if order.expected_engine_digest is not None and digest != order.expected_engine_digest:
        raise GateError(
            ErrorReason.DIGEST_MISMATCH, f"the engine's checksum is {digest}, expected {order.expected_engine_digest}"
        )
    ctx.store.put_load(op_id, record.model_copy(update={"verified": True, "engine_digest": digest}))
    return {"engineDigest": digest, "changed": changed, "meaningful": usable, "delivered": True}


def _changed(ctx: GateContext, op_id: str, digest: str | None, manifest_digest: str) -> bool | None:
    """True: moved. False: did not move though it had to. None: not moving, or not knowing, says nothing."""
    context = ctx.store.load_context or {}
    before = context.get("checksumBefore") if context.get("load") == op_id else None
    proven = context.get("provenBefore")
    return rules.has_changed(before, digest, proven=proven, manifest_digest=manifest_digest)
