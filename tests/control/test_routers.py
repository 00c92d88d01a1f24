"""Finding the routers of a pool, and taking addresses out of a real one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import RouterEndpoint, RouterType
from rlfleet.control.context import ControlSettings
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.pool_pods import Outcome, unroute, unrouted
from rlfleet.control.routers import RouterClients, RouterKey, base_url, resolve, routers_of
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.kube.guard import Guard
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS
from rlfleet.router import make_router
from tests.gate.kit import Router, address, free_port
from tests.plan.pool_kit import fact, pool
from tests.web.apiserver import Apiserver

SELECTED = {"name": "main", "type": "SGLangRouter", "podSelector": {"matchLabels": {"app": "router"}}, "port": 30001}


async def nowhere() -> Credentials:
    return Credentials("http://127.0.0.1:1")


def view(*pods: dict[str, Any]) -> Reflector:
    made = Reflector(KubeClient(nowhere), PODS)
    for pod in pods:
        made.observe(pod)
    return made


def pod(
    name: str, ip: str = "10.0.0.1", phase: str = "Running", *, app: str = "router", ns: str = "ns"
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": ns, "uid": name, "resourceVersion": "1", "labels": {"app": app}},
        "status": {"phase": phase, "podIP": ip},
    }


def test_pools_without_routers_are_legal() -> None:
    found = resolve(pool(), view(pod("r")))
    assert (found.endpoints, found.names, found.problems) == ((), frozenset(), ())


def test_router_is_found_by_selector_in_the_pools_own_namespace() -> None:
    pods = view(pod("r"), pod("other", "10.0.0.2", app="x"), pod("far", "10.0.0.3", ns="elsewhere"))
    found = resolve(pool(routers=[SELECTED]), pods)
    assert [(e.name, e.url) for e in found.endpoints] == [("main", "http://10.0.0.1:30001")]
    assert found.problems == ()


def test_fixed_url_needs_no_pod() -> None:
    found = resolve(pool(routers=[{"name": "out", "type": "SGLangRouter", "url": "http://1.2.3.4:5/"}]), view())
    assert [(e.name, e.url) for e in found.endpoints] == [("out", "http://1.2.3.4:5")]


def test_metrics_of_a_router_are_on_the_host_of_its_api() -> None:
    out = {"name": "out", "type": "SMG", "url": "https://1.2.3.4:5/base", "metricsPort": 29000}
    found = resolve(
        pool(routers=[{**SELECTED, "metricsPort": 29000}, SELECTED | {"name": "blind"}, out]), view(pod("r"))
    )
    assert [e.metrics for e in found.endpoints] == ["http://10.0.0.1:29000", None, "http://1.2.3.4:29000"]


def test_pods_that_are_routers_themselves_are_no_program_to_call() -> None:
    by_the_pod = [{"name": "a", "type": "Readiness"}, {"name": "b", "type": "InferencePool"}]
    found = resolve(pool(routers=by_the_pod), view(pod("r")))
    assert (found.endpoints, found.names, found.problems) == ((), frozenset(), ())


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed"])
def test_router_that_does_not_run_is_said_and_still_must_list_engines(phase: str) -> None:
    found = resolve(pool(routers=[SELECTED]), view(pod("r", phase=phase)))
    assert found.endpoints == ()
    assert found.names == {"main"}, "no engine counts as open while its router is not there"
    assert found.problems[0].reason is Reason.ROUTER_UNREACHABLE


def test_each_replica_of_a_router_is_a_router() -> None:
    found = resolve(pool(routers=[SELECTED]), view(pod("r1"), pod("r2", "10.0.0.2")))
    assert found.names == {"main:r1", "main:r2"}
    many = view(*(pod(f"r{i}", f"10.0.0.{i}") for i in range(20)))
    crowd = resolve(pool(routers=[SELECTED]), many)
    assert len(crowd.endpoints) == 16
    assert crowd.problems[0].reason is Reason.ROUTER_AMBIGUOUS


def engine_pod(name: str, ip: str, *, maker: str = "", app: str = "engines") -> dict[str, Any]:
    made = pod(name, ip, app=app)
    made["spec"] = {"initContainers": [{"name": "gate"}], "containers": [{"name": "engine"}]}
    if maker:
        made["metadata"]["ownerReferences"] = [
            {"controller": True, "kind": "EnginePool", "apiVersion": "rlfleet.dev/v1alpha1", "name": maker}
        ]
    return made


def test_a_living_engine_of_any_pool_keeps_its_entry_in_its_own_routers() -> None:
    """Another pool's engine got a dead one's address: what lists it by right is not touched, the others are cleared."""

    def routed(name: str, router: str, **source: Any) -> dict[str, Any]:
        where = [{"name": "out", "type": "SGLangRouter", "url": router}]
        return pool(name=name, routers=where, **({"source": source} if source else {}))

    adopting = routed("adopting", "http://r1", adopt={"selector": {"matchLabels": {"app": "engines"}}})
    pools = [adopting, routed("other", "http://r2"), routed("third", "http://r3")]
    seen = view(engine_pod("adopted", "10.0.0.1"), engine_pod("made", "10.0.0.2", maker="other"), pod("r", "10.0.0.3"))
    found = {ip: routers_of(seen.at_address("ns", ip), pools, seen) for ip in ("10.0.0.1", "10.0.0.2", "10.0.0.3")}
    assert found == {"10.0.0.1": {"http://r1"}, "10.0.0.2": {"http://r2"}, "10.0.0.3": set()}
    assert routers_of(seen.at_address("elsewhere", "10.0.0.1"), pools, seen) == set()
    assert seen.at_address("ns", "") == []
    assert [p["metadata"]["name"] for p in seen.at_address("ns", "10.0.0.3", "", "10.0.0.1")] == ["adopted", "r"]


def test_addresses() -> None:
    assert base_url("10.0.0.1", 5) == "http://10.0.0.1:5"
    assert base_url("fd00::1", 5) == "http://[fd00::1]:5"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    """A listed router entry needs something that answers /health."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    host = address()
    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 30000).start()
    yield f"http://{host}:30000"
    await runner.cleanup()


async def test_address_is_removed_and_each_router_gives_its_own_verdict(router: Router, engine: str) -> None:
    adapter = make_router("SGLangRouter", router.url)
    await adapter.add(engine, seconds=60)
    host = address()
    silent = RouterEndpoint(name="silent", type=RouterType.SGLANG_ROUTER, url=f"http://{host}:{free_port(host)}")
    real = RouterEndpoint(name="real", type=RouterType.SGLANG_ROUTER, url=router.url)
    clients = RouterClients(KubeClient(nowhere), timeout=5, guard=Guard.unelected())
    try:
        found = await clients.remove([real, silent], engine, {})
        assert found[real.url] is None
        assert "silent" in (found[silent.url] or ""), "no answer is not removed"
        assert not await adapter.lists(engine, 60)
        assert (await clients.remove([real], engine, {}))[real.url] is None, "absent counts as removed"
    finally:
        await clients.close()
        await adapter.close()


def test_replicas_of_a_router_have_one_key_and_a_fixed_one_its_own() -> None:
    ref = {"name": "keys", "key": "main"}
    out = {"name": "out", "type": "SMG", "url": "http://1.2.3.4:5/", "adminKeySecretRef": ref | {"key": "out"}}
    free = {"name": "free", "type": "VLLMRouter", "url": "http://1.2.3.4:6"}
    pods = view(pod("r1"), pod("r2", "10.0.0.2"))
    found = resolve(pool(routers=[{**SELECTED, "adminKeySecretRef": ref}, out, free]), pods)
    assert found.keys == {
        "http://10.0.0.1:30001": RouterKey("ns", "keys", "main"),
        "http://10.0.0.2:30001": RouterKey("ns", "keys", "main"),
        "http://1.2.3.4:5": RouterKey("ns", "keys", "out"),
    }


async def test_the_operator_reads_the_key_of_a_router_anew_and_says_what_hinders_it(
    tmp_path: Path, engine: str
) -> None:
    keyed = Router(tmp_path, "SMG", "--api-key", "right")
    secret: dict[str, Any] = {"metadata": {"name": "keys"}, "data": {}}
    served = Apiserver({"secrets": [secret]})
    await served.server.start_server()
    may = "all"

    async def source() -> Credentials:
        return Credentials(str(served.server.make_url("")).rstrip("/"), authorization=f"Bearer {may}")

    endpoint = RouterEndpoint(name="main", type=RouterType.SMG, url=keyed.url)
    adapter = make_router("SMG", keyed.url, key=lambda: "right")

    async def removed(name: str = "keys") -> str:
        async with KubeClient(source) as kube:
            clients = RouterClients(kube, timeout=60, guard=Guard.unelected())
            try:
                return (await clients.remove([endpoint], engine, {keyed.url: RouterKey("ns", name, "k")}))[
                    keyed.url
                ] or ""
            finally:
                await clients.close()

    try:
        await asyncio.to_thread(keyed.start)
        await adapter.add(engine, seconds=20)
        assert "Secret ns/other, which spec.routers[].adminKeySecretRef names, does not exist" in await removed("other")
        assert "has no key 'k'" in await removed()
        secret["data"]["k"] = "not base64"
        assert "has no key 'k'" in await removed()
        secret["data"]["k"] = base64.b64encode(b"two words").decode()
        assert "one line of ASCII" in await removed()
        secret["data"]["k"] = base64.b64encode(b"wrong").decode()
        assert "does not take the key" in await removed()
        may = "none"
        assert "may not be read by the operator: name it in the chart's routerKeySecrets" in await removed()
        assert await adapter.lists(engine, 60), "nothing of that took the entry away"
        may = "all"
        secret["data"]["k"] = base64.b64encode(b"right\n").decode()
        assert await removed() == ""
        assert not await adapter.lists(engine, 60)
    finally:
        await adapter.close()
        await served.server.close()
        keyed.close()


async def test_a_router_that_became_one_of_another_type_is_called_as_that() -> None:
    clients = RouterClients(KubeClient(nowhere), timeout=5, guard=Guard.unelected())
    for kind in RouterType:
        endpoint = RouterEndpoint(name="main", type=kind, url="http://10.0.0.1:30001")
        assert clients._client(endpoint).type == kind.value
        assert clients._client(endpoint) is clients._client(endpoint)
    await clients.keep_only({"http://10.0.0.1:30001"})
    assert len(clients._clients) == len(RouterType)
    await clients.close()
    assert not clients._clients


@pytest.mark.parametrize(("shared", "stays"), [(True, True), (False, False)])
async def test_an_entry_of_a_dead_engine_goes_unless_it_is_a_living_ones(
    router: Router, engine: str, shared: bool, stays: bool
) -> None:
    """An adopted engine of another pool got the address: with the same router the entry is its own, else a stray."""
    adapter = make_router("SGLangRouter", router.url)
    await adapter.add(engine, seconds=60)
    ip = engine.removeprefix("http://").rpartition(":")[0]
    adopt = {"adopt": {"selector": {"matchLabels": {"app": "engines"}}}}
    elsewhere = router.url if shared else "http://127.0.0.1:1"

    def routed(name: str, url: str, **spec: Any) -> dict[str, Any]:
        return pool(name=name, routers=[{"name": "main", "type": "SGLangRouter", "url": url}], **spec)

    mine, theirs = routed("mine", router.url), routed("theirs", elsewhere, source=adopt)
    served = Apiserver({"enginepools": [mine, theirs]})
    await served.server.start_server()

    async def source() -> Credentials:
        return Credentials(str(served.server.make_url("")).rstrip("/"), authorization="Bearer all")

    clients = RouterClients(KubeClient(nowhere), timeout=5, guard=Guard.unelected())
    dead = fact(0, "dead", ip=ip, finished=True)
    memory, out = PoolMemory("pool-uid"), Outcome()
    memory.see([dead], 0)
    try:
        async with KubeClient(source) as kube:
            seen = view(engine_pod("alive", ip))
            ctx = SimpleNamespace(kube=kube, pods=seen, settings=ControlSettings())
            await unroute(ctx, mine, [dead], resolve(mine, seen), clients, memory, fence=1, out=out)  # type: ignore[arg-type]
        assert out.problems == []
        assert unrouted(memory, resolve(mine, seen), fence=1) == {"dead"}, "there is nothing more to do for it"
        assert await adapter.lists(engine, 60) is stays
    finally:
        await clients.close()
        await adapter.close()
        await served.server.close()
