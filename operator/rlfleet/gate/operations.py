"""The operation log: one mutating operation at a time, each exactly once under its id.

Invariants:
- the start of an operation is durable before its first effect; its end is durable before anybody is told;
- asking again with the same id returns the same record, whatever generation asks and whoever disconnected meanwhile;
  the same id with another order is refused;
- an operation without a recorded end, or whose engine call got no answer, is Unknown, and until that is settled only
  Pause and Close are accepted: they can make nothing worse.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable
from typing import Any

from rlfleet.api.fencing import Fence
from rlfleet.api.wire import (
    ErrorBody,
    ErrorReason,
    OperationRecord,
    OperationRequest,
    OperationState,
    order_identity,
)
from rlfleet.calls import CallError
from rlfleet.gate import actions, loads, memory, pausing, rules, tags
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import EffectUnknown, GateError
from rlfleet.gate.links import STATUS_SECONDS, now_ms
from rlfleet.gate.order import ENGINE_SECONDS, MIN_SECONDS, Action, no_check

log = logging.getLogger(__name__)

ACTIONS: dict[str, Action] = {
    "Pause": Action(pausing.check_pause, pausing.pause),
    "Resume": Action(pausing.check_resume, pausing.resume),
    "Prepare": Action(no_check, actions.prepare),
    "Load": Action(loads.check_load, loads.load),
    "Verify": Action(loads.check_verify, loads.verify),
    "Publish": Action(actions.check_publish, actions.publish),
    "Probe": Action(actions.check_probe, actions.probe),
    "Open": Action(actions.check_open, actions.open_routes),
    "Close": Action(no_check, actions.close_routes),
    "Discard": Action(no_check, actions.discard),
    "Release": Action(memory.check_release, memory.release),
    "Wake": Action(memory.check_wake, memory.wake),
}


class Operations:
    """Runs operations and answers for them. ``on_fatal`` is called when the store fails: the gate must end."""

    def __init__(self, ctx: GateContext, on_fatal: Callable[[BaseException], None]) -> None:
        self._ctx = ctx
        self._on_fatal = on_fatal
        self._current: OperationRecord | None = None
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Condition()

    @property
    def in_flight(self) -> str | None:
        """Id of the running operation."""
        return None if self._current is None else self._current.id

    @property
    def uncertain(self) -> bool:
        """An operation's effect is unknown and not settled."""
        return bool(self._ctx.store.unsettled())

    @property
    def uncertain_seconds(self) -> float:
        """For how long the effect of the oldest such operation has been unknown; 0: nothing is."""
        since = [r.ended_ms or r.started_ms for r in self._ctx.store.unsettled()]
        return max(0.0, (now_ms() - min(since)) / 1000) if since else 0.0

    @property
    def wedged(self) -> bool:
        """The engine entered a broadcast group that never formed, and has not been seen to come out."""
        return any(_is_wedged(r) for r in self._ctx.store.unsettled())

    def recover(self) -> None:
        """After a restart: what has no recorded end is Unknown; what touched only our own files has failed."""
        store = self._ctx.store
        with store.transaction():
            for record in store.running():
                state, settled = rules.after_restart(record.kind, in_between=bool(store.memory.in_between))
                reason = ErrorReason.INTERNAL if settled else ErrorReason.UNCERTAIN
                error = ErrorBody(reason=reason, message="the gate restarted while this operation ran")
                log.warning("operation %s (%s) has no recorded end: %s", record.id, record.kind, state)
                update = {"state": state, "error": error, "ended_ms": now_ms()}
                store.update_operation(record.model_copy(update=update), settled=settled)
            for op_id, load in store.running_loads():
                store.put_load(op_id, load.model_copy(update={"state": OperationState.UNKNOWN}))

    async def start(self, request: OperationRequest) -> tuple[OperationRecord, bool]:
        """Start an operation or find the one with this id; True: it was started now. Fence and identity are checked."""
        kind = request.order.kind
        action = ACTIONS[kind]
        text = _canonical(request)
        async with self._starting:  # checks may ask the engine; two starts must not both pass them
            known = self._ctx.store.operation(request.id)
            if known is not None:
                record, known_text = known
                rules.same_order(request.id, record.kind, known_text, text)
                return record, False
            rules.nothing_unsettled(kind, self._ctx.store.unsettled())
            rules.nothing_runs(self._current)
            tags.memory_is_here(kind, self._ctx.store.memory)
            await action.check(self._ctx, request)
            rules.not_fenced_off(self._ctx.store.fence, Fence(request.pipeline, request.operation, request.generation))
            record = OperationRecord(
                id=request.id,
                kind=kind,
                operation=request.operation,
                generation=request.generation,
                attempt=request.attempt,
                state=OperationState.RUNNING,
                started_ms=now_ms(),
            )
            self._ctx.store.add_operation(record, text, f"{request.operation}/{kind}")
            self._current = record
            self._task = asyncio.create_task(self._run(action, request, record))
            return record, True

    async def close_unproven(self) -> bool:
        """Pause an engine whose weights nobody has proven; True: it is proven paused now.

        Does nothing while an operation runs, is unsettled, or proof is there: then orders decide.
        """
        view = await self._ctx.engine.adapter.view(STATUS_SECONDS)
        if self._ctx.engine.paused(view):
            return True
        if not view.admitting and not (view.admitting is False and self._ctx.engine.adapter.tells_pause):
            # Still starting, or its last health check failed. Without the lock, so that orders need not wait for it.
            if view.reachable and not self._orders_decide() and self._ctx.store.memory.all_here:
                await self._ctx.engine.adapter.heal_readiness(pausing.HEAL_AGAIN_SECONDS)
            return False
        async with self._starting:
            if self._orders_decide():
                return False
            await pausing.pause_engine(self._ctx, self._ctx.engine.adapter.default_pause, drain_seconds=0)
            log.info("engine closed: nothing proves its weights yet")
            return True

    async def heal_wedged(self) -> bool:
        """Settle rendezvous that timed out, once the engine proves that its loop has come out of them.

        Joining a group touches no weight, so with the loop free again the engine is what it was. Only while it is
        proven paused: anything else is an order's business.
        """
        stuck = [r for r in self._ctx.store.unsettled() if _is_wedged(r)]
        if not stuck or self._busy() or await pausing.is_paused(self._ctx) is not True:
            return False
        if not await self._ctx.engine.adapter.idle(ENGINE_SECONDS, memory_here=True):
            return False
        async with self._starting:
            if self._busy():  # an order came while the engine was asked
                return False
            for record in stuck:
                await self._leave_group(record)
            self._ctx.store.settle([r.id for r in stuck])
        log.info("the engine has come out of a rendezvous that timed out")
        return True

    def _busy(self) -> bool:
        return self._current is not None

    async def _leave_group(self, record: OperationRecord) -> None:
        """A trainer that came late may have completed the group; nobody will use it."""
        known = self._ctx.store.operation(record.id)
        group = json.loads(known[1])["order"].get("group") if known is not None else None
        if group is not None:
            try:
                await self._ctx.engine.adapter.leave_group(group["groupName"], MIN_SECONDS)
            except CallError as e:
                log.warning("a group that formed late was not left: %s", e)

    def _orders_decide(self) -> bool:
        store = self._ctx.store
        return store.holds is not None or self._current is not None or bool(store.unsettled())

    async def find(self, op_id: str, wait_seconds: float) -> OperationRecord:
        """The record of an operation, waiting for its end at most ``wait_seconds``."""
        if self._current is not None and self._current.id == op_id and wait_seconds > 0:
            try:
                async with asyncio.timeout(wait_seconds), self._ended:
                    await self._ended.wait_for(lambda: self._current is None or self._current.id != op_id)
            except TimeoutError:
                log.debug("operation %s still runs", op_id)
        known = self._ctx.store.operation(op_id)
        if known is None:
            raise GateError(ErrorReason.NOT_FOUND, f"no operation {op_id} is known here")
        return known[0]

    async def stop(self, grace_seconds: float) -> None:
        """Let a running operation end within the grace; one that does not is left without a recorded end."""
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=grace_seconds)
        if not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, action: Action, request: OperationRequest, record: OperationRecord) -> None:
        log.info("operation started", extra=_fields(record))
        settled = True
        update: dict[str, Any]
        try:
            result = await action.run(self._ctx, request)
            update = {"state": OperationState.SUCCEEDED, "result": result}
        except EffectUnknown as e:
            settled = False
            update = {"state": OperationState.UNKNOWN, "error": e.body()}
        except GateError as e:
            update = {"state": OperationState.FAILED, "error": e.body()}
        except (sqlite3.Error, OSError) as e:
            # Without the disk no end can be recorded: the next gate finds this one without an end.
            self._on_fatal(e)
            return
        except Exception as e:  # a defect of ours: what it left behind is not known
            log.exception("operation failed in an unforeseen way", extra=_fields(record))
            settled = False
            error = ErrorBody(reason=ErrorReason.INTERNAL, message=f"{type(e).__name__}: {e}"[:2000])
            update = {"state": OperationState.UNKNOWN, "error": error}
        ended = record.model_copy(update=update | {"ended_ms": now_ms()})
        try:
            self._ctx.store.update_operation(ended, settled=settled)
        except sqlite3.Error as e:
            self._on_fatal(e)
            return
        log.info("operation ended", extra=_fields(ended))
        self._observe(ended)
        async with self._ended:
            self._current = None
            self._ended.notify_all()

    def _observe(self, record: OperationRecord) -> None:
        metrics = self._ctx.metrics
        metrics.operations.labels(record.kind, record.state.value).inc()
        metrics.seconds.labels(record.kind).observe(max(0, (record.ended_ms or 0) - record.started_ms) / 1000)


def _is_wedged(record: OperationRecord) -> bool:
    return record.error is not None and record.error.reason is ErrorReason.RENDEZVOUS_TIMEOUT


def _canonical(request: OperationRequest) -> str:
    """What must be equal when the same id is asked again; generation and time left may have changed."""
    body = {"operation": request.operation, "attempt": request.attempt, "order": order_identity(request.order)}
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _fields(record: OperationRecord) -> dict[str, Any]:
    return {
        "operationId": record.id,
        "kind": record.kind,
        "operation": record.operation,
        "generation": record.generation,
        "attempt": record.attempt,
        "state": record.state.value,
        "error": record.error.wire() if record.error else None,
        "ms": record.ended_ms - record.started_ms if record.ended_ms else None,
    }
