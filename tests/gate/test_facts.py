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


async def test_who_waits_for_facts_of_a_process_that_is_replaced_goes_on_without(tmp_path: Path) -> None:
    """Whoever closes an unproven engine waits there: it must not end with the question."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    link = EngineLink(SGLangAdapter(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"), Store(tmp_path))
    try:
        waiting = asyncio.create_task(link.facts())
        await asked.wait()
        link.forget()
        assert await waiting is None
    finally:
        await link.close()
        await ended.wait()
        silent.close()


async def ask(link: EngineLink) -> object:
    for _ in range(4):
        found = await link.facts()
    return found
