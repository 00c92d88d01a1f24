"""A real middleware of vLLM in front of the reference engine: what it refuses reaches no handler."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from e2e.sim.engine.faults import Faults
from e2e.sim.engine.middleware import named

CONFIG = {"model_config": {"model": "tiny"}, "weight_transfer_config": {"backend": "rlfleet"}, "lora_config": None}


async def test_the_middleware_decides_and_is_told_the_engines_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLEET_ENGINE_ADMIN_KEY", "k")
    reached: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(text=await request.text())

    app = web.Application(middlewares=[named("rlfleet_vllm.ControlKey", CONFIG)])
    app.router.add_route("*", "/{path:.*}", handler)
    key = {"Authorization": "Bearer k"}
    async with TestClient(TestServer(app, host="127.0.0.1")) as client:
        refused = await client.post("/pause")
        assert (refused.status, reached) == (401, [])
        assert refused.headers["www-authenticate"] == "Bearer"
        assert await (await client.post("/pause", headers=key, data="body")).text() == "body"
        assert (await client.get("/v1/models")).status == 200
        assert reached == ["/pause", "/v1/models"]
        told = (await (await client.get("/rlfleet/setup", headers=key)).json())["vllm_config"]
        assert told["weight_transfer_config"] == {"backend": "rlfleet"}
        assert told["lora_config"] is None


async def test_a_hold_of_the_file_ends_when_the_file_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"pause": {"action": "hold"}}))
    faults = Faults(file)
    held = asyncio.ensure_future(faults.until_replaced())
    done, _ = await asyncio.wait([held], timeout=0.5)
    assert not done
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").replace(file)
    await asyncio.wait_for(held, 60)
