"""Rounds that can neither commit nor give up: who owns the closed engines, and every way out (DESIGN section 5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import ROOT, TERMINAL, Fleet, Operator, condition, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"


def sync(paused: int = 90, **more: Any) -> dict[str, Any]:
    deadlines = {"pendingSeconds": 60, "stagingSeconds": 30, "pausedSeconds": paused}
    return {"deadlines": deadlines, **more}


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def held_round(fleet: Fleet, cluster: LocalCluster, pods: list[dict[str, Any]], version: int) -> str:
    """A round in Holding: the first engine's gate is silent (and serves on), all others are whole and closed."""
    cluster.hollow.freeze(fleet.namespace, name_of(pods[0]), "gate", spared=True)
    fleet.publish(version)
    name = fleet.order(version)
    wait_until(lambda: fleet.phase(name) == "Holding", "Holding", 120)
    return name


def over(fleet: Fleet, name: str) -> dict[str, Any]:
    """Wait for a round's end, whoever owns the slot then; the round."""
    wait_until(lambda: fleet.phase(name) in TERMINAL, f"round {name} to end")
    return fleet.get("syncround", name)


def patch(fleet: Fleet, kind: str, name: str, body: dict[str, Any], *more: str) -> None:
    fleet.cluster.kubectl("patch", kind, name, "-n", fleet.namespace, "--type=merge", "-p", json.dumps(body), *more)


def all_serve(fleet: Fleet, pods: list[dict[str, Any]], version: int) -> bool:
    return all(not fleet.paused(p) and fleet.label(p) == str(version) for p in pods)


def test_a_refused_round_holds_what_it_inherited_and_starts_over_when_it_can(
    fleet: Fleet, cluster: LocalCluster, operator: Operator
) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync())
    first = held_round(fleet, cluster, pods, 1)
    # A publish waits for the hold of the round in Holding, which gives it up for that.
    fleet.publish(2)
    # Now the silent gate alone refuses every round.
    fleet.pipeline(sync=sync(maxUnavailable=0))
    second = fleet.order(2)
    assert over(fleet, first)["status"]["phase"] == "Superseded"
    wait_until(lambda: fleet.phase(second) == "Holding", "the refused round to hold", 120)
    status = fleet.status("syncround", second)
    assert status["refused"]["reason"] == "GatesUnreachable"
    assert pods[1]["metadata"]["uid"] in status["refused"]["podUIDs"]
    # Version 1 was never committed: the engine that holds it stays closed, and is owned.
    assert (fleet.label(pods[1]), fleet.paused(pods[1])) == ("1", True)
    assert fleet.status("rlpipeline", "p")["activeOperation"]["name"] == second
    # A successor goes on holding; it does not take the round for one that has moved weights.
    generation = status["lease"]["generation"]
    operator.kill()
    operator.start()
    wait_until(
        lambda: fleet.status("syncround", second)["lease"]["generation"] > generation, "the round to be taken over", 60
    )
    assert (fleet.label(pods[1]), fleet.paused(pods[1])) == ("1", True)
    cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
    done = fleet.ended(second)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert all_serve(fleet, pods, 2)


@pytest.mark.slow
def test_a_trainer_that_was_replaced_supersedes_a_held_round_with_any_version(
    fleet: Fleet, cluster: LocalCluster, operator: Operator
) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync())
    held = held_round(fleet, cluster, pods, 5)
    # Whoever raised the fence owns the pipeline: the operator that held the round stops and says so. (Nobody else is
    # there, so it takes the round over again.)
    fence = fleet.status("rlpipeline", "p")["fence"]
    patch(fleet, "rlpipeline", "p", {"status": {"fence": fence + 1_000_000}}, "--subresource=status")
    wait_until(
        lambda: any(a["result"] == "Rejected" for a in fleet.status("syncround", held)["attempts"]),
        "the refusal to be recorded",
    )
    wait_until(lambda: fleet.status("rlpipeline", "p")["fence"] > fence + 1_000_000, "a new claim", 120)
    assert fleet.phase(held) == "Holding"
    # The last version of a trainer that ends is not thrown away while only a fence is missing ...
    cluster.kubectl("delete", "pod", "trainer", "-n", fleet.namespace, "--force", "--grace-period=0")
    fleet.trainer()
    assert fleet.phase(held) == "Holding"
    # ... but a new trainer counts its versions anew.
    fleet.publish(3)
    new = fleet.order(3)
    assert over(fleet, held)["status"]["failure"]["reason"] == "Superseded"
    cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
    done = fleet.ended(new)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert all_serve(fleet, pods[1:], 3)


def test_a_cancel_that_comes_when_weights_move_is_recorded_and_changes_nothing(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1, sync=sync())
    fleet.fault(pods[0], DISK, action="hold", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    patch(fleet, "syncround", name, {"spec": {"cancel": True}})
    fleet.heal(pods[0])
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert condition(done, "CancelRequested") == "True"
    assert all_serve(fleet, pods, 1)


SHIFTED = """
import os, time
_by = int(os.environ["CLOCK_SHIFT_SECONDS"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _by
time.time_ns = lambda: _time_ns() + _by * 10**9
"""


@pytest.mark.parametrize("hours", [pytest.param(1, id="ahead"), pytest.param(-1, id="behind", marks=pytest.mark.slow)])
def test_an_operator_whose_clock_is_an_hour_off_runs_rounds(
    fleet: Fleet, operator: Operator, cluster: LocalCluster, tmp_path: Path, hours: int
) -> None:
    """It takes over in mid-round from one whose clock is right: no budget is refilled or spent by that."""
    pods = serialized_fleet(fleet, 1, sync=sync(paused=60))
    fleet.fault(pods[0], DISK, action="hold", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    wait_until(lambda: fleet.paused(pods[0]), "the engine to be paused")
    operator.kill()
    fleet.heal(pods[0])
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    odd = Operator(
        cluster,
        tmp_path / "odd",
        PYTHONPATH=f"{tmp_path}:{ROOT / 'operator'}:{ROOT}",
        CLOCK_SHIFT_SECONDS=str(hours * 3600),
    )
    odd.start()
    try:
        done = fleet.ended(name)
        if done["status"]["phase"] == "Failed":
            # The load had not begun when its operator died; that, and no deadline, is why.
            assert done["status"]["failure"]["reason"] == "OperatorRestarted", done["status"]
        assert all_serve(fleet, pods, 1 if done["status"]["committed"] else -1)
        assert 0 <= done["status"]["timings"]["pausedMs"] < 600_000
        # What it dated itself is compared with what the apiserver dates.
        assert fleet.sync(2)["status"]["phase"] == "Succeeded"
        assert all_serve(fleet, pods, 2)
    finally:
        odd.stop()


@pytest.mark.slow
def test_without_its_sender_a_round_that_needs_it_ends_by_the_resume_rule(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync(maxUnavailable=0, onFailure="Hold"))
    victim, other = pods
    fleet.fault(victim, DISK, action="hang", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    cluster.hollow.freeze(fleet.namespace, name_of(victim), "gate", spared=True)
    wait_until(lambda: fleet.phase(name) == "Holding", "Holding", 180)
    assert (fleet.label(other), fleet.paused(other)) == ("1", True)
    cluster.kubectl("delete", "pod", "trainer", "-n", fleet.namespace, "--force", "--grace-period=0")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Failed", done["status"]
    assert done["status"]["failure"]["reason"] == "SenderIncarnationGone"
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert fleet.paused(other), "version 1 is not committed: nobody may serve it"
    cluster.hollow.thaw(fleet.namespace, name_of(victim), "gate")


@pytest.mark.slow
def test_an_engine_that_joins_in_holding_stays_closed(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync(paused=300))
    name = held_round(fleet, cluster, pods, 1)
    fleet.pool(3)
    joiner = wait_until(
        lambda: next((p for p in fleet.engines() if name_of(p) not in [name_of(q) for q in pods]), None), "a joiner"
    )
    wait_until(lambda: condition(fleet.pod(name_of(joiner)), "Ready") == "True", "the joiner to be up")
    joiner = fleet.pod(name_of(joiner))
    assert fleet.phase(name) == "Holding"
    wait_until(lambda: fleet.paused(joiner), "the joiner to be closed")
    cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert name_of(joiner) not in [m["engine"] for m in done["status"]["plan"]["members"]]
    assert fleet.paused(joiner) or fleet.label(joiner) == "1"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "replace"])
def test_a_refused_round_gives_up_what_it_inherited(fleet: Fleet, cluster: LocalCluster, how: str) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync())
    held_round(fleet, cluster, pods, 1)
    fleet.publish(2)
    # Nobody knows the devices of these engines: every round is refused from now on.
    never = {"mode": "Broadcast", "backend": "gloo"}
    fleet.pipeline(sync=sync(paused=90 if how == "cancel" else 15), transport=never)
    second = fleet.order(2)
    wait_until(lambda: fleet.phase(second) == "Holding", "the refused round to hold", 120)
    if how == "cancel":
        patch(fleet, "syncround", second, {"spec": {"cancel": True}})
    done = fleet.ended(second)
    cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
    assert done["status"]["phase"] == ("Cancelled" if how == "cancel" else "Failed"), done["status"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    if how == "cancel":
        assert fleet.paused(pods[1]), "version 1 was never committed"
    else:
        assert done["status"]["failure"]["reason"] == "TopologyUnknown"
        assert name_of(pods[1]) not in [name_of(p) for p in fleet.ready_engines(2)]


@pytest.mark.slow
def test_one_lost_answer_at_planned_fails_no_round(fleet: Fleet, cluster: LocalCluster, operator: Operator) -> None:
    pods = serialized_fleet(fleet, 2, sync=sync(maxUnavailable=0))
    fleet.publish(1)
    cluster.hollow.freeze(fleet.namespace, name_of(pods[0]), "gate", spared=True)
    try:
        name = fleet.order(1)
        wait_until(lambda: "silent gates are asked again" in operator.tail(200), "the silence to be noticed")
    finally:
        cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert all_serve(fleet, pods, 1)
