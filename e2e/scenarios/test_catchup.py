"""Engines that missed a round are brought to what is committed, without a trainer asking for it."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import TERMINAL, Fleet, condition, wait_until
from e2e.scenarios.test_routing import routed_fleet, urls

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"
DEADLINES = {"pendingSeconds": 30, "stagingSeconds": 30, "pausedSeconds": 20}


def catch_ups(fleet: Fleet) -> list[dict[str, Any]]:
    """All CatchUps of the fleet, oldest first."""
    listed = fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"]
    found = [r for r in listed if r["spec"]["kind"] == "CatchUp"]
    return sorted(found, key=lambda r: (r["metadata"]["creationTimestamp"], r["spec"]["attempt"]))


def test_a_late_joiner_serves_the_committed_version_without_a_refresh(fleet: Fleet) -> None:
    router, pods = routed_fleet(fleet, 2)
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    before = fleet.status("rlpipeline", "p")
    fleet.cluster.kubectl("scale", "epool/e", "--replicas=3", "-n", fleet.namespace)
    more = fleet.ready_engines(3)
    fresh = next(p for p in more if p["metadata"]["uid"] not in {o["metadata"]["uid"] for o in pods})
    wait_until(lambda: router.listed() == urls(more), "the new engine to be routed")
    fleet.serving(fresh, 1)
    assert len({fleet.checksum(p) for p in more}) == 1
    done = wait_until(lambda: [r for r in catch_ups(fleet) if r["status"].get("phase") in TERMINAL], "its round to end")
    assert [r["status"]["outcome"] for r in done] == ["Succeeded"], done
    # Nobody else was in it, and nothing was committed anew.
    assert done[0]["spec"]["engines"] == [fresh["metadata"]["name"]]
    assert [m["engine"] for m in done[0]["status"]["plan"]["members"]] == [fresh["metadata"]["name"]]
    assert done[0]["status"]["committed"] is False
    after = fleet.status("rlpipeline", "p")
    assert after["committed"] == before["committed"]
    assert after["lastRound"] == before["lastRound"]
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")
