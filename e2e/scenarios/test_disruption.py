"""Pods that others end, by the real Eviction API and the real scheduler, and pods that a changed template replaces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from e2e.cluster.local import ClusterError
from e2e.scenarios.adopting import message
from e2e.scenarios.kit import Fleet, Operator, engine_url, http, wait_until
from e2e.scenarios.test_rounds import serialized_fleet
from rlfleet.plan.room import STARVED_MS

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"
DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}
#: Nobody may be missing: an engine that others take away does not count.
STRICT = {"deadlines": DEADLINES, "maxUnavailable": 0, "drainSeconds": 1}


def evict(fleet: Fleet, pod: dict[str, Any]) -> None:
    """What `kubectl drain` asks for each pod; ClusterError where a budget refuses."""
    meta = pod["metadata"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": meta["name"], "namespace": fleet.namespace},
    }
    path = f"/api/v1/namespaces/{fleet.namespace}/pods/{meta['name']}/eviction"
    fleet.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))


def allowed(fleet: Fleet) -> int:
    """Evictions that the pool's budget allows now; -1: it does not say yet."""
    found = fleet.get("poddisruptionbudget", "e")
    status = found.get("status") or {}
    seen = status.get("observedGeneration") == found["metadata"]["generation"]
    return int(status.get("disruptionsAllowed") or 0) if seen else -1


def results(done: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Result and reason of each member."""
    return {m["engine"]: (m["result"], m.get("reason", "")) for m in done["status"]["members"]}


def names(pods: list[dict[str, Any]]) -> list[str]:
    return [str(p["metadata"]["name"]) for p in pods]


def leaving(fleet: Fleet) -> str | None:
    """UID of an engine pod that is on its way out."""
    return next((str(p["metadata"]["uid"]) for p in fleet.engines() if "deletionTimestamp" in p["metadata"]), None)


def gone(fleet: Fleet, pod: dict[str, Any]) -> bool:
    return pod["metadata"]["uid"] not in {p["metadata"]["uid"] for p in fleet.engines()}


def test_an_engine_evicted_in_a_round_is_dropped_and_a_budget_guards_the_others(fleet: Fleet) -> None:
    stays, leaves = serialized_fleet(fleet, 2, sync=STRICT)
    wait_until(lambda: allowed(fleet) == 1, "the budget to count the engines")
    assert leaves["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    fleet.fault(leaves, DISK, action="delay", seconds=60, times=1, when="before")  # for as long as it lives
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    evict(fleet, leaves)
    with pytest.raises(ClusterError, match="disruption budget"):
        evict(fleet, stays)
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert results(done) == {names([stays])[0]: ("Ok", ""), names([leaves])[0]: ("Dropped", "Disrupted")}
    assert (fleet.label(stays), fleet.paused(stays)) == ("1", False)
    # Its successor comes in by a CatchUp.
    wait_until(lambda: gone(fleet, leaves), "the engine to go")
    pods = fleet.ready_engines(2)
    new = next(p for p in pods if p["metadata"]["uid"] != stays["metadata"]["uid"])
    wait_until(lambda: serves(new, "1"), "its successor to have caught up")


@pytest.mark.slow
def test_an_engine_that_the_scheduler_preempts_in_a_round_is_dropped(fleet: Fleet) -> None:
    stays, leaves = serialized_fleet(fleet, 2, sync=STRICT)
    # It fits on that node only without the engine: with one on each node, or with one of the two that share it.
    shared = stays["spec"]["nodeName"] == leaves["spec"]["nodeName"]
    for pod in (stays, leaves) if shared else (leaves,):
        fleet.fault(pod, DISK, action="hold", times=1)
    high = f"high-{fleet.namespace}"
    fleet.cluster.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": high}, "value": 1000}
    )
    try:
        fleet.publish(1)
        name = fleet.order(1)
        wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
        fleet.cluster.apply(greedy(fleet, leaves["spec"]["nodeName"], high, 7 if shared else 8))
        if shared:
            # Whichever of the two the scheduler does not take is to get on.
            preempted = wait_until(lambda: leaving(fleet), "the scheduler to choose")
            fleet.heal(next(p for p in (stays, leaves) if p["metadata"]["uid"] != preempted))
        done = fleet.ended(name)
    finally:
        fleet.cluster.kubectl("delete", "pod", "greedy", "-n", fleet.namespace, "--ignore-not-found")
        fleet.cluster.kubectl("delete", "priorityclass", high)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    found = results(done)
    assert sorted(found.values()) == [("Dropped", "Disrupted"), ("Ok", "")]


def greedy(fleet: Fleet, node: str, priority: str, gpus: int) -> dict[str, Any]:
    """A pod that takes this many GPUs of one node from whoever has a lower priority."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "greedy", "namespace": fleet.namespace},
        "spec": {
            "priorityClassName": priority,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [
                {
                    "name": "main",
                    "image": "busy",
                    "command": ["sleep", "600"],
                    "resources": {"limits": {"nvidia.com/gpu": gpus}},
                }
            ],
        },
    }


def roll(fleet: Fleet, mark: str) -> None:
    """Change the template."""
    patch = {"spec": {"source": {"template": {"metadata": {"labels": {"mark": mark}}}}}}
    fleet.cluster.kubectl("patch", "epool/e", "-n", fleet.namespace, "--type=merge", "-p", json.dumps(patch))


def marked(pods: list[dict[str, Any]], mark: str) -> int:
    return sum(p["metadata"]["labels"].get("mark") == mark for p in pods)


def serves(pod: dict[str, Any], version: str) -> bool:
    """The engine holds this version and takes requests."""
    try:
        code, answer = http("GET", engine_url(pod) + "/model_info", timeout=3)
        return (code, answer["weight_version"]) == (200, version) and http("GET", engine_url(pod) + "/ready")[0] == 200
    except OSError:
        return False


def ready_since(pod: dict[str, Any]) -> str:
    """When the pod became Ready."""
    return next(str(c["lastTransitionTime"]) for c in pod["status"]["conditions"] if c["type"] == "Ready")


def test_a_rolling_update_waits_for_the_round_and_takes_one_engine_at_a_time(fleet: Fleet) -> None:
    fleet.pipeline(sync=STRICT)
    fleet.pool(2, updateStrategy={"type": "RollingUpdate", "maxUnavailable": 1})
    fleet.trainer()
    old = fleet.ready_engines(2)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    fleet.fault(old[0], DISK, action="hold", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Transferring", "Transferring", every=0.02)
    roll(fleet, "new")

    def said() -> tuple[str, str]:
        return message(fleet.get("epool", "e"), "Progressing")

    wait_until(lambda: said()[0] == "RoundInProgress" and "earlier template" in said()[1], "the wish to be recorded")
    assert message(fleet.get("epool", "e"), "TemplateOutdated")[0] == "TemplateChanged"
    fleet.heal(old[0])
    done = fleet.ended(name)
    assert {r for r, _ in results(done).values()} == {"Ok"}, "the round kept its engines"

    def finished() -> bool:
        pods = fleet.ready_engines(2)
        return marked(pods, "new") == 2 and all(serves(p, "1") for p in pods)

    wait_until(finished, "both engines to be replaced and to have caught up", 240)
    first, second = sorted(fleet.engines(), key=lambda p: str(p["metadata"]["creationTimestamp"]))
    assert ready_since(first) <= second["metadata"]["creationTimestamp"], "one at a time"
    wait_until(lambda: message(fleet.get("epool", "e"), "TemplateOutdated")[0] == "TemplateCurrent", "the end of it")


def refused(fleet: Fleet) -> bool:
    """The apiserver takes no PodDisruptionBudget in the fleet's namespace."""
    try:
        fleet.cluster.kubectl("create", "pdb", "probe", "--selector=a=b", "--min-available=1", "-n", fleet.namespace)
    except ClusterError as e:
        return "quota" in str(e)
    fleet.cluster.kubectl("delete", "pdb", "probe", "-n", fleet.namespace)
    return False


def test_a_budget_that_can_not_be_made_is_named_and_made_when_it_can(fleet: Fleet) -> None:
    """Its name is somebody's own, then the apiserver refuses it; engines are not held up by either."""

    def degraded(reason: str) -> bool:
        return message(fleet.get("epool", "e"), "Degraded")[0] == reason

    fleet.cluster.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "e", "namespace": fleet.namespace},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "mine"}}},
        }
    )
    fleet.pipeline(sync=STRICT)
    fleet.pool(1)
    wait_until(lambda: degraded("BudgetNameTaken"), "the pool to say whose name it is")
    assert "PodDisruptionBudget e is not this pool's" in message(fleet.get("epool", "e"), "Degraded")[1]
    assert fleet.get("pdb", "e")["spec"]["minAvailable"] == 1, "somebody's own was changed"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no", "namespace": fleet.namespace}}
    fleet.cluster.apply({**quota, "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}}})
    wait_until(lambda: refused(fleet), "the quota to be heeded")
    fleet.cluster.kubectl("delete", "pdb", "e", "-n", fleet.namespace)
    wait_until(lambda: degraded("BudgetFailed"), "the pool to say what the apiserver refuses")
    fleet.ready_engines(1)
    fleet.cluster.kubectl("delete", "resourcequota", "no", "-n", fleet.namespace)
    wait_until(lambda: degraded("AsExpected"), "the trouble to be over")
    owner = fleet.get("pdb", "e")["metadata"]["ownerReferences"][0]
    assert owner["uid"] == fleet.get("epool", "e")["metadata"]["uid"]


@pytest.mark.slow
def test_a_round_waits_for_an_update_that_had_no_time_for_long(fleet: Fleet, operator: Operator) -> None:
    """What keeps the update from its step is a budget here; it goes while the round makes room. Meanwhile repair goes
    on, and an operator that dies has its successor wait for the rest, and no longer."""
    deadlines = {**DEADLINES, "pendingSeconds": 1200}
    # The gate of the pod that is made anew may be silent when the round is planned.
    fleet.pipeline(sync={"deadlines": deadlines, "maxUnavailable": 1, "drainSeconds": 300})
    fleet.pool(2, updateStrategy={"type": "RollingUpdate", "maxUnavailable": 1})
    fleet.trainer()
    old = fleet.ready_engines(2)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    everyone = {"matchLabels": {"rlfleet.dev/pool": "e"}}
    fleet.cluster.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "mine", "namespace": fleet.namespace},
            "spec": {"minAvailable": 2, "selector": everyone},
        }
    )
    roll(fleet, "new")

    def said() -> str:
        return message(fleet.get("epool", "e"), "Progressing")[1]

    wait_until(lambda: "PodDisruptionBudget mine lets none go" in said(), "the update to be stuck")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > STARVED_MS / 1000 + 1, "it to starve", 120, every=1)
    fleet.publish(1)
    name = fleet.order(1)

    def waits() -> bool:
        assert fleet.phase(name) in ("", "Pending"), "the round did not wait"
        return message(fleet.get("syncround", name), "Progressing")[0] == "Updating"

    wait_until(waits, "the round to wait")
    assert "EnginePool e" in message(fleet.get("syncround", name), "Progressing")[1]
    room = fleet.status("rlpipeline", "p")["updateRoom"]

    def repaired() -> None:
        http("POST", engine_url(old[0]) + "/pause_generation", {"mode": "retract"})
        wait_until(lambda: waits() and not fleet.paused(old[0]), "the engine to be resumed while the round waits")

    repaired()
    operator.kill()
    operator.start()
    repaired()
    assert fleet.status("rlpipeline", "p")["updateRoom"] == room, "the wait began anew"
    # Two budgets for one pod would make every eviction fail, as that of the pool is there, too.
    fleet.cluster.kubectl("delete", "pdb", "mine", "-n", fleet.namespace)
    done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    # The round began when one of them was on its way out, or gave up waiting; in any case the update goes on.
    uids = {p["metadata"]["uid"] for p in old}
    wait_until(lambda: not uids & {p["metadata"]["uid"] for p in fleet.ready_engines(2)}, "both to be replaced", 240)
    assert fleet.status("rlpipeline", "p")["updateRoom"] == room
