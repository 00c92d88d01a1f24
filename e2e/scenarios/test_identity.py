"""Objects made anew under their old names, and statuses that were wiped, set back or poisoned."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import ROOT, Fleet, Operator, condition, wait_until
from e2e.scenarios.test_deletion import DISK, SYNC, at_once, closed, delete, left, message, reason, round_in
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DAY_MS = 24 * 3600 * 1000


def write_status(fleet: Fleet, kind: str, name: str, status: dict[str, Any] | None) -> None:
    """Replace the whole status of an object, as a restored backup does; None: wipe it."""
    found = fleet.get(kind, name)
    found["status"] = status or {}
    found["metadata"].pop("resourceVersion")
    found["metadata"].pop("managedFields", None)
    fleet.cluster.kubectl("replace", "--subresource=status", "-n", fleet.namespace, "-f", "-", input=json.dumps(found))


def set_back(fleet: Fleet, status: dict[str, Any]) -> None:
    """Put an earlier status of the pipeline in place of the present one; its fence may only disappear, not fall."""
    write_status(fleet, "rlpipeline", "p", None)
    write_status(fleet, "rlpipeline", "p", status)


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {str(p["metadata"]["uid"]) for p in pods}


def events(fleet: Fleet, why: str) -> list[dict[str, Any]]:
    listed = fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]
    return [e for e in listed if e["reason"] == why]


def poison(fleet: Fleet, pod: dict[str, Any], generation: int) -> None:
    """Write a fence into a gate's own file, as a restored or altered disk would hold it, while the gate restarts."""
    uid, name = str(pod["metadata"]["uid"]), str(pod["metadata"]["name"])
    file = next(f for f in fleet.cluster.state.rglob("gate.sqlite") if uid in str(f))
    fleet.cluster.hollow.crash(fleet.namespace, name, "gate")
    with sqlite3.connect(file, isolation_level=None, timeout=30) as db:
        db.execute("BEGIN EXCLUSIVE")
        fence = json.loads(db.execute("SELECT value FROM facts WHERE key = 'fence'").fetchone()[0])
        text = json.dumps(fence | {"generation": generation})
        db.execute("UPDATE facts SET value = ? WHERE key = 'fence'", (text,))
        db.execute("COMMIT")
    db.close()


# ------------------------------------------------------------------------------------------ made anew


def test_a_pipeline_made_anew_takes_over_the_closed_engines_of_the_old_one(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    old = fleet.get("rlpipeline", "p")
    base = left(fleet, "syncrounds")
    delete(fleet, "rlpipeline/p", mode="foreground")
    assert left(fleet, "syncrounds") == [], "foreground: its rounds went first"
    assert closed(fleet, pods)
    fleet.pipeline(sync=SYNC)
    new = fleet.get("rlpipeline", "p")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    done = fleet.sync(-1, seed=100)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert done["metadata"]["name"] not in base, "rounds of the two pipelines have different names"
    assert uids(fleet.engines()) == uids(pods), "closed engines are taken over, not replaced"
    assert not any(fleet.paused(p) for p in pods)
    assert fleet.status("rlpipeline", "p")["fence"] > old["status"]["fence"]


def test_a_round_and_a_pool_made_anew_are_others(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1, sync=SYNC)
    name = fleet.order(1)
    old = fleet.get("syncround", name)["metadata"]["uid"]
    wait_until(lambda: reason(fleet.get("syncround", name), "Progressing") == "SenderNotReady", "the round to wait")
    delete(fleet, f"syncround/{name}")
    fleet.publish(1)
    assert fleet.order(1) == name, "the same order has the same name"
    done = fleet.ended(name)
    assert done["metadata"]["uid"] != old
    assert done["status"]["phase"] == "Succeeded", done["status"]

    delete(fleet, "enginepool/e")
    assert fleet.engines() == []
    fleet.pool(1)
    fresh = fleet.ready_engines(1)
    assert not uids(fresh) & uids(pods)
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    assert fleet.label(fresh[0]) == "2"


@pytest.mark.slow
def test_a_trainer_made_anew_is_another_sender(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1, sync=SYNC)
    name = fleet.order(1)
    wait_until(lambda: reason(fleet.get("syncround", name), "Progressing") == "SenderNotReady", "the round to wait")
    delete(fleet, "pod/trainer")
    fleet.trainer()
    fleet.publish(1)
    ended = fleet.ended(name)
    assert (ended["status"]["phase"], ended["status"]["failure"]["reason"]) == ("Superseded", "SenderIncarnationGone")
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    assert fleet.label(pods[0]) == "1"


# ------------------------------------------------------------------------------------------ lost statuses


def test_a_wiped_pipeline_goes_on_serving_says_so_and_recovers_with_the_next_round(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    fence = fleet.status("rlpipeline", "p")["fence"]
    write_status(fleet, "rlpipeline", "p", None)
    wait_until(
        lambda: reason(fleet.get("rlpipeline", "p"), "Ready") == "CommittedUnknown", "the pipeline to say what is lost"
    )
    found = fleet.status("rlpipeline", "p")
    assert found["fence"] > fence, "the fence rises although the status forgot it"
    assert "committed" not in found
    assert "Sync again" in message(fleet.get("rlpipeline", "p"), "Ready")
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "CommittedUnknown", "the pool to say so")
    assert condition(fleet.get("enginepool", "e"), "AdmissionOpen") == "True"
    assert not any(fleet.paused(p) for p in pods), "what serves proven weights goes on serving"
    wait_until(lambda: events(fleet, "StatusLost"), "an Event about it")
    # Enrolments below the gates' fence are refused; after the new claim the pool tells its gates what it must.
    fleet.pool(3)
    more = fleet.ready_engines(3)
    done = fleet.sync(1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert [fleet.label(p) for p in more] == ["1"] * 3
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")


def lose_in(fleet: Fleet, phase: str, what: str) -> None:
    """Wipe statuses while a round is in a phase; it still ends, and engines serve what is committed in the end."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, phase, pods) as name:
        if what in ("round", "both"):
            write_status(fleet, "syncround", name, None)
        if what in ("pipeline", "both"):
            write_status(fleet, "rlpipeline", "p", None)
        if phase == "Holding":
            wait_until(lambda: fleet.phase(name) == "Holding", "Holding again")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    if phase == "Committed" and "committed" not in fleet.status("rlpipeline", "p"):
        # The round had ended when its pipeline was wiped: that is what the record of a commit is lost with.
        wait_until(
            lambda: reason(fleet.get("rlpipeline", "p"), "Ready") == "CommittedUnknown", "what is lost to be said"
        )
    else:
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
        wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")
    # One whose gate was silent in Holding is no member; a CatchUp brings it along.
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    assert len({fleet.checksum(p) for p in pods}) == 1
    assert not any(fleet.paused(p) for p in pods)
    assert uids(fleet.engines()) == uids(pods)
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"


def test_both_statuses_wiped_while_weights_move(fleet: Fleet) -> None:
    lose_in(fleet, "Transferring", "both")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["round", "pipeline", "both"])
def test_statuses_wiped_in_every_phase(cluster: LocalCluster, operator: Operator, what: str) -> None:
    phases = ("Staging", "Quiescing", "Transferring", "Holding", "Committed")
    at_once(cluster, operator, phases, lambda fleet, phase: lose_in(fleet, phase, what))


def test_a_status_from_a_backup_is_found_out_and_its_committed_version_is_not_believed(
    fleet: Fleet, operator: Operator
) -> None:
    """Version 1 serves; the status says that the base is committed. A new engine must not be opened at the base."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    backup = fleet.status("rlpipeline", "p")
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    operator.kill()
    set_back(fleet, backup)
    operator.start()
    wait_until(
        lambda: reason(fleet.get("rlpipeline", "p"), "Ready") == "CommittedUnknown", "the pipeline to say what is lost"
    )
    assert "committed" not in fleet.status("rlpipeline", "p")
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    assert not any(fleet.paused(p) for p in pods)
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_recovery_that_was_interrupted_closes_nobody(fleet: Fleet, operator: Operator) -> None:
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    operator.kill()
    found = fleet.get("rlpipeline", "p")
    status = {k: v for k, v in found["status"].items() if k != "committed"}
    fence = status["fence"] + 1
    status["fence"] = fence
    status["activeOperation"] = {
        "kind": "Repair", "name": "p", "uid": found["metadata"]["uid"], "generation": fence, "committed": False,
    }  # fmt: skip
    write_status(fleet, "rlpipeline", "p", status)
    operator.start()
    wait_until(lambda: not fleet.status("rlpipeline", "p").get("activeOperation"), "the slot to be free")
    wait_until(lambda: reason(fleet.get("rlpipeline", "p"), "Ready") == "CommittedUnknown", "what is lost to be said")
    assert not any(fleet.paused(p) for p in pods)
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_recovery_waits_for_what_still_runs_at_a_gate(fleet: Fleet, operator: Operator) -> None:
    """Pipeline status and round are lost while an engine loads: nobody decides about it before that has ended."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    base = fleet.checksum(pods[0])
    fleet.fault(pods[0], DISK, action="hold", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.checksum(pods[1]) != base, "the other one to have loaded, as both were told", every=0.05)
    operator.kill()
    fleet.cluster.kubectl(
        "patch", "syncround", name, "-n", fleet.namespace, "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )
    delete(fleet, f"syncround/{name}")
    write_status(fleet, "rlpipeline", "p", None)
    operator.start()
    wait_until(lambda: fleet.status("rlpipeline", "p").get("activeOperation"), "the pipeline to be claimed", every=0.05)
    assert fleet.checksum(pods[0]) == base, "too late to see anything: the load has ended"
    fleet.heal(pods[0])
    wait_until(lambda: not fleet.status("rlpipeline", "p").get("activeOperation"), "the slot to be free", every=0.05)
    assert fleet.checksum(pods[0]) != base, "the slot was freed while the engine still loaded"
    assert "committed" not in fleet.status("rlpipeline", "p")


@pytest.mark.slow
def test_a_poisoned_gate_is_replaced_and_poisons_nobody(fleet: Fleet) -> None:
    """Its disk holds a fence of next week: nobody claims above that, and its pod makes room for another."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    bad = int(time.time() * 1000) + 7 * DAY_MS
    poison(fleet, pods[0], bad)
    wait_until(
        lambda: uids(pods[:1]).isdisjoint(uids(fleet.engines())) and len(fleet.engines()) == 2, "the pod to be replaced"
    )
    fleet.ready_engines(2)
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    assert fleet.status("rlpipeline", "p")["fence"] < bad
    wait_until(lambda: events(fleet, "FencePoisoned"), "an Event about it")


# ------------------------------------------------------------------------------------------ poisoned


def test_a_poisoned_fence_stops_everything_and_the_remedy_in_the_condition_works(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    pods = serialized_fleet(fleet, 1, sync=SYNC)
    bad = int(time.time() * 1000) + 3 * DAY_MS
    cluster.kubectl(
        "patch", "rlpipeline", "p", "-n", fleet.namespace, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"fence": bad}}),
    )  # fmt: skip
    fleet.publish(1)
    name = fleet.order(1)
    said = wait_until(
        lambda: next((m for m in [message(fleet.get("rlpipeline", "p"), "Degraded")] if str(bad) in m), ""),
        "the pipeline to say what is wrong",
    )
    assert reason(fleet.get("rlpipeline", "p"), "Degraded") == "FencePoisoned"
    wait_until(lambda: reason(fleet.get("syncround", name), "Progressing") == "FencePoisoned", "the round to say so")
    assert fleet.label(pods[0]) == "-1"
    assert not fleet.paused(pods[0])
    assert fleet.status("rlpipeline", "p")["fence"] == bad
    # What the condition says is what a person types, and what docs/concepts.md says.
    command = said[said.index("kubectl patch") :].replace("'", "").split()[1:]
    page = (ROOT / "docs/concepts.md").read_text()
    written = page[page.index("kubectl patch rlpipeline NAME") :].splitlines()[0].replace("'", "").split()[1:]
    assert [{"NAME": "p", "NAMESPACE": fleet.namespace}.get(word, word) for word in written] == command
    cluster.kubectl(*command)
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.status("rlpipeline", "p")["fence"] < bad
    assert uids(fleet.engines()) == uids(pods)
