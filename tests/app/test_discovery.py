"""Worker discovery's side towards the cluster: which pods are workers, who may read, and when nothing is known."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlfleet.api import labels, tokens
from rlfleet.api.wire import ErrorBody, ErrorReason
from rlfleet.app.discovery import Discovery
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.app.settings import Settings
from rlfleet.control.keys import PRIVATE_FIELD, SigningKeys
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import load
from rlfleet.kube.limiter import Priority, RateLimiter
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS
from rlfleet.plan.discovery import instance_id
from rlfleet.plan.pods import build_pod
from tests.plan.pool_kit import gate, pool

Obj = dict[str, Any]
TOKENS = {"all": None, "one": {"ns"}}


class World:
    """An apiserver with pools, pods and a signing key; gates at one port, which say whose they are by their address."""

    def __init__(self) -> None:
        self.pools: list[Obj] = []
        self.pods: list[Obj] = []
        self.secret: Obj | None = None
        self.replace_key(b"s" * 32)
        self.away = False
        self.listing_pods = asyncio.Event()
        self.listing_pods.set()
        self.asked: list[str] = []
        app = web.Application()
        app.router.add_get("/{path:.*}", self._api)
        self.apiserver = TestServer(app, host="127.0.0.1")
        gates = web.Application()
        gates.router.add_get("/v1/status", self._gate)
        self.gates = TestServer(gates, host="127.0.0.1")

    def replace_key(self, seed: bytes) -> None:
        """Another signing key, and gates that know no other."""
        self.secret = {"metadata": {"name": "k"}, "data": {PRIVATE_FIELD: base64.b64encode(seed).decode()}}
        self.keys = tokens.PublicKeys(SigningKeys(seed).public_text())

    async def _api(self, request: web.Request) -> web.StreamResponse:
        who = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.away:
            return web.json_response({"kind": "Status", "message": "no leader"}, status=503)
        parts = request.path.strip("/").split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        if parts[-2] == "secrets":
            return web.json_response(self.secret or {}, status=200 if self.secret else 404)
        if who == "trainer":
            found = parts[-2:] == ["rlpipelines", "p"]
            return web.json_response({"message": "forbidden"} if not found else {}, status=200 if found else 403)
        if who and who not in TOKENS:
            return web.json_response({"message": "Unauthorized"}, status=401)
        allowed = TOKENS.get(who)
        if allowed is not None and namespace not in allowed:
            return web.json_response({"message": "forbidden"}, status=403)
        if "watch" in request.query:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(3600)
        if parts[-1] == "pods" and not who:
            await self.listing_pods.wait()
        items = self.pods if parts[-1] == "pods" else self.pools
        found = [o for o in items if namespace in (None, o["metadata"]["namespace"])]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": found})

    async def _gate(self, request: web.Request) -> web.Response:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        found = (_claims(token, self.keys, p["metadata"]["uid"]) for p in self.pods)
        claims = next((c for c in found if c is not None), None)
        if claims is None:
            body = ErrorBody(reason=ErrorReason.UNAUTHENTICATED, message="unknown key")
            return web.Response(status=401, text=body.model_dump_json(exclude_none=True))
        assert claims.scope is tokens.Scope.READ
        (uid,) = claims.audience
        self.asked.append(uid)
        return web.Response(
            text=gate().model_copy(update={"pod_uid": uid, "enrolled": True}).model_dump_json(by_alias=True)
        )

    def add(self, name: str, of: Obj | None = None, **changes: Any) -> Obj:
        """A running pod of a pool; ``of`` None: somebody else's."""
        port = self.gates.port
        made = build_pod(of or pool(), 0, name, public_keys={"k": "AAAA"})
        for c in made["spec"]["initContainers"]:
            if c["name"] == "gate":
                c["ports"] = [{"containerPort": port}]
        meta = made["metadata"] | {"namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "5"}
        if of is None:
            meta |= {"ownerReferences": [], "labels": {"app": "theirs"}}
        running = {"state": {"running": {}}}
        status = {
            "podIP": "127.0.0.1", "phase": "Running",
            "initContainerStatuses": [{"name": "gate", **running}],
            "containerStatuses": [{"name": "engine", **running}],
        }  # fmt: skip
        pod = made | {"metadata": meta | changes.pop("metadata", {}), "status": status | changes}
        self.pods.append(pod)
        return pod


def _claims(token: str, keys: tokens.PublicKeys, uid: str) -> tokens.Claims | None:
    try:
        return tokens.verify(token, keys, audience=uid)
    except tokens.TokenError:
        return None


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    one = World()
    await one.apiserver.start_server()
    await one.gates.start_server()
    yield one
    await one.apiserver.close()
    await one.gates.close()


@asynccontextmanager
async def serving(
    world: World, folder: Path, limiter: RateLimiter | None = None, kind: type[Discovery] = Discovery, **settings: Any
) -> AsyncIterator[Discovery]:
    """Discovery with a view of pods that is being made."""
    kubeconfig = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": str(world.apiserver.make_url("")).rstrip("/")}}
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x",
            }
        )
    )  # fmt: skip
    chosen = Settings(**{"discovery_port": 0, **settings}, discovery=True, kubeconfig=str(kubeconfig))

    async def source() -> Any:
        return await load(str(kubeconfig))

    async with KubeClient(source, limiter=limiter or RateLimiter(1000, 1000)) as kube:
        view = Reflector(kube, PODS, index_labels=(labels.POOL,), namespaces=chosen.watch_namespaces)
        task = asyncio.create_task(view.run())
        if world.listing_pods.is_set():
            await view.wait_synced()
        served = kind(chosen, kube, view, authorities=None, observer=OperatorMetrics())
        await served.start()
        try:
            yield served
        finally:
            await served.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def get(served: Discovery, before: str = "", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{served.port}{before}/v1/rl/workers", headers=headers) as response,
    ):
        return response.status, await response.json()


def pods_of(answer: tuple[int, Any]) -> set[str]:
    status, body = answer
    assert status == 200, body
    return {w["rlfleet"]["pod"] for w in body["workers"]}


async def test_workers_are_live_engine_pods_of_pools(world: World, tmp_path: Path) -> None:
    mine = pool()
    theirs = pool(name="t", source={"adopt": {"selector": {"matchLabels": {"app": "theirs"}}}})
    theirs["metadata"]["uid"] = "other"
    world.pools = [mine, theirs]
    world.add("a-0", mine)
    world.add("x-0")
    world.add("booting", mine, podIP="")
    world.add("pulling", mine, initContainerStatuses=[{"name": "gate", "state": {"waiting": {}}}])
    world.add("failed", mine, phase="Failed")
    world.add("leaving", mine, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    world.add("forged", mine, metadata={"ownerReferences": []})
    async with serving(world, tmp_path) as served:
        status, body = await get(served)
        assert pods_of((status, body)) == {"a-0", "x-0"}
        assert sorted(world.asked) == ["uid-a-0", "uid-x-0"]
        by_pool = {w["component"]: w for w in body["workers"]}
        assert by_pool["a"]["instance_id"] == instance_id("uid-a-0")
        assert by_pool["t"]["rlfleet"]["version"] == 12
        assert not any("error" in w for w in body["workers"])


async def test_a_base_url_narrows_the_list(world: World, tmp_path: Path) -> None:
    mine = pool()
    other = pool(name="b", pipeline="q")
    other["metadata"]["uid"] = "other"
    world.pools = [mine, other]
    world.add("a-0", mine)
    world.add("b-0", other)
    async with serving(world, tmp_path) as served:
        assert pods_of(await get(served)) == {"a-0", "b-0"}
        assert pods_of(await get(served, "/namespaces/ns")) == {"a-0", "b-0"}
        assert pods_of(await get(served, "/namespaces/ns/pipelines/q")) == {"b-0"}
        assert pods_of(await get(served, "/namespaces/elsewhere")) == set()
    async with serving(world, tmp_path, discovery_components=("b",)) as served:
        assert pods_of(await get(served)) == {"b-0"}
    async with serving(world, tmp_path, watch_namespaces=("served",)) as served:
        status, body = await get(served, "/namespaces/ns")
        assert (status, body["error"]) == (404, "denied")
        assert "ns is not served" in body["message"]
        assert pods_of(await get(served)) == set()


class Asked(RateLimiter):
    """Remembers for whom there were calls."""

    def __init__(self) -> None:
        super().__init__(1000, 1000)
        self.whom: list[Priority] = []

    async def acquire(self, priority: Priority) -> None:
        self.whom.append(priority)
        await super().acquire(priority)


async def test_readers_go_behind_all_that_the_operator_does(world: World, tmp_path: Path) -> None:
    """Whoever reaches the port may ask for a list of any name, and each name's list is read by itself."""
    assert max(Priority) is Priority.READER
    limiter = Asked()
    async with serving(world, tmp_path, limiter) as served:
        for name in ("a", "b"):
            assert pods_of(await get(served, f"/namespaces/ns/pipelines/{name}")) == set()
    # The signing key, and pools twice; the view of pods is the operator's own.
    assert limiter.whom.count(Priority.READER) == 3


async def test_nothing_known_is_500(world: World, tmp_path: Path) -> None:
    world.pools = [pool()]
    world.listing_pods.clear()
    async with serving(world, tmp_path) as served:
        status, body = await get(served)
        assert (status, body["error"]) == (500, "discovery_failed")
        assert "view of pods is not complete" in body["message"]
        world.listing_pods.set()
    world.add("a-0", pool())
    async with serving(world, tmp_path) as served:
        assert pods_of(await get(served)) == {"a-0"}
        world.away = True
        status, body = await get(served)
        assert (status, body["error"]) == (500, "discovery_failed")
        assert "apiserver" in body["message"]
        world.away = False
        assert pods_of(await get(served)) == {"a-0"}
    world.secret = None
    async with serving(world, tmp_path) as served:
        status, body = await get(served)
        assert (status, body["error"]) == (500, "discovery_failed")
        assert "no signing key" in body["message"]


async def test_a_key_that_is_gone_later_is_still_known(world: World, tmp_path: Path) -> None:
    world.pools = [pool()]
    world.add("a-0", pool())
    async with serving(world, tmp_path, key_seconds=0.1) as served:
        assert pods_of(await get(served)) == {"a-0"}
        world.secret = None
        await asyncio.sleep(0.2)
        status, body = await get(served)
        assert (status, "error" in body["workers"][0]) == (200, False)


async def test_a_key_that_is_replaced_is_taken_up(world: World, tmp_path: Path) -> None:
    world.pools = [pool()]
    world.add("a-0", pool())
    async with serving(world, tmp_path, key_seconds=0.1) as served:
        assert pods_of(await get(served)) == {"a-0"}
        world.replace_key(b"t" * 32)
        async with asyncio.timeout(120):
            while "error" in (await get(served))[1]["workers"][0]:
                await asyncio.sleep(0.05)


async def test_with_tokens_the_apiserver_judges_the_reader(world: World, tmp_path: Path) -> None:
    world.pools = [pool()]
    world.add("a-0", pool())
    async with serving(world, tmp_path, discovery_auth="token") as served:
        for header in ({}, {"Authorization": "Bearer forged"}, {"Authorization": "Basic all"}):
            status, body = await get(served, **header)
            assert (status, body["error"]) == (401, "denied")
        assert pods_of(await get(served, Authorization="Bearer all")) == {"a-0"}
        status, body = await get(served, Authorization="Bearer one")
        assert (status, body["error"]) == (403, "denied")
        assert "/namespaces/NAMESPACE" in body["message"]
        assert pods_of(await get(served, "/namespaces/ns", Authorization="Bearer one")) == {"a-0"}
        assert (await get(served, "/namespaces/elsewhere", Authorization="Bearer one"))[0] == 403
        # A trainer may read its pipeline, and not list pods.
        mine = "/namespaces/ns/pipelines/p"
        assert pods_of(await get(served, mine, Authorization="Bearer trainer")) == {"a-0"}
        for path in ("/namespaces/ns/pipelines/q", "/namespaces/ns", ""):
            assert (await get(served, path, Authorization="Bearer trainer"))[0] == 403
        asked = len(world.asked)
        assert (await get(served))[0] == 401
        assert len(world.asked) == asked


async def test_a_port_that_is_taken_leaves_no_session_open(world: World, tmp_path: Path) -> None:
    made: list[Discovery] = []

    class Noted(Discovery):
        async def start(self) -> None:
            made.append(self)
            await super().start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="address already in use"):
            async with serving(world, tmp_path, kind=Noted, discovery_auth="token", discovery_port=port):
                pass
    (one,) = made
    assert one._session is not None
    assert one._session.closed
