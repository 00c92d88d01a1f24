"""Two operators under election: one acts at a time, a stop hands over in mid-round, and whoever lost the Lease is mute.

Each operator has its own proxy, so the journal tells who sent what. The Lease is short enough to be waited for, and
long enough that a busy machine loses none.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster
from e2e.scenarios.kit import wait_until
from tests.fault.calls import Call
from tests.fault.proxy import Fault, Rule
from tests.fault.stand import Instance, Stand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DISK = "update_weights_from_disk"
LEASE_NAME = "rlfleet-fault"
LEASE_SECONDS = 10


@pytest.fixture(scope="module")
def pair(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Two operators of one Lease, and a fleet of two engines whose base is committed."""
    env = {
        "RLFLEET_LEASE_NAME": LEASE_NAME,
        "RLFLEET_LEASE_SECONDS": str(LEASE_SECONDS),
        "RLFLEET_LEASE_RENEW_SECONDS": "8",
        "RLFLEET_LEASE_RETRY_SECONDS": "0.5",
    }
    grant(cluster)
    with Stand(cluster, tmp_path_factory.mktemp("pair"), instances=2, operator_env=env) as made:
        yield made
    cluster.kubectl("delete", "lease", LEASE_NAME, "-n", OPERATOR_NAMESPACE, "--ignore-not-found")


def grant(cluster: LocalCluster) -> None:
    """The chart grants one Lease by its name; this one is another, so that no other test's operator meets it."""
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "watch", "update"]}
    meta = {"name": LEASE_NAME, "namespace": OPERATOR_NAMESPACE}
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    cluster.apply(
        {**kind, "kind": "Role", "metadata": meta, "rules": [rule | {"resourceNames": [LEASE_NAME]}]},
        {
            **kind,
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": LEASE_NAME},
            "subjects": [{"kind": "ServiceAccount", "name": "rlfleet", "namespace": OPERATOR_NAMESPACE}],
        },
    )


def lease(stand: Stand) -> dict[str, Any]:
    return dict(stand.cluster.get("lease", LEASE_NAME, "-n", OPERATOR_NAMESPACE)["spec"])


def roles(stand: Stand) -> tuple[Instance, Instance]:
    """(leader, standby) by the last renewal in the journal; both run, restarted if they had ended."""
    for instance in stand.operators:
        assert instance.proxy is not None
        instance.proxy.rules = []
        if not instance.running():
            instance.operator.kill()
            instance.operator.start()

    def look() -> tuple[Instance, Instance] | None:
        mark = time.monotonic()
        wait_until(lambda: renewals(stand, mark), "a renewal", every=0.05)
        who = renewals(stand, mark)[-1].who
        one, two = stand.operators
        assert one.proxy is not None
        return (one, two) if one.proxy.name == who else (two, one)

    return wait_until(look, "a leader")


def renewals(stand: Stand, since: float) -> list[Call]:
    """Successful writes of the Lease that began after ``since``."""
    calls = list(stand.journal.calls)
    return [c for c in calls if c.plural == "leases" and not c.read and c.began > since and c.status in (200, 201)]


def mutations(stand: Stand, instance: Instance, since: float = 0.0) -> list[str]:
    """What the instance sent since then that could change anything, the Lease and Events included."""
    assert instance.proxy is not None
    calls = list(stand.journal.calls)
    return [c.point for c in calls if c.who == instance.proxy.name and not c.read and c.began > since]


def started(stand: Stand, phase: str) -> str:
    """A round that is in ``phase`` and stays there for a while; its name."""
    version = stand.next_version()
    stand.fleet.publish(version, bulk=8 if phase == "Staging" else 0)
    stand.pushes.rules = []
    if phase == "Staging":
        stand.pushes.strike(Rule(lambda c: "buckets" in c.label, Fault.DELAY, seconds=4))
    if phase == "Transferring":
        for pod in stand.pods:
            stand.fleet.fault(pod, DISK, action="delay", seconds=4, times=1, when="before")
    name = stand.fleet.order(version)
    wait_until(lambda: stand.fleet.phase(name) == phase, phase, every=0.01)
    return name


def check_succeeded(stand: Stand, name: str) -> None:
    """The round has succeeded, no engine was replaced, and nothing was violated on the way."""
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    stand.wait_steady("the fleet to be ready")
    assert [p["metadata"]["uid"] for p in stand.fleet.engines()] == [p["metadata"]["uid"] for p in stand.pods]
    assert [stand.fleet.label(p) for p in stand.pods] == [str(stand.version)] * len(stand.pods)
    assert stand.violations() == []


def test_of_two_that_start_at_once_one_leads_and_the_other_writes_nothing(pair: Stand) -> None:
    pair.kill_all()
    since = time.monotonic()
    for instance in pair.operators:
        instance.operator.start(wait=False)
    leader, standby = roles(pair)
    for instance in pair.operators:
        wait_until(instance.operator.ready, "both to be ready", 120)
    name = started(pair, "Staging")
    check_succeeded(pair, name)
    assert mutations(pair, leader, since)
    # A lost race for the Lease is the one thing that it may have tried.
    tried = [m for m in mutations(pair, standby, since) if "leases" not in m]
    assert tried == []
    assert {c.who for c in renewals(pair, since)} == {leader.proxy.name if leader.proxy else ""}


@pytest.mark.parametrize("phase", ["Staging", "Transferring"])
def test_a_leader_that_is_stopped_hands_its_round_over(pair: Stand, phase: str) -> None:
    leader, standby = roles(pair)
    name = started(pair, phase)
    holder = lease(pair)
    driver = pair.fleet.status("syncround", name)["lease"]["holder"]
    struck = time.monotonic()
    assert leader.operator.process is not None
    leader.operator.process.send_signal(signal.SIGTERM)
    assert leader.operator.process.wait(120) == 0, leader.operator.tail()
    ended = time.monotonic()
    check_succeeded(pair, name)
    assert pair.fleet.status("syncround", name)["lease"]["holder"] != driver, "the round was to outlast its operator"
    after = lease(pair)
    assert after["leaseTransitions"] == holder["leaseTransitions"] + 1
    assert "released" in leader.operator.log.read_text()
    # What it sent last was the release: nothing of it came after that.
    assert mutations(pair, leader)[-1].startswith("PUT leases")
    assert mutations(pair, leader, ended) == []
    assert mutations(pair, standby, struck)


def test_a_leader_that_was_frozen_past_its_lease_wakes_up_mute(pair: Stand) -> None:
    leader, standby = roles(pair)
    name = started(pair, "Transferring")
    before = lease(pair)["leaseTransitions"]
    leader.freeze()
    try:
        wait_until(lambda: lease(pair)["leaseTransitions"] > before, "the other one to take the Lease", every=0.05)
        check_succeeded(pair, name)
        woken = time.monotonic()
    finally:
        leader.thaw()
    assert leader.operator.process is not None
    assert leader.operator.process.wait(120) == 1, leader.operator.tail()
    assert mutations(pair, leader, woken) == []
    assert "leadership lost" in leader.operator.log.read_text()
    assert mutations(pair, standby, woken - LEASE_SECONDS)


def test_a_leader_whose_renewals_alone_are_cut_stops_before_another_one_acts(pair: Stand) -> None:
    leader, standby = roles(pair)
    assert leader.proxy is not None
    name = started(pair, "Transferring")
    since = time.monotonic()
    leader.proxy.strike(Rule(lambda c: c.plural == "leases", Fault.BUSY, times=0))
    assert leader.operator.process is not None
    assert leader.operator.process.wait(120) == 1, leader.operator.tail()
    check_succeeded(pair, name)
    name_of_leader = leader.proxy.name
    taken = wait_until(lambda: [c for c in renewals(pair, since) if c.who != name_of_leader], "the other one to lead")
    sent = [c for c in list(pair.journal.calls) if c.who == name_of_leader and not c.read and c.plural != "leases"]
    assert taken[0].began > max(c.began for c in sent)
    assert mutations(pair, standby, since)


def test_a_new_leader_tells_gates_nothing_new_and_raises_the_fence_before_it_tells_them_something(pair: Stand) -> None:
    leader, standby = roles(pair)
    assert standby.proxy is not None
    pair.wait_quiet()
    held = pair.fleet.status("rlpipeline", "p")["fence"]
    since = time.monotonic()
    assert leader.operator.process is not None
    leader.operator.process.send_signal(signal.SIGTERM)
    assert leader.operator.process.wait(120) == 0, leader.operator.tail()

    def sent(method: str) -> list[Call]:
        calls = list(pair.journal.calls)
        who = standby.proxy.name if standby.proxy else ""
        return [c for c in calls if c.who == who and c.method == method and c.began > since and c.status is not None]

    def looked() -> bool:
        asked = [c.peer_uid for c in sent("GET") if c.path == "/v1/status"]
        return all(asked.count(p["metadata"]["uid"]) >= 4 for p in pair.pods)

    wait_until(looked, "the new leader to have asked every gate several times")
    assert [m for m in mutations(pair, standby, since) if "leases" not in m] == []

    old = pair.pods[0]["metadata"]
    pair.cluster.kubectl("delete", "pod", old["name"], "-n", pair.namespace, "--wait=false")
    told = wait_until(lambda: [c for c in sent("POST") if c.path == "/v1/enroll"], "the new engine's gate to be told")
    raised = [c for c in sent("PATCH") if c.plural == "rlpipelines" and "fence" in (c.body.get("status") or {})]
    # It may have been raised more than once by then (a slow machine); what is told was written down before, and is new.
    raises = {c.body["status"]["fence"]: c.began for c in reversed(raised)}
    generation = told[0].body["generation"]
    assert raises[generation] < told[0].began
    assert generation > held
