"""Buckets on their way through a gate whose memory holds one of them at a time (staging Bucket).

The sender's push and the engine's load meet here: the push may bring bucket n only when bucket n-1 has been loaded, and
is answered only when the engine has loaded what it brought.

Invariants:
- at most one bucket is received or being loaded, in the order of the manifest, each exactly once;
- whatever goes wrong on one side ends the other at once, with the same words: nobody waits for a dead peer;
- a stream serves one load. The next load begins with the first bucket again, for what an engine took of a broken one
  is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlfleet.api.wire import ErrorReason
from rlfleet.gate.errors import GateError


class BucketStream:
    """One load's buckets, ``count`` of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0
        self._here = False
        self._error: GateError | None = None
        self._changed = asyncio.Condition()

    @property
    def loaded(self) -> int:
        """Buckets that the engine has loaded."""
        return self._next

    # ---------------------------------------------------------------------------------------------- the push

    async def turn(self, index: int) -> None:
        """Wait until bucket ``index`` may be received; GateError when the load ended, or this is not its turn."""
        await self._until(lambda: not self._here)
        if index != self._next:
            raise GateError(
                ErrorReason.NOT_STAGED, f"bucket {index} is out of turn: bucket {self._next} of {self._count} is next"
            )

    async def deliver(self, index: int) -> None:
        """Bucket ``index`` is received and checked: hand it over, and wait until the engine has loaded it."""
        async with self._changed:
            self._here = True
            self._changed.notify_all()
        await self._until(lambda: self._next > index)

    # ---------------------------------------------------------------------------------------------- the load

    async def bucket(self, seconds: float) -> None:
        """Wait for the next bucket at most ``seconds``; GateError TransportFailed when it does not come."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._until(lambda: self._here)
        except TimeoutError:
            raise GateError(
                ErrorReason.TRANSPORT_FAILED,
                f"bucket {self._next} of {self._count} did not arrive within {max(0.0, seconds):.1f} s",
            ) from None

    async def done(self) -> None:
        """The engine has loaded it, and its file is gone: the next one may come."""
        async with self._changed:
            self._here = False
            self._next += 1
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------- both

    async def fail(self, error: GateError) -> None:
        """End both sides; the first error stays."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def _until(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or ready())
            if self._error is not None and not ready():
                raise GateError(self._error.reason, self._error.message)
