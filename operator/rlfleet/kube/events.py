"""Kubernetes Events about our objects, few and useful.

Invariant: recording never delays or fails a reconcile: events are queued, aggregated while the same thing repeats,
rate limited per object, and dropped (counted) when the apiserver is not there. What could not be written was not said.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from rlfleet.api.conditions import Reason

from .client import KubeClient, Obj
from .errors import ApiError, NotFound, NotLeader
from .resources import EVENTS

log = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]

#: Seconds for which no event is written to a namespace that was found to be in deletion.
NAMESPACE_SECONDS = 60.0


#: Different notes of one object and reason that are said one by one within ``repeat_seconds``; more are combined.
SIMILAR = 10
#: Most bytes of a note.
NOTE_BYTES = 1024
#: Events, and objects, that are remembered.
REMEMBERED = 4096
#: Most Events that wait to be written; more are dropped and counted.
BACKLOG = 1000
#: Who says it, in every Event.
CONTROLLER = "rlfleet.dev/operator"
_COMBINED = "(combined) "


@dataclass(slots=True)
class _Said:
    """One Event: when it was told last, its object's name once it is written, and how often it happened."""

    told: float
    name: str = ""
    count: int = 1


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _cut(note: str) -> str:
    """As much of it as the apiserver takes: it counts bytes, and whatever people write is not ASCII alone."""
    return note.encode("utf-8", "replace")[:NOTE_BYTES].decode("utf-8", "ignore")


def _time(stamp: datetime) -> str:
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


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

    The same (object, reason, note) is written once, and counted in that Event's series every ``repeat_seconds`` while
    it repeats; more than ten different notes of one object and reason become one; one object gets at most ``burst``
    events at once and one per ``refill_seconds`` afterwards. ``run()`` does the writing until cancelled.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        instance: str,
        repeat_seconds: float = 600.0,
        burst: int = 20,
        refill_seconds: float = 30.0,
        api_timeout: float = 5.0,
        observer: EventObserver | None = None,
    ) -> None:
        self._client = client
        self._instance = instance[:128]
        self._repeat = repeat_seconds
        self._burst = burst
        self._refill = refill_seconds
        self._timeout = api_timeout
        self._observer = observer
        self._pending: deque[tuple[_Said, Obj]] = deque()
        self._wake = asyncio.Event()
        self._said: OrderedDict[str, _Said] = OrderedDict()
        self._notes: OrderedDict[str, tuple[float, set[str]]] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._ending: OrderedDict[str, float] = OrderedDict()
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Events that wait to be written."""
        return len(self._pending)

    def record(self, obj: Obj, type_: EventType, reason: str, note: str, *, action: str = "Reconcile") -> None:
        """Say ``note`` about ``obj`` (an API object with apiVersion and kind). Returns at once.

        ValueError for a reason that is not in api.conditions.
        """
        Reason.parse(reason)
        now = asyncio.get_running_loop().time()
        metadata = obj["metadata"]
        uid, namespace = metadata.get("uid", ""), metadata.get("namespace") or "default"
        ending = self._ending.get(namespace)
        if ending is not None and now - ending < NAMESPACE_SECONDS:
            self._drop(1)
            return
        note = self._combined(uid, type_, reason, _cut(note), now)
        same = _digest(uid, type_, reason, note.partition(_COMBINED)[1] or note)
        said = self._said.get(same)
        if said is not None:
            said.count += 1
            if now - said.told < self._repeat:
                return
        if not self._allow(uid, now) or len(self._pending) >= BACKLOG:
            self._drop(1)
            return
        stamp = datetime.now(UTC)
        body: Obj = {
            "metadata": {
                "name": f"{metadata['name'][:220]}.{stamp.timestamp() * 1e6:.0f}{same[:6]}",
                "namespace": namespace,
            },
            "eventTime": _time(stamp),
            "reportingController": CONTROLLER,
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
        if said is None:
            said = self._said[same] = _Said(now)
            while len(self._said) > REMEMBERED:
                self._said.popitem(last=False)
        said.told = now
        self._said.move_to_end(same)
        self._pending.append((said, body))
        self._wake.set()

    def _combined(self, uid: str, type_: str, reason: str, note: str, now: float) -> str:
        """The note, or one that stands for many: an object that says ever new things of one reason says it once."""
        key = _digest(uid, type_, reason)
        began, notes = self._notes.get(key, (now, set()))
        if now - began >= self._repeat:
            began, notes = now, set()
        self._notes[key] = began, notes
        self._notes.move_to_end(key)
        while len(self._notes) > REMEMBERED:
            self._notes.popitem(last=False)
        if len(notes) < SIMILAR:
            notes.add(_digest(note))
        return note if _digest(note) in notes else _cut(f"{_COMBINED}{note}")

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                said, event = self._pending.popleft()
                try:
                    await self._write(said, event)
                except (ApiError, NotLeader) as e:
                    self._drop(1)
                    said.told = -math.inf  # nobody has heard it: it is said when it happens again
                    if "being terminated" in str(e):
                        self._ending[event["metadata"]["namespace"]] = asyncio.get_running_loop().time()
                        while len(self._ending) > REMEMBERED:
                            self._ending.popitem(last=False)
                    log.info("event %s not written: %s", event["reason"], e)

    async def flush(self, timeout: float) -> None:
        """Write what is queued, at shutdown; gives up after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._pending:
                    await self._write(*self._pending.popleft())
        except (TimeoutError, ApiError, NotLeader) as e:
            self._drop(len(self._pending))
            log.info("events not written at shutdown: %r", e)

    async def _write(self, said: _Said, event: Obj) -> None:
        namespace = event["metadata"]["namespace"]
        if said.name:
            with suppress(NotFound):  # Events expire; then it is said anew
                last = event["eventTime"]
                await self._client.patch_series(
                    namespace, said.name, count=said.count, last=last, timeout=self._timeout
                )
                return
            said.count = 1
        await self._client.create(EVENTS, namespace, event, timeout=self._timeout)
        said.name = event["metadata"]["name"]
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
