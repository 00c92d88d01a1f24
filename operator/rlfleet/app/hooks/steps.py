"""What the chart's jobs share: saying, waiting, and calls that an apiserver away for a moment does not end.

Invariant: only what may be asked twice is repeated: reads, and writes under a precondition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from rlfleet.kube.errors import TooManyRequests, Unavailable, Unknown

T = TypeVar("T")

#: Seconds for one call to the apiserver, and between two looks.
CALL_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.5
_TRIES: Final = 6


class HookError(Exception):
    """The job cannot reach its purpose; the message says what to do."""


def say(line: str) -> None:
    """One line for whoever reads the job's log."""
    print(line, flush=True)


async def steadily(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of ``call``, asked up to six times while there is none."""
    for left in reversed(range(_TRIES)):
        try:
            return await call()
        except (Unavailable, Unknown, TooManyRequests) as e:
            if not left:
                raise
            say(f"{e}; again")
            await asyncio.sleep(2 * LOOK_SECONDS)
    raise AssertionError("unreachable")


async def until(look: Callable[[], Awaitable[T]], seconds: float) -> T:
    """What ``look`` gives once it is true, or its last result after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := await steadily(look)) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_SECONDS)
    return found
