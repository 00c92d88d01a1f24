"""Broadcast and mixed rounds with real process groups; refusals before anything is touched."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, condition, wait_until
from e2e.scenarios.test_rounds import wait_quiet, writes_of

pytestmark = pytest.mark.cluster

NODE = "hollow-000"
TRAIN = ["GPU-train-0", "GPU-train-1"]
FREE = ["GPU-free-0", "GPU-free-1"]


def pinned(devices: list[str]) -> dict[str, Any]:
    return {"mode": "Pinned", "devices": [{"node": NODE, "devices": devices}]}


def pipeline(fleet: Fleet, mode: str, **transport: Any) -> None:
    fleet.pipeline(
        transport={"mode": mode, "backend": "gloo", **transport},
        trainer={"gpus": [{"node": NODE, "devices": TRAIN}]},
        sync={"deadlines": {"pendingSeconds": 30, "stagingSeconds": 30, "pausedSeconds": 30}},
    )


def test_auto_mixes_and_both_ways_deliver_the_same_weights(fleet: Fleet) -> None:
    pipeline(fleet, "Auto", assertMixed=True)
    fleet.pool(4, backend="torch", placement=pinned([TRAIN[0], TRAIN[1], FREE[0], FREE[1]]))
    fleet.trainer()
    pods = fleet.ready_engines(4, 240)
    sums: set[str] = set()
    for version in (-1, 1, 2):
        done = fleet.sync(version)
        plan = done["status"]["plan"]
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert (plan["serialized"], plan["broadcast"], plan["worldSize"]) == (2, 2, 3)
        how = {m["engine"]: (m["transport"], m.get("rankOffset")) for m in plan["members"]}
        assert sorted(v for v in how.values() if v[0] == "Broadcast") == [("Broadcast", 1), ("Broadcast", 2)]
        assert [fleet.label(p) for p in pods] == [str(version)] * 4
        found = {fleet.checksum(p) for p in pods}
        assert len(found) == 1
        assert not found & sums
        sums |= found
    valid = next(c for c in fleet.status("rlpipeline", "p")["conditions"] if c["type"] == "TopologyValid")
    assert (valid["status"], valid["reason"]) == ("True", "TopologyKnown")


def test_broadcast_to_all_on_a_port_that_is_claimed_and_free(fleet: Fleet, cluster: LocalCluster) -> None:
    with socket.socket() as one, socket.socket() as other:
        first = three_free_ports()
        pipeline(fleet, "Broadcast", rendezvousPorts={"first": first, "last": first})
        fleet.pool(2, backend="torch", placement=pinned(FREE))
        fleet.trainer()
        for held, port in ((one, first), (other, first + 1)):
            held.bind((fleet.pod("trainer")["status"]["podIP"], port))
            held.listen()
        pods = fleet.ready_engines(2, 240)
        before = {fleet.checksum(p) for p in pods}
        failed = fleet.sync(-1)["status"]
        assert (failed["phase"], failed["committed"]) == ("Failed", False), failed
        assert {m["reason"] for m in failed["members"]} == {"PortsExhausted"}
        assert {fleet.checksum(p) for p in pods} == before
        pipeline(fleet, "Broadcast", rendezvousPorts={"first": first, "last": first + 2})
        done = fleet.ended(fleet.order(-1, attempt=2))["status"]
        assert done["phase"] == "Succeeded", done
    assert fleet.sync(1)["status"]["plan"]["broadcast"] == 2
    assert len({fleet.checksum(p) for p in pods}) == 1
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    wait_quiet(cluster, fleet)
    mark = cluster.audit_mark()
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    wait_quiet(cluster, fleet)
    writes = writes_of(cluster, fleet, mark)
    assert 0 < len(writes) <= 14 + 1, writes
    assert "rendezvousClaims" not in fleet.status("rlpipeline", "p")


def three_free_ports() -> int:
    """The first of three ports in a row that nobody uses now."""
    while True:
        with socket.socket() as probe, socket.socket() as second, socket.socket() as third:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
            try:
                second.bind(("127.0.0.1", first + 1))
                third.bind(("127.0.0.1", first + 2))
            except (OSError, OverflowError):
                continue
            return first


def test_weights_that_do_not_fit_stream_in_buckets_beside_a_broadcast(fleet: Fleet) -> None:
    pipeline(fleet, "Auto", bucketMiB=1)
    small = {"image": "rlfleet/gate", "stagingMiB": 2}
    fleet.pool(3, backend="torch", placement=pinned([*TRAIN, FREE[0]]), gate=small)
    fleet.trainer()
    pods = fleet.ready_engines(3, 240)
    fleet.publish(-1, bulk=1)
    refused = fleet.ended(fleet.order(-1))["status"]["failure"]
    assert (refused["stage"], refused["reason"]) == ("Planned", "StagingTooLarge")
    assert "use spec.transport.staging Bucket" in refused["message"]
    pipeline(fleet, "Auto", bucketMiB=1, staging="Bucket")
    done = fleet.ended(fleet.order(-1, attempt=2))["status"]
    assert done["phase"] == "Succeeded", done
    plan = done["plan"]
    assert (plan["staging"], plan["bucketMiB"], plan["serialized"], plan["broadcast"]) == ("Bucket", 1, 2, 1)
    assert len({fleet.checksum(p) for p in pods}) == 1
    # An engine that fails between two buckets holds neither version: it stays closed until it was loaded anew.
    streamed = next(m["engine"] for m in plan["members"] if m["transport"] == "Serialized")
    broken = next(p for p in pods if p["metadata"]["name"] == streamed)
    fleet.fault(broken, "update_weights_from_disk", action="http400", when="after", times=1)
    fleet.publish(1, bulk=1)
    done = fleet.ended(fleet.order(1))["status"]
    assert (done["phase"], done["committed"]) == ("Succeeded", True), done
    for pod in pods:
        fleet.serving(pod, 1)
    assert len({fleet.checksum(p) for p in pods}) == 1


@pytest.mark.parametrize(
    ("devices", "modes", "reason", "valid"),
    [
        (TRAIN, ("Broadcast",), "EnginesOnTrainDevices", "False"),
        ([], ("Auto", "Broadcast"), "TopologyUnknown", "Unknown"),
    ],
)
def test_impossible_transports_are_refused_and_touch_nothing(
    fleet: Fleet, devices: list[str], modes: tuple[str, ...], reason: str, valid: str
) -> None:
    pipeline(fleet, "CPUSerialize")
    placement = pinned(devices) if devices else {"mode": "Scheduler"}
    fleet.pool(1, placement=placement)
    fleet.trainer()
    pod = fleet.ready_engines(1)[0]
    before = fleet.checksum(pod)
    fleet.publish(-1)
    for attempt, mode in enumerate(modes, 1):
        pipeline(fleet, mode)
        done = fleet.ended(fleet.order(-1, attempt))
        failure = done["status"]["failure"]
        assert (failure["stage"], failure["reason"]) == ("Planned", reason), mode
        assert fleet.checksum(pod) == before
        assert fleet.label(pod) == "default"
        wait_until(
            lambda: condition(fleet.get("rlpipeline", "p"), "TopologyValid") == valid, "the pipeline to say so as well"
        )


def test_mixed_is_refused_where_it_cannot_mix(fleet: Fleet) -> None:
    pipeline(fleet, "CPUSerialize")
    fleet.pool(1, placement=pinned(TRAIN))
    fleet.trainer()
    fleet.ready_engines(1)
    pipeline(fleet, "Auto", assertMixed=True)
    assert fleet.sync(-1)["status"]["failure"]["reason"] == "MixedTransportImpossible"


def test_an_engine_that_cannot_join_a_group_does_not_stop_the_serialized_ones(fleet: Fleet) -> None:
    """A broadcast that fails in its rendezvous leaves those members untouched; the round holds, heals or replaces."""
    pipeline(fleet, "Auto")
    fleet.pool(3, backend="torch", placement=pinned([TRAIN[0], TRAIN[1], FREE[0]]))
    fleet.trainer()
    pods = fleet.ready_engines(3, 240)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    broadcast = next(p for p in pods if "-2-" in p["metadata"]["name"])
    fleet.fault(broadcast, "init_weights_update_group", action="http500", times=1)
    done = fleet.sync(1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert done["status"]["committed"] is True
    others = [p for p in pods if p is not broadcast]
    assert [fleet.label(p) for p in others] == ["1", "1"]
    assert len({fleet.checksum(p) for p in others}) == 1
