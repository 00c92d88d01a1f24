"""Engines whose pods somebody else makes: the guide's own manifests and commands, and what is different with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.scenarios.adopting import SYNC, example, guide, incarnation, keys, message, says, shell, states
from e2e.scenarios.kit import Fleet, condition, wait_until

pytestmark = pytest.mark.cluster


def pods_of(fleet: Fleet) -> list[dict[str, Any]]:
    """The StatefulSet's pods, by name."""
    listed = fleet.cluster.get("pods", "-n", fleet.namespace, "-l", "app=demo-engines")["items"]
    return sorted(listed, key=lambda p: str(p["metadata"]["name"]))


def test_the_guide_adopts_a_statefulset_and_lets_it_go(fleet: Fleet, tmp_path: Path) -> None:
    fleet.pipeline(sync={**SYNC, "onFailure": "Replace"})
    keys(fleet)
    come, _, go = guide(tmp_path)
    shell(fleet, tmp_path, come)
    fleet.trainer()
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    done = fleet.sync(1)
    pods = pods_of(fleet)
    names = [p["metadata"]["name"] for p in pods]
    assert names == ["demo-engines-0", "demo-engines-1"]
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(names, "Ok")
    assert [(fleet.label(p), fleet.paused(p)) for p in pods] == [("1", False)] * 2
    wait_until(lambda: set(states(fleet).values()) == {"Active"}, "both to be shown as Active")
    status = fleet.status("enginepool", "adopted")
    assert status["admissionGuarantee"] == "DetectOnly"
    assert (status["replicas"], status["selector"]) == (2, "app=demo-engines")
    assert [e["index"] for e in status["engines"]] == [0, 1]

    # An engine that restarts in its pod, as a StatefulSet's containers do: another process, which has to catch up.
    before = incarnation(fleet, names[0])
    fleet.cluster.hollow.crash(fleet.namespace, names[0], "engine")
    wait_until(lambda: incarnation(fleet, names[0]) not in ("", before), "the restart to be detected")
    wait_until(lambda: set(states(fleet).values()) == {"Active"}, "it to have caught up")
    assert (fleet.label(pods[0]), fleet.paused(pods[0])) == ("1", False)
    assert fleet.checksum(pods[0]) == fleet.checksum(pods[1])
    rounds = fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"]
    assert [r["spec"]["engines"] for r in rounds if r["spec"].get("kind") == "CatchUp"] == [[names[0]]]
    assert pods_of(fleet)[0]["metadata"]["uid"] == pods[0]["metadata"]["uid"], "nobody replaced the pod"

    # One that can not be healed is closed and named: its pod is not the operator's to replace.
    fleet.fault(pods[1], "update_weights_from_disk", action="http500")
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    wait_until(lambda: message(fleet.get("enginepool", "adopted"), "Degraded")[0] == "NotReplaced", "it to be named")
    assert message(fleet.get("enginepool", "adopted"), "Degraded")[1].startswith(f"{names[1]}: spec.sync.onFailure is")
    assert (fleet.label(pods[0]), fleet.paused(pods[1])) == ("2", True)
    fleet.heal(pods[1])
    assert fleet.sync(3)["status"]["phase"] == "Succeeded"
    wait_until(lambda: set(states(fleet).values()) == {"Active"}, "both to be active again")

    assert "demo-engines-0" in shell(fleet, tmp_path, go)
    kept = pods_of(fleet)
    assert [p["metadata"]["uid"] for p in kept] == [p["metadata"]["uid"] for p in pods]
    assert all("deletionTimestamp" not in p["metadata"] for p in kept)
    assert [fleet.paused(p) for p in kept] == [True, True], "the pool is gone and its engines are closed"


def by_hand(fleet: Fleet, name: str, *, gate: bool = True, **labels: str) -> None:
    """A pod that a person makes."""
    workload, _ = example()
    template = workload["spec"]["template"]
    spec = template["spec"] | {"restartPolicy": "Never"} | ({} if gate else {"initContainers": []})
    marks = {"app": "demo-engines", **labels}
    fleet.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": fleet.namespace, "labels": marks},
            "spec": spec,
        }
    )


@pytest.mark.slow
def test_pods_made_by_hand_and_who_gets_them(fleet: Fleet, tmp_path: Path) -> None:
    fleet.pipeline(sync=SYNC)
    keys(fleet)
    come, *_ = guide(tmp_path)
    shell(fleet, tmp_path, come.split("kubectl apply")[0])
    _, pool = example()
    fleet.apply("EnginePool", "adopted", pool["spec"])
    fleet.trainer()
    by_hand(fleet, "one", shared="yes")
    by_hand(fleet, "bare", gate=False)

    wait_until(
        lambda: says(fleet, "adopted", "Degraded", "GateMissing", ("bare",)), "the pod without a gate to be named"
    )
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    wait_until(lambda: states(fleet) == {"one": "Active"}, "the other one to serve")
    # A second pool that wants the same pod does not get it, and both say so.
    rival = {**pool["spec"], "source": {"adopt": {"selector": {"matchLabels": {"shared": "yes"}}}}}
    fleet.apply("EnginePool", "rival", rival)
    wait_until(
        lambda: says(fleet, "rival", "Ready", "SelectorsOverlap", ("adopted", "rival", "one")), "the rival to say so"
    )
    wait_until(
        lambda: says(fleet, "adopted", "Degraded", "SelectorsOverlap", ("adopted", "rival")), "the older pool to say so"
    )
    assert states(fleet, "rival") == {}
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    assert (fleet.label(fleet.pod("one")), fleet.paused(fleet.pod("one"))) == ("1", False)
    wait_until(lambda: states(fleet) == {"one": "Active"}, "it to be shown as Active")
    # An engine that ends in a pod of restartPolicy Never is gone; nobody makes another, and nobody deletes the pod.
    fleet.cluster.hollow.crash(fleet.namespace, "one", "engine")
    wait_until(lambda: states(fleet) == {"one": "Failed"}, "the end of the engine to be seen")
    assert [p["metadata"]["name"] for p in pods_of(fleet)] == ["bare", "one"]
    assert condition(fleet.get("enginepool", "adopted"), "Ready") == "False"
