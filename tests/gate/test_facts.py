"""What the gate asks its engine once, while many ask the gate at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlfleet.engine import Capability
from rlfleet.engine.sglang import SGLangAdapter
from rlfleet.gate.links import EngineLink
from rlfleet.gate.store import Store
from tests.engine.test_sglang import INFO, Server, serving


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


async def test_an_engine_of_an_unknown_version_takes_no_weights_unless_that_is_allowed(tmp_path: Path) -> None:
    async with serving(Server()) as server:
        server.answer("GET", "/server_info", (200, INFO | {"version": "0.6.0"}))
        found = []
        for allow in (False, True):
            store = Store(tmp_path / str(allow))
            link = EngineLink(SGLangAdapter(server.url), store, allow_unknown_version=allow)
            while (facts := await link.facts()) is None:
                pass
            _, report = await link.observe(busy=False)
            found.append((Capability.SERIALIZED in facts.capabilities, report.refused))
            await link.close()
    (loads, refused), allowed = found
    assert not loads
    assert "0.6.0 is not known" in str(refused)
    assert allowed == (True, None)


async def test_an_engine_that_refuses_to_tell_is_reported_once_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Server()) as server:
        link = EngineLink(SGLangAdapter(server.url), Store(tmp_path))
        for reason in ("no key", "no key", "no key", "no way"):
            server.answer("GET", "/server_info", (401, {"error": reason}))
            assert await link.facts() is None
        await link.close()
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [w.rpartition(": ")[2] for w in warned] == ["no key", "no way"]


async def test_many_that_ask_whether_the_loop_answers_cost_the_engine_one_question(tmp_path: Path) -> None:
    async with serving(Server()) as server:
        link = EngineLink(SGLangAdapter(server.url), Store(tmp_path))
        for status, answers in ((200, True), (500, False), (200, True)):
            server.answer("GET", "/server_info", (status, INFO))
            before = len(server.calls)
            assert await asyncio.gather(*(link.loop_answers() for _ in range(8))) == [answers] * 8
            assert len(server.calls) == before + 1
        await link.close()


async def ask(link: EngineLink) -> object:
    for _ in range(4):
        found = await link.facts()
    return found
