"""The client against the real apiserver: preconditions, typed errors, unknown outcomes."""

from __future__ import annotations

import asyncio
import inspect
import ssl
import time
from typing import Any

import pytest
from aiohttp import web

from e2e.cluster.local import LocalCluster
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import ConfigError, Credentials, credential_source, load
from rlfleet.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooManyRequests,
    Unavailable,
    Unknown,
)
from rlfleet.kube.limiter import Priority, RateLimiter
from rlfleet.kube.resources import PODS, RLPIPELINES, SECRETS, Resource
from tests.kube.proxy import Mode, Proxy

pytestmark = pytest.mark.cluster

CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
T = 60.0


def configmap(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


def pipeline(name: str = "p") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}},
    }


async def test_status_is_written_only_at_the_version_it_was_decided_on(kube: KubeClient, namespace: str) -> None:
    made = await kube.create(RLPIPELINES, namespace, pipeline(), timeout=T)
    first = made["metadata"]["resourceVersion"]
    won = await kube.patch_status(
        RLPIPELINES, namespace, "p", resource_version=first, status={"fence": 7, "observedGeneration": 1}, timeout=T
    )
    assert won["status"]["fence"] == 7
    with pytest.raises(Conflict) as e:
        await kube.patch_status(RLPIPELINES, namespace, "p", resource_version=first, status={"fence": 6}, timeout=T)
    assert e.value.status == 409
    live = await kube.get(RLPIPELINES, namespace, "p", timeout=T)
    assert live["status"]["fence"] == 7
    cleared = await kube.patch_status(
        RLPIPELINES,
        namespace,
        "p",
        resource_version=live["metadata"]["resourceVersion"],
        status={"fence": None},
        timeout=T,
    )
    assert cleared["status"].get("fence", 0) != 7
    assert cleared["status"]["observedGeneration"] == 1, "what is not named stays"


async def test_a_label_is_set_on_the_object_that_is_meant_and_makes_none(kube: KubeClient, namespace: str) -> None:
    made = await kube.create(CONFIGMAPS, namespace, configmap("c", kept="yes"), timeout=T)
    uid = made["metadata"]["uid"]
    marked = await kube.label(CONFIGMAPS, namespace, "c", uid=uid, labels={"a/b": "true"}, timeout=T)
    assert (marked["metadata"]["labels"], marked["data"]) == ({"a/b": "true"}, {"kept": "yes"})
    bare = await kube.label(CONFIGMAPS, namespace, "c", uid=uid, labels={"a/b": None}, timeout=T)
    assert "labels" not in bare["metadata"]
    with pytest.raises(Invalid, match="uid"):
        await kube.label(CONFIGMAPS, namespace, "c", uid="another", labels={"a/b": "true"}, timeout=T)
    with pytest.raises(NotFound):
        await kube.label(CONFIGMAPS, namespace, "none", uid=uid, labels={"a/b": "true"}, timeout=T)


async def test_another_object_of_the_same_name_is_refused(kube: KubeClient, namespace: str) -> None:
    old = await kube.create(CONFIGMAPS, namespace, configmap("c"), timeout=T)
    await kube.delete(CONFIGMAPS, namespace, "c", uid=old["metadata"]["uid"], timeout=T)
    new = await kube.create(CONFIGMAPS, namespace, configmap("c"), timeout=T)
    with pytest.raises(Conflict):
        await kube.delete(CONFIGMAPS, namespace, "c", uid=old["metadata"]["uid"], timeout=T)
    with pytest.raises(Conflict):
        await kube.patch_metadata(
            CONFIGMAPS,
            namespace,
            "c",
            resource_version=old["metadata"]["resourceVersion"],
            finalizers=["a.test/b"],
            timeout=T,
        )
    assert (await kube.get(CONFIGMAPS, namespace, "c", timeout=T))["metadata"]["uid"] == new["metadata"]["uid"]


@pytest.mark.parametrize(
    ("method", "precondition"),
    [
        ("patch_status", "resource_version"),
        ("patch_metadata", "resource_version"),
        ("delete", "uid"),
    ],
)
async def test_a_write_without_its_precondition_cannot_be_made(
    kube: KubeClient, namespace: str, method: str, precondition: str
) -> None:
    parameter = inspect.signature(getattr(kube, method)).parameters[precondition]
    assert parameter.default is inspect.Parameter.empty
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    more: dict[str, Any] = {"patch_status": {"status": {}}}.get(method, {})
    with pytest.raises(ValueError, match="needs the"):
        await getattr(kube, method)(RLPIPELINES, namespace, "p", **{precondition: ""}, **more, timeout=T)


def test_every_call_has_a_deadline() -> None:
    for name in ("get", "list", "create", "apply", "patch_status", "patch_metadata", "delete"):
        parameter = inspect.signature(getattr(KubeClient, name)).parameters["timeout"]
        assert parameter.default is inspect.Parameter.empty, name


async def test_errors_are_typed(kube: KubeClient, cluster: LocalCluster, namespace: str) -> None:
    with pytest.raises(NotFound):
        await kube.get(CONFIGMAPS, namespace, "none", timeout=T)
    await kube.create(CONFIGMAPS, namespace, configmap("c"), timeout=T)
    with pytest.raises(AlreadyExists):
        await kube.create(CONFIGMAPS, namespace, configmap("c"), timeout=T)
    broken = pipeline()
    broken["spec"]["transport"] = {"mode": "Pigeon"}
    with pytest.raises(Invalid, match=r"spec\.transport\.mode"):
        await kube.create(RLPIPELINES, namespace, broken, timeout=T)
    async with KubeClient(credential_source(str(cluster.operator_kubeconfig))) as operator:
        with pytest.raises(Forbidden):
            await operator.list(SECRETS, namespace, timeout=T)


async def test_write_whose_answer_is_lost_is_unknown_and_may_have_happened(
    kube: KubeClient, proxied: KubeClient, proxy: Proxy, namespace: str
) -> None:
    for mode, name in ((Mode.DROP, "dropped"), (Mode.CUT, "cut")):
        proxy.mode = Mode.PASS
        await proxied.list(CONFIGMAPS, namespace, timeout=T)  # the TLS handshake is done before answers get lost
        proxy.mode = mode
        with pytest.raises(Unknown):
            await proxied.create(CONFIGMAPS, namespace, configmap(name), timeout=2.0)
        async with asyncio.timeout(T):
            while name not in {
                o["metadata"]["name"] for o in (await kube.list(CONFIGMAPS, namespace, timeout=T)).items
            }:
                await asyncio.sleep(0.02)  # nobody heard when it happened


async def test_read_without_an_answer_is_unavailable(proxied: KubeClient, proxy: Proxy, namespace: str) -> None:
    await proxied.list(CONFIGMAPS, namespace, timeout=T)
    proxy.mode = Mode.DROP
    with pytest.raises(Unavailable):
        await proxied.list(CONFIGMAPS, namespace, timeout=1.0)


async def test_write_that_was_never_sent_is_unavailable(proxied: KubeClient, proxy: Proxy, namespace: str) -> None:
    await proxy.stop()
    with pytest.raises(Unavailable):
        await proxied.create(CONFIGMAPS, namespace, configmap("c"), timeout=2.0)


async def test_list_joins_pages(kube: KubeClient, namespace: str) -> None:
    for i in range(7):
        await kube.create(CONFIGMAPS, namespace, configmap(f"c{i}"), timeout=T)
    found = await kube.list(CONFIGMAPS, namespace, page=3, timeout=T)
    assert {f"c{i}" for i in range(7)} <= {o["metadata"]["name"] for o in found.items}
    assert int(found.resource_version) > 0
    some = await kube.list(CONFIGMAPS, namespace, field_selector="metadata.name=c3", timeout=T)
    assert [o["metadata"]["name"] for o in some.items] == ["c3"]


async def test_apply_owns_only_its_managers_fields(kube: KubeClient, namespace: str) -> None:
    one, two = kube.at(Priority.ROUND, field_manager="one"), kube.at(Priority.ROUND, field_manager="two")
    body = {"metadata": {"name": "c", "namespace": namespace}}
    await one.apply(CONFIGMAPS, namespace, "c", body | {"data": {"a": "1"}}, timeout=T)
    both = await two.apply(CONFIGMAPS, namespace, "c", body | {"data": {"b": "2"}}, timeout=T)
    assert both["data"] == {"a": "1", "b": "2"}
    assert (await one.apply(CONFIGMAPS, namespace, "c", body, timeout=T))["data"] == {"b": "2"}
    with pytest.raises(Conflict):
        await one.apply(CONFIGMAPS, namespace, "c", body | {"data": {"b": "3"}}, force=False, timeout=T)


async def test_watch_tells_changes_after_the_list(kube: KubeClient, namespace: str) -> None:
    listed = await kube.list(CONFIGMAPS, namespace, timeout=T)
    big = configmap("big", text="x" * 300_000)
    made = await kube.create(CONFIGMAPS, namespace, big, timeout=T)
    await kube.delete(CONFIGMAPS, namespace, "big", uid=made["metadata"]["uid"], timeout=T)
    seen = []
    async for event in kube.watch(CONFIGMAPS, namespace, resource_version=listed.resource_version):
        if event.type != "BOOKMARK":
            seen.append((event.type, event.object["metadata"]["name"]))
        if len(seen) == 2:
            break
    assert seen == [("ADDED", "big"), ("DELETED", "big")]


async def test_silent_watch_ends(proxied: KubeClient, proxy: Proxy, namespace: str) -> None:
    listed = await proxied.list(CONFIGMAPS, namespace, timeout=T)

    async def follow() -> None:
        async for _ in proxied.watch(
            CONFIGMAPS, namespace, resource_version=listed.resource_version, inactivity_timeout=0.5
        ):
            proxy.mode = Mode.DROP

    with pytest.raises(Unavailable, match="silent"):
        await follow()


async def test_date_of_the_apiserver_is_kept(kube: KubeClient, namespace: str) -> None:
    assert kube.last_date_ms == 0
    await kube.list(CONFIGMAPS, namespace, timeout=T)
    assert abs(kube.last_date_ms - time.time() * 1000) < 60_000
    assert kube.last_date_ms % 1000 == 0


async def test_refused_credentials_are_read_again_once(credentials: Credentials, namespace: str) -> None:
    stale = Credentials(credentials.server, tls=_anonymous(), authorization="Bearer no")
    reads = []

    async def source() -> Credentials:
        reads.append(1)
        return credentials if len(reads) > 1 else stale

    async with KubeClient(source) as client:
        await client.list(CONFIGMAPS, namespace, timeout=T)
        assert len(reads) == 2

    async def never() -> Credentials:
        return stale

    async with KubeClient(never) as client:
        with pytest.raises(Forbidden):
            await client.list(CONFIGMAPS, namespace, timeout=T)


def _anonymous() -> ssl.SSLContext:
    """No client certificate."""
    tls = ssl.create_default_context()
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    return tls


async def test_too_many_requests_says_when_to_come_back() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(
            {"kind": "Status", "reason": "TooManyRequests", "message": "busy"}, status=429, headers={"Retry-After": "7"}
        )

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def source() -> Credentials:
        return Credentials(f"http://127.0.0.1:{runner.addresses[0][1]}")

    try:
        async with KubeClient(source) as client:
            with pytest.raises(TooManyRequests) as e:
                await client.create(CONFIGMAPS, "ns", configmap("c"), timeout=T)
            assert e.value.retry_after == 7
    finally:
        await runner.cleanup()


async def test_call_that_gets_no_turn_within_its_deadline_is_not_sent(credentials: Credentials, namespace: str) -> None:
    async def source() -> Credentials:
        return credentials

    async with KubeClient(source, limiter=RateLimiter(0.01, 1)) as client:
        await client.list(CONFIGMAPS, namespace, timeout=T)
        with pytest.raises(Unavailable, match="own rate limit"):
            await client.create(CONFIGMAPS, namespace, configmap("late"), timeout=0.05)
        client2 = client.at(Priority.ROUND)
        assert client2.last_date_ms == client.last_date_ms


@pytest.mark.looptime
async def test_waiting_calls_go_by_priority_then_by_age() -> None:
    limiter = RateLimiter(1, 1)
    order: list[str] = []
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def call(name: str, priority: Priority) -> None:
        await limiter.acquire(priority)
        order.append(f"{name}@{loop.time() - start:.0f}")

    names = [("a", Priority.RESYNC), ("b", Priority.RESYNC), ("c", Priority.SCALE), ("d", Priority.ROUND)]
    await asyncio.gather(*(call(n, p) for n, p in names))
    assert order == ["a@0", "d@1", "c@2", "b@3"]


@pytest.mark.looptime
async def test_cancelled_waiter_leaves_its_turn_to_the_next() -> None:
    limiter = RateLimiter(1, 1)
    await limiter.acquire(Priority.SCALE)
    loop = asyncio.get_running_loop()
    start = loop.time()
    gone = asyncio.create_task(limiter.acquire(Priority.ROUND))
    await asyncio.sleep(0.5)
    gone.cancel()
    await limiter.acquire(Priority.SCALE)
    assert loop.time() - start == 1


async def test_missing_kubeconfig_is_a_clear_error(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        await load(str(tmp_path / "nowhere"))


def test_names_cannot_reach_another_path() -> None:
    assert PODS.path("ns", "../secrets/x") == "/api/v1/namespaces/ns/pods/..%2Fsecrets%2Fx"
    with pytest.raises(ValueError, match="needs its namespace"):
        PODS.path(None, "x")
    with pytest.raises(ValueError, match="empty name"):
        PODS.path("ns", "")
