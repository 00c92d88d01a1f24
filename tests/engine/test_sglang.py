"""The SGLang adapter against real HTTP servers: the reference engine, and small servers that play other versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlfleet.api.wire import BroadcastGroup, MemoryTag, PauseMode
from rlfleet.calls import NoAnswer, NotSent, Refused
from rlfleet.engine import Bucket, Capability, SGLangAdapter, make_adapter
from tests.gate.kit import Engine, address, free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
INFO = {"version": "0.5.23", "tp_size": 2, "pp_size": 1, "dp_size": 1, "model_path": "/m", "served_model_name": "m"}


def group(world_size: int) -> BroadcastGroup:
    return BroadcastGroup(master_address="h", master_port=1, group_name="g", world_size=world_size, backend="gloo")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, "--step-ms", "10")  # slow enough to be met in the middle of a request
    try:
        yield made.up()
    finally:
        made.close()


class Server:
    """A server that answers from a table of (method, path) -> (status, body), and records bodies and headers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.calls: list[tuple[str, str, Any, str | None]] = []
        self.missing: set[str] = set()
        self.host = address()
        self.url = f"http://{self.host}:30000"

    def answer(self, method: str, path: str, *answers: tuple[int, Any]) -> None:
        self.answers[method, path] = list(answers)

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.calls.append((request.method, request.path, body, request.headers.get("Authorization")))
        if request.path in self.missing:
            return web.Response(status=404)
        if request.method == "OPTIONS":
            return web.Response(status=405)
        answers = self.answers.get((request.method, request.path), [(200, {"success": True, "message": ""})])
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.json_response(answer, status=status)

    def sent(self, path: str) -> list[Any]:
        return [body for method, p, body, _ in self.calls if p == path and method == "POST"]


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, server.host, 30000).start()
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Server()) as made:
        made.answer("GET", "/server_info", (200, INFO))
        yield made


@pytest.fixture
async def adapter(server: Server) -> AsyncIterator[SGLangAdapter]:
    made = SGLangAdapter(server.url, api_key="user", admin_key="admin")
    yield made
    await made.close()


async def test_against_the_reference_engine(engine: Engine) -> None:
    adapter = make_adapter("SGLang", engine.url, api_key=None, admin_key=None)
    facts = await adapter.facts(5)
    assert {Capability.SERIALIZED, Capability.BROADCAST, Capability.CHECKSUM, Capability.LABEL} <= facts.capabilities
    assert (facts.world_size, bool(facts.version), bool(facts.layout)) == (1, True, True)
    view = await adapter.view(5)
    assert (view.reachable, view.admitting, view.label, view.running) == (True, True, "default", 0)
    checksum = await adapter.checksum(5)
    assert checksum is not None
    assert checksum.meaningful
    assert checksum.digest == await asyncio.to_thread(engine.checksum)
    await adapter.pause(PauseMode.RETRACT, drain_seconds=0)
    assert (await adapter.view(5)).admitting is False
    await adapter.flush(5)
    assert await adapter.write_label("3", 5) == "3"
    assert await adapter.idle(5, memory_here=True) is True
    await adapter.resume()
    assert (await adapter.view(5)).admitting is True
    await adapter.leave_group("never-made", 5)
    await adapter.close()


async def test_a_pause_in_the_middle_of_requests_retracts_them_and_none_fails(engine: Engine) -> None:
    adapter = make_adapter("SGLang", engine.url, api_key=None, admin_key=None)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}}
    request = asyncio.create_task(asyncio.to_thread(engine.http.post, "/generate", json=body))
    while (await adapter.view(5)).running != 1:
        assert not request.done(), request.result().text
        await asyncio.sleep(0.005)
    await adapter.pause(PauseMode.RETRACT, drain_seconds=0)
    assert (await adapter.view(5)).running == 0
    assert not request.done()
    await adapter.resume()
    answer = (await request).json()
    assert len(answer["output_ids"]) == 100
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    await adapter.close()


async def test_each_path_gets_its_own_key(server: Server, adapter: SGLangAdapter) -> None:
    await adapter.facts(2)
    await adapter.view(2)
    await adapter.flush(2)
    keys = {(path, key) for method, path, _, key in server.calls if method != "OPTIONS"}
    assert keys == {
        ("/server_info", "Bearer user"),
        ("/model_info", "Bearer user"),
        ("/ready", "Bearer user"),
        ("/v1/loads", "Bearer user"),
        ("/flush_cache", "Bearer admin"),
    }


async def test_facts_of_other_versions(server: Server, adapter: SGLangAdapter) -> None:
    new = await adapter.facts(2)
    assert new.world_size == 2
    server.answer("GET", "/server_info", (404, {}))
    server.answer("GET", "/get_server_info", (200, INFO | {"dp_size": 2, "version": "0.4.0"}))
    server.missing = {"/weights_checker"}
    old = await adapter.facts(2)
    assert old.layout != new.layout
    assert Capability.CHECKSUM not in old.capabilities
    server.missing = {"/update_weight_version"}
    unlabelled = await adapter.facts(2)
    assert not {Capability.LABEL, Capability.SERIALIZED, Capability.BROADCAST} & unlabelled.capabilities


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("enable_lora", True, "LoRA"),
        ("lora_paths", ["a=/adapters/a"], "LoRA"),
        ("quantization", "fp8", "--quantization fp8"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE"),
        ("ep_size", 2, "--ep-size 2"),
        ("dp_size", 2, "--dp-size 2"),
    ],
)
async def test_what_a_round_would_leave_as_it_was_is_refused_by_name(
    server: Server, adapter: SGLangAdapter, field: str, value: object, words: str
) -> None:
    absent = {"enable_lora": None, "lora_paths": None, "quantization": None, "speculative_algorithm": None}
    server.answer("GET", "/server_info", (200, INFO | absent | {"ep_size": 1}))
    assert (await adapter.facts(2)).refused is None
    server.answer("GET", "/server_info", (200, INFO | absent | {field: value}))
    assert words in str((await adapter.facts(2)).refused)


async def test_without_a_path_that_proves_a_pause_the_engine_is_refused(server: Server, adapter: SGLangAdapter) -> None:
    server.missing = {"/ready"}
    assert "0.5.20" in str((await adapter.facts(2)).refused)


async def test_sessions_only_where_the_version_has_them(server: Server, adapter: SGLangAdapter) -> None:
    bucket = Bucket(["a"], ["float32"], [(2, 3)])
    server.missing = {"/begin_weight_update", "/end_weight_update"}
    await adapter.begin_update(2)
    await adapter.receive(bucket, group="g", seconds=2)
    await adapter.end_update(2)
    assert server.sent("/begin_weight_update") == server.sent("/end_weight_update") == []
    server.missing = set()
    await adapter.facts(2)
    await adapter.begin_update(2)
    await adapter.end_update(2)
    assert server.sent("/begin_weight_update") == server.sent("/end_weight_update") == [{}]


async def test_what_a_broken_transfer_left_behind_is_cleared(server: Server, adapter: SGLangAdapter) -> None:
    refused = (400, {"success": False, "message": "a session is open"})
    fine = (200, {"success": True, "message": ""})
    server.answer("POST", "/begin_weight_update", refused, fine)
    await adapter.begin_update(2)
    assert server.sent("/end_weight_update") == [{}]
    exists = (400, {"success": False, "message": "The group name has already been created"})
    server.answer("POST", "/init_weights_update_group", exists, fine)
    await adapter.join_group(group(world_size=2), rank=1, seconds=2)
    assert server.sent("/destroy_weights_update_group") == [{"group_name": "g"}]


async def test_bodies_never_rely_on_the_engines_defaults(server: Server, adapter: SGLangAdapter) -> None:
    await adapter.load_directory("/staging/current", seconds=2)
    await adapter.receive(Bucket(["a", "b"], ["float32", "bfloat16"], [(2,), ()]), group="g", seconds=2)
    server.answer("GET", "/model_info", (200, {"weight_version": "5"}))
    assert await adapter.write_label("5", 2) == "5"
    assert server.sent("/update_weights_from_disk") == [
        {"model_path": "/staging/current", "flush_cache": False, "abort_all_requests": False}
    ]
    assert server.sent("/update_weights_from_distributed") == [
        {
            "names": ["a", "b"],
            "dtypes": ["float32", "bfloat16"],
            "shapes": [[2], []],
            "group_name": "g",
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
    ]
    assert server.sent("/update_weight_version") == [{"new_version": "5", "abort_all_requests": False}]


async def test_a_200_that_says_no_is_a_no(server: Server, adapter: SGLangAdapter) -> None:
    server.answer("POST", "/update_weights_from_disk", (200, {"success": False, "message": "partially updated"}))
    with pytest.raises(Refused, match="partially updated"):
        await adapter.load_directory("/d", seconds=2)


async def test_a_pause_that_changed_nothing_is_found(
    server: Server, adapter: SGLangAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlfleet.engine.sglang.PAUSE_SECONDS", 0.5)
    server.answer("GET", "/v1/loads", (200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}))
    with pytest.raises(Refused, match="still not paused"):
        await adapter.pause(PauseMode.RETRACT, drain_seconds=0)
    server.answer("GET", "/ready", (503, None))
    server.answer("GET", "/v1/loads", (200, {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]}))
    server.answer("POST", "/flush_cache", (400, "Flush cache failed."))
    with pytest.raises(Refused, match="still not paused"):
        await adapter.pause(PauseMode.ABORT, drain_seconds=0)
    server.answer("GET", "/v1/loads", (200, {"no": "counts"}))
    with pytest.raises(Refused, match="still not paused"):
        await adapter.pause(PauseMode.ABORT, drain_seconds=0)
    assert server.sent("/pause_generation") == [{"mode": "retract"}, {"mode": "abort"}, {"mode": "abort"}]


async def test_counts_of_before_the_pause_are_read_as_what_became_of_them(
    server: Server, adapter: SGLangAdapter
) -> None:
    """A scheduler that is paused counts no more, and says for ever what ran when the pause came."""
    server.answer("GET", "/v1/loads", (200, {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}))
    server.answer("GET", "/ready", (503, None))
    view = await adapter.view(2)
    assert (view.running, view.waiting) == (2, 1)  # not known to be paused: taken at its word
    await adapter.pause(PauseMode.RETRACT, drain_seconds=0)
    view = await adapter.view(2)
    assert (view.running, view.waiting) == (0, 3)
    # The next pause aborts what waits. Only a flush can tell, for the counts do not.
    server.answer("POST", "/flush_cache", (400, "Flush cache failed."), (200, "ok"))
    await adapter.pause(PauseMode.ABORT, drain_seconds=0)
    assert len(server.sent("/flush_cache")) == 2
    view = await adapter.view(2)
    assert (view.running, view.waiting) == (0, 0)


async def test_a_retraction_is_proven_by_the_scheduler_and_not_by_the_front_end(
    server: Server, adapter: SGLangAdapter
) -> None:
    server.answer("GET", "/ready", (503, None))
    server.answer("GET", "/server_info", (500, {"message": "scheduler is stuck"}))
    with pytest.raises(Refused, match="still not paused"):
        await adapter.pause(PauseMode.RETRACT, drain_seconds=0, seconds=0.5)
    server.answer("GET", "/server_info", (200, INFO))
    await adapter.pause(PauseMode.RETRACT, drain_seconds=0)


async def test_a_stale_not_ready_is_healed_by_the_engines_own_health_check(
    server: Server, adapter: SGLangAdapter
) -> None:
    server.answer("GET", "/ready", (503, None), (200, None))
    await adapter.resume()
    assert ("GET", "/health") in [(m, p) for m, p, _, _ in server.calls]


async def test_wait_mode_drains_until_idle(server: Server, adapter: SGLangAdapter) -> None:
    busy = (200, {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}]})
    idle = (200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
    server.answer("GET", "/v1/loads", busy, busy, idle)
    server.answer("GET", "/ready", (503, None))
    await adapter.pause(PauseMode.WAIT, drain_seconds=30)
    first = next(i for i, call in enumerate(server.calls) if call[1] == "/pause_generation")
    assert sum(1 for call in server.calls[:first] if call[1] == "/v1/loads") >= 3


async def test_flush_backs_off_on_400_and_gives_up_with_the_engines_words(
    server: Server, adapter: SGLangAdapter
) -> None:
    no = (400, {"message": "Flush cache failed."})
    server.answer("POST", "/flush_cache", no, no, (200, "ok"))
    await adapter.flush(10)
    assert len(server.sent("/flush_cache")) == 3
    server.answer("POST", "/flush_cache", no)
    with pytest.raises(Refused, match="Flush cache failed"):
        await adapter.flush(0.3)


async def test_checksum_shapes(server: Server, adapter: SGLangAdapter) -> None:
    ranks = [{"checksums": {"a": "1", "b": "2"}}]

    async def digest(status: int, body: Any) -> Any:
        server.answer("POST", "/weights_checker", (status, body))
        return await adapter.checksum(2)

    one = await digest(200, {"success": True, "ranks": ranks, "per_engine_checksum": "abc"})
    assert (one.digest, one.meaningful) == ("abc", True)
    older = await digest(200, {"success": True, "ranks": ranks, "per_engine_checksum": ["x", "y"]})
    assert len(older.digest) == 64
    bare = await digest(200, {"success": True, "ranks": ranks})
    moved = await digest(200, {"success": True, "ranks": [{"checksums": {"a": "1", "b": "3"}}]})
    assert bare.digest != moved.digest
    empty = await digest(200, {"success": True, "ranks": [{"checksums": {"a": "e3", "b": "e3"}}]})
    assert empty.meaningful is False
    assert await digest(200, {"success": True}) is None
    assert await digest(200, {"success": False}) is None
    assert await digest(404, {}) is None
    assert await digest(400, {}) is None
    with pytest.raises(Refused):
        await digest(500, {})


async def test_silence_and_absence_are_different(server: Server, adapter: SGLangAdapter) -> None:
    host = address()
    nobody = SGLangAdapter(f"http://{host}:{free_port(host)}")
    with pytest.raises(NotSent):
        await nobody.load_directory("/d", seconds=1)
    assert (await nobody.view(1)).reachable is False
    assert await nobody.idle(1, memory_here=True) is False
    await nobody.close()

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    silent_host = address()
    await web.TCPSite(runner, silent_host, 30000).start()
    silent = SGLangAdapter(f"http://{silent_host}:30000")
    with pytest.raises(NoAnswer):
        await silent.load_directory("/d", seconds=0.3)
    view = await silent.view(0.2)
    assert (view.reachable, view.admitting) == (False, None)
    await silent.close()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("saver", "missing", "offers"),
    [
        ({"enable_memory_saver": True}, set(), True),
        ({"enable_memory_saver": False}, set(), False),  # its release would say 200 and free nothing
        ({}, set(), False),
        ({"enable_memory_saver": True}, {"/release_memory_occupation"}, False),
    ],
)
async def test_offload_needs_the_memory_saver(
    server: Server, adapter: SGLangAdapter, saver: dict[str, bool], missing: set[str], offers: bool
) -> None:
    server.answer("GET", "/server_info", (200, INFO | saver))
    server.missing = missing
    facts = await adapter.facts(5)
    assert (Capability.OFFLOAD in facts.capabilities, bool(facts.memory_tags)) == (offers, offers)


async def test_memory_moves_one_tag_at_a_time_and_is_asked_once(server: Server, adapter: SGLangAdapter) -> None:
    for tag in MemoryTag:
        await adapter.release_memory(tag, seconds=5)
        await adapter.resume_memory(tag, seconds=5)
    wanted = [{"tags": ["weights"]}, {"tags": ["kv_cache"]}, {"tags": ["cuda_graph"]}]
    assert server.sent("/release_memory_occupation") == server.sent("/resume_memory_occupation") == wanted
    server.answer("POST", "/resume_memory_occupation", (400, {"message": "no"}))
    with pytest.raises(Refused):
        await adapter.resume_memory(MemoryTag.WEIGHTS, seconds=5)
    assert len(server.sent("/resume_memory_occupation")) == 4


async def test_an_engine_without_its_memory_is_proven_idle_without_a_checksum(
    server: Server, adapter: SGLangAdapter
) -> None:
    assert await adapter.idle(5, memory_here=False) is True
    assert server.sent("/weights_checker") == []
    server.answer("GET", "/server_info", (500, {}))
    assert await adapter.idle(5, memory_here=False) is False


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="SGLang"):
        make_adapter("Ollama", "http://a:1", api_key=None, admin_key=None)
