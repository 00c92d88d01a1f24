"""The work queue: which root object is reconciled next, and when again.

Invariants:
- one key is never worked on twice at the same time; an ``enqueue`` while it runs makes it run once more afterwards;
- any number of enqueues of a waiting key are one run; the earliest due time and the best priority win;
- a failing key waits longer each time (exponential, with jitter) and is forgiven at its first success; it delays
  nobody else. Whoever enqueues it meanwhile has it run at once, except before a Retry-After of the apiserver is over.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from rlfleet.kube.errors import ApiError, Conflict, NotLeader, TooManyRequests
from rlfleet.kube.limiter import Priority

log = logging.getLogger(__name__)


class Kind(StrEnum):
    """What is reconciled: root objects, and deletions (so that a long round delays no ceiling)."""

    POOL = "Pool"
    PIPELINE = "Pipeline"
    DELETION = "Deletion"
    """An object of ours that is being deleted; its key's name is ``<plural>/<name>``."""


class QueueKey(NamedTuple):
    """One root object."""

    kind: Kind
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to do until something changes."""


@dataclass(frozen=True, slots=True)
class After:
    """Look again after ``seconds``, or sooner if something changes."""

    seconds: float
    priority: Priority = Priority.RESYNC


Result = Done | After


class Retry(Exception):
    """The reconcile could not finish (conflict, stale view, peer busy); try again with backoff, or after ``after``."""

    def __init__(self, reason: str, *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Terminal(Exception):
    """Trying again cannot help until the object changes; the reason is already in its status."""


Reconcile = Callable[[QueueKey], Awaitable[Result]]


class QueueObserver(Protocol):
    """Told what the queue does, for metrics. ``result``: Done, After, Retry, Terminal, Error or Cancelled."""

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """One reconcile ended."""

    def queue_state(self, depth: int, running: int, oldest_seconds: float) -> None:
        """The queue changed: waiting and due keys, running keys, age of the oldest due key."""


class NullObserver:
    """Observes nothing."""

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """See QueueObserver."""

    def queue_state(self, depth: int, running: int, oldest_seconds: float) -> None:
        """See QueueObserver."""


@dataclass(slots=True)
class _Waiting:
    due: float
    priority: Priority
    ticket: int


class WorkQueue:
    """Runs ``reconcile`` for enqueued keys, at most ``concurrency`` at a time; use from one event loop only."""

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        concurrency: int = 32,
        backoff_base: float = 0.05,
        backoff_max: float = 60.0,
        jitter: float = 0.2,
        observer: QueueObserver | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._reconcile = reconcile
        self._concurrency = concurrency
        self._base = backoff_base
        self._max = backoff_max
        self._jitter = jitter
        self._observer: QueueObserver = observer or NullObserver()
        self._tickets = itertools.count()
        self._waiting: dict[QueueKey, _Waiting] = {}
        self._again: dict[QueueKey, _Waiting] = {}
        self._running: dict[QueueKey, asyncio.Task[None]] = {}
        self._failures: dict[QueueKey, int] = {}
        self._not_before: dict[QueueKey, float] = {}
        self._delayed: list[tuple[float, int, QueueKey]] = []
        self._ready: list[tuple[int, int, QueueKey]] = []
        self._wake = asyncio.Event()
        self._draining = False

    # ------------------------------------------------------------------------------------------ entrance

    def enqueue(self, key: QueueKey, *, after: float = 0.0, priority: Priority = Priority.SCALE) -> None:
        """Have ``key`` reconciled, at the earliest after ``after`` seconds; merges with what is already asked."""
        if self._draining:
            return
        due = max(asyncio.get_running_loop().time() + max(0.0, after), self._not_before.get(key, 0.0))
        into = self._again if key in self._running else self._waiting
        known = into.get(key)
        if known is not None:
            due, priority = min(due, known.due), min(priority, known.priority)
            if due == known.due and priority == known.priority:
                return
        entry = _Waiting(due, priority, next(self._tickets))
        into[key] = entry
        if into is self._waiting:
            heapq.heappush(self._delayed, (due, entry.ticket, key))
            self._wake.set()

    @property
    def failures(self) -> int:
        """Keys whose latest run failed."""
        return len(self._failures)

    def depth(self) -> int:
        """Keys that are due and wait for a free worker."""
        now = asyncio.get_running_loop().time()
        return sum(w.due <= now for w in self._waiting.values())

    def oldest_seconds(self) -> float:
        """How long the longest waiting due key has been due."""
        now = asyncio.get_running_loop().time()
        return max((now - w.due for w in self._waiting.values() if w.due <= now), default=0.0)

    # ------------------------------------------------------------------------------------------ running

    async def run(self) -> None:
        """Work until cancelled (running reconciles are cancelled too) or drained."""
        loop = asyncio.get_running_loop()
        try:
            while not (self._draining and not self._running):
                self._wake.clear()
                now = loop.time()
                self._promote(now)
                self._start(loop)
                self._observer.queue_state(self.depth(), len(self._running), self.oldest_seconds())
                pause = self._delayed[0][0] - now if self._delayed else None
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self, grace: float) -> bool:
        """Start nothing more; wait up to ``grace`` seconds for running reconciles. True when all ended."""
        self._draining = True
        self._waiting.clear()
        self._again.clear()
        self._delayed.clear()
        self._ready.clear()
        self._wake.set()
        tasks = list(self._running.values())
        if not tasks:
            return True
        _, late = await asyncio.wait(tasks, timeout=grace)
        return not late

    async def drain(self, grace: float) -> bool:
        """As ``settle``; then cancel what still runs. True when all ended by themselves."""
        if await self.settle(grace):
            return True
        late = list(self._running.values())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return False

    def _promote(self, now: float) -> None:
        while self._delayed and (self._delayed[0][0] <= now or not self._valid(self._delayed[0][1:])):
            _, ticket, key = heapq.heappop(self._delayed)
            if self._valid((ticket, key)):
                heapq.heappush(self._ready, (int(self._waiting[key].priority), ticket, key))

    def _valid(self, entry: tuple[int, QueueKey]) -> bool:
        waiting = self._waiting.get(entry[1])
        return waiting is not None and waiting.ticket == entry[0]

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._ready and len(self._running) < self._concurrency:
            _, ticket, key = heapq.heappop(self._ready)
            if not self._valid((ticket, key)):
                continue
            del self._waiting[key]
            self._not_before.pop(key, None)
            self._running[key] = loop.create_task(self._work(key), name=f"reconcile {'/'.join(key)}")

    async def _work(self, key: QueueKey) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        result, next_run = "Cancelled", None
        try:
            result, next_run = await self._attempt(key)
        finally:
            del self._running[key]
            self._observer.reconciled(key.kind.value, result, loop.time() - started)
            again = self._again.pop(key, None)
            if again is not None:
                self.enqueue(key, after=again.due - loop.time(), priority=again.priority)
            if next_run is not None:
                self.enqueue(key, after=next_run.seconds, priority=next_run.priority)
            self._wake.set()

    async def _attempt(self, key: QueueKey) -> tuple[str, After | None]:
        """One run: the word for metrics, and when to run again."""
        try:
            outcome = await self._reconcile(key)
        except Terminal as e:
            self._failures.pop(key, None)
            log.info("%s: stopped until it changes: %s", "/".join(key), e)
            return "Terminal", None
        except Retry as e:
            log.debug("%s: again: %s", "/".join(key), e)
            return "Retry", self._backoff(key, e.after)
        except TooManyRequests as e:
            self._not_before[key] = asyncio.get_running_loop().time() + e.retry_after
            return "Retry", self._backoff(key, e.retry_after)
        except Conflict as e:
            log.debug("%s: lost a race, again: %s", "/".join(key), e)
            return "Retry", self._backoff(key, None)
        except NotLeader as e:
            # Either this process is about to end, or a renewal was late and the next one brings the right back.
            log.info("%s: %s", "/".join(key), e)
            return "Retry", self._backoff(key, None)
        except ApiError as e:
            log.warning("%s: %s", "/".join(key), e)
            return "Error", self._backoff(key, None)
        except Exception:  # the one place that keeps the operator alive when a reconciler has a defect
            log.exception("%s: reconcile failed", "/".join(key))
            return "Error", self._backoff(key, None)
        self._failures.pop(key, None)
        return ("After", outcome) if isinstance(outcome, After) else ("Done", None)

    def _backoff(self, key: QueueKey, at_least: float | None) -> After:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        if at_least is not None:
            return After(at_least, Priority.SCALE)
        seconds = min(self._max, self._base * 2 ** min(count, 30))
        return After(seconds * random.uniform(1 - self._jitter, 1 + self._jitter), Priority.SCALE)
