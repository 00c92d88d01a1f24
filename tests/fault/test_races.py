"""Rounds that something else crosses: late gates, dead pods, pods that never start, deletion, a second operator."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"


def paused_seconds(seconds: int) -> dict[str, Any]:
    return {"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": seconds}}


def started(fleet: Fleet, version: int, phase: str, **order: Any) -> str:
    """Publish and order a version and wait for a phase of its round; the round's name."""
    fleet.publish(version, **order)
    name = fleet.order(version)
    wait_until(lambda: fleet.phase(name) == phase, phase, every=0.02)
    return name


def gone(fleet: Fleet, kind: str) -> bool:
    return not fleet.cluster.get(kind, "-n", fleet.namespace)["items"]


def test_a_gate_that_answers_late_is_closed_before_the_commit(fleet: Fleet, cluster: LocalCluster) -> None:
    """Silent when members were frozen, serving the old version all the time: fencing alone would leave it open."""
    pods = serialized_fleet(fleet, 2, sync=paused_seconds(60))
    late = pods[0]
    cluster.hollow.freeze(fleet.namespace, late["metadata"]["name"], "gate", spared=True)
    try:
        name = started(fleet, 1, "Holding")
        assert not fleet.paused(late)
    finally:
        cluster.hollow.thaw(fleet.namespace, late["metadata"]["name"], "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    # It was never open with the old version again, and catches up.
    fleet.serving(late, 1)
    assert not fleet.paused(pods[1])
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    assert [fleet.label(p) for p in pods] == ["2", "2"]
    assert not any(fleet.paused(p) for p in pods)


def test_a_pod_that_vanishes_while_it_loads_costs_only_itself(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 2, sync=paused_seconds(100))
    fleet.fault(pods[0], DISK, action="hang", times=1)
    name = started(fleet, 1, "Transferring")
    cluster.kubectl("delete", "pod", pods[0]["metadata"]["name"], "-n", fleet.namespace, "--force", "--grace-period=0")
    done = fleet.ended(name, 60)  # well before pausedSeconds
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.label(pods[1]) == "1"
    assert not fleet.paused(pods[1])


def test_a_gate_that_falls_silent_while_it_loads_leaves_time_to_prove_the_others(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    pods = serialized_fleet(fleet, 2, sync=paused_seconds(12))
    old = {p["metadata"]["uid"] for p in pods}
    fleet.fault(pods[0], DISK, action="hang", times=1)
    # The gate of the pod that comes in its place takes its time to start.
    cluster.hollow.stall(fleet.namespace, "e-0-", "gate")
    name = started(fleet, 1, "Transferring")
    cluster.hollow.freeze(fleet.namespace, pods[0]["metadata"]["name"], "gate", spared=True)

    def successor() -> dict[str, Any] | None:
        return next((p for p in fleet.engines() if p["metadata"]["uid"] not in old), None)

    fresh = wait_until(successor, "the silent one to be replaced", every=0.02)
    for attempt in (8, 9):
        # A round that holds tells others their end in each of its turns, and replaces at the end of one.
        called_off = fleet.order(1, attempt, cancel=True)
        wait_until(lambda called_off=called_off: fleet.phase(called_off) == "Cancelled", "a turn of the round")
    assert fleet.phase(name) == "Holding"
    assert "deletionTimestamp" not in fleet.pod(fresh["metadata"]["name"])["metadata"]

    def stalled() -> bool:
        with suppress(HollowError, OSError):
            pid = cluster.hollow.pid(fleet.namespace, fresh["metadata"]["name"], "gate")
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    wait_until(stalled, "its gate to stand still")
    cluster.hollow.thaw(fleet.namespace, fresh["metadata"]["name"], "gate")
    done = fleet.ended(name)
    # The other one had its weights, and nobody threw them away.
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.label(pods[1]) == "1"
    assert not fleet.paused(pods[1])


def test_a_pod_that_never_starts_holds_up_no_round(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1)
    template = fleet.get("enginepool", "e")["spec"]["source"]["template"]
    template["spec"]["nodeSelector"] = {"no-such": "node"}
    fleet.pool(1, name="stuck", source={"template": template})
    wait_until(lambda: len(fleet.engines()) == len(pods) + 1, "the pod that waits for a node")
    done = fleet.sync(1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.label(pods[0]) == "1"
    assert len(fleet.engines()) == len(pods) + 1


@pytest.mark.parametrize("phase", ["Staging", "Transferring"])
def test_a_round_that_is_deleted_ends_first(fleet: Fleet, cluster: LocalCluster, phase: str) -> None:
    pods = serialized_fleet(fleet, 1, sync=paused_seconds(100))
    fleet.fault(pods[0], DISK, action="delay", seconds=2, times=1, when="before")
    name = started(fleet, 1, phase, bulk=64 if phase == "Staging" else 0)
    cluster.kubectl("delete", "syncround", name, "-n", fleet.namespace, "--timeout=180s")
    status = fleet.status("rlpipeline", "p")
    assert status.get("activeOperation") is None
    assert fleet.label(pods[0]) == str(status["committed"]["version"])
    assert not fleet.paused(pods[0])
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"


def test_a_pipeline_deleted_in_a_round_leaves_no_round_behind(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 1)
    fleet.fault(pods[0], DISK, action="delay", seconds=2, times=1, when="before")
    started(fleet, 1, "Transferring")
    cluster.kubectl("delete", "rlpipeline", "p", "-n", fleet.namespace, "--timeout=180s")
    wait_until(lambda: gone(fleet, "syncrounds"), "all rounds to be gone")


def test_two_operators_at_once_harm_nobody(
    fleet: Fleet, operator: Operator, cluster: LocalCluster, tmp_path: Path
) -> None:
    # Long enough for an operator to start on a busy machine while the engines load.
    deadlines = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 150}
    pods = serialized_fleet(fleet, 2, sync={"deadlines": deadlines})
    for pod in pods:
        fleet.fault(pod, DISK, action="hold", times=1)
    name = started(fleet, 1, "Transferring")
    before = fleet.status("rlpipeline", "p")["fence"]
    second = Operator(cluster, tmp_path / "second")
    second.start()
    try:
        wait_until(lambda: fleet.status("rlpipeline", "p")["fence"] > before, "the second one to claim the round")
        for pod in pods:
            fleet.heal(pod)
        done = fleet.ended(name)
        committed = fleet.status("rlpipeline", "p")["committed"]
        assert (done["status"]["phase"] == "Succeeded") == (committed["version"] == 1)
        assert [fleet.label(p) for p in pods] == [str(committed["version"])] * 2
        assert {fleet.checksum(p) for p in pods} == {d["digest"] for d in committed["engineDigests"]}
        assert not any(fleet.paused(p) for p in pods)
        wait_until(lambda: "fence lost" in operator.log.read_text() + second.log.read_text(), "one of them to stop")
        assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    finally:
        second.stop()
