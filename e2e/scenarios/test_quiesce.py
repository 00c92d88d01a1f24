"""How running requests fare in each quiesce mode, and the one-token probe, behind a real router."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from e2e.scenarios.kit import TERMINAL, Fleet, engine_url, http, wait_until
from e2e.scenarios.routers import Router, routed_fleet, urls
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 30, "pausedSeconds": 30}
#: A token takes so long that requests are still running when the round comes.
SLOW_STEPS = ("--step-ms", "40")


def sync(mode: str) -> dict[str, Any]:
    return {"deadlines": DEADLINES, "drainSeconds": 60, "quiesce": {"mode": mode}}


def running(fleet: Fleet, pods: list[dict[str, Any]]) -> int:
    loads = [http("GET", engine_url(p) + "/v1/loads")[1]["loads"][0] for p in pods]
    return sum(int(load["num_running_reqs"]) for load in loads)


def generate(router: Router, tokens: int) -> tuple[int, Any]:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    return http("POST", router.url + "/generate", body, timeout=120)


def update_under_load(
    fleet: Fleet, router: Router, pods: list[dict[str, Any]], version: int, tokens: int
) -> list[tuple[int, Any]]:
    """Order a round while requests run; their answers. In the middle of it no router lists any engine."""
    fleet.publish(version)
    for pod in pods:
        fleet.fault(pod, "update_weights_from_disk", action="hold", times=1)
    with ThreadPoolExecutor() as pool:
        requests: list[Future[tuple[int, Any]]] = [pool.submit(generate, router, tokens) for _ in range(4)]
        wait_until(lambda: running(fleet, pods) == 4, "all requests to run")
        name = fleet.order(version)
        wait_until(lambda: fleet.phase(name) in ("Transferring", *TERMINAL), "Transferring", every=0.05)
        assert fleet.phase(name) == "Transferring", fleet.status("syncround", name)
        assert router.listed() == set()
        for pod in pods:
            fleet.heal(pod)
        done = fleet.ended(name)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        answers = [r.result() for r in requests]
    assert router.listed() == urls(pods)
    assert [fleet.label(p) for p in pods] == [str(version)] * len(pods)
    return answers


def test_draining_lets_requests_end_aborting_ends_them_and_keeping_is_refused(fleet: Fleet) -> None:
    router, pods = routed_fleet(fleet, 2, engine_args=SLOW_STEPS, sync=sync("Wait"))
    # Wait: every request ends as it would have, with the weights that it began with.
    for code, answer in update_under_load(fleet, router, pods, 1, 60):
        meta = answer["meta_info"]
        assert (code, meta["finish_reason"]["type"]) == (200, "length")
        assert [span["version"] for span in meta["weight_versions"]] == ["-1"]
    # Abort: they end at once, with what they had.
    fleet.pipeline(sync=sync("Abort"))
    for code, answer in update_under_load(fleet, router, pods, 2, 200):
        meta = answer["meta_info"]
        assert (code, meta["finish_reason"]["type"]) == (200, "abort")
        assert meta["completion_tokens"] < 200
        assert [span["version"] for span in meta["weight_versions"]] == ["1"]
    # Keep: refused before anything is touched.
    fleet.pipeline(sync=sync("Keep"))
    refused = fleet.sync(3)["status"]
    assert (refused["failure"]["stage"], refused["failure"]["reason"]) == ("Planned", "QuiesceUnsupported")
    assert "cache" in refused["failure"]["message"]
    assert [fleet.label(p) for p in pods] == ["2", "2"]
    assert not any(fleet.paused(p) for p in pods)
    assert router.listed() == urls(pods)


@pytest.mark.slow
def test_an_engine_that_cannot_generate_after_a_commit_is_closed_and_said(fleet: Fleet) -> None:
    probing = {"deadlines": DEADLINES, "probeGeneration": True}
    pods = serialized_fleet(fleet, 2, sync=probing)
    fleet.fault(pods[0], "generate", action="http500", times=1)
    status = fleet.sync(1)["status"]
    assert (status["phase"], status["committed"]) == ("Failed", True), status
    assert status["failure"]["reason"] == "RoutingDegraded"
    assert "ProbeFailed" in status["failure"]["message"]
    results = {m["engine"]: (m["result"], m.get("reason")) for m in status["members"]}
    assert results[pods[0]["metadata"]["name"]] == ("Unknown", "ProbeFailed")
    assert results[pods[1]["metadata"]["name"]][0] == "Ok"
    assert not fleet.paused(pods[1])
    # Nothing proves its weights any more: it serves again only after a catch-up loaded them anew, or as another pod.
    wait_until(lambda: all(not fleet.paused(p) for p in fleet.ready_engines(2)), "both engines to serve")
    assert len({fleet.checksum(p) for p in fleet.engines()}) == 1
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
