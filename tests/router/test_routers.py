"""Every adapter against the real router that it is for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from aiohttp import web

from rlfleet.calls import NoAnswer, NotSent, Refused
from rlfleet.router import Entry, RouterAdapter, make_router, normal, usable_key
from rlfleet_vllm import control_key
from tests.gate.kit import ROUTERS, Engine, Router, address, free_port


@pytest.fixture(scope="module", params=ROUTERS)
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """One router of each kind; every test has engines of its own."""
    made = Router(tmp_path_factory.mktemp("router"), request.param, "--worker-startup-timeout-secs", "3")
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
async def adapter(router: Router) -> AsyncIterator[RouterAdapter]:
    made = make_router(router.kind, router.url + "/")
    yield made
    for url in await listed(router):
        await made.remove(url, seconds=60)
    await made.close()


class Worker:
    """Just enough of an engine for a router to register it."""

    def __init__(self) -> None:
        self.health_calls = 0
        self.delay = 0.0
        self.healthy = True
        self.status = 200
        self.served = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.host = address()
        self.url = f"http://{self.host}:30000"

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{path:.*health}", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.host, 30000).start()
        return runner

    async def _health(self, _: web.Request) -> web.Response:
        self.health_calls += 1
        await asyncio.sleep(self.delay)
        return web.Response(status=200 if self.healthy else 503)

    async def _generate(self, _: web.Request) -> web.Response:
        self.served += 1
        await self.hold.wait()
        return web.json_response({"served": self.url}, status=self.status)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


MakeWorker = Callable[[], Awaitable[Worker]]


@pytest.fixture
async def make_worker() -> AsyncIterator[MakeWorker]:
    runners = []

    async def make() -> Worker:
        made = Worker()
        runners.append(await made.start())
        return made

    yield make
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def worker(make_worker: MakeWorker) -> Worker:
    return await make_worker()


async def listed(router: Router) -> list[str]:
    return await asyncio.to_thread(router.urls)


async def seen(what: str, condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll; pytest's own timeout ends a test whose condition never comes true."""
    while not await condition():
        await asyncio.sleep(0.05)


async def ask(router: Router, seconds: float = 60) -> httpx.Response:
    """One request as a client of the router sends it."""
    async with httpx.AsyncClient(base_url=router.url, timeout=seconds) as client:
        return await client.post("/generate", json={"text": "a"})


async def test_add_ends_when_listed_and_remove_when_unlisted(
    adapter: RouterAdapter, router: Router, worker: Worker
) -> None:
    assert await adapter.look(worker.url, 5) == Entry(listed=False)
    await adapter.add(worker.url, seconds=60)
    assert worker.url in await listed(router)
    assert await adapter.look(worker.url, 5) == Entry(listed=True)
    await adapter.remove(worker.url, seconds=60)
    assert worker.url not in await listed(router)


async def test_both_are_idempotent_and_may_follow_each_other_at_once(
    adapter: RouterAdapter, router: Router, worker: Worker
) -> None:
    await adapter.remove(worker.url, seconds=60)
    for _ in range(3):
        await adapter.add(worker.url, seconds=60)
        calls = worker.health_calls
        await adapter.add(worker.url + "/", seconds=60)
        assert worker.health_calls == calls, "an addition of what is listed asks for nothing"
        assert (await listed(router)).count(worker.url) == 1
        await adapter.remove(worker.url, seconds=60)
        await adapter.remove(worker.url, seconds=60)


async def test_additions_at_the_same_time_all_end_well(adapter: RouterAdapter, router: Router, worker: Worker) -> None:
    other = make_router(router.kind, router.url)
    worker.delay = 0.3
    await asyncio.gather(*(a.add(worker.url, seconds=60) for a in (adapter, other, adapter)))
    assert (await listed(router)).count(worker.url) == 1
    await asyncio.gather(*(a.remove(worker.url, seconds=60) for a in (adapter, other, adapter)))
    assert worker.url not in await listed(router)
    await other.close()


async def test_every_spelling_is_found_and_removed(adapter: RouterAdapter, router: Router, worker: Worker) -> None:
    spellings = {worker.url, worker.url + "/"}
    for spelling in spellings:
        await asyncio.to_thread(router.add, spelling)

    async def both() -> bool:
        return spellings <= set(await listed(router))

    await seen("both spellings in the list", both)
    await adapter.remove(worker.url.upper().replace("HTTP", "http"), seconds=60)
    assert not spellings & set(await listed(router))


async def test_add_waits_for_the_routers_own_job(adapter: RouterAdapter, router: Router, worker: Worker) -> None:
    worker.delay = 1.0
    task = asyncio.create_task(adapter.add(worker.url, seconds=60))

    async def asked() -> bool:
        return worker.health_calls > 0

    await seen("the router's question", asked)
    assert not task.done()
    assert worker.url not in await listed(router)
    await task
    assert worker.url in await listed(router)


async def test_an_engine_that_does_not_answer_is_not_listed_and_its_failure_is_no_later_one_s(
    adapter: RouterAdapter, router: Router
) -> None:
    worker = Worker()
    with pytest.raises(Refused, match="job failed"):
        await adapter.add(worker.url, seconds=60)
    assert worker.url not in await listed(router)
    runner = await worker.start()
    try:
        await adapter.add(worker.url, seconds=60)
        assert worker.url in await listed(router)
    finally:
        await runner.cleanup()


async def test_another_workers_entry_is_left_alone(
    adapter: RouterAdapter, router: Router, make_worker: MakeWorker
) -> None:
    one, other = await make_worker(), await make_worker()
    await adapter.add(one.url, seconds=60)
    await adapter.add(other.url, seconds=60)
    await adapter.remove(one.url, seconds=60)
    assert await listed(router) == [other.url]
    await adapter.remove(other.url, seconds=60)
    # No worker is legal, and a client hears of it at once or after the retries that the manifest allows.
    answer = await ask(router)
    assert answer.status_code == {"SGLangRouter": 503, "SMG": 404, "VLLMRouter": 503}[router.kind], answer.text


async def test_requests_in_flight_end_well_and_new_ones_go_elsewhere(
    adapter: RouterAdapter, router: Router, make_worker: MakeWorker
) -> None:
    one, other = await make_worker(), await make_worker()
    await adapter.add(one.url, seconds=60)
    one.hold.clear()
    flying = [asyncio.create_task(ask(router)) for _ in range(3)]

    async def there() -> bool:
        return one.served == 3

    await seen("three requests at the engine", there)
    await adapter.add(other.url, seconds=60)
    await adapter.remove(one.url, seconds=60)
    for _ in range(6):
        assert (await ask(router)).json() == {"served": other.url}
    one.hold.set()
    assert [(r.status_code, r.json()) for r in await asyncio.gather(*flying)] == [(200, {"served": one.url})] * 3
    assert one.served == 3
    await adapter.remove(other.url, seconds=60)


async def test_no_router_raises_instead_of_looking_empty(router: Router) -> None:
    host = address()
    adapter = make_router(router.kind, f"http://{host}:{free_port(host)}")
    calls = (
        adapter.look("http://a:1", 2),
        adapter.add("http://a:1", seconds=2),
        adapter.remove("http://a:1", seconds=2),
    )
    for call in calls:
        with pytest.raises(NotSent):
            await call
    await adapter.close()


async def test_another_program_at_the_address_raises_too(router: Router, worker: Worker) -> None:
    adapter = make_router(router.kind, worker.url)
    calls = (
        adapter.look("http://a:1", 2),
        adapter.add("http://a:1", seconds=2),
        adapter.remove("http://a:1", seconds=2),
    )
    for call in calls:
        with pytest.raises(Refused):
            await call
    await adapter.close()


@pytest.mark.parametrize("kind", ROUTERS)
async def test_an_engine_that_the_router_holds_for_ill_is_listed_and_shunned(
    kind: str, tmp_path: Path, worker: Worker
) -> None:
    router = Router(tmp_path, kind, "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
                    "--health-success-threshold", "1")  # fmt: skip
    adapter = make_router(kind, router.url)

    async def health(word: str) -> bool:
        return word in (await adapter.look(worker.url, 5)).shunned

    try:
        await asyncio.to_thread(router.start)
        await adapter.add(worker.url, seconds=60)
        worker.healthy = False
        await seen("shunned", lambda: health("its health check says"))
        assert await adapter.lists(worker.url, 5), "it is listed all the same"
        worker.healthy = True

        async def well() -> bool:
            return await adapter.look(worker.url, 5) == Entry(listed=True)

        await seen("used again", well)
    finally:
        await adapter.close()
        router.close()


@pytest.mark.parametrize("kind", ROUTERS)
async def test_an_open_circuit_breaker_is_seen_where_the_metrics_are_known(
    kind: str, tmp_path: Path, worker: Worker
) -> None:
    router = Router(tmp_path, kind, "--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "600",
                    "--disable-retries")  # fmt: skip
    blind = make_router(kind, router.url)
    adapter = make_router(kind, router.url, router.metrics)
    try:
        await asyncio.to_thread(router.start)
        await adapter.add(worker.url, seconds=60)
        worker.status = 500
        while (await ask(router)).status_code == 500:
            pass
        assert await blind.look(worker.url, 5) == Entry(listed=True), "the list does not tell"

        async def broken() -> bool:
            return await adapter.look(worker.url, 5) == Entry(listed=True, shunned="its circuit breaker is open")

        await seen("the open breaker", broken)
    finally:
        await adapter.close()
        await blind.close()
        router.close()


KEYS = [
    ("SGLangRouter", ("--api-key", "right")),
    ("SGLangRouter", ("--control-plane-api-keys", "a:gates:admin:right", "b:users:user:wrong")),
    ("SMG", ("--api-key", "right")),
    ("SMG", ("--control-plane-api-keys", "a:gates:admin:right", "b:users:user:wrong")),
]


@pytest.mark.parametrize(("kind", "arguments"), KEYS)
async def test_a_router_that_demands_a_key_is_shown_it_and_says_what_to_do_without(
    kind: str, arguments: tuple[str, ...], tmp_path: Path, worker: Worker
) -> None:
    router = Router(tmp_path, kind, *arguments)
    key = ""
    adapter = make_router(kind, router.url, router.metrics, lambda: key)
    try:
        await asyncio.to_thread(router.start)
        for call in (
            partial(adapter.look, seconds=5),
            partial(adapter.add, seconds=20),
            partial(adapter.remove, seconds=5),
        ):
            with pytest.raises(Refused, match=r"shown none: name the Secret .*adminKeySecretRef"):
                await call(worker.url)
        key = "wrong"
        with pytest.raises(Refused, match=r"does not take the key .* role admin") as refused:
            await adapter.add(worker.url, seconds=20)
        assert "wrong" not in str(refused.value), "keys stand in no message"
        key = "right"  # the Secret was corrected: no new adapter is needed
        await adapter.add(worker.url, seconds=20)
        assert await adapter.look(worker.url, 5) == Entry(listed=True)
        await adapter.remove(worker.url, seconds=10)
        assert await adapter.look(worker.url, 5) == Entry(listed=False)
        metrics = await asyncio.to_thread(httpx.get, f"{router.metrics}/metrics")
        assert metrics.status_code == 200, "for whoever asks"
    finally:
        await adapter.close()
        router.close()


@pytest.mark.parametrize("raw", [b"", b" \n", b"two words", b"a\nb", "schl\u00fcssel".encode(), b"\xff"])
def test_a_key_that_can_stand_in_no_header_is_none(raw: bytes) -> None:
    assert usable_key(raw) == ""
    assert usable_key(b" good-key_1=\n") == "good-key_1="


RETRIES = ("--retry-max-retries", "300", "--retry-initial-backoff-ms", "100", "--retry-max-backoff-ms", "200")


@pytest.mark.parametrize("kind", ROUTERS)
async def test_a_request_that_comes_while_no_engine_is_listed(kind: str, tmp_path: Path, worker: Worker) -> None:
    """With retries it waits for the next engine, where the router knows such a thing: docs/guides/routers.md."""
    router = Router(tmp_path, kind, *RETRIES)
    adapter = make_router(kind, router.url)
    try:
        await asyncio.to_thread(router.start)
        waiting = asyncio.create_task(ask(router))
        if kind == "SMG":
            assert (await waiting).status_code == 404, "it knows no model without an engine, and does not wait for one"
            return
        # Time for it to come; where that was too short, this shows less, and nothing wrong.
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        await adapter.add(worker.url, seconds=60)
        assert (await waiting).json() == {"served": worker.url}
    finally:
        await adapter.close()
        router.close()


async def test_vllm_router_passes_unknown_paths_on_and_an_engine_with_a_key_refuses_them(tmp_path: Path) -> None:
    """Without a key anybody who may ask for tokens may pause the fleet."""
    router = Router(tmp_path, "VLLMRouter")
    engines = [Engine(tmp_path, "--admin-api-key=secret"), Engine(tmp_path)]
    adapter = make_router("VLLMRouter", router.url)

    async def pause() -> int:
        return (await asyncio.to_thread(router.http.post, "/pause_generation", json={"mode": "retract"})).status_code

    try:
        await asyncio.to_thread(router.start)
        closed, bare = [await asyncio.to_thread(engine.up) for engine in engines]
        await adapter.add(closed.url, seconds=60)
        assert await pause() == 401
        assert closed.ready() == 200
        await adapter.remove(closed.url, seconds=60)
        await adapter.add(bare.url, seconds=60)
        assert await pause() == 200
        assert bare.ready() == 503
    finally:
        await adapter.close()
        router.close()
        for engine in engines:
            engine.close()


async def test_vllm_router_passes_unknown_paths_on_and_our_middleware_in_vllm_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own key guards no control path: what closes them runs inside its server."""
    monkeypatch.setenv(control_key.KEY_ENV, "secret")
    reached: list[str] = []

    async def vllm(scope: Any, _: Any, send: Any) -> None:
        if scope["path"] != "/health":
            reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    host = address()
    config = uvicorn.Config(control_key.ControlKey(vllm), host=host, port=30000, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    router = Router(tmp_path, "VLLMRouter")
    adapter = make_router("VLLMRouter", router.url)
    try:
        await asyncio.to_thread(router.start)
        await adapter.add(f"http://{host}:30000", seconds=60)
        for path in ("/pause", "/resume", "/update_weights", "/collective_rpc", "/sleep?level=2"):
            answer = await asyncio.to_thread(router.http.post, path, json={})
            assert (answer.status_code, reached) == (401, []), path
        assert (await ask(router)).status_code == 401, "vLLM has no such path for users either"
        answer = await asyncio.to_thread(router.http.post, "/v1/completions", json={"model": "m", "prompt": "a"})
        assert (answer.status_code, reached) == (200, ["/v1/completions"])
    finally:
        await adapter.close()
        router.close()
        server.should_exit = True
        await serving


async def test_smg_an_entry_that_drains_is_waited_for_and_never_deleted_twice(tmp_path: Path, worker: Worker) -> None:
    """It unlists by URL when the drain is over: whatever was added meanwhile would go with it."""
    router = Router(tmp_path, "SMG")
    adapter = make_router("SMG", router.url)
    try:
        await asyncio.to_thread(router.start)
        # As somebody else adds it: unless an entry says otherwise it drains for 5 s.
        body = {"url": worker.url, "health": {"drain_settle_secs": 8}}
        (await asyncio.to_thread(router.http.post, "/workers", json=body)).raise_for_status()

        async def there() -> bool:
            return worker.url in await listed(router)

        await seen("the entry", there)
        workers = (await asyncio.to_thread(router.http.get, "/workers")).json()["workers"]
        (await asyncio.to_thread(router.http.delete, f"/workers/{workers[0]['id']}")).raise_for_status()
        assert (await adapter.look(worker.url, 5)).shunned == "its health check says draining"
        with pytest.raises(NoAnswer, match="still listed"):
            await adapter.remove(worker.url, seconds=0.2)
        await adapter.add(worker.url, seconds=60)
        assert await adapter.look(worker.url, 5) == Entry(listed=True)
        # Ours drains for no time at all, not for the usual 5 s: there is nothing that could take a later entry away.
        await adapter.remove(worker.url, seconds=4)
        await adapter.add(worker.url, seconds=60)
        assert (await listed(router)) == [worker.url]
    finally:
        await adapter.close()
        router.close()


@pytest.mark.parametrize("kind", ROUTERS)
async def test_what_somebody_else_has_listed_may_be_no_url(kind: str) -> None:
    """It is none of ours, and must not hide what is."""
    own = "http://10.0.0.1:30000"
    listed = [{"url": url, "is_healthy": True} for url in ("http://[x", "grpc://b:none", "http://c:99999", own + "/")]
    breakers = "".join(f'smg_worker_cb_state{{worker="{w["url"]}"}} 1\n' for w in listed)

    async def workers(_: web.Request) -> web.Response:
        return web.json_response({"workers": listed})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=breakers)

    app = web.Application()
    app.router.add_get("/workers", workers)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host = address()
    await web.TCPSite(runner, host, 30001).start()
    adapter = make_router(kind, f"http://{host}:30001", f"http://{host}:30001")
    try:
        assert await adapter.look(own, 30) == Entry(listed=True, shunned="its circuit breaker is open")
        assert await adapter.look("http://10.0.0.2:30000", 30) == Entry(listed=False)
    finally:
        await adapter.close()
        await runner.cleanup()


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="SGLangRouter, SMG, VLLMRouter"):
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
