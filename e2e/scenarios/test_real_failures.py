"""Trouble with a real SGLang: the trainer dies or stalls in mid-broadcast, the engine in a load or between rounds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from e2e.cluster.local import LocalCluster
from e2e.engines.asking import RealEngine
from e2e.engines.fixtures import (
    BROADCAST,
    LONG_RUNS,
    SEEDS,
    SERIALIZED,
    Expected,
    pipeline,
    start,
    sync,
)
from e2e.engines.tiny import MODEL
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_trainer_failures import strike
from e2e.scenarios.test_transports import FREE, pinned

pytestmark = LONG_RUNS

DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 40}
RECEIVED = "POST /update_weights_from_distributed"


def trainer(fleet: Fleet) -> None:
    """Bulk of many buckets, so that a transfer takes long enough to be interrupted."""
    fleet.trainer(MODEL=MODEL, BUCKET_BYTES=str(1 << 20))


def received(cluster: LocalCluster, fleet: Fleet, engine: RealEngine) -> int:
    """Broadcasts that the engine says it took."""
    return cluster.hollow.log(fleet.namespace, engine.name, "engine").read_text(errors="replace").count(RECEIVED)


def serves(fleet: Fleet, version: int, expected: list[list[int]], seconds: float = 600.0) -> RealEngine:
    """Wait until the pool's one engine, whichever it is by then, serves the version; what it says is the version's."""

    def look() -> RealEngine | None:
        pods = [p for p in fleet.engines() if "deletionTimestamp" not in p["metadata"]]
        # The pool's rows may be those of the pod before.
        rows = fleet.status("enginepool", "e").get("engines") or []
        active = {r["podUID"] for r in rows if r["state"] == "Active"}
        if len(pods) != 1 or not pods[0]["status"].get("podIP") or pods[0]["metadata"]["uid"] not in active:
            return None
        return RealEngine.of_pod("SGLang", pods[0])

    engine = wait_until(look, f"an engine to serve version {version}", seconds, every=0.5)
    assert engine.label() == str(version)
    assert engine.greedy() == expected
    return engine


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_trainer_that_goes_in_mid_broadcast_commits_nothing(
    fleet: Fleet, cluster: LocalCluster, models: Path, expected: Expected, how: str
) -> None:
    pipeline(fleet, BROADCAST, deadlines=DEADLINES)
    trainer(fleet)
    (engine,) = start(fleet, "SGLang", models, placement=pinned(FREE))
    sync(fleet, -1, SEEDS[0])
    before = received(cluster, fleet, engine)
    fleet.publish(1, seed=SEEDS[1], bulk=600, pieces=600)
    name = fleet.order(1)
    wait_until(lambda: received(cluster, fleet, engine) > before + 5, "buckets to arrive", every=0.01)
    strike(fleet, cluster, how)
    status = fleet.ended(name, 300)["status"]
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    # A part of it may be in there, so it may not serve until a whole version is; the next trainer brings one.
    new_trainer_for(fleet)
    fleet.publish(2, seed=SEEDS[2])
    attempts = itertools.count(1)
    wait_until(
        lambda: fleet.ended(fleet.order(2, attempt=next(attempts)), 300)["status"]["phase"] == "Succeeded",
        "a round to succeed",
        900,
        every=5,
    )
    serves(fleet, 2, expected[SEEDS[2]])


def new_trainer_for(fleet: Fleet) -> None:
    fleet.cluster.kubectl("delete", "pod", "trainer", f"--namespace={fleet.namespace}", "--wait=true", "--timeout=120s")
    trainer(fleet)


def ready_reason(fleet: Fleet) -> str:
    """Why the pool is not Ready."""
    conditions = fleet.status("enginepool", "e").get("conditions") or []
    return next((str(c["reason"]) for c in conditions if c["type"] == "Ready"), "")


def test_an_engine_that_dies_in_a_load_or_between_rounds_is_replaced_and_catches_up(
    fleet: Fleet, cluster: LocalCluster, models: Path, expected: Expected
) -> None:
    pipeline(fleet, SERIALIZED, deadlines=DEADLINES)
    trainer(fleet)
    (engine,) = start(fleet, "SGLang", models, placement=pinned(FREE))
    sync(fleet, -1, SEEDS[0])
    fleet.publish(1, seed=SEEDS[1], bulk=700, pieces=700)
    name = fleet.order(1)
    wait_until(
        lambda: fleet.phase(name) not in ("", "Pending", "Planned", "Staging", "Quiescing"), "the load", every=0.01
    )
    cluster.hollow.crash(fleet.namespace, engine.name, "engine")
    status = fleet.ended(name, 400)["status"]
    assert not (status["committed"] and status["phase"] != "Succeeded"), status
    committed = int(fleet.status("rlpipeline", "p")["committed"]["version"])
    assert committed == (1 if status["committed"] else -1)
    if committed == -1:
        # The sender has nothing but version 1 any more: what is committed can not be had, and the pool says so.
        wait_until(lambda: ready_reason(fleet) == "AwaitingRound", "the successor to wait for a round", 400)
        again = fleet.ended(fleet.order(1, attempt=2), 400)["status"]
        assert again["phase"] == "Succeeded", again
    successor = serves(fleet, 1, expected[SEEDS[1]])
    assert successor.uid != engine.uid
    # Between rounds: nobody asks for a round, and the successor of the successor holds the version all the same.
    cluster.hollow.crash(fleet.namespace, successor.name, "engine")
    wait_until(lambda: all(p["metadata"]["uid"] != successor.uid for p in fleet.engines()), "the dead engine to go")
    serves(fleet, 1, expected[SEEDS[1]])
