"""The sender's operations: each runs once under its id, and its end is recorded.

Invariants: the same id with the same order joins or answers the record and never starts a second run; one operation
runs at a time; what ended stays ended. Used from the server's event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlfleet.api import wire
from rlfleet.sender.errors import Refused

log = logging.getLogger(__name__)

#: Ended operations that are remembered.
MAX_ENDED = 1024

Run = Callable[[], Awaitable[dict[str, object]]]


@dataclass(slots=True)
class _Entry:
    record: wire.OperationRecord
    order: str
    cancellable: bool
    cleanup: Callable[[], None]
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def order_hash(request: wire.SenderOperationRequest) -> str:
    """What makes two requests the same order; see ``wire.order_identity``."""
    order = wire.order_identity(request.order)
    return hashlib.sha256(json.dumps([request.operation, request.attempt, order], sort_keys=True).encode()).hexdigest()


class Operations:
    """Records by id. ``on_end`` is called with every record that ended."""

    def __init__(self, on_end: Callable[[wire.OperationRecord], None]) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._running: str | None = None
        self._on_end = on_end

    @property
    def in_flight(self) -> str | None:
        """Id of the operation that runs."""
        return self._running

    def known(self, request: wire.SenderOperationRequest) -> wire.OperationRecord | None:
        """The record of this id; Refused OperationConflict when it belongs to another order."""
        entry = self._entries.get(request.id)
        if entry is None:
            return None
        if entry.order != order_hash(request):
            raise Refused(wire.ErrorReason.OPERATION_CONFLICT, f"operation {request.id} is known with another order")
        return entry.record

    async def make_room(self, request: wire.SenderOperationRequest) -> None:
        """Refused Busy while another operation runs; one of a lower generation is stopped where that is possible.

        Only a push can be stopped: its owner is deposed, and gates refuse its tokens from now on.
        """
        running = self._entries.get(self._running or "")
        if running is None:
            return
        if not running.cancellable or running.record.generation >= request.generation or running.task is None:
            raise Refused(
                wire.ErrorReason.BUSY, f"operation {running.record.id} ({running.record.kind}) runs until its end"
            )
        running.task.cancel()
        await running.ended.wait()

    def start(
        self, request: wire.SenderOperationRequest, run: Run, cleanup: Callable[[], None], *, cancellable: bool
    ) -> wire.OperationRecord:
        """Begin an operation that ``known`` does not know, after ``make_room``. ``cleanup`` runs at its end."""
        assert self._running is None
        record = wire.OperationRecord(
            id=request.id,
            kind=request.order.kind,
            operation=request.operation,
            generation=request.generation,
            attempt=request.attempt,
            state=wire.OperationState.RUNNING,
            started_ms=int(time.time() * 1000),
        )
        entry = _Entry(record, order_hash(request), cancellable, cleanup)
        self._entries[request.id] = entry
        self._running = request.id
        entry.task = asyncio.get_running_loop().create_task(self._carry(entry, run))
        # A task that is cancelled before its first step runs nothing of its body, not even its end.
        entry.task.add_done_callback(lambda _: self._stopped(entry))
        return record

    def record_failure(self, request: wire.SenderOperationRequest, error: Refused) -> wire.OperationRecord:
        """Record an operation that failed before it began to run."""
        now = int(time.time() * 1000)
        record = wire.OperationRecord(
            id=request.id,
            kind=request.order.kind,
            operation=request.operation,
            generation=request.generation,
            attempt=request.attempt,
            state=wire.OperationState.FAILED,
            error=error.body(),
            started_ms=now,
            ended_ms=now,
        )
        entry = _Entry(record, order_hash(request), cancellable=False, cleanup=lambda: None)
        entry.ended.set()
        self._entries[request.id] = entry
        self._on_end(record)
        self._forget()
        return record

    async def _carry(self, entry: _Entry, run: Run) -> None:
        try:
            self._end(entry, result=await run())
        except asyncio.CancelledError:
            self._stopped(entry)
        except Refused as e:
            self._end(entry, error=e)
        except Exception as e:
            log.exception("operation %s (%s) failed in a way that has no word", entry.record.id, entry.record.kind)
            self._end(entry, error=Refused(wire.ErrorReason.INTERNAL, f"{type(e).__name__}: {e}"))

    def _stopped(self, entry: _Entry) -> None:
        if not entry.ended.is_set():
            self._end(entry, error=Refused(wire.ErrorReason.TRANSPORT_FAILED, "stopped: a later operation took over"))

    def _end(self, entry: _Entry, *, result: dict[str, object] | None = None, error: Refused | None = None) -> None:
        entry.record = entry.record.model_copy(
            update={
                "state": wire.OperationState.SUCCEEDED if error is None else wire.OperationState.FAILED,
                "result": result or {},
                "error": None if error is None else error.body(),
                "ended_ms": int(time.time() * 1000),
            }
        )
        entry.cleanup()
        self._running = None
        entry.task = None
        entry.ended.set()
        self._on_end(entry.record)
        self._forget()

    def _forget(self) -> None:
        while len(self._entries) > MAX_ENDED:
            oldest = next(iter(self._entries))
            if oldest == self._running:
                return
            del self._entries[oldest]

    async def wait(self, op_id: str, seconds: float) -> wire.OperationRecord | None:
        """The record, at the latest after ``seconds``, earlier when it ended; None for an unknown id."""
        entry = self._entries.get(op_id)
        if entry is None:
            return None
        try:
            async with asyncio.timeout(seconds):
                await entry.ended.wait()
        except TimeoutError:
            pass
        return entry.record

    async def close(self) -> None:
        """Stop what can be stopped and wait for the rest."""
        entry = self._entries.get(self._running or "")
        if entry is not None and entry.task is not None:
            entry.task.cancel()
            await entry.ended.wait()
