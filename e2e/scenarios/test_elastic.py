"""Engines that sleep and wake: by spec.active under load, all of them, from the start, and whoever dies meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import ROOT, Fleet, Operator, condition, engine_url, http, wait_until
from e2e.scenarios.routers import ROUTER_PORT, Router, urls
from e2e.scenarios.test_rounds import wait_quiet, writes_of

pytestmark = pytest.mark.cluster

SAVER = ("--enable-memory-saver",)
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
SYNC = {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}, "drainSeconds": 10}


def elastic_pool(
    fleet: Fleet, replicas: int, *, router: bool = False, engine_args: tuple[str, ...] = (), **spec: Any
) -> None:
    routers = [
        {"name": "main", "type": "SGLangRouter", "podSelector": {"matchLabels": {"app": "router"}}, "port": ROUTER_PORT}
    ]
    wanted = {"shrink": "Offload", "routers": routers if router else [], **spec}
    fleet.pool(replicas, engine_args=(*SAVER, *engine_args), **wanted)


def elastic_fleet(
    fleet: Fleet, replicas: int, *, gpus: tuple[str, list[str]] | None = None, **spec: Any
) -> list[dict[str, Any]]:
    """A pipeline with engines that can sleep, and a trainer whose base is committed; no router. ``gpus``: its own."""
    fleet.pipeline(sync=SYNC)
    elastic_pool(fleet, replicas, **spec)
    fleet.trainer(gpus=gpus)
    pods = fleet.ready_engines(replicas)
    base = fleet.sync(-1, seed=100)
    assert base["status"]["phase"] == "Succeeded", base["status"]
    return pods


def set_active(fleet: Fleet, count: int | None) -> None:
    """``kubectl patch`` of spec.active; None: all."""
    patch = json.dumps({"spec": {"active": count}})
    fleet.cluster.kubectl("patch", "epool/e", "-n", fleet.namespace, "--type=merge", "-p", patch)


def states(fleet: Fleet) -> dict[int, str]:
    """Index -> state, as the pool's status has it."""
    return {e["index"]: e["state"] for e in fleet.status("enginepool", "e").get("engines") or []}


def settled(fleet: Fleet, wanted: dict[int, str], seconds: float = 90.0) -> None:
    """Wait until the pool shows these states and nobody owns the engines."""

    def look() -> bool:
        return states(fleet) == wanted and not fleet.status("rlpipeline", "p").get("activeOperation")

    wait_until(look, f"states {wanted}; they are {states(fleet)}", seconds)


def asleep(pod: dict[str, Any]) -> bool:
    """The engine itself refuses: its memory is away, so it does not admit requests."""
    return http("GET", engine_url(pod) + "/ready")[0] == 503


@contextmanager
def request_of(pod: dict[str, Any], tokens: int) -> Iterator[None]:
    """A request that runs in the engine now, for as long as its tokens take."""
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0}}
    url = engine_url(pod)
    asking = subprocess.Popen(
        ["curl", "-s", "-m", "300", "-d", json.dumps(body), "-H", "Content-Type: application/json", url + "/generate"],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: http("GET", url + "/v1/loads")[1]["loads"][0]["num_running_reqs"], "a request", every=0.05)
        yield
    finally:
        asking.kill()
        asking.wait()


def reason(obj: dict[str, Any], kind: str) -> str:
    return next((str(c["reason"]) for c in obj["status"]["conditions"] if c["type"] == kind), "")


def test_engines_sleep_and_wake_under_load_and_a_fleet_asleep_commits(
    fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    fleet.pipeline(sync=SYNC)
    router = Router(fleet)
    elastic_pool(fleet, 2, router=True)
    fleet.trainer()
    pods = fleet.ready_engines(2)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    uids = [p["metadata"]["uid"] for p in pods]
    summary = tmp_path / "load.json"
    command = [sys.executable, "-m", "e2e.sim.load", "--router", router.url, "--summary", str(summary)]
    load = subprocess.Popen([*command, "--concurrency", "2"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        # Shrink: the engine with the highest index leaves the router, ends its requests, sleeps; its pod stays.
        mark = cluster.audit_mark()
        set_active(fleet, 1)
        settled(fleet, {0: "Active", 1: "Offloaded"})
        assert router.listed() == urls(pods[:1])
        assert asleep(pods[1])
        # The pipeline says it by itself, a moment after the pool.
        counts = {"total": 1, "active": 1, "asleep": 1}
        wait_until(lambda: fleet.status("rlpipeline", "p")["engines"] == counts, "the pipeline to count one asleep")
        assert condition(fleet.get("rlpipeline", "p"), "Ready") == "True"
        assert fleet.status("enginepool", "e")["counts"]["offloaded"] == 1
        # Claim and end of the work, and what the pool and pipeline have to say of it.
        assert len([w for w in writes_of(cluster, fleet, mark) if "rlpipelines" in str(w)]) <= 4
        # A round is for those that are awake.
        done = fleet.sync(1)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert [m["engine"] for m in done["status"]["members"]] == [pods[0]["metadata"]["name"]]
        # Expand: it wakes, catches up, and only then is listed.
        set_active(fleet, None)
        fleet.serving(pods[1], 1)
        wait_until(lambda: router.listed() == urls(pods), "both engines in the router")
        settled(fleet, {0: "Active", 1: "Active"})
    finally:
        load.send_signal(signal.SIGTERM)
        load.wait(60)
    books = json.loads(summary.read_text())
    assert books["answered"] > 20
    assert books["failures"] == {}, books
    # A whole fleet asleep is legal: the version is committed for those that wake.
    set_active(fleet, 0)
    settled(fleet, {0: "Offloaded", 1: "Offloaded"})
    assert router.listed() == set()
    wait_until(lambda: reason(fleet.get("rlpipeline", "p"), "Ready") == "EnginesOffloaded", "the pipeline to say so")
    done = fleet.sync(2)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert reason(done, "Complete") == "NoMembers"
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 2
    set_active(fleet, 2)
    for pod in pods:
        fleet.serving(pod, 2)
    wait_until(lambda: router.listed() == urls(pods), "both engines in the router")
    assert [p["metadata"]["uid"] for p in fleet.engines()] == uids, "nobody's pod was replaced"


def test_a_pool_that_starts_asleep_is_neither_routed_nor_synced_before_it_wakes(fleet: Fleet) -> None:
    fleet.pipeline(sync=SYNC)
    elastic_pool(fleet, 1, active=0)
    settled(fleet, {0: "Offloaded"}, 180)
    (pod,) = fleet.engines()
    assert fleet.label(pod) == "default", "nobody has written a version to it"
    # Nobody is woken before the sender has weights: what it woke with would be nothing.
    set_active(fleet, 1)
    wait_until(
        lambda: reason(fleet.get("rlpipeline", "p"), "Progressing") == "SenderNotReady", "the wake waits for the sender"
    )
    assert states(fleet) == {0: "Offloaded"}
    set_active(fleet, 0)
    fleet.trainer()
    base = fleet.sync(-1, seed=100)
    assert reason(base, "Complete") == "NoMembers", base["status"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert states(fleet) == {0: "Offloaded"}
    assert fleet.label(pod) == "default"
    set_active(fleet, 1)
    fleet.serving(pod, -1)
    settled(fleet, {0: "Active"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Offload", "Wake"])
def test_whoever_takes_over_from_an_operator_that_died_at_it_brings_it_to_its_end(
    fleet: Fleet, operator: Operator, kind: str
) -> None:
    pods = elastic_fleet(fleet, 2)
    if kind == "Wake":
        set_active(fleet, 1)
        settled(fleet, {0: "Active", 1: "Offloaded"})
    fleet.fault(pods[1], RELEASE if kind == "Offload" else RESUME, action="hold", times=1)
    set_active(fleet, 1 if kind == "Offload" else 2)
    wait_until(
        lambda: (fleet.status("rlpipeline", "p").get("activeOperation") or {}).get("kind") == kind, kind, every=0.02
    )
    first = fleet.status("rlpipeline", "p")["activeOperation"]["generation"]
    operator.kill()
    fleet.heal(pods[1])
    operator.start()
    settled(fleet, {0: "Active", 1: "Offloaded" if kind == "Offload" else "Active"})
    assert fleet.status("rlpipeline", "p")["fence"] > first
    assert fleet.label(pods[0]) == "-1"
    assert not fleet.paused(pods[0])
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_shrink_that_meets_a_round_waits_for_it_and_says_so(fleet: Fleet) -> None:
    pods = elastic_fleet(fleet, 2)
    fleet.publish(1, bulk=512)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
    set_active(fleet, 1)
    wait_until(
        lambda: (
            reason(fleet.get("enginepool", "e"), "Progressing") == "RoundInProgress"
            or fleet.phase(name) not in ("Staging", "Quiescing", "Transferring")
        ),
        "the pool to say that it waits",
        every=0.02,
    )
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    results = {m["engine"]: m["result"] for m in done["status"]["members"]}
    assert results == {pods[0]["metadata"]["name"]: "Ok", pods[1]["metadata"]["name"]: "Dropped"}
    settled(fleet, {0: "Active", 1: "Offloaded"})
    assert fleet.engines()[1]["metadata"]["uid"] == pods[1]["metadata"]["uid"], "it keeps its pod"


@pytest.mark.slow
def test_an_engine_whose_requests_do_not_end_drains_on_by_name_and_the_others_sleep(fleet: Fleet) -> None:
    pods = elastic_fleet(fleet, 2, engine_args=("--step-ms", "1000"))
    fleet.fault(pods[0], "pause_generation", action="http500", when="before")  # nor does an abort end them
    with request_of(pods[0], 100):
        set_active(fleet, 0)
        wait_until(lambda: condition(fleet.get("enginepool", "e"), "Degraded") == "True", "the pool to say so")
        wait_until(lambda: states(fleet) == {0: "Draining", 1: "Offloaded"}, "the other one to sleep")
        entry = fleet.status("enginepool", "e")["engines"][0]
        assert entry["failure"].startswith("EnginesBusy"), entry
    fleet.heal(pods[0])
    settled(fleet, {0: "Offloaded", 1: "Offloaded"}, 180)


@pytest.mark.slow
def test_a_refresh_goes_before_a_shrink_that_still_drains(fleet: Fleet, operator: Operator) -> None:
    pods = elastic_fleet(fleet, 2, engine_args=("--step-ms", "300"))
    fleet.publish(1)
    with request_of(pods[1], 100):
        set_active(fleet, 1)
        wait_until(
            lambda: (fleet.status("rlpipeline", "p").get("activeOperation") or {}).get("kind") == "Offload",
            "Offload",
            every=0.02,
        )
        name = fleet.order(1)
        done = fleet.ended(name)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert fleet.label(pods[0]) == "1"
    assert any("gives way" in line and name in line for line in operator.log.read_text().splitlines())
    settled(fleet, {0: "Active", 1: "Offloaded"})


@pytest.mark.slow
def test_an_idle_fleet_with_sleepers_writes_nothing(fleet: Fleet, cluster: LocalCluster) -> None:
    elastic_fleet(fleet, 2, active=1)
    settled(fleet, {0: "Active", 1: "Offloaded"})
    wait_quiet(cluster, fleet, 5)
    mark = cluster.audit_mark()
    wait_quiet(cluster, fleet, 15)
    assert writes_of(cluster, fleet, mark) == []
