"""Rounds in which something dies, hangs or does not answer: verdict and routing of each (DESIGN section 5)."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, http, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"


def names(pods: list[dict[str, Any]]) -> list[str]:
    return [str(p["metadata"]["name"]) for p in pods]


def test_a_frozen_gate_in_staging_ends_with_the_staging_deadline(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(
        fleet,
        sync={
            "deadlines": {"pendingSeconds": 30, "stagingSeconds": 4, "pausedSeconds": 20},
            "maxUnavailable": 0,
        },
    )
    sums = [fleet.checksum(p) for p in pods]
    fleet.publish(1, bulk=256)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
    cluster.hollow.freeze(fleet.namespace, names(pods)[0], "gate", spared=True)
    try:
        done = fleet.ended(name)
    finally:
        cluster.hollow.thaw(fleet.namespace, names(pods)[0], "gate")
    assert done["status"]["phase"] == "Failed"
    assert done["status"]["failure"]["stage"] == "Staging"
    assert done["status"]["failure"]["reason"] in ("StagingDeadline", "StagingFailed")
    assert [fleet.checksum(p) for p in pods] == sums
    assert not any(fleet.paused(p) for p in pods)
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1


def test_a_trainer_killed_in_staging_ends_the_round_early(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(
        fleet, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 60, "pausedSeconds": 20}}
    )
    sums = [fleet.checksum(p) for p in pods]
    fleet.publish(1, bulk=512)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
    cluster.hollow.crash(fleet.namespace, "trainer", "trainer")
    done = fleet.ended(name, 50)
    assert done["status"]["phase"] == "Failed"
    assert (done["status"]["failure"]["stage"], done["status"]["failure"]["reason"]) == ("Staging", "StagingFailed")
    assert [fleet.checksum(p) for p in pods] == sums
    assert not any(fleet.paused(p) for p in pods)


def test_an_engine_killed_in_transferring_is_lost_and_the_rest_commit(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 3)
    victim = pods[0]
    fleet.fault(victim, DISK, action="hang", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    cluster.hollow.crash(fleet.namespace, victim["metadata"]["name"], "engine")
    done = fleet.ended(name)
    status = done["status"]
    assert status["phase"] == "Succeeded", status
    results = {m["engine"]: m["result"] for m in status["members"]}
    assert results.pop(victim["metadata"]["name"]) == "Lost"
    assert set(results.values()) == {"Ok"}
    assert [fleet.label(p) for p in pods[1:]] == ["1", "1"]
    # Its replacement is another pod, which catches up.
    fresh = next(p for p in fleet.ready_engines(3) if p["metadata"]["name"] not in names(pods))
    fleet.serving(fresh, 1)
    assert len({fleet.checksum(p) for p in fleet.engines()}) == 1


def test_a_load_that_never_ends_poisons_that_engine_only(fleet: Fleet) -> None:
    pods = serialized_fleet(
        fleet, 3, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 6}}
    )
    fleet.fault(pods[0], DISK, action="hang", times=1)
    done = fleet.sync(1)
    status = done["status"]
    assert status["phase"] == "Succeeded", status
    bad = [m for m in status["members"] if m["result"] != "Ok"]
    assert [m["engine"] for m in bad] == [pods[0]["metadata"]["name"]]
    assert bad[0]["result"] == "Unknown"
    assert [fleet.label(p) for p in pods[1:]] == ["1", "1"]
    # It is healed, or makes room for a new one: in the end three engines serve the version.
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "three engines to serve")
    assert {fleet.label(p) for p in fleet.ready_engines(3)} == {"1"}


def test_when_no_engine_takes_the_weights_nothing_is_committed(fleet: Fleet) -> None:
    pods = serialized_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 5}}
    )
    for pod in pods:
        fleet.fault(pod, DISK, action="http500", times=1, when="before")
    done = fleet.sync(1)
    status = done["status"]
    assert status["phase"] == "Failed"
    assert status["failure"]["stage"] == "Transferring"
    assert status["failure"]["reason"] in ("TransferFailed", "PausedDeadline")
    assert status["committed"] is False
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    # Poisoned engines are never resumed: they are replaced, and the new ones wait for a round.
    fresh = fleet.replaced(pods)
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    assert {fleet.label(p) for p in fresh} == {"2"}


def test_an_engine_that_cannot_be_paused_aborts_and_all_serve_the_committed_version(fleet: Fleet) -> None:
    pods = serialized_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 4}}
    )
    sums = [fleet.checksum(p) for p in pods]
    fleet.fault(pods[0], "pause_generation", action="hang", times=1)
    done = fleet.sync(1)
    status = done["status"]
    assert status["phase"] == "Failed"
    assert status["failure"]["stage"] == "Quiescing"
    assert status["failure"]["reason"] in ("QuiesceFailed", "PausedDeadline")
    assert fleet.checksum(pods[1]) == sums[1]
    assert not fleet.paused(pods[1])
    assert fleet.label(pods[1]) == "-1"


def test_a_wrong_success_is_found_out(fleet: Fleet) -> None:
    """Engines that answer 200 and load nothing are not opened at the new version, and it is not committed."""
    pods = serialized_fleet(fleet, 2)
    fleet.publish(1, change="names")
    done = fleet.ended(fleet.order(1))
    status = done["status"]
    assert status["phase"] == "Failed", status
    assert status["failure"]["reason"] in ("TransferFailed", "VerifyFailed", "ChecksumUnchanged")
    assert "hecksum" in status["failure"]["message"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    # Nothing proves what they hold now: they are replaced, and the new ones are closed.
    fresh = fleet.replaced(pods)
    assert {fleet.label(p) for p in fresh} == {"default"}
    wait_until(lambda: all(fleet.paused(p) for p in fresh), "the new engines to be closed")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_killed_in_transferring_guesses_nothing(fleet: Fleet, operator: Operator, when: str) -> None:
    pods = serialized_fleet(fleet, 2)
    sums = [fleet.checksum(p) for p in pods]
    for pod in pods:
        fleet.fault(pod, DISK, action="hold", times=1, when=when)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    wait_until(lambda: all(fleet.paused(p) for p in pods), "engines to be paused")
    fence = fleet.status("rlpipeline", "p")["fence"]
    operator.kill()
    for pod in pods:
        fleet.heal(pod)
    operator.start()
    done = fleet.ended(name)
    status = done["status"]
    # The loads that ran on end by themselves; the new operator reads that and goes forward, or aborts if none began.
    assert status["lease"]["generation"] > fence
    if status["phase"] == "Succeeded":
        assert [fleet.label(p) for p in pods] == ["1", "1"]
        assert len({fleet.checksum(p) for p in pods}) == 1
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
    else:
        assert status["failure"]["reason"] == "OperatorRestarted"
        assert [fleet.checksum(p) for p in pods] == sums
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert not any(fleet.paused(p) for p in pods)


def test_an_operator_killed_in_staging_plans_anew(fleet: Fleet, operator: Operator) -> None:
    # stagingSeconds go on while nobody runs: they must outlast the start of an operator on a busy machine.
    deadlines = {"pendingSeconds": 120, "stagingSeconds": 120, "pausedSeconds": 60}
    pods = serialized_fleet(fleet, 2, sync={"deadlines": deadlines})
    fleet.publish(1, bulk=512)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
    operator.kill()
    operator.start()
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert [fleet.label(p) for p in pods] == ["1", "1"]


def test_a_gate_killed_while_idle_keeps_engine_and_fence(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 2)
    victim = pods[0]["metadata"]["name"]
    cluster.hollow.crash(fleet.namespace, victim, "gate")
    wait_until(
        lambda: fleet.pod(victim)["status"]["initContainerStatuses"][0]["restartCount"] == 1, "the gate to restart"
    )
    fleet.ready_engines(2)
    assert fleet.label(pods[0]) == "-1"
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    assert names(fleet.engines()) == names(pods)
    assert [fleet.label(p) for p in pods] == ["1", "1"]


@pytest.mark.slow  # the next test, with Hold, has this fleet with its time spent
def test_a_silent_engine_is_never_committed_around(fleet: Fleet, cluster: LocalCluster) -> None:
    """A frozen gate within maxUnavailable: the round may go on, but not commit until that engine is fenced or gone."""
    pods = serialized_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 60}}
    )
    cluster.hollow.freeze(fleet.namespace, names(pods)[0], "gate", spared=True)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Holding", "Holding", 120)
    said = next(c for c in fleet.status("syncround", name)["conditions"] if c["type"] == "Progressing")
    assert names(pods)[0] in said["message"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert fleet.paused(pods[1])
    cluster.hollow.thaw(fleet.namespace, names(pods)[0], "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded"
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
    assert not fleet.paused(pods[1])


@pytest.mark.parametrize("on_failure", ["Hold", "Replace"])
def test_holding_has_an_exit_when_its_time_is_spent(
    fleet: Fleet, operator: Operator, cluster: LocalCluster, on_failure: str
) -> None:
    pods = serialized_fleet(
        fleet,
        2,
        sync={
            "deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 5},
            "onFailure": on_failure,
        },
    )
    silent = names(pods)[0]
    cluster.hollow.freeze(fleet.namespace, silent, "gate", spared=True)
    fleet.publish(1)
    name = fleet.order(1)
    if on_failure == "Hold":
        # Nobody is deleted: a person is asked, by name, and may mend it.
        wait_until(lambda: reason(fleet, name) == "HoldingNeedsAction", "the round to ask for a person")
        said = next(c for c in fleet.status("syncround", name)["conditions"] if c["type"] == "Progressing")
        assert silent in said["message"]
        assert silent in names(fleet.engines())
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
        assert fleet.paused(pods[1]), "version 1 is not committed: nobody may serve it"
        # It looks again and again, and writes nothing as long as it sees nothing new.
        before, looks = versions(fleet, name), lists_of_rounds(operator)
        wait_until(lambda: lists_of_rounds(operator) >= looks + 2, "two more looks at the world")
        assert versions(fleet, name) == before
        cluster.hollow.thaw(fleet.namespace, silent, "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
    assert (fleet.label(pods[1]), fleet.paused(pods[1])) == ("1", False)
    if on_failure == "Replace":
        wait_until(lambda: silent not in names(fleet.engines()), "the silent engine to be replaced")


def versions(fleet: Fleet, name: str) -> list[str]:
    """resourceVersions of a round and its pipeline: they change with every write."""
    found = fleet.get("syncround", name), fleet.get("rlpipeline", "p")
    return [str(o["metadata"]["resourceVersion"]) for o in found]


def lists_of_rounds(operator: Operator) -> float:
    """How often the operator has listed SyncRounds: once per turn of a round in Holding."""
    text = str(http("GET", f"http://127.0.0.1:{operator.port}/metrics")[1])
    series = 'rlfleet_api_calls_total{code="200",resource="syncrounds",verb="list"} '
    return next((float(x.removeprefix(series)) for x in text.splitlines() if x.startswith(series)), 0.0)


def reason(fleet: Fleet, name: str) -> str:
    conditions = fleet.status("syncround", name).get("conditions") or []
    return next((str(c["reason"]) for c in conditions if c["type"] == "Progressing"), "")


def test_cancel_while_holding_resumes_nobody_at_unproven_weights(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(
        fleet, 2, sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 60}}
    )
    cluster.hollow.freeze(fleet.namespace, names(pods)[0], "gate", spared=True)
    fleet.publish(1)
    name = fleet.order(1)
    try:
        wait_until(lambda: fleet.phase(name) == "Holding", "Holding", 120)
        cluster.kubectl("patch", "sr", name, "-n", fleet.namespace, "--type=merge", "-p", '{"spec":{"cancel":true}}')
        done = fleet.ended(name, 120)
    finally:
        cluster.hollow.thaw(fleet.namespace, names(pods)[0], "gate")
    assert done["status"]["phase"] == "Cancelled"
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    # The member that had loaded version 1 must not serve it: it is not committed.
    assert fleet.paused(pods[1])
