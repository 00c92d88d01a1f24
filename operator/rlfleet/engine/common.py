"""Small things that every adapter needs: polling with a deadline, keys as headers, and answers read with suspicion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from rlfleet.api.wire import BroadcastGroup
from rlfleet.calls import CallError, JsonClient

#: Seconds for a call that an engine's front end answers by itself.
QUICK = 2.0
#: Bounds of the pause between two polls or two tries of a flush.
POLL_MIN, POLL_MAX = 0.01, 0.5
#: Ids that every vocabulary has.
PROBE_PROMPT = [1, 2, 3, 5, 8, 13, 21]


async def polls(deadline: float) -> AsyncIterator[float]:
    """Yield the seconds left, first at once, then with growing pauses, until the deadline."""
    pause = POLL_MIN
    while (left := deadline - time.monotonic()) > 0:
        yield left
        await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(pause * 2, POLL_MAX)


def bearer(key: str | None) -> dict[str, str] | None:
    """The header that carries a key; None without one."""
    return {"Authorization": f"Bearer {key}"} if key else None


def joining(group: BroadcastGroup, rank: int) -> dict[str, Any]:
    """What an engine is told that shall join as ``rank`` and, for its further processes, the ranks after it."""
    return {
        "master_address": group.master_address,
        "master_port": group.master_port,
        "rank_offset": rank,
        "world_size": group.world_size,
        "group_name": group.group_name,
        "backend": group.backend,
    }


async def refuses_strangers(http: JsonClient, users: dict[str, str] | None, seconds: float) -> bool | None:
    """Whether the engine refuses to set a version for a caller who has what ``users`` have and no more.

    The call names no version, so an engine that lets it through has nothing to do but complain. None: neither is seen.
    """
    try:
        answer = await http.ask("POST", "/update_weight_version", seconds=seconds, body={}, headers=users)
    except CallError:
        return None
    if answer.status in (401, 403):
        return True
    return False if answer.status in (400, 422) else None


def as_int(value: Any) -> int | None:
    """The value if it is an integer; True and False are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: Any) -> str | None:
    """The value if it is a text that says something, cut to what a status may carry."""
    return value[:512] if isinstance(value, str) and value else None
