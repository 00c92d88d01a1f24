"""The server of worker discovery over real sockets: shapes, refusals, readers that misbehave."""

from __future__ import annotations

import asyncio

import pytest

from rlfleet.discovery import server as module
from rlfleet.plan.discovery import Scope
from tests.discovery.kit import Site
from tests.plan.test_discovery import worker


async def test_the_list_has_dynamos_form(site: Site) -> None:
    status, body, headers = await site.get()
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["Cache-Control"] == "no-store"
    assert "Content-Encoding" not in headers
    assert body.keys() == {"protocol_version", "namespace", "workers"}
    assert (body["protocol_version"], body["namespace"]) == (1, "dynamo")
    identities = [(w["namespace"], w["component"], w["endpoint"], w["instance_id"]) for w in body["workers"]]
    assert identities == sorted(set(identities))
    (bad,) = (w for w in body["workers"] if "error" in w)
    assert (bad["rlfleet"]["pod"], bad["routes"]) == ("e-1", [])
    assert "system_url" not in bad
    assert "TimeoutError" in bad["error"]
    assert all(w["rlfleet"]["version"] == 3 for w in body["workers"] if w is not bad)
    assert all(type(w["instance_id"]) is int for w in body["workers"])


async def test_for_clients_that_take_no_other_member(site: Site) -> None:
    status, body, _ = await site.get("/strict/v1/rl/workers")
    assert status == 200
    known = {
        "namespace", "component", "endpoint", "instance_id", "transport", "request_plane_url", "system_url", "model",
        "routes", "world_size", "error", "admin_base_url",
    }  # fmt: skip
    assert [w.keys() <= known for w in body["workers"]] == [True] * 3


async def test_a_base_url_may_name_a_namespace_and_a_pipeline(site: Site) -> None:
    for before, scope, count in (
        ("", Scope(), 3),
        ("/namespaces/team", Scope("team"), 3),
        ("/namespaces/team/pipelines/q", Scope("team", "q"), 1),
        ("/strict/namespaces/team/pipelines/q", Scope("team", "q"), 1),
    ):
        status, body, _ = await site.get(f"{before}/v1/rl/workers")
        assert (status, len(body["workers"]), site.scopes[-1]) == (200, count, scope)
    assert (await site.get("/namespaces/Team_A/v1/rl/workers"))[0] == 404


async def test_nothing_known_is_500_in_dynamos_form(site: Site) -> None:
    site.failure = "the apiserver is away"
    status, body, _ = await site.get()
    assert (status, body) == (500, {"error": "discovery_failed", "message": "the apiserver is away"})
    site.failure = ""
    site.workers = []
    assert (await site.get())[1] == {"protocol_version": 1, "namespace": "dynamo", "workers": []}
    await site.until(["Failed", "Ok"])


async def test_it_is_read_only_and_nothing_else_is_there(site: Site) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert (await site.get(method=method))[0] == 405
    for path in ("/", "/metrics", "/v1/rl", "/v1/rl/workers/1", "/engine/pause_generation"):
        status, body, _ = await site.get(path)
        assert (status, body["error"]) == (404, "not_served")
    status, body, headers = await site.get(method="HEAD")
    assert (status, body) == (200, None)
    assert int(headers["Content-Length"]) > 100


async def test_who_may_not_read_is_told_why_before_anything_is_asked(site: Site) -> None:
    status, body, _ = await site.get(Authorization="Bearer stranger")
    assert (status, body) == (403, {"error": "denied", "message": "not yours"})
    status, _, headers = await site.get(Authorization="")
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert site.scopes == []
    await site.until(["Denied", "Denied"])


async def test_readers_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READERS", 2)
    site.hold = asyncio.Event()
    waiting = [asyncio.create_task(site.get()) for _ in range(2)]
    async with asyncio.timeout(120):
        while site.server._readers < 2:
            await asyncio.sleep(0.01)
    status, body, headers = await site.get()
    assert (status, body["error"], headers["Retry-After"]) == (503, "busy", "1")
    site.hold.set()
    assert [(await w)[0] for w in waiting] == [200, 200]
    await site.until(["Busy", "Ok", "Ok"])
    assert (await site.get())[0] == 200


async def test_callers_without_rights_take_no_reader_s_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the apiserver takes to say that they have none."""
    monkeypatch.setattr(module, "MAX_READERS", 2)
    site.judge = asyncio.Event()
    strangers = [asyncio.create_task(site.get(Authorization="Bearer stranger")) for _ in range(4)]
    async with asyncio.timeout(30):
        while site.server._judged < 4:
            await asyncio.sleep(0.01)
    assert (await site.get())[0] == 200, "who is known to be a reader is answered meanwhile"
    monkeypatch.setattr(module, "MAX_JUDGED", 4)
    assert (await site.get())[0] == 503, "they are bounded, too"
    site.judge.set()
    assert {(await s)[0] for s in strangers} == {403}
    assert (site.server._judged, site.server._readers) == (0, 0)
    assert (await site.get())[0] == 200


async def test_a_judgement_that_does_not_come_gives_its_place_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JUDGE_SECONDS", 0.1)
    site.judge = asyncio.Event()
    status, body, _ = await site.get(Authorization="Bearer somebody")
    assert (status, body["error"], site.server._judged) == (502, "denied", 0)


async def test_a_reader_that_hangs_up_is_forgotten(site: Site) -> None:
    site.hold = asyncio.Event()
    waiting = asyncio.create_task(site.get())
    async with asyncio.timeout(120):
        while not site.scopes:
            await asyncio.sleep(0.01)
    waiting.cancel()
    await site.until(["Gone"])
    assert site.server._readers == 0
    site.hold.set()
    assert (await site.get())[0] == 200


async def test_a_reader_that_does_not_take_its_answer_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.5)
    site.workers = [worker(f"e-{i}", model="x" * 8000) for i in range(4000)]  # more than sockets buffer
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port, limit=1024)
    writer.write(b"GET /v1/rl/workers HTTP/1.1\r\nHost: x\r\n\r\n")
    await site.until(["Gone"])
    assert site.server._readers == 0
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(2**28)
    writer.close()
