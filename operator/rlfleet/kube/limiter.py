"""How fast the operator may talk to the apiserver: a token bucket whose waiters go by priority.

Invariant: a waiter of a better class never waits behind one of a worse class, and within a class order is kept.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from enum import IntEnum


class Priority(IntEnum):
    """Who goes first at the apiserver and in the queue: lower is sooner."""

    ROUND = 0
    DELETE = 1
    SCALE = 2
    RESYNC = 3
    #: What readers of worker discovery cause, however many there are and whoever they may be.
    READER = 4


class RateLimiter:
    """``rate`` calls per second with a burst of ``burst``; time is the running loop's."""

    def __init__(self, rate: float = 50.0, burst: int = 100, *, on_wait: Callable[[float], None] | None = None) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError("rate must be above 0 and burst at least 1")
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at: float | None = None
        self._order = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._on_wait = on_wait

    async def acquire(self, priority: Priority) -> None:
        """Wait for one token."""
        loop = asyncio.get_running_loop()
        self._refill(loop.time())
        if not self._waiters and self._tokens >= 1:
            self._tokens -= 1
            return
        started = loop.time()
        future: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiters, (int(priority), next(self._order), future))
        self._arm(loop)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._tokens += 1  # granted and not used
                self._release(loop)
            raise
        if self._on_wait is not None:
            self._on_wait(loop.time() - started)

    def _refill(self, now: float) -> None:
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._waiters:
            self._timer = loop.call_later(max(0.0, (1 - self._tokens) / self._rate), self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._release(loop)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        self._refill(loop.time())
        # The margin absorbs float rounding: a timer that fires at the computed instant must find its token.
        while self._waiters and self._tokens >= 1 - 1e-6:
            future = heapq.heappop(self._waiters)[2]
            if not future.done():
                self._tokens -= 1
                future.set_result(None)
        self._arm(loop)
