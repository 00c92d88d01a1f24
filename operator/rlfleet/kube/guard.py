"""The guard of every mutation: whoever does not lead, or may not lead for much longer, sends nothing.

Invariant: the guard judges by the clock at the moment of the call, so a process that was frozen refuses its first
mutation after the thaw before any task of it has noticed anything.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rlfleet.plan.leader import may_mutate

from .errors import NotLeader

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds of a clock that never goes back and, where the system has one, goes on while the machine is suspended."""
    return time.clock_gettime(_BOOT_CLOCK)


class GuardObserver(Protocol):
    """Told of refused mutations, for metrics."""

    def mutation_refused(self, target: str) -> None:
        """A mutation was refused locally; ``target``: apiserver, peer or router."""


@dataclass(frozen=True, slots=True)
class Token:
    """Leadership at this moment, with ``seconds`` of validity left."""

    seconds: float


class Guard:
    """One process's right to mutate. It starts without it; ``lead`` gives it until a time of ``clock``."""

    def __init__(
        self,
        *,
        margin: float = 0.0,
        clock: Callable[[], float] = boot_seconds,
        observer: GuardObserver | None = None,
    ) -> None:
        self._margin = margin
        self._clock = clock
        self._observer = observer
        self._until = -math.inf
        self._why = "this process is a standby"
        self._revoked = False
        self._in_flight = 0
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()

    @classmethod
    def unelected(cls) -> Guard:
        """A guard that always allows: a single operator without leader election."""
        guard = cls()
        guard.lead(math.inf)
        return guard

    def lead(self, until: float) -> None:
        """Mutations are allowed until ``until``, less the margin. Nothing after ``revoke``."""
        if not self._revoked:
            self._until = until
            self._why = "the Lease was not renewed in time"

    def revoke(self, why: str) -> None:
        """No mutation any more, for good."""
        if not self._revoked:
            self._revoked, self._why = True, why
        self._until = -math.inf

    @property
    def leads(self) -> bool:
        """Whether a mutation would be allowed now."""
        return may_mutate(self._until, self._clock(), margin=self._margin)

    def token(self, target: str = "apiserver") -> Token:
        """Leadership now; raises NotLeader when too little validity, or none, is left."""
        now = self._clock()
        if not may_mutate(self._until, now, margin=self._margin):
            if self._observer is not None:
                self._observer.mutation_refused(target)
            raise NotLeader(f"not the leader: {self._why}")
        return Token(self._until - now)

    @contextmanager
    def mutation(self, target: str = "apiserver") -> Iterator[Token]:
        """One mutation, from before it is sent until it is answered or given up. Raises NotLeader."""
        token = self.token(target)
        self._in_flight += 1
        self._none_in_flight.clear()
        try:
            yield token
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.set()

    async def quiet(self, timeout: float) -> bool:
        """Wait until no mutation is under way; False after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._none_in_flight.wait()
        except TimeoutError:
            return False
        return True
