"""What becomes of demands when things go wrong on the way, at a small stand-in for the apiserver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlfleet.api import labels
from rlfleet.client import Client, GrantTimeout
from rlfleet.client.compat import ranks
from rlfleet.client.compat.ranks import Ranks

HOME = f"/apis/{labels.GROUP}/{labels.VERSION}/namespaces/ns"


def obj(kind: str, name: str, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": meta, "spec": spec, "status": status}


class Apiserver:
    """Answers every request at once, unless told otherwise grants it; its pool goes on to show all engines awake."""

    def __init__(self) -> None:
        self.demand: dict[str, Any] | None = None
        self.refused: set[str] = set()
        self.answers = True
        self.answer: dict[str, Any] = {"granted": True, "reason": "Granted", "message": ""}
        self.slow = 0.0
        sender = {"podSelector": {"matchLabels": {"app": "trainer"}}}
        self.pipeline = obj("RLPipeline", "demo", {"weights": {"sender": sender}}, {"grants": []})
        template = {"spec": {"containers": [{"name": "engine", "image": "x"}]}}
        spec = {
            "pipeline": "demo", "replicas": 2, "engine": {"type": "SGLang"},
            "source": {"template": template}, "gate": {"image": "x"},
        }  # fmt: skip
        rows = [
            {"name": f"pool-{i}", "index": i, "node": "n0", "gpus": [f"GPU-{i}"], "state": "Active"} for i in (0, 1)
        ]
        self.pool = obj("EnginePool", "pool", spec, {"engines": rows})
        app = web.Application()
        app.router.add_get(f"{HOME}/rlpipelines/demo", self._pipeline)
        app.router.add_get(f"{HOME}/enginepools/pool", self._pool)
        app.router.add_get(f"{HOME}/enginepools", self._pools)
        app.router.add_get(f"{HOME}/trainerdemands/demo", self._demand)
        app.router.add_post(f"{HOME}/trainerdemands", self._create)
        app.router.add_patch(f"{HOME}/trainerdemands/demo", self._change)
        self.server = TestServer(app)

    @property
    def wants(self) -> list[str]:
        return sorted(r["cluster"] for r in (self.demand or {"spec": {}})["spec"].get("requests") or [])

    async def _pipeline(self, _: web.Request) -> web.Response:
        return web.json_response(self.pipeline)

    async def _pool(self, _: web.Request) -> web.Response:
        return web.json_response(self.pool)

    async def _pools(self, request: web.Request) -> web.Response:
        if "watch" in request.query:
            return web.json_response({"message": "watch is forbidden"}, status=403)
        return web.json_response({"apiVersion": labels.API_VERSION, "items": [self.pool]})

    async def _demand(self, _: web.Request) -> web.Response:
        if self.demand is None:
            return web.json_response({"message": 'trainerdemands.rlfleet.dev "demo" not found'}, status=404)
        return web.json_response(self.demand)

    async def _create(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.slow)
        return self._store(await request.json())

    async def _change(self, request: web.Request) -> web.Response:
        body = await request.json()
        gone = set(self.wants) - {r["cluster"] for r in body["spec"]["requests"]}
        if gone & self.refused:
            return web.json_response({"reason": "Invalid", "message": "refused"}, status=422)
        body["spec"]["trainer"].pop("podName", None)
        return self._store(body)

    def _store(self, body: dict[str, Any]) -> web.Response:
        known = (self.demand or {"metadata": {"resourceVersion": "0"}})["metadata"]["resourceVersion"]
        self.demand = {**body, "metadata": {**body["metadata"], "resourceVersion": str(int(known) + 1)}}
        self.pipeline["status"]["grants"] = [
            {"devices": [], **r, **self.answer} for r in body["spec"]["requests"] if self.answers
        ]
        return web.json_response(self.demand)


@pytest.fixture
async def apiserver() -> AsyncIterator[Apiserver]:
    one = Apiserver()
    await one.server.start_server()
    yield one
    await one.server.close()


@pytest.fixture
def kubeconfig(apiserver: Apiserver, tmp_path: Path) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": str(apiserver.server.make_url("")).rstrip("/")}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


async def shrink(kubeconfig: Path) -> None:
    def work() -> None:
        with Client("ns", "demo", kubeconfig, pod_uid="pod-1") as client:
            Ranks(client, "demo").rest([0, 1], 3, None)

    await asyncio.to_thread(work)


async def test_engines_that_never_show_asleep_are_given_back(
    apiserver: Apiserver, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SHOWN_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"EnginePool pool does not show them asleep"):
        await shrink(kubeconfig)
    assert apiserver.wants == []


async def test_a_rank_that_cannot_be_given_back_hides_no_error_and_keeps_no_other(
    apiserver: Apiserver, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "SHOWN_SECONDS", 0.0)
    apiserver.refused = {"resize-0"}
    with pytest.raises(RuntimeError, match=r"does not show them asleep"):
        await shrink(kubeconfig)
    assert apiserver.wants == ["resize-0"]
    assert "the devices of engine 0 could not be given back" in caplog.text


async def test_what_is_not_granted_in_time_is_withdrawn_and_the_error_says_why(
    apiserver: Apiserver, kubeconfig: Path
) -> None:
    apiserver.answer = {"granted": False, "reason": "ResidualMemoryHigh", "message": "n0/GPU-0 has 20.0 GiB in use"}

    def ask() -> None:
        with Client("ns", "demo", kubeconfig, pod_uid="pod-1") as client:
            client.request_gpus(3, timeout=0.5)

    with pytest.raises(GrantTimeout, match=r"n0/GPU-0 has 20\.0 GiB in use.*withdrawn") as refused:
        await asyncio.to_thread(ask)
    assert refused.value.reason == "ResidualMemoryHigh"
    assert apiserver.wants == []


async def test_a_short_wait_for_gpus_outlives_a_slow_write(apiserver: Apiserver, kubeconfig: Path) -> None:
    apiserver.answers, apiserver.slow = False, 0.3

    def ask() -> None:
        with Client("ns", "demo", kubeconfig, pod_uid="pod-1") as client:
            client.request_gpus(3, timeout=0.1)

    with pytest.raises(GrantTimeout, match="no operator has answered"):
        await asyncio.to_thread(ask)
    assert apiserver.wants == []


async def test_of_an_adopted_pool_as_many_pods_as_were_registered_are_waited_for(
    apiserver: Apiserver, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spec says no number: spec.replicas is 1 there, however many pods somebody makes, and in whatever time."""
    apiserver.pool["spec"]["source"] = {"adopt": {"selector": {"matchLabels": {"app": "engine"}}}}
    apiserver.pool["spec"] |= {"replicas": 1, "gate": {}}
    apiserver.pool["status"]["replicas"] = 2

    def up(registered: int | None) -> list[int]:
        with Client("ns", "demo", kubeconfig, pod_uid="pod-1") as client:
            return Ranks(client, "demo").all_up(registered)

    assert await asyncio.to_thread(up, 2) == [0, 1]
    with pytest.raises(RuntimeError, match="register with them first"):
        await asyncio.to_thread(up, None)
    monkeypatch.setattr(ranks, "RESIZE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"engines \[2\] of EnginePool pool have no process"):
        await asyncio.to_thread(up, 3)
    # A maker may number its pods from 4.
    for entry, index in zip(apiserver.pool["status"]["engines"], (4, 7), strict=True):
        entry["index"] = index
    assert await asyncio.to_thread(up, 2) == [4, 7]
    apiserver.pool["spec"]["source"] = {"template": {"spec": {}}}
    with pytest.raises(RuntimeError, match=r"engines \[0\] of EnginePool pool have no process"):
        await asyncio.to_thread(up, None)
