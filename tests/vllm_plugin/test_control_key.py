"""The middleware that closes an engine's control paths: plain ASGI, no vLLM needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rlfleet_vllm import ControlKey
from rlfleet_vllm.control_key import KEY_ENV

KEY = "key-of-this-pod"
#: As vLLM 0.32 with VLLM_SERVER_DEV_MODE=1 has them, and some that no version has.
CONTROL = [
    *("/pause", "/resume", "/is_paused", "/abort_requests", "/sleep", "/wake_up", "/release_kv_cache_memory"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/update_weight_version", "/weight_info", "/weight_checker", "/collective_rpc", "/reset_prefix_cache"),
    *("/server_info", "/scale_elastic_ep", "/start_profile", "/fault_tolerance/apply", "/openapi.json", "/docs"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pause", "/v1/models/pause", "/brand/new", "/", ""),
    *("//pause", "/pause/", "/Pause", "/metrics/../pause", "/v1/completions/../../pause", "/healthy", "/metrics2"),
]


class Application:
    """What lies behind the middleware."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 200."""
        self.seen.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


async def call(middleware: ControlKey, path: str, *authorization: str, **scope: Any) -> list[dict[str, Any]]:
    """What is sent in answer to one request."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"authorization", text.encode("latin-1")) for text in authorization]
    await middleware({"type": "http", "method": "POST", "path": path, "headers": headers} | scope, receive, send)
    return sent


def status(sent: list[dict[str, Any]]) -> int:
    return int(sent[0]["status"])


@pytest.fixture
def behind() -> Application:
    return Application()


@pytest.fixture
def closed(behind: Application, monkeypatch: pytest.MonkeyPatch) -> ControlKey:
    monkeypatch.setenv(KEY_ENV, KEY)
    return ControlKey(behind)


@pytest.mark.parametrize("path", CONTROL)
async def test_whatever_is_no_path_of_users_needs_the_key(path: str, closed: ControlKey, behind: Application) -> None:
    refused = await call(closed, path)
    assert status(refused) == 401
    assert (b"www-authenticate", b"Bearer") in refused[0]["headers"]
    assert json.loads(refused[1]["body"])["error"]["code"] == 401
    assert KEY not in str(refused)
    assert not behind.seen
    assert status(await call(closed, path, f"Bearer {KEY}")) == 200
    assert len(behind.seen) == 1


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/v1/responses/r1/cancel"]
)
async def test_users_routers_and_probes_need_no_key_of_ours(path: str, closed: ControlKey, behind: Application) -> None:
    assert status(await call(closed, path)) == 200
    # Their own key is the application's business, and reaches it.
    assert status(await call(closed, path, "Bearer users-key")) == 200
    assert len(behind.seen) == 2


@pytest.mark.parametrize(
    "given",
    [
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY[:-1]}"],
        ["Bearer "],
        ["Bearer"],
        [KEY],
        [f"Basic {KEY}"],
        [f"Bearer {KEY}", "Bearer other"],
        ["Bearer other", f"Bearer {KEY}"],
        ["Bearer \xff\xfe"],
    ],
)
async def test_only_the_one_key_opens(given: list[str], closed: ControlKey, behind: Application) -> None:
    assert status(await call(closed, "/pause", *given)) == 401
    assert not behind.seen


async def test_the_scheme_may_be_written_in_any_case(closed: ControlKey) -> None:
    assert status(await call(closed, "/pause", f"bearer {KEY}")) == 200


@pytest.mark.parametrize("key", [None, ""])
async def test_an_engine_without_a_key_lets_nobody_control_it(
    key: str | None, behind: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_ENV, key)
    keyless = ControlKey(behind)
    for given in ([], ["Bearer "], ["Bearer"], ["Bearer x"]):
        refused = await call(keyless, "/pause", *given)
        assert status(refused) == 403
        assert KEY_ENV in json.loads(refused[1]["body"])["error"]["message"]
    assert not behind.seen
    assert status(await call(keyless, "/v1/completions")) == 200


async def test_a_prefix_that_a_proxy_adds_is_not_judged(closed: ControlKey) -> None:
    assert status(await call(closed, "/v1/pause", root_path="/v1")) == 401, "the application serves /pause here"
    assert status(await call(closed, "/x/v1/completions", root_path="/x")) == 200
    assert status(await call(closed, "/v1/completions", root_path="/x")) == 200
    assert status(await call(closed, "/xx/v1/completions", root_path="/x")) == 401


async def test_websockets_are_judged_alike_and_start_up_passes(closed: ControlKey, behind: Application) -> None:
    refused = await call(closed, "/pause", type="websocket")
    assert [m["type"] for m in refused] == ["websocket.close"]
    await call(closed, "/v1/realtime", type="websocket")
    await call(closed, "", type="lifespan")
    assert [s["type"] for s in behind.seen] == ["websocket", "lifespan"]


async def test_the_gate_is_told_what_the_engine_was_started_with(closed: ControlKey, behind: Application) -> None:
    """Without pip in the image vLLM's own /server_info answers 500."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="/m", served_model_name="m", dtype="torch.bfloat16", quantization=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, enable_expert_parallel=False),
        weight_transfer_config=SimpleNamespace(backend="rlfleet"),
        lora_config=object(),
    )
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    sent = await call(closed, "/rlfleet/setup", f"Bearer {KEY}", method="GET", app=app)
    assert status(sent) == 200
    assert behind.seen == []
    told = json.loads(sent[1]["body"])["vllm_config"]
    assert told["model_config"]["dtype"] == "torch.bfloat16"
    assert told["model_config"]["enable_sleep_mode"] is None
    assert told["parallel_config"]["tensor_parallel_size"] == 2
    assert told["weight_transfer_config"] == {"backend": "rlfleet"}
    assert (told["lora_config"], told["speculative_config"]) == ({}, None)
    assert status(await call(closed, "/rlfleet/setup", method="GET", app=app)) == 401
