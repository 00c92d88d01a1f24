"""Kubernetes Events about our objects, few and useful.

Invariant: recording never delays or fails a reconcile: events are queued, aggregated while the same thing repeats,
rate limited per object, and dropped (counted) when the apiserver is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from .client import KubeClient, Obj
from .errors import ApiError, NotLeader
from .resources import EVENTS

log = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]

#: Seconds for which no event is written to a namespace that was found to be in deletion.
NAMESPACE_SECONDS = 60.0


@dataclass(slots=True)
class _Bucket:
    last: float
    tokens: float = 0.0


class EventObserver(Protocol):
    """Told what became of Events, for metrics."""

    def event_written(self, type_: str) -> None:
        """One of this type (Normal or Warning) was written."""

    def events_dropped(self, count: int) -> None:
        """So many were not written."""


class EventRecorder:
    """Writes events.k8s.io/v1 Events.

    The same (object, reason, note) is written once per ``repeat_seconds``; one object gets at most ``burst`` events at
    once and one per ``refill_seconds`` afterwards. ``run()`` does the writing until cancelled.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        instance: str,
        controller: str = "rlfleet.dev/operator",
        repeat_seconds: float = 600.0,
        burst: int = 20,
        refill_seconds: float = 30.0,
        api_timeout: float = 5.0,
        backlog: int = 1000,
        observer: EventObserver | None = None,
    ) -> None:
        self._client = client
        self._instance = instance[:128]
        self._controller = controller
        self._repeat = repeat_seconds
        self._burst = burst
        self._refill = refill_seconds
        self._timeout = api_timeout
        self._backlog = backlog
        self._observer = observer
        self._pending: deque[Obj] = deque()
        self._wake = asyncio.Event()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._ending: OrderedDict[str, float] = OrderedDict()
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Events that wait to be written."""
        return len(self._pending)

    def record(self, obj: Obj, type_: EventType, reason: str, note: str, *, action: str = "Reconcile") -> None:
        """Say ``note`` about ``obj`` (an API object with apiVersion and kind). Returns at once."""
        now = asyncio.get_running_loop().time()
        metadata = obj["metadata"]
        uid = metadata.get("uid", "")
        note = note[:1024]
        same = hashlib.sha256("\0".join([uid, type_, reason, note]).encode()).hexdigest()
        last = self._seen.get(same)
        if last is not None and now - last < self._repeat:
            return
        ending = self._ending.get(metadata.get("namespace") or "default")
        if ending is not None and now - ending < NAMESPACE_SECONDS:
            self._drop(1)
            return
        if not self._allow(uid, now) or len(self._pending) >= self._backlog:
            self._drop(1)
            return
        self._seen[same] = now
        self._seen.move_to_end(same)
        while len(self._seen) > 4096:
            self._seen.popitem(last=False)
        stamp = datetime.now(UTC)
        namespace = metadata.get("namespace") or "default"
        self._pending.append(
            {
                "metadata": {
                    "name": f"{metadata['name'][:220]}.{stamp.timestamp() * 1e6:.0f}{same[:6]}",
                    "namespace": namespace,
                },
                "eventTime": stamp.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "reportingController": self._controller,
                "reportingInstance": self._instance,
                "action": action,
                "reason": reason,
                "type": type_,
                "note": note,
                "regarding": {
                    "apiVersion": obj["apiVersion"],
                    "kind": obj["kind"],
                    "namespace": metadata.get("namespace"),
                    "name": metadata["name"],
                    "uid": uid,
                },
            }
        )
        self._wake.set()

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                event = self._pending.popleft()
                try:
                    await self._write(event)
                except (ApiError, NotLeader) as e:
                    self._drop(1)
                    log.info("event %s not written: %s", event["reason"], e)

    async def flush(self, timeout: float) -> None:
        """Write what is queued, at shutdown; gives up after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._pending:
                    event = self._pending.popleft()
                    await self._write(event)
        except (TimeoutError, ApiError, NotLeader) as e:
            self._drop(len(self._pending))
            log.info("events not written at shutdown: %r", e)

    async def _write(self, event: Obj) -> None:
        await self._client.create(EVENTS, event["metadata"]["namespace"], event, timeout=self._timeout)
        if self._observer is not None:
            self._observer.event_written(event["type"])

    def _drop(self, count: int) -> None:
        self.dropped += count
        if self._observer is not None and count:
            self._observer.events_dropped(count)

    def _allow(self, uid: str, now: float) -> bool:
        bucket = self._buckets.get(uid)
        if bucket is None:
            bucket = self._buckets[uid] = _Bucket(now, tokens=float(self._burst))
            while len(self._buckets) > 4096:
                self._buckets.popitem(last=False)
        bucket.tokens = min(float(self._burst), bucket.tokens + (now - bucket.last) / self._refill)
        bucket.last = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True
