"""The trainer dies, freezes, is replaced, or is there twice: what serves stays committed, and the next round works."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, condition, engine_url, http, trainer_pod, wait_until
from e2e.scenarios.test_rounds import serialized_fleet
from e2e.scenarios.test_transports import FREE, NODE, TRAIN, pinned

pytestmark = pytest.mark.cluster

SYNC: dict[str, Any] = {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 15, "pausedSeconds": 15}}


def broadcast_pipeline(fleet: Fleet, sync: dict[str, Any]) -> None:
    fleet.pipeline(
        transport={"mode": "Broadcast", "backend": "gloo"},
        trainer={"gpus": [{"node": NODE, "devices": TRAIN}]},
        sync=sync,
    )


def broadcast_fleet(fleet: Fleet, sync: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    broadcast_pipeline(fleet, sync or SYNC)
    fleet.pool(2, backend="torch", placement=pinned(FREE))
    fleet.trainer()
    pods = fleet.ready_engines(2, 240)
    base = fleet.sync(-1)
    assert base["status"]["phase"] == "Succeeded", base["status"]
    return pods


def new_trainer(fleet: Fleet) -> None:
    """Another trainer pod in the place of the old one, whatever became of that."""
    fleet.cluster.kubectl("delete", "pod", "trainer", f"--namespace={fleet.namespace}", "--wait=true", "--timeout=120s")
    fleet.trainer()


def assert_serves_what_is_committed(fleet: Fleet) -> None:
    """Every engine that takes requests holds the committed bytes, asked of the engines themselves."""
    committed = fleet.status("rlpipeline", "p")["committed"]
    digests = {d["digest"] for d in committed["engineDigests"]}
    for pod in fleet.engines():
        if pod["status"].get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
            continue
        # One that is replaced meanwhile answers nobody.
        with suppress(OSError):
            if condition(pod, "Ready") == "True" and not fleet.paused(pod):
                assert fleet.label(pod) == str(committed["version"]), pod["metadata"]["name"]
                assert fleet.checksum(pod) in digests, pod["metadata"]["name"]


def strike(fleet: Fleet, cluster: LocalCluster, how: str) -> None:
    if how == "kill":
        cluster.hollow.crash(fleet.namespace, "trainer", "trainer")
    else:
        cluster.hollow.freeze(fleet.namespace, "trainer", "trainer")


def interrupted(
    fleet: Fleet, cluster: LocalCluster, phases: set[str], how: str, fault: dict[str, Any], bulk: int = 0
) -> dict[str, Any]:
    """Run version 1 with faults at the engines that stretch a phase, strike in it, and wait for the round's end."""
    for pod in fleet.engines():
        for call, rule in fault.items():
            fleet.fault(pod, call, **rule)
    fleet.publish(1, **({"bulk": bulk} if bulk else {}))
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) in phases, f"one of {phases}", every=0.02)
    strike(fleet, cluster, how)
    status: dict[str, Any] = fleet.ended(name)["status"]
    assert_serves_what_is_committed(fleet)
    return status


def recovers(fleet: Fleet, engines: int = 2) -> None:
    """With a new trainer the next version reaches every engine."""
    new_trainer(fleet)
    fleet.ready_engines(engines, 240)
    fleet.publish(2)
    attempts = itertools.count(1)
    # An engine that hangs in a rendezvous with the dead is replaced after a grace; rounds before that touch nothing.
    wait_until(
        lambda: fleet.ended(fleet.order(2, attempt=next(attempts)))["status"]["phase"] == "Succeeded",
        "a round to succeed",
        300,
        every=5,
    )
    pods = fleet.ready_engines(engines, 240)
    wait_until(lambda: all(not fleet.paused(p) for p in fleet.ready_engines(engines)), "all engines to serve")
    assert len({fleet.checksum(p) for p in pods}) == 1
    assert_serves_what_is_committed(fleet)


SLOWLY: dict[str, Any] = {"action": "delay", "seconds": 4, "times": 1}
#: Where the bytes are staged already, the trainer is not needed any more.
UNHURT = {
    "Quiescing": ({"Quiescing"}, {"pause_generation": SLOWLY}),
    "Transferring": ({"Transferring"}, {"update_weights_from_disk": SLOWLY}),
    "Committed": ({"Committed"}, {"continue_generation": SLOWLY}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("phase", list(UNHURT))
def test_once_bytes_are_staged_a_round_does_not_need_its_trainer(
    fleet: Fleet, cluster: LocalCluster, phase: str, how: str
) -> None:
    serialized_fleet(fleet, sync=SYNC)
    phases, fault = UNHURT[phase]
    status = interrupted(fleet, cluster, phases, how, fault)
    assert (status["phase"], status["committed"]) == ("Succeeded", True), status
    assert [fleet.label(p) for p in fleet.engines()] == ["1", "1"]
    recovers(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_trainer_that_goes_before_bytes_are_staged_touches_nothing(
    fleet: Fleet, cluster: LocalCluster, how: str
) -> None:
    pods = serialized_fleet(fleet, sync=SYNC)
    sums = [fleet.checksum(p) for p in pods]
    status = interrupted(fleet, cluster, {"Planned", "Staging"}, how, {}, bulk=512)
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    assert status["failure"]["stage"] in ("Planned", "Staging")
    assert [fleet.checksum(p) for p in pods] == sums
    assert not any(fleet.paused(p) for p in pods)
    recovers(fleet)


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("Transferring", "kill"),
        pytest.param("Transferring", "freeze", marks=pytest.mark.slow),
        pytest.param("Quiescing", "kill", marks=pytest.mark.slow),
        pytest.param("Quiescing", "freeze", marks=pytest.mark.slow),
    ],
)
def test_a_broadcast_whose_trainer_goes_commits_nothing_and_opens_nobody_half_written(
    fleet: Fleet, cluster: LocalCluster, phase: str, how: str
) -> None:
    broadcast_fleet(fleet)
    # Joining or pausing slowly, the engines give the trainer the time to die in between.
    call = "pause_generation" if phase == "Quiescing" else "init_weights_update_group"
    status = interrupted(fleet, cluster, {phase}, how, {call: SLOWLY})
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    left = fleet.status("rlpipeline", "p")
    assert left["committed"]["version"] == -1
    if (phase, how) == ("Transferring", "freeze"):
        # Nobody knows whether it listens still: the port stays claimed until its pod is gone.
        assert [c["leaked"] for c in left["rendezvousClaims"]] == [True]
    recovers(fleet)
    wait_until(lambda: "rendezvousClaims" not in fleet.status("rlpipeline", "p"), "no port to be claimed any more")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_stream_of_buckets_whose_trainer_goes_commits_nothing(fleet: Fleet, cluster: LocalCluster, how: str) -> None:
    pods = serialized_fleet(fleet, sync=SYNC, transport={"mode": "CPUSerialize", "staging": "Bucket", "bucketMiB": 1})
    base = {fleet.checksum(p) for p in pods}
    for pod in pods:
        # Loaded, but not said so: the trainer goes before the second bucket is asked for.
        fleet.fault(pod, "update_weights_from_disk", when="after", **SLOWLY)
    fleet.publish(1, bulk=8)
    name = fleet.order(1)
    wait_until(
        lambda: not base & {fleet.checksum(p) for p in pods}, "every engine to have the first bucket", every=0.02
    )
    strike(fleet, cluster, how)
    status = fleet.ended(name)["status"]
    assert_serves_what_is_committed(fleet)
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    # They hold the one and the other: nobody serves before a new trainer has loaded them. They may be replaced by now.
    for pod in fleet.engines():
        with suppress(OSError):
            assert condition(pod, "Ready") != "True" or fleet.paused(pod), pod["metadata"]["name"]
    recovers(fleet)


@pytest.mark.slow
def test_an_engine_that_hangs_in_a_dead_rendezvous_keeps_no_round_from_the_others(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    """It counts as unavailable: beyond maxUnavailable the round names it, within that the others go on."""
    call, deadlines = "init_weights_update_group", {**SYNC["deadlines"], "pausedSeconds": 60}
    hold = {"deadlines": deadlines, "onFailure": "Hold"}  # it must still be there when the next round is planned
    stuck, healthy = broadcast_fleet(fleet, sync=hold)
    name, uid = stuck["metadata"]["name"], stuck["metadata"]["uid"]
    before = fleet.checksum(healthy)
    # One joins when the trainer is dead, but before its gate gives up; the other one never does: it is what it was.
    fleet.fault(stuck, call, action="delay", seconds=5, times=1)
    fleet.fault(healthy, call, action="http500", times=1)
    fleet.publish(1)
    first = fleet.order(1)
    wait_until(lambda: http("GET", engine_url(stuck) + "/_sim/faults")[1][call]["struck"], "both to be told to join")
    strike(fleet, cluster, "kill")
    status = fleet.ended(first)["status"]
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    new_trainer(fleet)
    fleet.publish(2)

    broadcast_pipeline(fleet, sync={**hold, "maxUnavailable": 0})
    refused = fleet.ended(fleet.order(2))["status"]
    assert refused["phase"] == "Failed", refused
    assert (refused["failure"]["stage"], refused["failure"]["reason"]) == ("Planned", "Uncertain"), refused
    assert f"{name}: it hangs in a rendezvous" in refused["failure"]["message"]
    assert [fleet.label(healthy), fleet.checksum(healthy), fleet.paused(healthy)] == ["-1", before, False]

    broadcast_pipeline(fleet, sync=hold)
    done = fleet.ended(fleet.order(2, attempt=2))["status"]
    assert (done["phase"], done["committed"]) == ("Succeeded", True), done
    assert [m["engine"] for m in done["plan"]["members"]] == [healthy["metadata"]["name"]]
    assert done["plan"]["blocked"] == [uid]
    assert [fleet.label(healthy), fleet.paused(healthy)] == ["2", False]
    # Nobody is served by it, and it waits, closed, for what heals or replaces it.
    assert (fleet.paused(stuck), fleet.pod(name)["metadata"]["uid"]) == (True, uid)
    assert_serves_what_is_committed(fleet)


def test_a_replaced_trainer_cannot_change_what_a_version_means(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, sync=SYNC)
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    before = fleet.status("rlpipeline", "p")["committed"]
    waiting = fleet.order(7)  # of the first trainer, which never publishes it
    new_trainer(fleet)
    # The same version with other bytes, then an older one: neither is taken for what is committed.
    fleet.publish(1, seed=4711)
    assert fleet.ended(waiting)["status"]["failure"]["reason"] == "SenderIncarnationGone"
    other = fleet.ended(fleet.order(1))["status"]
    assert (other["phase"], other["failure"]["reason"]) == ("Failed", "VersionGoesBackwards")
    older = fleet.ended(fleet.order(0))["status"]
    assert (older["phase"], older["failure"]["reason"]) == ("Failed", "VersionGoesBackwards")
    assert fleet.status("rlpipeline", "p")["committed"] == before
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    assert_serves_what_is_committed(fleet)
    # A newer one is.
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert (committed["version"], committed["senderIncarnation"]) == (2, fleet.incarnation)
    assert_serves_what_is_committed(fleet)


def test_two_trainers_that_claim_one_pipeline_stop_both_until_one_is_gone(fleet: Fleet) -> None:
    serialized_fleet(fleet, sync=SYNC)
    second = trainer_pod(fleet.namespace, _environment(fleet))
    second["metadata"]["name"] = "usurper"
    fleet.cluster.apply(second)

    def ready() -> tuple[str, str]:
        conditions = fleet.status("rlpipeline", "p")["conditions"]
        return next((str(c["status"]), str(c["reason"])) for c in conditions if c["type"] == "SenderReady")

    wait_until(lambda: ready() == ("False", "SenderAmbiguous"), "the pipeline to say so")
    fleet.publish(1)
    name = fleet.order(1)

    def waits() -> bool:
        progressing = [c for c in fleet.status("syncround", name).get("conditions") or [] if c["type"] == "Progressing"]
        return bool(progressing) and progressing[0]["reason"] == "SenderAmbiguous"

    wait_until(waits, "the round to wait for one of them to go")
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert_serves_what_is_committed(fleet)
    fleet.cluster.kubectl("delete", "pod", "usurper", f"--namespace={fleet.namespace}", "--wait=true", "--timeout=120s")
    done = fleet.ended(name)["status"]
    assert (done["phase"], done["committed"]) == ("Succeeded", True), done
    assert_serves_what_is_committed(fleet)


def _environment(fleet: Fleet) -> dict[str, str]:
    containers = fleet.pod("trainer")["spec"]["containers"]
    return {e["name"]: e["value"] for e in containers[0]["env"] if "value" in e}
