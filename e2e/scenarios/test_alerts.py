"""Alerts are provoked: a fault of a real fleet, seen by a real Prometheus that scrapes the real operator and gates.

The rules are the chart's without their patience (e2e.observability.rules): what they ask for is what is shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.observability.prometheus import Prometheus
from e2e.observability.require import require_prometheus
from e2e.observability.rules import eager
from e2e.scenarios.kit import Fleet, Operator, engine_url, http, wait_until
from e2e.scenarios.test_elastic import set_active, settled
from e2e.scenarios.test_elastic_trouble import DEVICES, neighbour, pinned_fleet
from e2e.scenarios.test_rounds import serialized_fleet
from tests.fault.proxy import Fault, FaultProxy, Rule

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DISK = "update_weights_from_disk"
SHORT = {"deadlines": {"pendingSeconds": 2, "stagingSeconds": 20, "pausedSeconds": 60}}
LONG = {"deadlines": {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 600}}


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    require_prometheus()


@contextmanager
def watched(folder: Path, operator: Operator, fleet: Fleet | None = None) -> Iterator[Prometheus]:
    targets = {"operator": [f"127.0.0.1:{operator.port}"]}
    if fleet is not None:
        targets["gate"] = [f"{p['status']['podIP']}:9440" for p in fleet.engines()]
    with Prometheus(folder / "prometheus", targets, eager()) as prometheus:
        yield prometheus


def fires(prometheus: Prometheus, name: str, **labels: str) -> None:
    """Wait until this alert fires with these labels."""
    wait_until(
        lambda: any(labels.items() <= a.items() for a in prometheus.firing().get(name, ())), f"{name} to fire", 120
    )


def quiet(prometheus: Prometheus, name: str) -> None:
    """Wait until this alert does not fire."""
    wait_until(lambda: name not in prometheus.firing(), f"{name} to end", 120)


def ours(fleet: Fleet) -> dict[str, str]:
    return {"namespace": fleet.namespace, "pipeline": "p"}


def pools(fleet: Fleet) -> dict[str, str]:
    return {"namespace": fleet.namespace, "pool": "e"}


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def test_no_leader(operator: Operator, fleet: Fleet, tmp_path: Path) -> None:
    with watched(tmp_path, operator) as prometheus:
        wait_until(lambda: prometheus.query("rlfleet_leader == 1"), "a scrape")
        quiet(prometheus, "RlfleetNoLeader")
        operator.stop()
        fires(prometheus, "RlfleetNoLeader")
        operator.start()
        quiet(prometheus, "RlfleetNoLeader")


def test_a_held_round_and_a_deletion_that_waits(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    pods = serialized_fleet(fleet, 2, sync=LONG)
    cluster.hollow.freeze(fleet.namespace, name_of(pods[0]), "gate", spared=True)
    fleet.publish(1)
    round_ = fleet.order(1)
    try:
        with watched(tmp_path, operator) as prometheus:
            fires(prometheus, "RlfleetRoundHolding", **ours(fleet))
            fires(prometheus, "RlfleetRoundTooLong", **ours(fleet), kind="Refresh")
            assert fleet.phase(round_) == "Holding"
            cluster.kubectl("delete", "sr", round_, "-n", fleet.namespace, "--wait=false")
            cluster.kubectl("delete", "rlp", "p", "-n", fleet.namespace, "--wait=false")
            fires(prometheus, "RlfleetFinalizerStuck", kind="RLPipeline")
            cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
            quiet(prometheus, "RlfleetRoundHolding")
            quiet(prometheus, "RlfleetFinalizerStuck")
    finally:
        cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")


def test_rounds_that_fail_and_weights_that_nobody_syncs(operator: Operator, fleet: Fleet, tmp_path: Path) -> None:
    serialized_fleet(fleet, 1, sync=SHORT)
    with watched(tmp_path, operator) as prometheus:
        for version in (5, 6, 7, 8):
            assert fleet.ended(fleet.order(version))["status"]["phase"] == "Expired"
        fires(prometheus, "RlfleetRoundsFailing", **ours(fleet))
        fleet.publish(2)
        fires(prometheus, "RlfleetVersionLag", **ours(fleet))


def test_a_pool_that_never_opens(operator: Operator, fleet: Fleet, tmp_path: Path) -> None:
    fleet.pool(1)
    with watched(tmp_path, operator) as prometheus:
        fires(prometheus, "RlfleetDegraded", **pools(fleet))
        fleet.pipeline()
        fleet.ready_engines(1)
        quiet(prometheus, "RlfleetDegraded")
        fires(prometheus, "RlfleetPoolClosed", **pools(fleet))
        fires(prometheus, "RlfleetSenderNotReady", **ours(fleet))


def test_an_engine_that_can_not_load(operator: Operator, fleet: Fleet, tmp_path: Path) -> None:
    pods = serialized_fleet(fleet, 3, sync={**LONG, "onFailure": "Hold"})
    fleet.fault(pods[0], DISK, action="partial")
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    with watched(tmp_path, operator) as prometheus:
        fires(prometheus, "RlfleetEnginesQuarantined", **pools(fleet))
        fleet.heal(pods[0])


def test_engines_that_stay_closed_without_a_trainer(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    short = {"deadlines": {"pendingSeconds": 5, "stagingSeconds": 5, "pausedSeconds": 5}}
    pods = serialized_fleet(fleet, 2, sync=short)
    cluster.hollow.crash(fleet.namespace, "trainer", "trainer")
    cluster.hollow.crash(fleet.namespace, name_of(pods[0]), "engine")
    with watched(tmp_path, operator) as prometheus:
        fires(prometheus, "RlfleetSenderNotReady", **ours(fleet))
        fires(prometheus, "RlfleetStuckLoading", **pools(fleet))


def test_a_gate_that_died_in_a_load(operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path) -> None:
    pods = serialized_fleet(fleet, 3, sync={**LONG, "onFailure": "Hold"})
    fleet.fault(pods[0], DISK, action="hang")
    fleet.publish(1)
    round_ = fleet.order(1)
    wait_until(lambda: fleet.phase(round_) == "Transferring", "Transferring", every=0.02)
    struck = engine_url(pods[0]) + "/_sim/faults"
    wait_until(lambda: http("GET", struck)[1], "the load to hang")
    with watched(tmp_path, operator, fleet) as prometheus:
        cluster.hollow.crash(fleet.namespace, name_of(pods[0]), "gate")
        fires(prometheus, "RlfleetGateUncertain", job="gate")


def test_two_operators_that_both_lead(operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path) -> None:
    pods = serialized_fleet(fleet, 2, sync=LONG)
    cluster.hollow.freeze(fleet.namespace, name_of(pods[0]), "gate", spared=True)
    other = Operator(cluster, tmp_path / "other")
    try:
        with watched(tmp_path, operator) as prometheus:
            fleet.publish(1)
            round_ = fleet.order(1)
            wait_until(lambda: fleet.phase(round_) == "Holding", "Holding", 120)
            other.start()
            fires(prometheus, "RlfleetFenceRejected")
    finally:
        other.stop()
        cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")


def test_an_operator_without_a_free_worker(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    pods = serialized_fleet(fleet, 2, sync=LONG)
    operator.stop()
    busy = Operator(cluster, tmp_path / "busy", RLFLEET_CONCURRENCY="1")
    busy.start()
    cluster.hollow.freeze(fleet.namespace, name_of(pods[0]), "gate", spared=True)
    try:
        with watched(tmp_path, busy) as prometheus:
            fleet.publish(1)
            fleet.order(1)
            fires(prometheus, "RlfleetQueueStuck")
    finally:
        cluster.hollow.thaw(fleet.namespace, name_of(pods[0]), "gate")
        busy.stop()


CALLS: list[tuple[str, Callable[[Any], bool], Fault, dict[str, str]]] = [
    ("RlfleetApiErrors", lambda c: c.plural == "syncrounds", Fault.ERROR, {}),
    ("RlfleetReconcileErrors", lambda c: c.plural == "syncrounds", Fault.ERROR, {"kind": "Pipeline"}),
]


@pytest.mark.parametrize(("alert", "when", "fault", "labels"), CALLS, ids=[c[0] for c in CALLS])
def test_an_apiserver_that_fails(
    operator: Operator,
    fleet: Fleet,
    cluster: LocalCluster,
    tmp_path: Path,
    alert: str,
    when: Callable[[Any], bool],
    fault: Fault,
    labels: dict[str, str],
) -> None:
    operator.stop()
    fleet.pipeline()
    with FaultProxy(cluster.operator_kubeconfig, tmp_path) as proxy:
        mine = Operator(cluster, tmp_path / "mine", RLFLEET_KUBECONFIG=str(proxy.kubeconfig))
        mine.start()
        try:
            with watched(tmp_path, mine) as prometheus:
                wait_until(lambda: prometheus.query("rlfleet_reconciles_total"), "a scrape")
                proxy.rules = [Rule(when, fault, times=0)]
                fires(prometheus, alert, **labels)
                proxy.rules = []
                quiet(prometheus, alert)
        finally:
            mine.stop()


def test_an_engine_that_somebody_drives_past_its_gate(operator: Operator, fleet: Fleet, tmp_path: Path) -> None:
    """The round protocol excludes it, and its gate closes such an engine at once: this one takes no pause."""
    pods = serialized_fleet(fleet, 2, sync={**LONG, "onFailure": "Hold"})
    with watched(tmp_path, operator) as prometheus:
        quiet(prometheus, "RlfleetVersionsDiffer")
        fleet.fault(pods[0], "pause_generation", action="http500")
        body = {"new_version": "7", "abort_all_requests": False}
        assert http("POST", engine_url(pods[0]) + "/update_weight_version", body)[0] == 200
        fires(prometheus, "RlfleetVersionsDiffer", **pools(fleet))
        fleet.heal(pods[0])
        quiet(prometheus, "RlfleetVersionsDiffer")


def test_a_repair_rule_that_fails(operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path) -> None:
    operator.stop()
    with FaultProxy(cluster.operator_kubeconfig, tmp_path) as proxy:
        mine = Operator(cluster, tmp_path / "mine", RLFLEET_KUBECONFIG=str(proxy.kubeconfig))
        mine.start()
        try:
            serialized_fleet(fleet, 1, sync=LONG, historyLimit=1)
            proxy.rules = [Rule(lambda c: c.plural == "syncrounds" and c.method == "DELETE", Fault.ERROR, times=0)]
            with watched(tmp_path, mine) as prometheus:
                for version in (1, 2, 3):
                    assert fleet.sync(version)["status"]["phase"] == "Succeeded"
                fires(prometheus, "RlfleetRepairRuleFailing", rule="History")
                proxy.rules = []
                quiet(prometheus, "RlfleetRepairRuleFailing")
        finally:
            mine.stop()


def test_a_neighbour_on_the_device_of_a_sleeping_engine(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    pinned_fleet(fleet)
    set_active(fleet, 1)
    settled(fleet, {0: "Active", 1: "Offloaded"})
    with watched(tmp_path, operator) as prometheus:
        with neighbour(cluster, DEVICES[1], 40):
            fires(prometheus, "RlfleetResidualMemoryHigh", **pools(fleet))
        quiet(prometheus, "RlfleetResidualMemoryHigh")


def test_an_operator_that_waits_for_its_own_rate_limit(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    operator.stop()
    fleet.pipeline()
    fleet.pool(2)
    slow = Operator(cluster, tmp_path / "slow", RLFLEET_API_QPS="2", RLFLEET_API_BURST="1", RLFLEET_POLL_SECONDS="0.2")
    slow.start()
    try:
        with watched(tmp_path, slow) as prometheus:
            fires(prometheus, "RlfleetApiThrottled")
    finally:
        slow.stop()
