"""What a look at the fleet showed, for everybody who may see the same.

Invariants:
- an answer is kept for a time that grows with what it took to make, so however many tabs are open, and however large
  the fleet is, looks take a small share of this process's time;
- who gets a kept answer is not decided here: whoever asks must have proven at the apiserver that they may see it;
- one failure is one asker's: the next one looks anew, with a token of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

#: Seconds for which an answer is kept at least, and at most.
LEAST_SECONDS: Final = 1.5
MOST_SECONDS: Final = 30.0
#: An answer is kept for so many times what it took to make.
SHARE: Final = 20.0
#: Answers that are kept, one for each namespace that somebody looks at.
KEPT: Final = 64


def fresh_seconds(took: float) -> float:
    """How long an answer is kept that took so many seconds to make."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * took))


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    text: str = ""
    until: float = 0.0


class Shared:
    """Answers by key. ``clock``: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[str]]) -> str:
        """The kept answer, else what ``make`` answers; those who ask meanwhile wait for it."""
        entry = self._entries.get(key)
        if entry is None:
            self._forget()
            entry = self._entries[key] = _Entry()
        async with entry.lock:
            began = self._clock()
            if began >= entry.until:
                entry.text = await make()
                now = self._clock()
                entry.until = now + fresh_seconds(now - began)
            return entry.text

    def _forget(self) -> None:
        """Drop what is not fresh any more, and the oldest where too much is kept."""
        now = self._clock()
        idle = [k for k, e in self._entries.items() if not e.lock.locked()]
        for key in [k for k in idle if self._entries[k].until <= now]:
            del self._entries[key]
        while len(self._entries) >= KEPT and (left := [k for k in idle if k in self._entries]):
            del self._entries[min(left, key=lambda k: self._entries[k].until)]
