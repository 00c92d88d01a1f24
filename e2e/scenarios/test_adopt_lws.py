"""Leaders of a real LeaderWorkerSet as engines: one that dies takes its group with it, and the next one catches up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.adopting import SYNC, active, guide, keys, manifest, shell, states, with_reference_engine
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.lws import lws_controller
from e2e.scenarios.makers import IDLE, LWS, create

# Its controller is built once, which takes minutes and is no part of the test.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(480, func_only=True)]

LEADERS = ["lws-engines-0", "lws-engines-1"]
#: What the imitation in makers.py gives to both.
LABELS = {f"{LWS}/{key}" for key in ("name", "worker-index", "group-index", "group-key", "template-revision-hash")}


@pytest.fixture
def controller(cluster: LocalCluster, namespace: str, tmp_path: Path) -> Iterator[None]:
    with lws_controller(cluster, namespace, tmp_path / "lws"):
        yield


def pods(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Pods of the LeaderWorkerSet by name."""
    listed = fleet.cluster.get("pods", "-n", fleet.namespace, "-l", f"{LWS}/name=lws-engines")["items"]
    return {str(p["metadata"]["name"]): p for p in listed}


def anew(fleet: Fleet, leader: str, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """All pods, once those of this leader's group are others than before."""
    now = pods(fleet)
    old = {p["metadata"]["uid"] for name, p in before.items() if name.startswith(leader)}
    return None if len(now) < len(before) or old & {p["metadata"]["uid"] for p in now.values()} else now


def caught_up(fleet: Fleet, engine: str) -> bool:
    """A CatchUp of this engine alone has succeeded."""
    rounds = fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"]
    mine = [r for r in rounds if r["spec"].get("kind") == "CatchUp" and r["spec"]["engines"] == [engine]]
    return any((r.get("status") or {}).get("phase") == "Succeeded" for r in mine)


def test_a_group_that_is_made_anew_catches_up(fleet: Fleet, controller: None, tmp_path: Path) -> None:
    fleet.pipeline(sync=SYNC)
    keys(fleet)
    come, *_ = guide(tmp_path / "guide")
    shell(fleet, tmp_path / "guide", come.split("kubectl apply")[0])
    workload, pool = manifest("adopt-lws")
    groups = workload["spec"]["leaderWorkerTemplate"]
    groups |= {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
    with_reference_engine(groups["leaderTemplate"])
    groups["workerTemplate"]["spec"]["terminationGracePeriodSeconds"] = 1
    groups["workerTemplate"]["spec"]["containers"][0] |= IDLE
    fleet.apply("EnginePool", "lws", pool["spec"])
    create(fleet, workload)
    fleet.trainer()
    wait_until(lambda: fleet.status("enginepool", "lws").get("readyReplicas") == 2, "both leaders to be up")
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    done = fleet.sync(1)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(LEADERS, "Ok")
    before = wait_until(lambda: found if len(found := pods(fleet)) == 4 else None, "both workers to be there")
    assert set(before) == {*LEADERS, *(f"{name}-1" for name in LEADERS)}
    assert all(set(p["metadata"]["labels"]) >= LABELS for p in before.values())
    assert list(states(fleet, "lws")) == LEADERS, "workers are no engines"

    # Its controller counts the restart of a container and deletes the leader, and with it the worker.
    fleet.cluster.hollow.crash(fleet.namespace, LEADERS[0], "engine")
    after = wait_until(lambda: anew(fleet, LEADERS[0], before), "the group to be made anew")
    leaders = [after[name] for name in LEADERS]
    assert leaders[1]["metadata"]["uid"] == before[LEADERS[1]]["metadata"]["uid"], "the other group goes on"
    wait_until(lambda: active(fleet, "lws") == {p["metadata"]["uid"] for p in leaders}, "the new leader to serve")
    wait_until(lambda: caught_up(fleet, LEADERS[0]), "its CatchUp to have ended")
    leaders = [fleet.pod(name) for name in LEADERS]
    assert [(fleet.label(p), fleet.paused(p)) for p in leaders] == [("1", False)] * 2
    assert fleet.checksum(leaders[0]) == fleet.checksum(leaders[1])
    done = fleet.sync(2)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(LEADERS, "Ok")
    assert [(fleet.label(p), fleet.paused(p)) for p in leaders] == [("2", False)] * 2

    # So it does with the gate, whose restart alone would have cost nobody anything.
    fleet.cluster.hollow.crash(fleet.namespace, LEADERS[1], "gate")
    final = wait_until(lambda: anew(fleet, LEADERS[1], after), "the other group to be made anew")
    wait_until(lambda: active(fleet, "lws") == {final[n]["metadata"]["uid"] for n in LEADERS}, "both to serve again")
