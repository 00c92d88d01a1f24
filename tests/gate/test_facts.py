"""What the gate asks its engine once, while many ask the gate at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlfleet.engine.sglang import SGLangAdapter
from rlfleet.gate.links import EngineLink
from rlfleet.gate.store import Store


async def test_many_that_ask_for_facts_of_an_engine_that_is_not_there_all_get_an_answer(tmp_path: Path) -> None:
    # Nothing listens on port 1. Each question ends at once, so that one caller asks anew while others still have to
    # read what the last question brought.
    link = EngineLink(SGLangAdapter("http://127.0.0.1:1"), Store(tmp_path))
    try:
        for _ in range(20):
            assert await asyncio.gather(*(ask(link) for _ in range(8))) == [None] * 8
    finally:
        await link.close()


async def ask(link: EngineLink) -> object:
    for _ in range(4):
        found = await link.facts()
    return found
