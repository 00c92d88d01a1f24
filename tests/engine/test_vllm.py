"""The vLLM adapter against small servers that play other versions, set-ups and moods of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlfleet.api.wire import MemoryTag, PauseMode
from rlfleet.calls import NoAnswer, NotSent, Refused
from rlfleet.engine import Bucket, Capability, VLLMAdapter, make_adapter
from rlfleet.gate.links import EngineLink
from rlfleet.gate.store import Store
from tests.engine.test_sglang import Server, group, serving
from tests.gate.kit import address, free_port

PATHS = {
    path: {}
    for path in (
        *("/pause", "/is_paused", "/reset_prefix_cache", "/update_weight_version", "/weight_checker"),
        *("/collective_rpc", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    )
}
MODEL: dict[str, Any] = {"model": "/m", "served_model_name": ["name", "alias"], "dtype": "torch.bfloat16"}
PARALLEL: dict[str, Any] = {"tensor_parallel_size": 2}


def info(plugin: bool = True, model: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    told = {
        "model_config": MODEL | (model or {}),
        "parallel_config": PARALLEL,
        "weight_transfer_config": {"backend": "rlfleet"} if plugin else None,
    }
    return {"vllm_config": told | config}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Server()) as made:
        made.answer("GET", "/version", (200, {"version": "0.32.0"}))
        made.answer("GET", "/openapi.json", (200, {"paths": PATHS}))
        made.answer("GET", "/server_info", (200, info()))
        made.answer("GET", "/get_world_size", (200, {"world_size": 2}))
        made.answer("GET", "/is_paused", (200, {"is_paused": True}))
        made.answer("GET", "/rlfleet/setup", (404, {"detail": "Not Found"}))
        yield made


@pytest.fixture
async def adapter(server: Server) -> AsyncIterator[VLLMAdapter]:
    made = VLLMAdapter(server.url, api_key="user", admin_key="admin")
    yield made
    await made.close()


async def test_each_path_gets_its_own_key(server: Server, adapter: VLLMAdapter) -> None:
    await adapter.facts(2)
    await adapter.view(2)
    server.answer("POST", "/v1/completions", (200, {"choices": [{"token_ids": [3], "finish_reason": "length"}]}))
    await adapter.probe(2)
    await adapter.leave_group("g", 2)
    keys = {path: key for _, path, _, key in server.calls}
    users = {path for path, key in keys.items() if key == "Bearer user"}
    assert users == {"/v1/models", "/v1/completions"}
    assert {key for path, key in keys.items() if path not in users} == {"Bearer admin"}


async def test_facts(server: Server, adapter: VLLMAdapter) -> None:
    facts = await adapter.facts(2)
    assert (facts.version, facts.world_size, facts.model, facts.memory_tags) == ("0.32.0", 2, "name", ())
    assert {Capability.SERIALIZED, Capability.PARTS, Capability.BROADCAST} <= facts.capabilities
    assert {Capability.of_pause(mode) for mode in PauseMode} <= facts.capabilities
    server.answer("GET", "/server_info", (200, info(plugin=False, model={"dtype": "torch.float16"})))
    bare = await adapter.facts(2)
    assert not {Capability.PARTS, Capability.BROADCAST, Capability.OFFLOAD} & bare.capabilities
    assert Capability.SERIALIZED in bare.capabilities
    assert bare.layout != facts.layout
    server.answer("GET", "/server_info", (200, info()))
    server.answer("GET", "/get_world_size", (200, {}))
    sizeless = await adapter.facts(2)
    assert facts.capabilities - sizeless.capabilities == {Capability.BROADCAST}, "its ranks would be a guess"
    server.answer("GET", "/openapi.json", (200, {"paths": {"/collective_rpc": {}}}))
    server.answer("GET", "/server_info", (200, info(model={"enable_sleep_mode": True})))
    unlabelled = await adapter.facts(2)
    assert unlabelled.capabilities == {Capability.OFFLOAD}
    assert set(unlabelled.memory_tags) == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (info(lora_config={"max_lora_rank": 8}), "LoRA adapters (--enable-lora)"),
        (info(speculative_config={"method": "eagle"}), "a draft model (--speculative-config)"),
        (info(model={"quantization": "fp8"}), "quantised weights (--quantization fp8)"),
        (info(parallel_config=PARALLEL | {"enable_expert_parallel": True}), "experts spread over ranks"),
        (info(parallel_config=PARALLEL | {"data_parallel_size": 2}), "data-parallel replicas (--data-parallel-size 2)"),
    ],
)
async def test_what_can_not_follow_the_trainer_is_named(
    server: Server, adapter: VLLMAdapter, config: dict[str, Any], named: str
) -> None:
    server.answer("GET", "/server_info", (200, config))
    refused = (await adapter.facts(2)).refused
    assert refused is not None
    assert named in refused


async def test_an_engine_without_development_paths_names_the_remedy(server: Server, adapter: VLLMAdapter) -> None:
    server.missing = {"/server_info"}
    with pytest.raises(Refused, match="VLLM_SERVER_DEV_MODE=1"):
        await adapter.facts(2)


async def test_an_engine_that_hides_its_paths_names_the_remedy(server: Server, adapter: VLLMAdapter) -> None:
    server.missing = {"/openapi.json"}
    with pytest.raises(Refused, match="leave --disable-fastapi-docs out"):
        await adapter.facts(2)


async def test_an_image_without_pip_can_not_tell_its_setup_but_our_middleware_can(
    server: Server, adapter: VLLMAdapter
) -> None:
    failed = {"error": {"message": "'NoneType' object has no attribute 'splitlines'"}}
    server.answer("GET", "/server_info", (500, failed))
    with pytest.raises(Refused, match="--middleware rlfleet_vllm"):
        await adapter.facts(2)
    server.answer("GET", "/rlfleet/setup", (200, info()))
    assert Capability.BROADCAST in (await adapter.facts(2)).capabilities


async def test_requests_are_counted_over_all_engine_cores_and_held_ones_wait(server: Server) -> None:
    async def metrics(_: web.Request) -> web.Response:
        lines = [
            'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 1.0',
            'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0',
        ]
        return web.Response(text="\n".join(lines))

    async def paused(_: web.Request) -> web.Response:
        return web.json_response({"is_paused": held[0]})

    held = [False]
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/is_paused", paused)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host = address()
    await web.TCPSite(runner, host, 30000).start()
    adapter = make_adapter("VLLM", f"http://{host}:30000", api_key=None, admin_key=None)
    try:
        view = await adapter.view(2)
        assert (view.admitting, view.running, view.waiting, view.label) == (True, 3, 4, None)
        held[0] = True
        view = await adapter.view(2)
        assert (view.admitting, view.running, view.waiting) == (False, 0, 7)
    finally:
        await adapter.close()
        await runner.cleanup()


async def test_a_pause_that_answers_and_does_not_hold_is_found(server: Server, adapter: VLLMAdapter) -> None:
    server.answer("GET", "/is_paused", (200, {"is_paused": False}))
    with pytest.raises(Refused, match="still not paused"):
        await adapter.pause(PauseMode.KEEP, drain_seconds=0, seconds=0.3)


async def test_a_flush_is_believed_by_its_body(server: Server, adapter: VLLMAdapter) -> None:
    server.answer("POST", "/reset_prefix_cache", (200, {"success": False}), (200, {"success": True}))
    await adapter.flush(5)
    assert len(server.sent("/reset_prefix_cache")) == 2
    server.answer("POST", "/reset_prefix_cache", (200, {"success": False}))
    with pytest.raises(Refused, match="reset_prefix_cache"):
        await adapter.flush(0.2)


async def test_checksums(server: Server, adapter: VLLMAdapter) -> None:
    async def digest(status: int, body: Any) -> Any:
        server.answer("POST", "/weight_checker", (status, body))
        return await adapter.checksum(2)

    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    one = await digest(200, {"checksums": {"a": "1", "b": "2"}})
    assert one.meaningful
    assert (await digest(200, {"checksums": {"b": "2", "a": "1"}})) == one
    assert (await digest(200, {"checksums": {"a": "1", "b": "3"}})).digest != one.digest
    assert (await digest(200, {"checksums": {"a": "1", "b": empty}})).meaningful is False
    assert await digest(404, {}) is None
    with pytest.raises(Refused, match="no data"):
        await digest(500, {"error": {"message": "Cannot copy out of meta tensor; no data!"}})
    with pytest.raises(Refused):
        await digest(200, {"checksums": {}})


async def test_bodies_of_a_session(server: Server, adapter: VLLMAdapter) -> None:
    await adapter.join_group(group(world_size=5), rank=3, seconds=10)
    await adapter.receive(Bucket(["a"], ["bfloat16"], [(2, 3)]), group="g", seconds=5)
    assert server.sent("/init_weight_transfer_engine") == [
        {
            "init_info": {
                "master_address": "h",
                "master_port": 1,
                "rank_offset": 3,
                "world_size": 5,
                "group_name": "g",
                "backend": "gloo",
                "timeout_s": 9.0,
            }
        }
    ]
    assert server.sent("/update_weights") == [
        {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "timeout_s": 4.0}}
    ]


async def test_a_session_that_was_left_open_is_dropped_before_the_next(server: Server, adapter: VLLMAdapter) -> None:
    already = (500, {"error": {"message": "start_weight_update called while a weight update is already active."}})
    fine = (200, {"message": ""})
    server.answer("POST", "/start_weight_update", already, fine)
    server.answer("POST", "/update_weights", (500, {"error": {"message": "update_info needs names or directory"}}))
    await adapter.begin_update(2)
    assert server.sent("/update_weights") == [{"update_info": {}}]
    assert len(server.sent("/start_weight_update")) == 2
    server.answer("POST", "/start_weight_update", (500, {"error": {"message": "Weight transfer not configured."}}))
    with pytest.raises(Refused, match="not configured"):
        await adapter.begin_update(2)


async def test_recovery_leaves_no_session_open(server: Server, adapter: VLLMAdapter) -> None:
    server.answer("POST", "/update_weights", (500, {"error": {"message": "update_info needs names or directory"}}))
    await adapter.recover(2)
    assert server.sent("/update_weights") == [{"update_info": {}}]
    assert server.sent("/start_weight_update") == []
    # Without the plug-in what was loaded in part must be put back, and that is seen by a checksum.
    server.answer("GET", "/server_info", (200, info(plugin=False)))
    bare = VLLMAdapter(server.url)
    server.answer("POST", "/weight_checker", (200, {"checksums": {"a": "1"}}))
    await bare.recover(2)
    assert len(server.sent("/start_weight_update")) == len(server.sent("/finish_weight_update")) == 1
    server.answer("POST", "/weight_checker", (500, {"error": {"message": "no data!"}}))
    with pytest.raises(Refused, match="no data"):
        await bare.recover(2)
    await bare.close()


async def test_directories_travel_by_the_plug_in_where_there_is_one(server: Server, adapter: VLLMAdapter) -> None:
    await adapter.load_directory("/staging/current", seconds=2)
    assert server.sent("/update_weights") == [{"update_info": {"directory": "/staging/current"}}]
    assert server.sent("/collective_rpc") == []
    server.answer("GET", "/server_info", (200, info(plugin=False)))
    bare = VLLMAdapter(server.url)
    await bare.load_directory("/staging/current", seconds=2)
    assert server.sent("/collective_rpc") == [
        {"method": "reload_weights", "kwargs": {"weights_path": "/staging/current"}}
    ]
    with pytest.raises(Refused, match="backend rlfleet"):
        await bare.begin_parts(2)
    await bare.close()


async def test_memory_is_asked_of_the_workers(server: Server, adapter: VLLMAdapter) -> None:
    for tag in (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS):
        await adapter.release_memory(tag, seconds=2)
    for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE):
        await adapter.resume_memory(tag, seconds=2)
    assert server.sent("/collective_rpc") == [
        {"method": "discard", "kwargs": {"tags": ["kv_cache"]}},
        {"method": "sleep", "kwargs": {"level": 2}},
        {"method": "wake_up", "kwargs": {"tags": ["weights"]}},
        {"method": "wake_up", "kwargs": {"tags": ["kv_cache"]}},
    ]
    assert server.sent("/wake_up") == server.sent("/sleep") == []


@pytest.mark.parametrize(
    ("paused", "checksum", "idle"),
    [
        (200, (200, {"checksums": {"a": "1"}}), True),
        (200, (500, {"error": {"message": "no data"}}), True),  # load state: nobody works on the parameters
        (200, (404, {"detail": "Not Found"}), True),  # no checksums: its pause state is all that can be asked
        (500, (500, {"error": {"message": "EngineCore encountered an issue"}}), False),
        (404, (404, {"detail": "Not Found"}), None),  # it answers; nothing says that it hangs, or that it does not
    ],
)
async def test_what_proves_an_engine_idle(
    server: Server, adapter: VLLMAdapter, paused: int, checksum: tuple[int, Any], idle: bool | None
) -> None:
    server.answer("GET", "/is_paused", (paused, {"is_paused": True}))
    server.answer("POST", "/weight_checker", checksum)
    assert await adapter.idle(2, memory_here=True) is idle
    assert await adapter.idle(2, memory_here=False) is {200: True, 500: False, 404: None}[paused]


async def test_an_engine_without_development_paths_does_not_hang(server: Server, tmp_path: Path) -> None:
    link = EngineLink(VLLMAdapter(server.url), Store(tmp_path))
    for status, answers in ((404, True), (500, False)):
        server.answer("GET", "/is_paused", (status, {"detail": "Not Found"}))
        assert await link.loop_answers() is answers
    await link.close()


async def test_silence_and_absence_are_different() -> None:
    host = address()
    nobody = VLLMAdapter(f"http://{host}:{free_port(host)}")
    with pytest.raises(NotSent):
        await nobody.write_label("1", 1)
    assert (await nobody.view(1)).reachable is False
    assert await nobody.idle(1, memory_here=True) is False
    await nobody.close()

    async with raw(b"") as (url, _):
        mute = VLLMAdapter(url)
        with pytest.raises(NoAnswer):
            await mute.write_label("1", 0.2)
        view = await mute.view(0.2)
        assert (view.reachable, view.admitting) == (False, None)
        await mute.close()


async def test_no_connection_is_used_twice() -> None:
    """After an error 500 vLLM closes it without a word, and what met it closed might have been carried out or not."""
    async with raw(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\n{}") as (url, connections):
        adapter = VLLMAdapter(url)
        for _ in range(3):
            with pytest.raises(Refused):
                await adapter.end_update(2)
        assert len(connections) == 3
        await adapter.close()


@contextlib.asynccontextmanager
async def raw(answer: bytes) -> AsyncIterator[tuple[str, list[asyncio.Task[Any]]]]:
    """A server that answers one request per connection with these bytes, and never closes by itself."""
    connections: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    host = address()
    server = await asyncio.start_server(serve, host, 0)
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()
        await asyncio.gather(*connections)
