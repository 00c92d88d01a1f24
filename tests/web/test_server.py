"""What the web page's server answers to whom: with the viewer's own token, read-only, and with a strict policy."""

from __future__ import annotations

import asyncio
from io import StringIO
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from rlfleet.cli.asking import explained
from rlfleet.control.explaining import Wanted
from rlfleet.kube.config import Credentials
from rlfleet.web.server import WebServer
from rlfleet.web.shared import KEPT, LEAST_SECONDS, MOST_SECONDS, Shared
from rlfleet.web.viewer import Denied
from tests.cli.fleets import large
from tests.web.apiserver import Apiserver
from tests.web.conftest import serving


async def get(
    page: WebServer, path: str, token: str | None = "all", method: str = "GET"
) -> tuple[int, Any, dict[str, str]]:
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{page.port}{path}", headers=headers) as response,
    ):
        json = response.content_type == "application/json"
        return response.status, await (response.json() if json else response.text()), dict(response.headers)


async def test_the_tree_and_rounds_are_read_with_the_viewers_token_alone(page: WebServer, apiserver: Apiserver) -> None:
    status, body, _ = await get(page, "/api/fleet")
    assert status == 200
    assert [p["name"] for p in body["pipelines"]] == ["p"]
    assert body["pipelines"][0]["lag"] == 1
    assert body["rounds"][0]["failure"]["reason"] == "StagingDeadline"
    assert {who for _, who in apiserver.seen} == {"Bearer all"}


async def test_tabs_share_one_look_that_each_of_them_must_be_allowed(apiserver: Apiserver) -> None:
    where = "/api/fleet?namespace=t-8dbb0a5ba5"
    async with serving(apiserver, Shared(lambda: 0.0)) as page:
        answers = await asyncio.gather(*(get(page, where, token) for token in ("all", "one", "all", "one")))
        assert [status for status, _, _ in answers] == [200] * 4
        assert all(body == answers[0][1] for _, body, _ in answers)
        assert len(apiserver.looks) == 3, "one list of each kind for all of them"
        # It is kept, and shown to nobody who may not look: neither to one without rights, nor of another namespace.
        assert (await get(page, where, "none"))[0] == 403
        assert (await get(page, where, "forged"))[0] == 401
        assert (await get(page, "/api/fleet", "one"))[0] == 403
        assert len(apiserver.looks) == 3


class Slow:
    """A clock, and looks that take so many seconds of it."""

    def __init__(self, took: float) -> None:
        self.now, self.took, self.made = 0.0, took, 0

    def __call__(self) -> float:
        return self.now

    async def make(self) -> str:
        self.made += 1
        self.now += self.took
        return f"look {self.made}"


@pytest.mark.parametrize(("took", "kept"), [(0.0, LEAST_SECONDS), (0.5, 10.0), (60.0, MOST_SECONDS)])
async def test_a_look_is_kept_for_longer_the_longer_it_takes(took: float, kept: float) -> None:
    slow = Slow(took)
    looks = Shared(slow)
    assert await looks.get("a", slow.make) == "look 1"
    slow.now += kept - 0.01
    assert await looks.get("a", slow.make) == "look 1"
    slow.now += 0.02
    assert await looks.get("a", slow.make) == "look 2"


async def test_a_look_that_fails_is_nobody_elses_failure() -> None:
    looks = Shared()

    async def fail() -> str:
        raise Denied(401, "expired")

    async def work() -> str:
        return "seen"

    with pytest.raises(Denied):
        await looks.get("a", fail)
    assert await looks.get("a", work) == "seen"


async def test_no_more_looks_are_kept_than_some() -> None:
    slow = Slow(0.0)
    looks = Shared(slow)
    for i in range(KEPT + 1):
        await looks.get(f"n{i}", slow.make)
        slow.now += 0.001
    await looks.get(f"n{KEPT}", slow.make)
    assert slow.made == KEPT + 1
    await looks.get("n0", slow.make)
    assert slow.made == KEPT + 2, "the oldest one made room"


async def test_a_token_that_reads_one_namespace_sees_that_and_is_told_how(page: WebServer) -> None:
    status, body, _ = await get(page, "/api/fleet?namespace=t-8dbb0a5ba5", "one")
    assert (status, len(body["pipelines"])) == (200, 1)
    status, body, _ = await get(page, "/api/fleet", "one")
    assert status == 403
    assert "Name a namespace that this token may read" in body["error"]
    status, body, _ = await get(page, "/api/fleet?namespace=other", "one")
    assert status == 403
    assert "pipelines" not in body


@pytest.mark.parametrize("token", [None, "", "forged", "all extra", "x" * 4000])
async def test_without_a_token_that_the_apiserver_takes_nothing_is_shown(page: WebServer, token: str | None) -> None:
    for path in ("/api/fleet", "/api/look?namespace=t-8dbb0a5ba5&pipeline=p&version=1"):
        status, body, headers = await get(page, path, token)
        assert (status, list(body)) == (401, ["error"])
        assert headers["WWW-Authenticate"] == "Bearer"


async def test_a_dry_run_needs_the_right_to_read_what_it_tells(page: WebServer, apiserver: Apiserver) -> None:
    path = "/api/look?namespace=t-8dbb0a5ba5&pipeline=p&version=1"
    assert (await get(page, path, "none"))[0] == 403
    status, body, _ = await get(page, path, "one")
    assert status == 503  # it got as far as the operator, which is a standby here
    assert "standby" in body["error"]
    home = "/apis/rlfleet.dev/v1alpha1/namespaces/t-8dbb0a5ba5"
    asked = {p for p, who in apiserver.seen if who == "Bearer one"}
    assert asked == {
        f"{home}/rlpipelines/p", f"{home}/enginepools", f"{home}/syncrounds", "/api/v1/namespaces/t-8dbb0a5ba5/pods"
    }  # fmt: skip


async def test_a_dry_run_answers_what_the_command_line_and_the_page_read(page: WebServer) -> None:
    status, body, _ = await get(page, "/api/look?namespace=t-8dbb0a5ba5&pipeline=p&version=2", "one")
    assert status == 200
    said = body["explanation"]
    assert said["would"] == "WouldRun"
    assert said["mayMiss"] == 1
    assert said["engines"][0] == {
        "engine": "a", "pool": "pool", "joins": True, "why": "its gate answers and its engine is awake",
        "transport": "Serialized", "rankOffset": None, "worldSize": 1,
    }  # fmt: skip
    drawn = StringIO()
    Console(file=drawn, width=80, no_color=True).print(explained("ns/p", 2, said))
    assert "a sync to v2 would run" in drawn.getvalue()
    assert "b       stays out" in drawn.getvalue()


@pytest.mark.parametrize(
    "query",
    [
        "namespace=a/../b&pipeline=p", "namespace=a&pipeline=..%2Fx", "namespace=a", "pipeline=p",
        "namespace=a&pipeline=p&version=x", "namespace=a&pipeline=p&version=-2",
        "namespace=a&pipeline=p&version=1&digest=%0a",
    ],
)  # fmt: skip
async def test_parameters_that_are_no_names_or_versions_are_refused_before_anything_is_asked(
    page: WebServer, apiserver: Apiserver, query: str
) -> None:
    assert (await get(page, f"/api/look?{query}"))[0] == 400
    assert apiserver.seen == []


async def test_it_is_read_only_and_everything_carries_the_policy(page: WebServer) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        for path in ("/", "/api/fleet", "/api/look"):
            assert (await get(page, path, method=method))[0] == 405
    for path in ("/", "/app.js", "/style.css", "/icon.svg", "/api/fleet", "/nowhere"):
        _, _, headers = await get(page, path, None)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


async def test_static_files_need_no_token_and_hold_no_inline_code(page: WebServer) -> None:
    status, html, _ = await get(page, "/", None)
    assert status == 200
    assert "<script src=" in html
    assert " style=" not in html
    assert " on" + "click" not in html
    assert (await get(page, "/static/../server.py", None))[0] == 404


async def test_lists_longer_than_a_page_are_read_whole(page: WebServer, apiserver: Apiserver) -> None:
    objects = large(200)
    first = objects["syncrounds"][0]
    objects["syncrounds"] += [
        {**first, "metadata": {**first["metadata"], "name": f"r-{i}", "creationTimestamp": "2026-12-01T00:00:00Z"}}
        for i in range(600)
    ]
    apiserver.objects = objects
    _, body, _ = await get(page, "/api/fleet")
    assert len(body["rounds"]) == 60
    assert body["rounds"][0]["name"].startswith("r-")
    assert body["pipelines"][0]["pools"][0]["unlisted"] == 199


async def test_an_apiserver_that_is_away_is_said(page: WebServer, apiserver: Apiserver) -> None:
    await apiserver.server.close()
    status, body, _ = await get(page, "/api/fleet")
    assert status == 502
    assert "the apiserver does not answer" in body["error"]


async def test_something_else_than_an_apiserver_is_said() -> None:
    async def page_of_login(_: web.Request) -> web.Response:
        return web.Response(text="<html>log in</html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page_of_login)
    async with TestServer(app) as other:

        async def where() -> Credentials:
            return Credentials(str(other.make_url("")).rstrip("/"))

        async def report(namespace: str, name: str, wanted: Wanted | None) -> dict[str, Any]:
            raise AssertionError("nothing is looked at for who may read nothing")

        page = WebServer("127.0.0.1", 0, where=where, report=report)
        await page.start()
        try:
            for path in ("/api/fleet", "/api/look?namespace=a&pipeline=p"):
                status, body, _ = await get(page, path)
                assert (status, body) == (502, {"error": "the apiserver answered something else than JSON"})
        finally:
            await page.stop()


async def test_a_look_that_hangs_does_not_hold_up_the_end(apiserver: Apiserver) -> None:
    asked = asyncio.Event()

    async def where() -> Credentials:
        return Credentials(str(apiserver.server.make_url("")).rstrip("/"))

    async def report(namespace: str, name: str, wanted: Wanted | None) -> dict[str, Any]:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    page = WebServer("127.0.0.1", 0, where=where, report=report)
    await page.start()
    asking = asyncio.create_task(get(page, "/api/look?namespace=t-8dbb0a5ba5&pipeline=p"))
    await asked.wait()
    # aiohttp itself would wait a minute for the answer.
    async with asyncio.timeout(50):
        await page.stop()
    with pytest.raises(aiohttp.ClientError):
        await asking
