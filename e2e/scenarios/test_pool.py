"""EnginePools on real pods: create, scale, replace, drain, update, refuse; and silence when nothing changes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from e2e.scenarios.kit import Fleet, Operator, condition, wait_until
from e2e.scenarios.routers import routed_fleet, urls

pytestmark = pytest.mark.cluster
OPERATOR = "system:serviceaccount:rlfleet-system:"


def uids(pods: list[dict[str, Any]]) -> dict[str, str]:
    """Engine index -> pod UID."""
    return {p["metadata"]["labels"]["rlfleet.dev/engine-index"]: p["metadata"]["uid"] for p in pods}


def reason(obj: dict[str, Any], kind: str) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["reason"]) for c in conditions if c["type"] == kind), "")


def scale(fleet: Fleet, replicas: int) -> None:
    fleet.cluster.kubectl("scale", "enginepool/e", f"--replicas={replicas}", "-n", fleet.namespace)


def counted(fleet: Fleet, **counts: int) -> dict[str, Any]:
    """Wait until the pool's status counts these; the pool."""

    def look() -> dict[str, Any] | None:
        pool = fleet.get("enginepool", "e")
        found = (pool.get("status") or {}).get("counts") or {}
        settled = pool["status"].get("observedGeneration") == pool["metadata"]["generation"] if found else False
        return pool if settled and all(found.get(k) == v for k, v in counts.items()) else None

    return wait_until(look, f"counts {counts}")


def test_pool_comes_up_and_follows_kubectl_scale(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(2)
    first = uids(fleet.ready_engines(2))
    pool = counted(fleet, loading=2)
    assert pool["status"]["replicas"] == 2
    assert condition(pool, "Ready") == "False"
    assert reason(pool, "Ready") == "NothingCommitted"
    assert {e["state"] for e in pool["status"]["engines"]} == {"Loading"}
    assert all(e["incarnation"] for e in pool["status"]["engines"])
    scale(fleet, 3)
    grown = uids(fleet.ready_engines(3))
    assert {k: grown[k] for k in first} == first, "growing touches nobody"
    scale(fleet, 1)
    assert uids(fleet.ready_engines(1)) == {"0": first["0"]}, "the highest indices go"
    scale(fleet, 0)
    wait_until(lambda: not fleet.engines(), "all pods to go")
    empty = counted(fleet, loading=0, pending=0)
    assert condition(empty, "Ready") == "True"
    assert reason(empty, "Ready") == "NoEngines"


def test_crashed_engine_is_replaced_under_a_new_identity(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(2)
    pods = fleet.ready_engines(2)
    before = uids(pods)
    incarnations = {e["podUID"]: e["incarnation"] for e in counted(fleet, loading=2)["status"]["engines"]}
    fleet.cluster.hollow.crash(fleet.namespace, pods[1]["metadata"]["name"], "engine")
    wait_until(lambda: uids(fleet.engines()).get("1") not in (before["1"], None), "a replacement")
    after = fleet.ready_engines(2)
    assert uids(after)["0"] == before["0"]
    assert uids(after)["1"] != before["1"]
    assert pods[1]["metadata"]["name"] not in {p["metadata"]["name"] for p in after}
    engines = counted(fleet, loading=2, failed=0)["status"]["engines"]
    assert {e["incarnation"] for e in engines} - set(incarnations.values()), "a new engine process has a new nonce"

    def failures() -> list[dict[str, Any]]:
        events = fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]
        return [e for e in events if e["reason"] == "PodFailed"]

    failed = wait_until(failures, "an Event about it")
    assert len(failed) == 1
    assert "exit code 137" in failed[0]["note"]


def test_an_eviction_that_the_pod_s_status_keeps_to_itself_is_told_in_the_kubelet_s_words(fleet: Fleet) -> None:
    """A kubelet loses its reason where every container ends with code 0 at once; its Event was written before."""
    fleet.pipeline()
    fleet.pool(1)
    (pod,) = fleet.ready_engines(1)
    meta = pod["metadata"]
    about = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "namespace": fleet.namespace, "uid": meta["uid"]}
    fleet.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.evicted", "namespace": fleet.namespace},
            "involvedObject": about,
            "reason": "Evicted",
            "message": "Usage of EmptyDir volume exceeds the limit",
            "source": {"component": "kubelet", "host": pod["spec"]["nodeName"]},
            "type": "Warning",
        }
    )
    os.kill(fleet.cluster.hollow.pid(fleet.namespace, meta["name"], "engine"), signal.SIGTERM)

    def told() -> list[str]:
        events = fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]
        return [str(e["note"]) for e in events if e["reason"] == "PodFailed"]

    (note,) = wait_until(told, "an Event about it")
    assert note.endswith(f"({meta['name']}) failed: Evicted: Usage of EmptyDir volume exceeds the limit")


@pytest.mark.slow
def test_engines_that_fail_again_and_again_are_named_whoever_leads(fleet: Fleet, operator: Operator) -> None:
    fleet.pipeline()
    fleet.pool(1)
    nodes: list[str] = []
    for count in (1, 2, 3):
        pod = fleet.ready_engines(1)[0]
        nodes.append(pod["spec"]["nodeName"])
        fleet.cluster.hollow.crash(fleet.namespace, pod["metadata"]["name"], "engine")

        def failed(wanted: int = count) -> dict[str, Any] | None:
            rows = fleet.status("enginepool", "e").get("startFailures") or [{}]
            return rows[0] if rows[0].get("count") == wanted else None

        found = wait_until(failed, "it to be counted")
        operator.kill()
        operator.start()
    assert (found["index"], found["node"]) == (0, nodes[-1])
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Degraded") == "EnginesKeepFailing", "it to be said")
    degraded = next(c for c in fleet.status("enginepool", "e")["conditions"] if c["type"] == "Degraded")
    assert "3" in degraded["message"]
    assert (f"on node {nodes[-1]}" in degraded["message"]) == (len(set(nodes)) == 1)
    # Who serves is forgiven.
    fleet.trainer()
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    wait_until(lambda: "startFailures" not in fleet.status("enginepool", "e"), "it to be forgotten")


def test_pod_that_somebody_deletes_is_replaced(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(1)
    old = fleet.ready_engines(1)[0]
    fleet.cluster.kubectl("delete", "pod", old["metadata"]["name"], "-n", fleet.namespace, "--wait=false")
    wait_until(lambda: uids(fleet.engines()).get("0") not in (old["metadata"]["uid"], None), "a replacement")
    assert uids(fleet.ready_engines(1))["0"] != old["metadata"]["uid"]


def test_template_change_waits_for_deletion(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(2)
    before = uids(fleet.ready_engines(2))
    assert condition(counted(fleet, loading=2), "TemplateOutdated") == "False"
    fleet.pool(2, engine_args=("--seed", "7"))

    def outdated(count: int) -> dict[str, Any] | None:
        pool = fleet.get("enginepool", "e")
        found = next(c for c in pool["status"]["conditions"] if c["type"] == "TemplateOutdated")
        return pool if found["status"] == "True" and found["message"].startswith(f"{count} of 2") else None

    wait_until(lambda: outdated(2), "TemplateOutdated for both")
    assert uids(fleet.engines()) == before, "OnDelete: running engines stay"
    victim = fleet.engines()[0]
    fleet.cluster.kubectl("delete", "pod", victim["metadata"]["name"], "-n", fleet.namespace, "--wait=false")
    wait_until(lambda: outdated(1), "TemplateOutdated for the other")
    made = [p for p in fleet.ready_engines(2) if p["metadata"]["uid"] not in before.values()]
    command = next(c for c in made[0]["spec"]["containers"] if c["name"] == "engine")["command"]
    assert command[-2:] == ["--seed", "7"]


def test_pool_without_pipeline_makes_no_pods_until_there_is_one(fleet: Fleet) -> None:
    fleet.pool(1)
    pool = counted(fleet, pending=1)
    assert reason(pool, "Ready") == "PipelineNotFound"
    assert condition(pool, "Degraded") == "True"
    assert fleet.engines() == []
    fleet.pipeline()
    fleet.ready_engines(1)
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "NothingCommitted", "the pool to recover")


def test_spec_that_cannot_become_pods_is_refused_by_field(fleet: Fleet) -> None:
    fleet.pipeline()
    template = {"spec": {"containers": [{"name": "engine", "image": "x", "env": [{"name": "RLFLEET_POOL"}]}]}}
    fleet.pool(1, source={"template": template})

    def refused() -> dict[str, Any] | None:
        pool = fleet.get("enginepool", "e")
        return pool if reason(pool, "Ready") == "InvalidSpec" else None

    found = wait_until(refused, "InvalidSpec")
    message = next(c["message"] for c in found["status"]["conditions"] if c["type"] == "Ready")
    assert "RLFLEET_POOL" in message
    assert fleet.engines() == []


def test_pod_that_the_apiserver_refuses_is_said_and_costs_few_calls(fleet: Fleet, operator: Operator) -> None:
    fleet.pipeline()
    mark = fleet.cluster.audit_mark()
    template = {"spec": {"containers": [{"name": "engine", "image": "x", "imagePullPolicy": "Sometimes"}]}}
    fleet.pool(40, source={"template": template})
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Degraded") == "PodCreateFailed", "PodCreateFailed")
    tries = [
        e
        for e in fleet.cluster.audit(mark)
        if e.namespace == fleet.namespace and (e.verb, e.resource) == ("create", "pods")
    ]
    assert 0 < len(tries) < 20, "one call at a time while nothing succeeds, not one per engine"
    # Since when outlives the operator, and what is put right is tried at once.
    since = fleet.status("enginepool", "e")["podsRefusedSince"]
    operator.kill()
    mark = fleet.cluster.audit_mark()
    operator.start()

    def tried() -> bool:
        return any(
            e.namespace == fleet.namespace and (e.verb, e.resource) == ("create", "pods")
            for e in fleet.cluster.audit(mark)
        )

    wait_until(tried, "its successor to try")
    status = fleet.status("enginepool", "e")
    assert (status["podsRefusedSince"], reason({"status": status}, "Degraded")) == (since, "PodCreateFailed")
    fleet.pool(1)
    fleet.ready_engines(1)
    wait_until(lambda: "podsRefusedSince" not in fleet.status("enginepool", "e"), "the trouble to be over")


def test_idle_fleet_writes_nothing(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(2)
    fleet.ready_engines(2)
    counted(fleet, loading=2)
    seen = ""

    def quiet() -> bool:
        # The last writes of coming up are over when nothing changes from one look to the next. The first look only
        # begins the interval: it must not be compared with a value read in the same instant.
        nonlocal seen
        before, seen = seen, fleet.get("enginepool", "e")["metadata"]["resourceVersion"]
        return bool(before == seen)

    wait_until(quiet, "the pool's status to settle", every=6)
    mark = fleet.cluster.audit_mark()
    time.sleep(10)  # the observation itself: ten polls, each of which could have written
    # Other tests' namespaces may still be on their way out.
    ours = [e for e in fleet.cluster.audit(mark) if e.namespace == fleet.namespace and e.user.startswith(OPERATOR)]
    writes = [e for e in ours if e.writes]
    assert ours, "the operator does look"
    assert writes == [], fleet.get("enginepool", "e")["status"]


def test_pool_goes_with_its_pods(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(2)
    fleet.ready_engines(2)
    fleet.cluster.kubectl("delete", "enginepool", "e", "-n", fleet.namespace, "--timeout=180s")
    wait_until(lambda: not fleet.engines(), "the pods to be collected")


def test_restarted_operator_changes_nothing(fleet: Fleet, operator: Operator) -> None:
    fleet.pipeline()
    fleet.pool(2)
    before = uids(fleet.ready_engines(2))
    counted(fleet, loading=2)
    operator.kill()
    # Somebody scales and an engine dies while nobody looks.
    scale(fleet, 3)
    fleet.cluster.hollow.crash(fleet.namespace, fleet.engines()[1]["metadata"]["name"], "engine")
    operator.start()
    after = uids(fleet.ready_engines(3))
    assert after["0"] == before["0"]
    assert after["1"] != before["1"]


def test_operator_ends_by_itself_when_asked_to(operator: Operator) -> None:
    if operator.process is None:
        operator.start()
    process = operator.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, operator.tail()
    operator.process = None


def test_scaling_down_drains_routed_engines_and_deletion_leaves_no_entry(fleet: Fleet) -> None:
    router, _ = routed_fleet(fleet, 3)
    active = counted(fleet, active=3)
    assert condition(active, "Ready") == "True"
    assert active["status"]["versions"] == [{"version": -1, "engines": "0-2"}]
    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(router.generate()[0])

    client = threading.Thread(target=ask)
    client.start()
    try:
        scale(fleet, 1)
        left = fleet.ready_engines(1)
        wait_until(lambda: len(fleet.engines()) == 1, "the others to be gone")
        assert router.listed() == urls(left)
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 3, "requests after the drain")
    finally:
        stop.set()
        client.join()
    assert set(answers) == {200}, "an engine left with requests inside, or while the router still listed it"
    fleet.cluster.kubectl("delete", "enginepool", "e", "-n", fleet.namespace, "--timeout=180s")
    assert router.listed() == set()


def test_crashed_engine_leaves_the_router_though_its_pod_is_gone_at_once(fleet: Fleet) -> None:
    router, pods = routed_fleet(fleet, 2)
    counted(fleet, active=2)
    name = pods[1]["metadata"]["name"]
    fleet.cluster.kubectl("delete", "pod", name, "-n", fleet.namespace, "--grace-period=0", "--force")
    wait_until(lambda: router.listed() == urls(pods[:1]), "the entry of the lost engine to go")
