"""How the command line gets to the operator: a URL, or a port that kubectl forwards to the leader's pod."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlfleet.cli import operator as reach
from rlfleet.cli.cluster import Cluster
from rlfleet.cli.failures import CliError, Exit
from rlfleet.client.credentials import Access

ANSWER = {"observed": {}, "explanation": {"would": "WouldRun"}}


class Both:
    """An apiserver with the leader's Lease, and the operator's page, on one port."""

    def __init__(self) -> None:
        self.holder = "rlfleet-7_uid_nonce"
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.clusters: list[Cluster] = []
        app = web.Application()
        app.router.add_get("/apis/coordination.k8s.io/v1/namespaces/ops/leases/rlfleet-operator", self._lease)
        app.router.add_get("/api/look", self._look)
        self.server = TestServer(app)

    async def _lease(self, _: web.Request) -> web.Response:
        return web.json_response({"spec": {"holderIdentity": self.holder}})

    async def _look(self, request: web.Request) -> web.Response:
        self.asked.append((request.headers["Authorization"], dict(request.query)))
        if request.query["pipeline"] == "secret":
            return web.json_response({"error": "pods is forbidden"}, status=403)
        return web.json_response(ANSWER)

    def way(self, *, url: str | None = None, token: str | None = None, mine: str | None = "Bearer mine") -> reach.Way:
        access = Access(str(self.server.make_url("")).rstrip("/"), None, lambda: mine)
        self.clusters.append(Cluster(access, "ns"))
        return reach.Way(self.clusters[-1], url, token, "ops", "/k/config", "here")


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    """Both servers."""
    one = Both()
    await one.server.start_server()
    yield one
    for cluster in one.clusters:
        cluster.close()
    await one.server.close()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a program called kubectl first on the PATH; it writes its arguments to a file."""

    def make(script: str) -> Path:
        file, log = tmp_path / "kubectl", tmp_path / "arguments"
        file.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return log

    return make


async def ask(way: reach.Way, pipeline: str = "p", **wanted: str) -> dict[str, Any]:
    return await asyncio.to_thread(reach.look, way, "ns", pipeline, **wanted)


async def test_a_url_is_asked_with_the_kubeconfigs_token_or_the_one_that_is_given(both: Both) -> None:
    url = str(both.server.make_url("/"))
    assert await ask(both.way(url=url), version="3") == ANSWER
    await ask(both.way(url=url, token="other"))
    assert both.asked == [
        ("Bearer mine", {"namespace": "ns", "pipeline": "p", "version": "3"}),
        ("Bearer other", {"namespace": "ns", "pipeline": "p"}),
    ]


async def test_the_port_is_forwarded_to_the_leaders_pod_and_given_back(
    both: Both, kubectl: Callable[[str], Path]
) -> None:
    port = both.server.port
    log = kubectl(f'echo "Forwarding from 127.0.0.1:{port} -> 9470"\nexec sleep 300')
    assert await ask(both.way()) == ANSWER
    words = log.read_text().split()
    assert words == [
        "--kubeconfig=/k/config", "--context=here", "port-forward", "-n", "ops", "pod/rlfleet-7", ":9470"
    ]  # fmt: skip


async def test_one_forward_serves_many_looks_and_one_failure_is_told_at_each(
    both: Both, kubectl: Callable[[str], Path]
) -> None:
    def looks(way: reach.Way) -> list[Any]:
        with reach.opened(way) as there:
            return [reach.look(there, "ns", name) for name in ("p", "q")]

    log = kubectl(f'echo "Forwarding from 127.0.0.1:{both.server.port} -> 9470"\nexec sleep 300')
    assert await asyncio.to_thread(looks, both.way()) == [ANSWER, ANSWER]
    assert len(log.read_text().splitlines()) == 1

    def refused(way: reach.Way) -> None:
        with reach.opened(way) as there:
            for name in ("p", "q"):
                with pytest.raises(CliError, match="no operator runs"):
                    reach.look(there, "ns", name)

    both.holder = ""
    await asyncio.to_thread(refused, both.way())


async def test_a_forward_that_fails_says_what_kubectl_said(both: Both, kubectl: Callable[[str], Path]) -> None:
    kubectl("echo 'pods \"rlfleet-7\" is forbidden' >&2; exit 1")
    with pytest.raises(CliError, match=r'rlfleet-7" is forbidden.*pods/portforward') as e:
        await ask(both.way())
    assert e.value.code is Exit.UNREACHABLE


async def test_without_a_leader_without_a_token_or_without_rights_it_says_what_to_do(both: Both) -> None:
    url = str(both.server.make_url("/"))
    both.holder = ""
    with pytest.raises(CliError, match="no operator runs"):
        await ask(both.way())
    with pytest.raises(CliError, match="kubectl create token") as e:
        await ask(both.way(url=url, mine=None))
    assert e.value.code is Exit.FORBIDDEN
    with pytest.raises(CliError, match="pods is forbidden") as e:
        await ask(both.way(url=url), "secret")
    assert e.value.code is Exit.FORBIDDEN
    with pytest.raises(CliError, match="--web-bind") as e:
        await ask(both.way(url="http://127.0.0.1:1"))
    assert e.value.code is Exit.UNREACHABLE


async def test_a_leader_that_is_no_pod_is_reached_by_a_url(both: Both, kubectl: Callable[[str], Path]) -> None:
    kubectl("echo 'Error from server (NotFound): pods \"rlfleet-7\" not found' >&2; exit 1")
    with pytest.raises(CliError, match=r"rlfleet-7 leads.*--operator URL") as e:
        await ask(both.way())
    assert e.value.code is Exit.UNREACHABLE
    assert "portforward" not in str(e.value), "no right is missing"
