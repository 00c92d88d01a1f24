"""The adapter against the real sglang-router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rlfleet.calls import NotSent, Refused
from rlfleet.router import SGLangRouterAdapter, make_router, normal
from tests.gate.kit import Router, address, free_port


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
async def adapter(router: Router) -> AsyncIterator[SGLangRouterAdapter]:
    made = SGLangRouterAdapter(router.url + "/")
    yield made
    await made.close()


class Worker:
    """Just enough of an engine for the router to register it."""

    def __init__(self) -> None:
        self.health_calls = 0
        self.delay = 0.0
        self.host = address()
        self.url = f"http://{self.host}:30000"

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*health}", self._health)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.host, 30000).start()
        return runner

    async def _health(self, _: web.Request) -> web.Response:
        self.health_calls += 1
        await asyncio.sleep(self.delay)
        return web.Response()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    runner = await made.start()
    yield made
    await runner.cleanup()


async def test_add_ends_when_listed_and_remove_when_unlisted(
    adapter: SGLangRouterAdapter, router: Router, worker: Worker
) -> None:
    assert await adapter.lists(worker.url, 2) is False
    await adapter.add(worker.url, seconds=20)
    assert await asyncio.to_thread(router.urls) == [worker.url]
    assert await adapter.lists(worker.url, 2) is True
    await adapter.remove(worker.url, seconds=10)
    assert await asyncio.to_thread(router.urls) == []


async def test_both_are_idempotent(adapter: SGLangRouterAdapter, router: Router, worker: Worker) -> None:
    await adapter.remove(worker.url, seconds=10)
    await adapter.add(worker.url, seconds=20)
    calls = worker.health_calls
    await adapter.add(worker.url + "/", seconds=20)
    assert worker.health_calls == calls
    assert await asyncio.to_thread(router.urls) == [worker.url]
    await adapter.remove(worker.url, seconds=10)
    await adapter.remove(worker.url, seconds=10)


async def test_every_spelling_is_found_and_removed(
    adapter: SGLangRouterAdapter, router: Router, worker: Worker
) -> None:
    for spelling in (worker.url, worker.url + "/"):
        await asyncio.to_thread(router.add, spelling)
    while len(await asyncio.to_thread(router.urls)) < 2:
        await asyncio.sleep(0.05)
    await adapter.remove(worker.url.upper().replace("HTTP", "http"), seconds=10)
    assert await asyncio.to_thread(router.urls) == []


async def test_add_waits_for_the_routers_own_job(adapter: SGLangRouterAdapter, worker: Worker) -> None:
    worker.delay = 1.0
    task = asyncio.create_task(adapter.add(worker.url, seconds=20))
    while not worker.health_calls:
        await asyncio.sleep(0.02)
    assert not task.done()
    await task
    assert await adapter.lists(worker.url, 2) is True


async def test_an_engine_that_does_not_answer_fails_with_the_routers_words(adapter: SGLangRouterAdapter) -> None:
    host = address()
    with pytest.raises(Refused, match="job failed"):
        await adapter.add(f"http://{host}:{free_port(host)}", seconds=30)


async def test_an_old_failure_does_not_fail_a_new_addition(adapter: SGLangRouterAdapter) -> None:
    worker = Worker()
    with pytest.raises(Refused):
        await adapter.add(worker.url, seconds=30)
    runner = await worker.start()
    try:
        await adapter.add(worker.url, seconds=30)
        assert await adapter.lists(worker.url, 2) is True
    finally:
        await runner.cleanup()


async def test_another_workers_entry_is_left_alone(
    adapter: SGLangRouterAdapter, router: Router, worker: Worker
) -> None:
    other = Worker()
    runner = await other.start()
    try:
        await adapter.add(worker.url, seconds=20)
        await adapter.add(other.url, seconds=20)
        await adapter.remove(worker.url, seconds=10)
        assert await asyncio.to_thread(router.urls) == [other.url]
    finally:
        await runner.cleanup()


async def test_no_router_raises_instead_of_looking_empty(router: Router) -> None:
    host = address()
    adapter = make_router("SGLangRouter", f"http://{host}:{free_port(host)}")
    with pytest.raises(NotSent):
        await adapter.lists("http://a:1", 2)
    await adapter.close()


async def test_another_program_at_the_address_raises_too(worker: Worker) -> None:
    adapter = make_router("SGLangRouter", worker.url)
    with pytest.raises(Refused):
        await adapter.lists("http://a:1", 2)
    await adapter.close()


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="SGLangRouter"):
        make_router("Nginx", "http://a:1")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://A.example:30000/", "http://a.example:30000"),
        ("http://a.example", "http://a.example:80"),
        ("https://a.example/x/", "https://a.example:443/x"),
        ("http://[FD00::1]:30000", "http://[fd00::1]:30000"),
        (" http://a:1 ", "http://a:1"),
    ],
)
def test_normal_form(url: str, expected: str) -> None:
    assert normal(url) == expected
    assert normal(expected) == expected
