"""Rounds behind a real router: who is listed, when, and that nobody is listed who is not proven."""

from __future__ import annotations

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, engine_url, wait_until
from e2e.scenarios.routers import routed_fleet, urls

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"


def test_lost_and_poisoned_engines_leave_the_router_and_their_successors_catch_up(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    router, pods = routed_fleet(
        fleet, 3, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 8}}
    )
    lost, poisoned, good = pods
    fleet.fault(lost, DISK, action="hang", times=1)
    fleet.fault(poisoned, DISK, action="http500", times=1, when="after")
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    cluster.hollow.crash(fleet.namespace, lost["metadata"]["name"], "engine")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    results = {m["engine"]: m["result"] for m in done["status"]["members"]}
    assert results[lost["metadata"]["name"]] == "Lost"
    assert results[good["metadata"]["name"]] == "Ok"
    assert results[poisoned["metadata"]["name"]] in ("Ok", "Unknown")
    wait_until(lambda: engine_url(lost) not in router.listed(), "the lost engine to leave the router")
    code, answer = router.generate()
    assert (code, answer["meta_info"]["weight_version"]) == (200, "1")
    # Healed, or replaced and caught up: what the router lists in the end serves the committed version.
    now = fleet.ready_engines(3)
    wait_until(lambda: router.listed() == urls(fleet.engines()), "three engines in the router")
    now = fleet.ready_engines(3)
    assert {fleet.label(p) for p in now} == {"1"}
    assert not any(fleet.paused(p) for p in now)


def test_a_failed_round_leaves_the_committed_engines_routed_and_serving(fleet: Fleet) -> None:
    router, pods = routed_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 4}}
    )
    fleet.fault(pods[0], "pause_generation", action="hang", times=1)
    done = fleet.sync(1)
    assert done["status"]["failure"]["stage"] == "Quiescing", done["status"]
    assert engine_url(pods[1]) in router.listed()
    code, answer = router.generate()
    assert (code, answer["meta_info"]["weight_version"]) == (200, "-1")


def test_a_silent_engine_that_left_the_router_does_not_hold_up_the_commit(fleet: Fleet, cluster: LocalCluster) -> None:
    """This operator has heard of the gate last, and sends it nothing: out of the router nobody reaches its engine."""
    router, pods = routed_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 120}}
    )
    silent, other = pods
    cluster.hollow.freeze(fleet.namespace, silent["metadata"]["name"], "gate", spared=True)
    try:
        done = fleet.sync(1)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert router.listed() == {engine_url(other)}
        assert fleet.label(silent) == "-1"
        code, answer = router.generate()
        assert (code, answer["meta_info"]["weight_version"]) == (200, "1")
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
    finally:
        cluster.hollow.thaw(fleet.namespace, silent["metadata"]["name"], "gate")
