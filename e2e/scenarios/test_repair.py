"""What goes wrong between rounds is put right without a round, and only as far as it is proven.

One fleet behind a real router for the whole module: each scenario damages it, and leaves it serving.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, engine_url, http, wait_until
from e2e.scenarios.routers import Router, routed_fleet, urls

pytestmark = pytest.mark.cluster

OPERATOR = "system:serviceaccount:rlfleet-system:"
DISK = "update_weights_from_disk"


@dataclass
class Stand:
    """Operator, fleet and router, and what is committed."""

    operator: Operator
    fleet: Fleet
    router: Router
    pods: list[dict[str, Any]]
    version: int = -1
    """What is committed."""
    newest: int = -1
    """What was published last."""
    rounds: list[str] = field(default_factory=list)

    def next(self) -> int:
        """A version that nobody has published yet."""
        self.newest += 1
        return self.newest

    def sync(self) -> None:
        """Commit the next version."""
        self.version = self.next()
        done = self.fleet.sync(self.version)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        self.rounds.append(done["metadata"]["name"])

    def healthy(self) -> bool:
        """Every engine serves what is committed, the router lists all of them, and nobody owns the slot."""
        self.pods = self.fleet.engines()
        return (
            len(self.pods) == 2
            and self.router.listed() == urls(self.pods)
            and not any(self.fleet.paused(p) for p in self.pods)
            and all(self.fleet.label(p) == str(self.version) for p in self.pods)
            and self.active() is None
        )

    def active(self) -> dict[str, Any] | None:
        """What owns the slot."""
        found: dict[str, Any] | None = self.fleet.status("rlpipeline", "p").get("activeOperation")
        return found

    def claimed(self, kind: str) -> dict[str, Any]:
        """Wait until work of this kind owns the slot."""

        def look() -> dict[str, Any] | None:
            active = self.active()
            return active if active is not None and active["kind"] == kind else None

        return wait_until(look, f"{kind} to own the slot", every=0.02)

    def heals(self) -> None:
        """Wait until the fleet is healthy without any round."""
        before = self.rounds_there()
        wait_until(self.healthy, "the fleet to be repaired")
        assert self.rounds_there() == before, "a round was made"

    def rounds_there(self, kind: str = "") -> set[str]:
        """Names of all rounds, or of those of one kind."""
        items = self.fleet.cluster.get("syncrounds", "-n", self.fleet.namespace)["items"]
        return {r["metadata"]["name"] for r in items if not kind or r["spec"]["kind"] == kind}

    def notes(self, reason: str) -> list[str]:
        """What Events with this reason say."""
        items = self.fleet.cluster.get("events.events.k8s.io", "-n", self.fleet.namespace)["items"]
        return [str(e["note"]) for e in items if e["reason"] == reason]

    def by_hand(self, pod: dict[str, Any], path: str, body: Any) -> None:
        """Call an engine past its gate, as a person with a shell would."""
        code, answer = http("POST", engine_url(pod) + path, body)
        assert code == 200, answer


@pytest.fixture(scope="module")
def stand(cluster: LocalCluster, operator: Operator) -> Iterator[Stand]:
    namespace = f"t-{uuid.uuid4().hex[:10]}"
    cluster.kubectl("create", "namespace", namespace)
    for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
        cluster.kubectl("wait", "--for=create", thing, f"--namespace={namespace}", "--timeout=180s")
    fleet = Fleet(cluster, namespace)
    sync = {"onFailure": "Hold", "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}}
    router, pods = routed_fleet(fleet, 2, sync=sync)
    try:
        yield Stand(operator, fleet, router, pods)
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        cluster.kubectl("delete", "pods", "--all", f"--namespace={namespace}", "--wait=false")


@pytest.fixture(autouse=True)
def serving(stand: Stand) -> None:
    """Each scenario begins with a fleet that serves."""
    if stand.operator.process is None:
        stand.operator.start()
    wait_until(stand.healthy, "the fleet to serve")


def test_a_restarted_router_gets_its_entries_back(stand: Stand) -> None:
    fleet = stand.fleet
    fleet.cluster.kubectl("delete", "pod", "router", "-n", fleet.namespace, "--grace-period=0", "--force")
    wait_until(lambda: not fleet.cluster.get("pods", "-n", fleet.namespace, "-l", "app=router")["items"], "no router")
    stand.router = Router(fleet)
    seen: list[set[str]] = []

    def back() -> bool:
        seen.append(stand.router.listed())
        return stand.healthy()

    wait_until(back, "the entries")
    assert all(listed <= urls(stand.pods) for listed in seen)
    assert stand.router.generate()[0] == 200


def test_an_engine_that_somebody_paused_resumes(stand: Stand) -> None:
    stand.by_hand(stand.pods[0], "/pause_generation", {"mode": "retract"})
    assert stand.fleet.paused(stand.pods[0])
    stand.heals()


def test_an_engine_whose_label_somebody_changed_is_closed_and_caught_up(stand: Stand) -> None:
    victim = stand.pods[0]
    stand.by_hand(victim, "/update_weight_version", {"new_version": "77", "abort_all_requests": False})
    # Its gate closes it at once. Whether repair has to take it out of the router before the catch-up comes is a race,
    # but nobody else writes the label back than a gate that has loaded, verified and published.
    wait_until(
        lambda: stand.healthy() and stand.fleet.label(victim) == str(stand.version), "the engine to be caught up"
    )


def test_a_poisoned_engine_that_somebody_opens_is_closed(stand: Stand) -> None:
    victim, other = stand.pods
    stand.fleet.pipeline(
        sync={
            "onFailure": "Hold", "maxUnavailable": 1,
            "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60},
        }
    )  # fmt: skip
    stand.fleet.fault(victim, DISK, action="http500", times=99, when="before")
    stand.sync()
    assert stand.router.listed() == urls([other])
    code, _ = http("POST", stand.router.url + "/workers", {"url": engine_url(victim)})
    assert code < 300
    wait_until(lambda: stand.router.listed() == urls(stand.pods), "the entry that was made by hand")
    wait_until(lambda: stand.router.listed() == urls([other]), "the entry to be removed")
    assert stand.fleet.paused(victim)
    stand.fleet.fault(victim, DISK, action="http500", times=0, when="before")
    stand.sync()


def test_an_operator_that_dies_within_a_repair_is_succeeded(stand: Stand) -> None:
    victim = stand.pods[0]
    stand.fleet.fault(victim, "continue_generation", action="hold", times=1)
    stand.by_hand(victim, "/pause_generation", {"mode": "retract"})
    claim = stand.claimed("Repair")
    stand.operator.kill()
    assert stand.fleet.status("rlpipeline", "p")["activeOperation"] == claim
    stand.fleet.heal(victim)
    stand.operator.start()
    stand.heals()
    assert stand.fleet.status("rlpipeline", "p")["fence"] > claim["generation"]


@pytest.mark.slow
def test_an_order_without_a_known_end_is_settled(stand: Stand) -> None:
    """The engine never answers the resume of a repair: it is paused anew, proven idle, and resumed."""
    victim = stand.pods[0]
    stand.fleet.fault(victim, "continue_generation", action="hang", times=1)
    stand.by_hand(victim, "/pause_generation", {"mode": "retract"})
    name = victim["metadata"]["name"]
    wait_until(lambda: any("settled" in n and name in n for n in stand.notes("Repaired")), "the order to be settled")
    stand.heals()
    assert victim["metadata"]["uid"] in {p["metadata"]["uid"] for p in stand.pods}, "the pod was replaced"


def test_work_of_an_unknown_kind_is_taken_over_by_the_resume_rule(stand: Stand) -> None:
    """As an operator leaves it that was killed while it put engines to sleep."""
    stand.operator.kill()
    stand.by_hand(stand.pods[0], "/pause_generation", {"mode": "retract"})
    fence = stand.fleet.status("rlpipeline", "p")["fence"] + 1
    active = {"kind": "Offload", "name": "offload", "uid": str(uuid.uuid4()), "generation": fence, "holder": "gone"}
    stand.fleet.cluster.kubectl(
        "patch", "rlpipeline", "p", "-n", stand.fleet.namespace, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"fence": fence, "activeOperation": active}}),
    )  # fmt: skip
    stand.operator.start()
    stand.heals()


@pytest.mark.slow
def test_a_round_that_no_claim_names_ends(stand: Stand) -> None:
    """As a status leaves it that was restored from a backup: the round goes on, by what the engines prove."""
    fleet = stand.fleet
    version = stand.next()
    for pod in stand.pods:
        fleet.fault(pod, DISK, action="hold", times=1)
    fleet.publish(version)
    name = fleet.order(version)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    stand.operator.kill()
    fleet.cluster.kubectl(
        "patch", "rlpipeline", "p", "-n", fleet.namespace, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"activeOperation": None}}),
    )  # fmt: skip
    for pod in stand.pods:
        fleet.heal(pod)
    stand.operator.start()
    done = fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed")
    stand.version = fleet.status("rlpipeline", "p")["committed"]["version"]
    wait_until(stand.healthy, "the fleet to serve what is committed")


@pytest.mark.slow
def test_a_refresh_goes_before_a_repair(stand: Stand) -> None:
    """The repair has claimed, and waits for a silent gate when a round can run: it gives way untouched."""
    fleet = stand.fleet
    victim, silent = stand.pods
    stand.version = stand.next()
    name = fleet.order(stand.version)
    wait_until(lambda: fleet.phase(name) == "Pending", "the round to wait for its version")
    fleet.cluster.hollow.freeze(fleet.namespace, silent["metadata"]["name"], "gate", spared=True)
    try:
        stand.by_hand(victim, "/pause_generation", {"mode": "retract"})
        stand.claimed("Repair")
        fleet.publish(stand.version)
        wait_until(lambda: "repair gives way" in stand.operator.log.read_text(), "the repair to give way")
        assert fleet.paused(victim), "the repair touched an engine first"
    finally:
        fleet.cluster.hollow.thaw(fleet.namespace, silent["metadata"]["name"], "gate")
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    stand.rounds.append(name)
    wait_until(stand.healthy, "the fleet to serve")


def test_old_rounds_go(stand: Stand) -> None:
    for _ in range(2):
        stand.sync()
    stand.fleet.pipeline(
        ttlSecondsAfterFinished=1,
        sync={"onFailure": "Hold", "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}},
    )
    wait_until(lambda: stand.rounds_there("Refresh") == {stand.rounds[-1]}, "all rounds but the last one to be swept")


def test_an_idle_fleet_writes_nothing(stand: Stand) -> None:
    fleet, seen = stand.fleet, {""}

    def versions() -> set[str]:
        listed = fleet.cluster.get("rlpipelines,enginepools,syncrounds", "-n", fleet.namespace)["items"]
        return {i["metadata"]["resourceVersion"] for i in listed}

    def quiet() -> bool:
        nonlocal seen
        before, seen = seen, versions()
        return bool(before == seen)

    wait_until(quiet, "statuses to settle", every=2.5)
    mark = fleet.cluster.audit_mark()
    time.sleep(10)  # the observation itself: ten polls, each of which could have claimed or written
    ours = [e for e in fleet.cluster.audit(mark) if e.namespace == fleet.namespace and e.user.startswith(OPERATOR)]
    assert ours, "the operator does look"
    assert [e for e in ours if e.writes] == []
