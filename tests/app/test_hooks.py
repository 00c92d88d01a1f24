"""The chart's jobs: decisions of the CRD upgrade; the rest is tested where helm runs them (tests/chart)."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlfleet.api import crdgen
from rlfleet.app.hooks import __main__ as command
from rlfleet.app.hooks import check
from rlfleet.app.hooks.crds import merged
from rlfleet.app.hooks.steps import HookError, steadily, until
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.kube.errors import NotFound, Unavailable


def live(**status: Any) -> dict[str, Any]:
    """An installed CRD with things of others on it."""
    made = crdgen.crd(crdgen.KINDS[0])
    made["metadata"] |= {
        "resourceVersion": "7",
        "uid": "u",
        "labels": {"theirs": "a"},
        "annotations": {"helm.sh/resource-policy": "keep"},
    }
    made["spec"]["conversion"] = {"strategy": "None"}
    made["spec"]["versions"][0]["additionalPrinterColumns"] = []
    return {**made, "status": status}


def test_a_crd_is_replaced_as_it_was_read_with_what_others_wrote_on_it() -> None:
    wanted = crdgen.crd(crdgen.KINDS[0])
    wanted["metadata"]["annotations"] = {"ours": "b"}
    body = merged(live(storedVersions=["v1alpha1"]), wanted)
    assert body["metadata"]["resourceVersion"] == "7"
    assert body["metadata"]["labels"] == {"theirs": "a"}
    assert body["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep", "ours": "b"}
    assert body["spec"]["versions"] == wanted["spec"]["versions"]
    assert body["spec"]["conversion"] == {"strategy": "None"}


def test_a_version_that_objects_are_stored_in_is_never_taken_away() -> None:
    with pytest.raises(HookError, match="stored as v1, which this release does not serve"):
        merged(live(storedVersions=["v1alpha1", "v1"]), crdgen.crd(crdgen.KINDS[0]))


def test_helm_test_takes_no_pipeline_of_somebody_else_for_its_own() -> None:
    made = check._pipeline("rlfleet-test")
    # As the apiserver gives it back: with defaults.
    made["spec"]["weights"]["sender"]["port"] = 9450
    assert check.is_the_tests(made)
    theirs = {"spec": {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}}}
    files = {"spec": {"weights": {"checkpoint": {"pathTemplate": "/v{version}"}}}}
    assert not any(check.is_the_tests(p) for p in (theirs, files, {"metadata": {"name": "rlfleet-test"}}))


async def test_a_wrong_pipeline_that_is_refused_for_its_name_alone_was_accepted() -> None:
    answers = {"POST": (409, {"reason": "AlreadyExists"}), "GET": (404, {"reason": "NotFound"})}

    async def answer(request: web.Request) -> web.Response:
        status, body = answers[request.method]
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)

    async def where() -> Credentials:
        return Credentials(str(server.make_url("")).rstrip("/"))

    async with TestServer(app, host="127.0.0.1") as server, KubeClient(where) as kube:
        with pytest.raises(HookError, match="Telepathy was accepted"):
            await check.check(kube, "ns", "rlfleet-test", seconds=1)


async def test_what_may_be_asked_again_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlfleet.app.hooks.steps.LOOK_SECONDS", 0.0)
    answers: list[Exception | str] = [Unavailable("away", call="get x"), "here"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await steadily(call) == "here"
    answers += [NotFound("gone", call="get x"), "never"]
    with pytest.raises(NotFound):
        await steadily(call)


async def test_an_apiserver_that_stays_away_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlfleet.app.hooks.steps.LOOK_SECONDS", 0.0)
    calls = []

    async def call() -> str:
        calls.append(1)
        raise Unavailable("away", call="get x")

    with pytest.raises(Unavailable):
        await steadily(call)
    assert 1 < len(calls) < 20


async def test_waiting_ends_with_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlfleet.app.hooks.steps.LOOK_SECONDS", 0.0)
    looks = iter([False, False, True])

    async def look() -> bool:
        return next(looks)

    assert await until(look, 60.0)

    async def never() -> bool:
        return False

    assert not await until(never, 0.0)


def test_without_credentials_the_job_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    assert command.main(["crds"]) == 1
    assert "error: cannot load Kubernetes credentials from /nowhere/kubeconfig" in capsys.readouterr().err
