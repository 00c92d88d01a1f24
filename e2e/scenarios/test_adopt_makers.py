"""Pods as LeaderWorkerSet, RoleBasedGroup and KubeRay make them, adopted: one fleet, and none of theirs is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.local import OPERATOR_NAME, OPERATOR_NAMESPACE
from e2e.scenarios.adopting import guide, keys, manifest, says, shell, states
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.makers import LWS, lws_group, ray_pods, rbg_pods, serve_kinds

pytestmark = pytest.mark.cluster

OPERATOR = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{OPERATOR_NAME}"
ENGINES = {"lws": "lws-engines-0", "rbg": "rbg-engines-engine-0", "ray": "ray-engines-engines-worker-x7k2p"}
OTHERS = {"lws-engines-0-1", "rbg-engines-router-0", "ray-engines-head"}

#: Nothing fails here: no deadline is to end a round on a slow machine.
PATIENT = {"pendingSeconds": 180, "stagingSeconds": 180, "pausedSeconds": 180}


def up(fleet: Fleet, pool: str) -> bool:
    """The pool has one engine, which answers."""
    return bool(fleet.status("enginepool", pool).get("readyReplicas") == 1)


def test_leaders_roles_and_worker_groups_are_engines_of_one_fleet(fleet: Fleet, tmp_path: Path) -> None:
    mark = fleet.cluster.audit_mark()
    serve_kinds(fleet.cluster)
    fleet.pipeline(sync={"deadlines": PATIENT, "drainSeconds": 2})
    keys(fleet)
    come, *_ = guide(tmp_path)
    shell(fleet, tmp_path, come.split("kubectl apply")[0])
    for name, make in (("lws", lws_group), ("rbg", rbg_pods), ("raycluster", ray_pods)):
        workload, pool = manifest(f"adopt-{name}")
        fleet.apply("EnginePool", pool["metadata"]["name"], pool["spec"])
        make(fleet, workload)
    fleet.trainer()
    wait_until(lambda: all(up(fleet, pool) for pool in ENGINES), "each pool to have its engine up")
    for pool_name, engine in ENGINES.items():
        assert list(states(fleet, pool_name)) == [engine], "the others of its group are no engines"
        assert fleet.status("enginepool", pool_name)["admissionGuarantee"] == "DetectOnly"
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    done = fleet.sync(1)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(ENGINES.values(), "Ok")
    pods = [fleet.pod(name) for name in ENGINES.values()]
    assert [(fleet.label(p), fleet.paused(p)) for p in pods] == [("1", False)] * 3
    assert len({fleet.checksum(p) for p in pods}) == 1

    # A selector without the worker's index takes whole groups: it gets the leader of nobody else, and no worker.
    _, wide = manifest("adopt-lws")
    del wide["spec"]["source"]["adopt"]["selector"]["matchLabels"][f"{LWS}/worker-index"]
    fleet.apply("EnginePool", "wide", wide["spec"])
    both = ("lws", "wide", ENGINES["lws"])
    wait_until(
        lambda: says(fleet, "wide", "Ready", "SelectorsOverlap", both), "the younger pool to be refused the leader"
    )
    wait_until(lambda: says(fleet, "lws", "Degraded", "SelectorsOverlap", both), "the older pool to say so")
    gateless = "the worker without a gate to be named"
    wait_until(lambda: "lws-engines-0-1: no container named gate" in str(fleet.status("enginepool", "wide")), gateless)
    assert states(fleet, "wide") == {}
    done = fleet.sync(2)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(ENGINES.values(), "Ok")

    # All of it without a single write to a pod: labels, owners and lives are their makers'.
    written = [
        e for e in fleet.cluster.audit(mark) if e.writes and e.user == OPERATOR and e.namespace == fleet.namespace
    ]
    assert written, "the operator's writes are in the log"
    assert [e for e in written if e.resource in ("pods", "statefulsets", "rayclusters", "rolebasedgroups")] == []
    left = fleet.cluster.get("pods", "-n", fleet.namespace)["items"]
    assert {p["metadata"]["name"] for p in left} == {*ENGINES.values(), *OTHERS, "trainer"}
    now = {p["metadata"]["name"]: p["metadata"]["uid"] for p in left}
    assert [now[p["metadata"]["name"]] for p in pods] == [p["metadata"]["uid"] for p in pods]
