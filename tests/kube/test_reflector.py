"""The view: deletions that no watch told, own writes, versions that never go back, broken watches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.kube.reflector import Change, Reflector
from rlfleet.kube.resources import PODS, Resource
from tests.kube.proxy import Mode, Proxy

CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
T = 60.0


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(view: Reflector) -> AsyncIterator[None]:
    task = asyncio.create_task(view.run())
    try:
        async with asyncio.timeout(120):
            await view.wait_synced()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def obj(name: str, version: int, *, uid: str = "", labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": uid or f"u-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata | ({"labels": labels} if labels else {}) | more}


class Script:
    """An apiserver that serves prepared lists, and watches that end as the test says."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.lists = 0
        self.streams: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.selector = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            self.selector = request.query.get("labelSelector", "")
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": self.items})
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.streams.append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await queue.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    async def send(self, type_: str, object_: dict[str, Any]) -> None:
        await until(lambda: self.streams)
        self.version = max(self.version, int(object_["metadata"].get("resourceVersion", 0)))
        self.streams[-1].put_nowait({"type": type_, "object": object_})

    async def gone(self) -> None:
        """What the apiserver sends when the watched version was compacted."""
        await until(lambda: self.streams)
        stream = self.streams.pop()
        stream.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
        stream.put_nowait(None)

    async def end(self) -> None:
        await until(lambda: self.streams)
        self.streams.pop().put_nowait(None)


@pytest.fixture
async def script() -> AsyncIterator[tuple[Script, KubeClient]]:
    made = Script()
    app = web.Application()
    app.router.add_get("/{any:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def source() -> Credentials:
        return Credentials(f"http://127.0.0.1:{runner.addresses[0][1]}")

    async with KubeClient(source) as client:
        yield made, client
    for stream in made.streams:
        stream.put_nowait(None)
    await runner.cleanup()


async def test_object_that_vanished_during_a_broken_watch_is_reported_as_deleted(
    script: tuple[Script, KubeClient],
) -> None:
    server, client = script
    server.items, server.version = [obj("a", 5, labels={"app": "x"}), obj("b", 6)], 6
    changes: list[Change] = []
    view = Reflector(client, PODS, on_change=changes.append, index_labels=("app",))
    async with running(view):
        assert [o["metadata"]["name"] for o in view.by_label("app", "x")] == ["a"]
        changes.clear()
        server.items, server.version = [obj("b", 6)], 9
        await server.gone()
        await until(lambda: view.get("ns", "a") is None)
        assert [(c.key, c.labels, c.old_labels) for c in changes] == [(("ns", "a"), {}, {"app": "x"})]
        assert view.by_label("app", "x") == []
        assert view.by_uid("u-a") is None
        assert server.lists == 2


async def test_an_object_that_went_is_remembered_as_it_was_seen_last(
    script: tuple[Script, KubeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlfleet.kube.reflector.DEPARTED", 1)
    server, client = script
    view = Reflector(client, PODS)
    async with running(view):
        await server.send("ADDED", obj("a", 5))
        await server.send("MODIFIED", obj("a", 6, deletionTimestamp="2026-01-01T00:00:00Z"))
        await server.send("DELETED", obj("a", 7))
        await until(lambda: view.last_of("u-a"))
        last = view.last_of("u-a")
        assert last is not None
        assert "deletionTimestamp" in last["metadata"]
        assert view.by_uid("u-a") is None
        await server.send("ADDED", obj("b", 8))
        await server.send("DELETED", obj("b", 9))
        await until(lambda: view.last_of("u-b"))
        assert view.last_of("u-a") is None, "only so many are remembered"


async def test_an_object_is_remembered_as_it_was_before_its_deletion_was_asked_for(
    script: tuple[Script, KubeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlfleet.kube.reflector.DEPARTED", 1)
    server, client = script
    view = Reflector(client, PODS)
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    async with running(view):
        await server.send("ADDED", obj("a", 5, labels={"phase": "1"}))
        await server.send("MODIFIED", obj("a", 6, labels={"phase": "2"}))
        await until(lambda: (found := view.get("ns", "a")) and found["metadata"]["labels"] == {"phase": "2"})
        assert view.before_deletion("u-a") is None
        await server.send("MODIFIED", obj("a", 7, labels={"phase": "3"}, **going))
        await server.send("MODIFIED", obj("a", 8, labels={"phase": "4"}, **going))
        await server.send("DELETED", obj("a", 9, labels={"phase": "4"}, **going))
        await until(lambda: view.last_of("u-a"))
        before = view.before_deletion("u-a")
        assert before is not None
        assert before["metadata"]["labels"] == {"phase": "2"}
        await server.send("ADDED", obj("b", 10))
        await server.send("MODIFIED", obj("b", 11, **going))
        await until(lambda: view.before_deletion("u-b"))
        assert view.before_deletion("u-a") is None, "only so many are remembered"


async def test_stream_that_ends_is_continued_without_a_new_list(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    view = Reflector(client, PODS)
    async with running(view):
        await server.end()
        await server.send("ADDED", obj("a", 7))
        await until(lambda: view.get("ns", "a"))
        assert server.lists == 1


async def test_view_never_goes_back(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    view = Reflector(client, PODS)
    async with running(view):
        await server.send("ADDED", obj("a", 7, note="new"))
        await server.send("MODIFIED", obj("a", 5, note="old"))
        await server.send("ADDED", obj("b", 8))
        await until(lambda: view.get("ns", "b"))
        found = view.get("ns", "a")
        assert found is not None
        assert found["metadata"]["note"] == "new"


async def test_deletion_of_a_former_object_does_not_remove_its_successor(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    view = Reflector(client, PODS)
    async with running(view):
        await server.send("ADDED", obj("a", 9, uid="second"))
        await server.send("DELETED", obj("a", 8, uid="first"))
        await server.send("ADDED", obj("b", 10))
        await until(lambda: view.get("ns", "b"))
        assert view.by_uid("second") is not None


async def test_an_own_write_is_seen_at_once_and_an_older_event_does_not_undo_it(
    script: tuple[Script, KubeClient],
) -> None:
    server, client = script
    server.items, server.version = [obj("a", 5)], 5
    view = Reflector(client, PODS)
    async with running(view):
        view.observe(obj("a", 8))
        await server.send("MODIFIED", obj("a", 7))
        await server.send("ADDED", obj("x", 7))
        await until(lambda: view.get("ns", "x"))
        found = view.get("ns", "a")
        assert found is not None
        assert found["metadata"]["resourceVersion"] == "8"


async def test_an_own_deletion_is_named_until_the_view_shows_it(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    server.items, server.version = [obj("a", 5), obj("b", 5), obj("c", 5)], 5
    view = Reflector(client, PODS)
    async with running(view):
        for name in ("a", "b", "c"):
            view.note_delete("ns", name, f"u-{name}")
        view.note_delete("ns", "none", "u-none")
        assert view.stale_keys("ns") == [("ns", "a"), ("ns", "b"), ("ns", "c")]
        assert view.stale_keys("ns", "a") == [("ns", "a")]
        assert view.stale_keys("ns", older_than=3600) == view.stale_keys("elsewhere") == []
        await server.send("MODIFIED", obj("a", 6))
        await server.send("ADDED", obj("x", 7))
        await until(lambda: view.get("ns", "x"))
        assert ("ns", "a") in view.stale_keys("ns"), "a change that is no deletion"
        await server.send("MODIFIED", obj("a", 8, deletionTimestamp="now"))
        await server.send("DELETED", obj("c", 9))
        await server.send("MODIFIED", obj("b", 10, uid="its successor"))
        await until(lambda: not view.stale_keys("ns"))


async def test_live_reads_settle_what_the_watch_does_not_show(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    server.items, server.version = [obj("a", 5), obj("b", 5)], 5
    view = Reflector(client, PODS)
    async with running(view):
        for name in ("a", "b"):
            view.note_delete("ns", name, f"u-{name}")
        view.observe(obj("a", 8, deletionTimestamp="now"))
        assert view.stale_keys("ns") == [("ns", "b")]
        view.observe_absent("ns", "b")
        assert view.stale_keys("ns") == []


async def test_selection_by_labels(script: tuple[Script, KubeClient]) -> None:
    server, client = script
    server.items = [
        obj("a", 1, labels={"app": "x", "tier": "1"}),
        obj("b", 1, labels={"app": "x", "tier": "2"}),
        obj("c", 1, labels={"tier": "2"}),
    ]
    view = Reflector(client, PODS, index_labels=("app",), label_selector="managed=yes")
    async with running(view):
        assert server.selector == "managed=yes"

        def names(match: dict[str, str], namespace: str = "ns") -> list[str]:
            return [o["metadata"]["name"] for o in view.select(namespace, match)]

        assert names({"app": "x", "tier": "2"}) == ["b"]
        assert names({"tier": "2"}) == ["b", "c"]
        assert names({"tier": "2"}, "other") == []
        assert names({}) == [], "no selector selects nothing, never everything"


@pytest.mark.cluster
async def test_view_is_right_again_after_an_outage(
    kube: KubeClient, proxied: KubeClient, proxy: Proxy, namespace: str
) -> None:
    made = [await kube.create(CONFIGMAPS, namespace, {"metadata": {"name": f"c{i}"}}, timeout=T) for i in range(3)]
    resets: list[str] = []
    view = Reflector(
        proxied,
        CONFIGMAPS,
        namespaces=[namespace],
        inactivity_timeout=0.5,
        list_timeout=0.5,
        on_reset=resets.append,
    )
    async with running(view):
        assert view.get(namespace, "c1") is not None
        proxy.mode = Mode.DROP
        await kube.delete(CONFIGMAPS, namespace, "c1", uid=made[1]["metadata"]["uid"], timeout=T)
        await kube.create(CONFIGMAPS, namespace, {"metadata": {"name": "c9"}}, timeout=T)
        await until(lambda: len(resets) >= 5)  # the watch was tried again, given up, and listing fails too
        assert view.get(namespace, "c1") is not None, "silence is not a deletion"
        proxy.mode = Mode.PASS
        await until(lambda: view.get(namespace, "c1") is None and view.get(namespace, "c9"))
        assert view.get(namespace, "c0") is not None


@pytest.mark.cluster
async def test_several_namespaces_are_one_view_and_no_others(kube: KubeClient, namespace: str) -> None:
    config = {"metadata": {"name": "c", "labels": {"app": "x"}}}
    second = f"{namespace}-2"
    await kube.create(NAMESPACES, None, {"metadata": {"name": second}}, timeout=T)
    for where in (namespace, second, "default"):
        await kube.create(CONFIGMAPS, where, config, timeout=T)
    try:
        # Lists again all the time: the list of one namespace must not take the other's objects for deleted.
        gone: list[Change] = []
        view = Reflector(
            kube,
            CONFIGMAPS,
            namespaces=[namespace, second],
            index_labels=["app"],
            relist_seconds=1.1,
            on_change=lambda c: gone.append(c) if not c.labels and c.old_labels else None,
        )
        async with running(view):
            found = view.by_label("app", "x")
            assert [o["metadata"]["namespace"] for o in found] == [namespace, second]
            await kube.create(CONFIGMAPS, second, {"metadata": {"name": "mine"}}, timeout=T)
            await until(lambda: view.get(second, "mine"))
            uid = found[0]["metadata"]["uid"]
            await kube.delete(CONFIGMAPS, namespace, "c", uid=uid, timeout=T)
            view.note_delete(namespace, "c", uid)
            await until(lambda: not view.stale_keys(namespace) and gone)
            assert [c.key for c in gone] == [(namespace, "c")]
    finally:
        await kube.delete(CONFIGMAPS, "default", "c", uid=await uid_of(kube, "default", "c"), timeout=T)
        await kube.delete(NAMESPACES, None, second, uid=await uid_of(kube, None, second), timeout=T)


async def uid_of(kube: KubeClient, namespace: str | None, name: str) -> str:
    found = await kube.get(NAMESPACES if namespace is None else CONFIGMAPS, namespace, name, timeout=T)
    return str(found["metadata"]["uid"])
