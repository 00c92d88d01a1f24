"""Engines that missed a round are brought to what is committed, without a trainer asking for it."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, engine_url, http, wait_until
from e2e.scenarios.routers import routed_fleet, urls
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"
DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 100}


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
    wait_until(lambda: outcomes(fleet) == ["Succeeded"], "its round to end")
    done = catch_ups(fleet)
    # Nobody else was in it, and nothing was committed anew.
    assert done[0]["spec"]["engines"] == [fresh["metadata"]["name"]]
    assert [m["engine"] for m in done[0]["status"]["plan"]["members"]] == [fresh["metadata"]["name"]]
    assert done[0]["status"]["committed"] is False
    after = fleet.status("rlpipeline", "p")
    assert after["committed"] == before["committed"]
    assert after["lastRound"] == before["lastRound"]
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")


def outcomes(fleet: Fleet) -> list[str | None]:
    """How each CatchUp ended, oldest first; None: it has not."""
    return [(r.get("status") or {}).get("outcome") for r in catch_ups(fleet)]


def pool_says(fleet: Fleet, pod: dict[str, Any]) -> str:
    """The reason that the pool's row of this pod gives for its state."""
    rows = fleet.status("enginepool", "e").get("engines") or []
    return str(next((r.get("failure", "") for r in rows if r["podUID"] == pod["metadata"]["uid"]), ""))


def reason(fleet: Fleet, kind: str, name: str, condition_type: str) -> tuple[str, str, str]:
    """Status, reason and message of one condition."""
    found = fleet.status(kind, name).get("conditions") or []
    each = next((c for c in found if c["type"] == condition_type), {"status": "", "reason": "", "message": ""})
    return each["status"], each["reason"], each["message"]


def counted(fleet: Fleet, pod: dict[str, Any], version: int | None = None) -> int:
    """Attempts that the pool has counted on this pod. ``version``: only if that of the latest one is this."""
    rows = fleet.status("enginepool", "e").get("catchUp") or []
    mine = [r for r in rows if r["engine"] == pod["metadata"]["name"]]
    return sum(int(r["attempts"]) for r in mine if version in (None, r["version"]))


def scaled(fleet: Fleet, replicas: int, old: list[dict[str, Any]]) -> dict[str, Any]:
    """Scale the pool up by one; the new pod, Ready."""
    fleet.cluster.kubectl("scale", "epool/e", f"--replicas={replicas}", "-n", fleet.namespace)
    known = {p["metadata"]["uid"] for p in old}
    return next(p for p in fleet.ready_engines(replicas) if p["metadata"]["uid"] not in known)


def closed_joiner(fleet: Fleet, cluster: LocalCluster, replicas: int, old: list[dict[str, Any]]) -> dict[str, Any]:
    """A new engine that is up while the trainer is frozen, so that its CatchUp begins when the trainer thaws."""
    cluster.hollow.freeze(fleet.namespace, "trainer", "trainer")
    fresh = scaled(fleet, replicas, old)
    wait_until(lambda: fleet.paused(fresh), "the new engine to be closed")
    return fresh


def test_a_poisoned_engine_is_healed_and_given_up_when_its_attempts_are_spent(fleet: Fleet, operator: Operator) -> None:
    pods = serialized_fleet(fleet, 3, sync={"deadlines": DEADLINES, "onFailure": "Hold"})
    ill = pods[0]
    name = str(ill["metadata"]["name"])
    fleet.fault(ill, DISK, action="http500", times=2, when="before")
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    # The Refresh left it behind, the first attempt failed too, the second one did not.
    fleet.serving(ill, 1)
    assert counted(fleet, ill) == 2
    assert len({fleet.checksum(p) for p in pods}) == 1
    wait_until(lambda: outcomes(fleet) == ["Failed", "Succeeded"], "both rounds to end")
    assert catch_ups(fleet)[0]["status"]["failure"]["reason"] == "EngineRefused"

    # Whole in a Refresh since: it has all its attempts again, and no more than these, whoever counts them.
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    fleet.fault(ill, DISK, action="http500", times=100, when="before")
    assert fleet.sync(3)["status"]["phase"] == "Succeeded"
    wait_until(lambda: counted(fleet, ill, 3) == 2, "two attempts")
    operator.kill()
    operator.start()
    wait_until(lambda: reason(fleet, "rlpipeline", "p", "Degraded")[1] == "CatchUpExhausted", "the pipeline to say so")
    assert counted(fleet, ill, 3) == 3
    _, _, message = reason(fleet, "rlpipeline", "p", "Degraded")
    assert name in message
    assert "delete these pods" in message
    wait_until(lambda: reason(fleet, "enginepool", "e", "Degraded")[1] == "CatchUpExhausted", "the pool to say so")
    assert pool_says(fleet, ill).startswith("CatchUpExhausted")
    assert fleet.paused(ill)
    assert not any(fleet.paused(p) for p in pods[1:])

    # A Refresh takes it along, whatever was counted.
    fleet.fault(ill, DISK, action="delay", seconds=0, times=1)
    assert fleet.sync(4)["status"]["phase"] == "Succeeded"
    fleet.serving(ill, 4)
    wait_until(lambda: reason(fleet, "rlpipeline", "p", "Degraded")[0] == "False", "the trouble to be over")
    assert [p["metadata"]["uid"] for p in fleet.engines()] == [p["metadata"]["uid"] for p in pods]


@pytest.mark.slow
def test_an_engine_whose_attempts_are_spent_is_replaced(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 3, sync={"deadlines": DEADLINES})
    ill = pods[0]
    fleet.fault(ill, DISK, action="http500", times=100, when="before")
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    wait_until(
        lambda: ill["metadata"]["uid"] not in {p["metadata"]["uid"] for p in fleet.engines()}, "the pod to be replaced"
    )
    assert outcomes(fleet).count("Failed") == 3
    fresh = next(
        p for p in fleet.ready_engines(3) if p["metadata"]["name"] not in {o["metadata"]["name"] for o in pods}
    )
    fleet.serving(fresh, 1)


def test_without_the_bytes_engines_wait_for_a_refresh(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1, sync={"deadlines": DEADLINES})
    digest = fleet.status("rlpipeline", "p")["committed"]["manifestDigest"]
    fleet.publish(1)
    fresh = scaled(fleet, 2, pods)
    wait_until(lambda: reason(fleet, "rlpipeline", "p", "Ready")[1] == "AwaitingRound", "the pipeline to say so")
    message = reason(fleet, "rlpipeline", "p", "Ready")[2]
    assert fresh["metadata"]["name"] in message
    assert "does not hold the committed version -1" in message
    wait_until(lambda: reason(fleet, "enginepool", "e", "Ready")[1] == "AwaitingRound", "the pool to say so")
    assert catch_ups(fleet) == []
    assert fleet.paused(fresh)

    # By hand it is refused as well: first for what is not committed, then for what nobody holds.
    spec = {
        "pipeline": "p",
        "version": 1,
        "kind": "CatchUp",
        "senderIncarnation": fleet.incarnation,
        "manifestDigest": digest,
        "engines": [fresh["metadata"]["name"]],
    }
    fleet.apply("SyncRound", "other", spec)
    assert fleet.ended("other")["status"]["failure"]["reason"] == "CommittedMismatch"
    fleet.apply("SyncRound", "same", {**spec, "version": -1})
    assert fleet.ended("same")["status"]["failure"]["reason"] == "VersionNotHeld"
    assert fleet.paused(fresh)

    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    assert [fleet.label(p) for p in (pods[0], fresh)] == ["1", "1"]
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")
    # And one that nobody needs touches nobody.
    committed = fleet.status("rlpipeline", "p")["committed"]["manifestDigest"]
    fleet.apply("SyncRound", "idle", {**spec, "manifestDigest": committed})
    idle = fleet.ended("idle")["status"]
    assert (idle["phase"], idle["conditions"][0]["reason"], "plan" in idle) == ("Succeeded", "AlreadyCommitted", False)


@pytest.mark.parametrize("phase", ["Transferring", pytest.param("Staging", marks=pytest.mark.slow)])
def test_an_operator_killed_in_a_catch_up(fleet: Fleet, operator: Operator, cluster: LocalCluster, phase: str) -> None:
    pods = serialized_fleet(fleet, 1, sync={"deadlines": DEADLINES})
    fleet.publish(1, bulk=192 if phase == "Staging" else 0)
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    fresh = closed_joiner(fleet, cluster, 2, pods)
    fleet.fault(fresh, DISK, action="hold", times=1)
    cluster.hollow.thaw(fleet.namespace, "trainer", "trainer")
    wait_until(lambda: any(r.get("status", {}).get("phase") == phase for r in catch_ups(fleet)), phase, every=0.02)
    if phase == "Transferring":  # killed before the engine was told to load, its successor ends the round
        wait_until(lambda: http("GET", engine_url(fresh) + "/_sim/faults")[1][DISK]["struck"], "the load", every=0.02)
    operator.kill()
    assert fleet.paused(fresh)
    fleet.heal(fresh)
    operator.start()
    fleet.serving(fresh, 1)
    assert len({fleet.checksum(p) for p in (pods[0], fresh)}) == 1
    wait_until(lambda: outcomes(fleet) == ["Succeeded"], "its round to end")
    # Both operators worked at one attempt.
    assert counted(fleet, fresh) == 1


@pytest.mark.parametrize("second_slot", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_catch_up_makes_room_for_a_refresh(fleet: Fleet, cluster: LocalCluster, second_slot: bool) -> None:
    fleet.pipeline(sync={"deadlines": DEADLINES})
    fleet.pool(1)
    fleet.trainer(SECOND_SLOT="1" if second_slot else "0")
    pods = fleet.ready_engines(1)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    fleet.publish(1, bulk=192)
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    fresh = closed_joiner(fleet, cluster, 2, pods)
    name = str(fresh["metadata"]["name"])
    cluster.hollow.thaw(fleet.namespace, "trainer", "trainer")
    wait_until(
        lambda: any(r.get("status", {}).get("phase") == "Staging" for r in catch_ups(fleet)), "Staging", every=0.02
    )
    cluster.hollow.freeze(fleet.namespace, name, "gate", spared=True)
    try:
        # With one slot the publish itself waits for the hold, with two the Refresh is there at once.
        fleet.publish(2)
        order = fleet.order(2)
        done = wait_until(
            lambda: [r for r in catch_ups(fleet) if (r.get("status") or {}).get("outcome")], "the CatchUp to end"
        )
    finally:
        cluster.hollow.thaw(fleet.namespace, name, "gate")
    assert done[0]["status"]["outcome"] == "Superseded", done[0]["status"]
    assert (order if second_slot else "publish") in done[0]["status"]["failure"]["message"]
    assert counted(fleet, fresh) == 0
    assert fleet.ended(order)["status"]["phase"] == "Succeeded"
    fleet.serving(pods[0], 2)
    fleet.serving(fresh, 2)
    assert len({fleet.checksum(p) for p in (pods[0], fresh)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_catch_up_that_is_called_off_touches_nobody_and_comes_again(
    fleet: Fleet, cluster: LocalCluster, how: str
) -> None:
    pods = serialized_fleet(fleet, 1, sync={"deadlines": DEADLINES})
    fleet.publish(1, bulk=192)
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    fresh = closed_joiner(fleet, cluster, 2, pods)
    before = fleet.checksum(fresh)
    cluster.hollow.thaw(fleet.namespace, "trainer", "trainer")
    wait_until(
        lambda: any(r.get("status", {}).get("phase") == "Staging" for r in catch_ups(fleet)), "Staging", every=0.02
    )
    cluster.hollow.freeze(fleet.namespace, fresh["metadata"]["name"], "gate", spared=True)
    name = str(catch_ups(fleet)[0]["metadata"]["name"])
    try:
        if how == "cancel":
            patch = '{"spec":{"cancel":true}}'
            cluster.kubectl("patch", "sr", name, "-n", fleet.namespace, "--type=merge", "-p", patch)
            assert fleet.ended(name)["status"]["phase"] == "Cancelled"
        else:
            cluster.kubectl("delete", "sr", name, "-n", fleet.namespace, "--timeout=180s")
        assert fleet.checksum(fresh) == before
    finally:
        cluster.hollow.thaw(fleet.namespace, fresh["metadata"]["name"], "gate")
    fleet.serving(fresh, 1)
    assert counted(fleet, fresh) == 1


@pytest.mark.slow
def test_a_catch_up_whose_object_vanishes_leaves_its_engine_closed_and_another_one_heals_it(
    fleet: Fleet, operator: Operator, cluster: LocalCluster
) -> None:
    pods = serialized_fleet(fleet, 1, sync={"deadlines": DEADLINES})
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    fresh = closed_joiner(fleet, cluster, 2, pods)
    fleet.fault(fresh, DISK, action="hold", times=1)
    cluster.hollow.thaw(fleet.namespace, "trainer", "trainer")
    wait_until(
        lambda: any(r.get("status", {}).get("phase") == "Transferring" for r in catch_ups(fleet)),
        "Transferring",
        every=0.02,
    )
    operator.kill()
    fleet.heal(fresh)
    lost = catch_ups(fleet)[0]["metadata"]
    patch = '{"metadata":{"finalizers":[]}}'
    cluster.kubectl("delete", "sr", lost["name"], "-n", fleet.namespace, "--wait=false")
    cluster.kubectl("patch", "sr", lost["name"], "-n", fleet.namespace, "--type=merge", "-p", patch)
    operator.start()
    fleet.serving(fresh, 1)
    assert lost["uid"] not in {r["metadata"]["uid"] for r in catch_ups(fleet)}
    assert counted(fleet, fresh) == 2
    assert len({fleet.checksum(p) for p in (pods[0], fresh)}) == 1
