"""How the operator asks Dynamo frontends: one question at a time, waited for shortly, and no older than it may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rlfleet.discovery.client import STALE_SECONDS, Frontends, Unknown
from rlfleet.plan.dynamo import Listing
from tests.gate.kit import address

EMPTY: dict[str, Any] = {"protocol_version": 1, "namespace": "dynamo", "workers": []}


class Frontend:
    """A frontend whose answers a test holds back, and counts."""

    def __init__(self) -> None:
        self.status = 200
        self.body: Any = EMPTY
        self.asked = 0
        self.held = asyncio.Event()
        self.held.set()
        self.url = ""

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        status, body = self.status, self.body
        await self.held.wait()
        return web.json_response(body, status=status)


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    one, app = Frontend(), web.Application()
    app.router.add_get("/v1/rl/workers", one.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    host = address()
    await web.TCPSite(runner, host, 8001).start()
    one.url = f"http://{host}:8001"
    yield one
    one.held.set()
    await runner.cleanup()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def frontends(clock: Clock) -> AsyncIterator[Frontends]:
    one = Frontends(monotonic=clock)
    yield one
    await one.close()


async def test_many_ask_and_the_frontend_is_asked_once(frontend: Frontend, frontends: Frontends) -> None:
    frontend.held.clear()
    waiting = [asyncio.create_task(frontends.look(frontend.url, patience=60)) for _ in range(20)]
    while not frontend.asked:
        await asyncio.sleep(0.01)
    frontend.held.set()
    told = await asyncio.gather(*waiting)
    assert all(isinstance(t, Listing) for t in told)
    assert frontend.asked == 1
    await frontends.look(frontend.url, patience=60, fresh=5)
    assert frontend.asked == 1, "an answer that is new enough is taken again"
    await frontends.look(frontend.url, patience=60)
    assert frontend.asked == 2


async def test_who_does_not_wait_has_the_answer_before_until_that_is_too_old(
    frontend: Frontend, frontends: Frontends, clock: Clock
) -> None:
    frontend.held.clear()
    first = await frontends.look(frontend.url, patience=0.01)
    assert isinstance(first, Unknown), "nothing was heard yet"
    frontend.held.set()
    assert isinstance(await frontends.look(frontend.url, patience=60), Listing)
    frontend.held.clear()
    clock.now += STALE_SECONDS
    assert isinstance(await frontends.look(frontend.url, patience=0.01), Listing)
    clock.now += 1
    old = await frontends.look(frontend.url, patience=0.01)
    clock.now += 100
    older = await frontends.look(frontend.url, patience=0.01)
    assert isinstance(old, Unknown)
    assert old == older, "in the same words, or each look would write a status"


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (500, {"error": "discovery_failed", "message": "no store"}, False),
        (200, EMPTY | {"workers": [{"instance_id": 1}]}, False),
        (200, EMPTY | {"protocol_version": 2}, True),
        (404, {}, False),
        (307, {}, False),
    ],
)
async def test_what_is_no_list_takes_the_place_of_the_one_before(
    frontend: Frontend, frontends: Frontends, status: int, body: Any, refused: bool
) -> None:
    assert isinstance(await frontends.look(frontend.url, patience=60), Listing)
    frontend.status, frontend.body = status, body
    told = await frontends.look(frontend.url, patience=60)
    assert isinstance(told, Unknown)
    assert told.refused is refused


async def test_one_that_nobody_names_any_more_is_forgotten(frontend: Frontend, frontends: Frontends) -> None:
    assert isinstance(await frontends.look(frontend.url, patience=60), Listing)
    frontend.held.clear()
    hanging = asyncio.create_task(frontends.look(frontend.url, patience=60))
    while frontend.asked < 2:
        await asyncio.sleep(0.01)
    await frontends.forget("http://127.0.0.1:1")
    assert not hanging.done()
    await frontends.forget(frontend.url)
    assert isinstance(await hanging, Listing), "the answer before"
    frontend.held.set()
    await frontends.look(frontend.url, patience=60)
    assert frontend.asked == 3


async def test_one_that_was_late_is_not_waited_for_again(
    frontend: Frontend, frontends: Frontends, clock: Clock
) -> None:
    assert isinstance(await frontends.look(frontend.url, patience=60), Listing)
    frontend.held.clear()
    late = asyncio.create_task(frontends.look(frontend.url, patience=60))
    while frontend.asked < 2:
        await asyncio.sleep(0.01)
    clock.now += 61
    frontend.held.set()
    await late
    frontend.held.clear()
    # Nobody lets this answer go, so whoever waited for it would wait for a minute.
    async with asyncio.timeout(50):
        assert isinstance(await frontends.look(frontend.url, patience=60), Unknown)
