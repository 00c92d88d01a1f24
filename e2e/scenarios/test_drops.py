"""A pool that shrinks while a round owns its engines: dropped before weights move, or instead of being reopened."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from e2e.scenarios.kit import Fleet, Operator, engine_url, wait_until
from e2e.scenarios.routers import routed_fleet
from e2e.scenarios.test_quiesce import SLOW_STEPS, generate, running
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"


def goes(fleet: Fleet, pod: dict[str, Any]) -> bool:
    """The pod is gone or on its way out, at this moment."""
    now = [p for p in fleet.engines() if p["metadata"]["uid"] == pod["metadata"]["uid"]]
    return not now or "deletionTimestamp" in now[0]["metadata"]


@pytest.mark.parametrize("phase", ["Staging", pytest.param("Transferring", marks=pytest.mark.slow)])
def test_a_shrink_takes_effect_within_the_round_that_it_meets(fleet: Fleet, operator: Operator, phase: str) -> None:
    deadlines = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}
    # Nobody may be missing: an intended drop does not count.
    pods = serialized_fleet(fleet, 2, sync={"deadlines": deadlines, "maxUnavailable": 0})
    stays, leaves = pods
    if phase == "Transferring":
        for pod in pods:
            fleet.fault(pod, DISK, action="hold", times=1)
    fleet.publish(1, bulk=512 if phase == "Staging" else 0)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == phase, phase, every=0.01)
    fleet.cluster.kubectl("scale", "epool/e", "--replicas=1", "-n", fleet.namespace)
    assert fleet.phase(name) == phase, "too late: the test shrinks the pool while the round is there"
    for pod in pods:
        fleet.heal(pod)
    done = fleet.ended(name)
    # The slot was not free for a moment: rounds that follow each other at once can not starve a shrink.
    assert goes(fleet, leaves), "the round has ended and has not removed the engine"
    removed = [line for line in operator.log.read_text().splitlines() if "dropped and removed" in line]
    assert any(done["metadata"]["uid"] in line for line in removed), "its pool removed it, in a gap between rounds"
    assert done["status"]["phase"] == "Succeeded", done["status"]
    results = {m["engine"]: m["result"] for m in done["status"]["members"]}
    assert results == {stays["metadata"]["name"]: "Ok", leaves["metadata"]["name"]: "Dropped"}
    assert (fleet.label(stays), fleet.paused(stays)) == ("1", False)
    assert fleet.ready_engines(1)[0]["metadata"]["uid"] == stays["metadata"]["uid"]


@pytest.mark.slow
def test_no_user_notices_that_an_engine_is_dropped(fleet: Fleet) -> None:
    """What runs in it ends as it would have, what comes later goes elsewhere, and waits there while weights move."""
    deadlines = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}
    sync = {"deadlines": deadlines, "maxUnavailable": 0}
    router, (stays, leaves) = routed_fleet(fleet, 2, engine_args=SLOW_STEPS, sync=sync)
    over = Event()
    answers: list[tuple[int, Any]] = []

    def user() -> None:
        while not over.is_set():
            answers.append(generate(router, 40))

    with ThreadPoolExecutor() as pool:
        users = [pool.submit(user) for _ in range(6)]
        try:
            fleet.publish(1, bulk=256)
            name = fleet.order(1)
            wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
            fleet.cluster.kubectl("scale", "epool/e", "--replicas=1", "-n", fleet.namespace)
            wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.01)
            assert running(fleet, [leaves]) > 0, "nothing was in flight at the engine that goes"
            done = fleet.ended(name)
            wait_until(lambda: any(_versions(a) == ["1"] for _, a in list(answers)), "the new version to answer")
        finally:
            over.set()
        for one in users:
            one.result()
    assert done["status"]["phase"] == "Succeeded", done["status"]
    results = {m["engine"]: m["result"] for m in done["status"]["members"]}
    assert results[leaves["metadata"]["name"]] == "Dropped"
    assert router.listed() == {engine_url(stays)}
    assert {code for code, _ in answers} == {200}
    assert {answer["meta_info"]["finish_reason"]["type"] for _, answer in answers} == {"length"}


def _versions(answer: Any) -> list[str]:
    """Versions that took part in an answer, in order; nothing for one that failed."""
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    return [str(span["version"]) for span in meta.get("weight_versions", [])]
