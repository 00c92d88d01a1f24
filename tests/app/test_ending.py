"""The end of an operator process, at any moment of its life."""

from __future__ import annotations

import asyncio

from rlfleet.app.operator import Operator
from rlfleet.app.settings import Settings


async def test_nothing_begins_once_the_process_ends() -> None:
    """What waits for CRDs may see them come while everything ends: an election that began then would never end."""
    begun = asyncio.Event()

    async def election() -> None:
        begun.set()

    one = Operator(Settings())
    ended = one._end("SIGTERM")
    one._spawn(election(), "leader election")
    await ended
    await asyncio.sleep(0)
    assert not begun.is_set()
