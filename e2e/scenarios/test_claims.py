"""Placement Claims: trainer and engines share the GPUs of a train block by the real scheduler's allocation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.hollow.nodes import DRIVER, PCIE_ROOT
from e2e.scenarios.kit import Fleet, Operator, condition, trainer_pod, wait_until
from e2e.scenarios.test_topology import verdict

pytestmark = pytest.mark.cluster

BLOCK = {"name": "a", "deviceClassName": DRIVER, "slots": 2, "devicesPerSlot": 2, "matchAttributes": [PCIE_ROOT]}
NODE = "hollow-001"


def pool(fleet: Fleet, replicas: int, **spec: Any) -> None:
    fleet.pool(
        replicas,
        engine={"type": "SGLang", "gpusPerEngine": 2},
        placement={"mode": "Claims", "blocks": ["a"], **spec},
    )


def trainer(fleet: Fleet, **env: str) -> None:
    """The trainer uses the whole claim."""
    keys = wait_until(lambda: fleet.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")
    text = "{" + ",".join(f'"{k["kid"]}": "{k["key"]}"' for k in keys) + "}"
    pod = trainer_pod(fleet.namespace, {"RLFLEET_PUBLIC_KEYS": text, **env})
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": "p.a"}]
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
    fleet.cluster.apply(pod)
    fleet.wait_trainer()


@pytest.fixture
def crowded(fleet: Fleet) -> Iterator[None]:
    """The first two GPUs of a node are taken: the next four in line lie on two PCIe roots."""
    first = {"cel": {"expression": f'device.attributes["{DRIVER}"].index < 2'}}
    request = {"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 2, "selectors": [first]}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "crowd", "namespace": fleet.namespace},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": request}]}},
    }
    container = {
        "name": "main",
        "image": "x",
        "command": ["sleep", "infinity"],
        "resources": {"claims": [{"name": "c"}]},
    }
    holder = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "crowd", "namespace": fleet.namespace},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": NODE},
            "terminationGracePeriodSeconds": 0,
            "resourceClaims": [{"name": "c", "resourceClaimName": "crowd"}],
            "containers": [container],
        },
    }
    fleet.cluster.apply(claim, holder)
    wait_until(lambda: (fleet.pod("crowd").get("status") or {}).get("phase") == "Running", "the crowd to run")
    yield
    fleet.cluster.kubectl("delete", "pod", "crowd", "-n", fleet.namespace, "--wait=false")


def block(fleet: Fleet) -> dict[str, Any]:
    """The block as the pipeline's status has it, once its devices are known."""

    def look() -> dict[str, Any] | None:
        rows = fleet.status("rlpipeline", "p").get("blocks") or []
        return rows[0] if rows and rows[0].get("devices") else None

    return wait_until(look, "the train block to be allocated")


def seen(fleet: Fleet, pod: dict[str, Any], container: str) -> list[str]:
    """The devices that a container was given, from its own environment."""
    given = fleet.cluster.hollow.environment(fleet.namespace, pod["metadata"]["name"], container)
    return given["NVIDIA_VISIBLE_DEVICES"].split(",")


def test_trainer_and_engines_share_a_block_where_first_fit_would_fail(fleet: Fleet, crowded: None) -> None:
    fleet.pipeline(trainer={"blocks": [BLOCK]})
    pool(fleet, 2, nodes=[NODE])
    pods = fleet.ready_engines(2)
    trainer(fleet)
    found = block(fleet)
    assert found["node"] == NODE
    right = [f"GPU-{NODE}-{i:02}" for i in range(4, 8)]
    assert sorted(found["devices"]) == right, "2 to 5 come first, and lie on two roots"
    # A slot test: each engine and its gate see the devices of its own slot, the trainer sees all.
    engines = [seen(fleet, p, "engine") for p in pods]
    assert [len(e) for e in engines] == [2, 2]
    assert [*sorted(engines[0]), *sorted(engines[1])] == found["devices"], "slot by slot"
    assert [seen(fleet, p, "gate") for p in pods] == engines
    assert sorted(seen(fleet, fleet.pod("trainer"), "trainer")) == sorted(found["devices"])
    assert {p["spec"]["nodeName"] for p in [*pods, fleet.pod("trainer")]} == {found["node"]}
    # Identity comes from the claim: engines on the train devices are never in a broadcast.
    fleet.pipeline(trainer={"blocks": [BLOCK]}, transport={"mode": "Auto", "backend": "gloo"})
    done = fleet.sync(-1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert {m["reason"] for m in done["status"]["plan"]["members"]} == {"shares devices with the trainer"}
    assert verdict(fleet, "TopologyKnown").startswith("True")
    # One of two sharers goes: the allocation stays, the next pod joins the same devices.
    old = pods[1]["metadata"]
    fleet.cluster.kubectl("delete", "pod", old["name"], "-n", fleet.namespace, "--wait=false")
    wait_until(lambda: old["uid"] not in {p["metadata"]["uid"] for p in fleet.engines()}, "the pod to go")
    assert seen(fleet, fleet.ready_engines(2)[1], "engine") == engines[1]
    assert block(fleet)["devices"] == found["devices"]
    assert "movedFrom" not in block(fleet)


def test_a_block_that_moved_is_said_until_a_round_was_planned_for_it(fleet: Fleet) -> None:
    fleet.pipeline(trainer={"blocks": [BLOCK]})
    pool(fleet, 1, nodes=["hollow-000"])
    fleet.ready_engines(1)
    trainer(fleet)
    fleet.sync(-1)
    before = block(fleet)
    assert before["node"] == "hollow-000"
    # Everybody who holds the claim ends: nothing promises that it comes back to the same devices.
    pool(fleet, 0, nodes=["hollow-001"])
    fleet.cluster.kubectl("delete", "pod", "trainer", "-n", fleet.namespace, "--wait=false")
    wait_until(lambda: not fleet.engines(), "the engine to go")
    wait_until(lambda: "allocation" not in fleet.get("resourceclaim", "p.a").get("status", {}), "the claim to be free")
    assert block(fleet)["devices"] == before["devices"], "what was known last stays known"
    pool(fleet, 1, nodes=["hollow-001"])
    fleet.ready_engines(1)
    trainer(fleet)
    old = ", ".join(f"hollow-000/{uuid}" for uuid in sorted(before["devices"]))
    assert verdict(fleet, "BlockMoved").startswith(f"True: train block a moved from {old} to ")
    assert block(fleet)["node"] == "hollow-001"
    events = fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]
    assert [e["type"] for e in events if e["reason"] == "BlockMoved"] == ["Warning"]
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    verdict(fleet, "TopologyNotNeeded")
    assert "movedFrom" not in block(fleet)


@pytest.mark.slow
def test_claims_are_the_pipelines_own_and_go_with_it(fleet: Fleet) -> None:
    strange = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "p.a", "namespace": fleet.namespace},
        "spec": {"devices": {"requests": [{"name": "x", "exactly": {"deviceClassName": DRIVER}}]}},
    }
    fleet.cluster.apply(strange)
    fleet.pipeline(trainer={"blocks": [BLOCK]})
    pool(fleet, 1)
    assert "ResourceClaim p.a is not this pipeline's" in verdict(fleet, "BlockClaimTaken")
    assert fleet.engines() == []
    fleet.cluster.kubectl("delete", "resourceclaim", "p.a", "-n", fleet.namespace)
    fleet.ready_engines(1)
    # A block that the pipeline has no more: its claim goes once its pods have ended, and new ones are not made.
    fleet.pipeline(trainer={"blocks": [{**BLOCK, "name": "b"}]})
    assert "names a, and spec.trainer.blocks of the RLPipeline has b" in verdict(fleet, "BlockNotFound")
    wait_until(
        lambda: fleet.get("resourceclaim", "p.a")["metadata"].get("deletionTimestamp"), "the claim to be deleted"
    )
    assert len(fleet.ready_engines(1)) == 1, "a violation takes nobody's engine"
    fleet.cluster.kubectl("delete", "enginepool", "e", "-n", fleet.namespace)
    fleet.cluster.kubectl("wait", "--for=delete", "resourceclaim/p.a", "-n", fleet.namespace, "--timeout=180s")
    fleet.cluster.kubectl("delete", "rlpipeline", "p", "-n", fleet.namespace)
    fleet.cluster.kubectl("wait", "--for=delete", "resourceclaim/p.b", "-n", fleet.namespace, "--timeout=180s")


@pytest.mark.slow
def test_engines_of_a_pool_stay_in_one_domain(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(
        3, placement={"mode": "Scheduler", "packDomain": "kubernetes.io/hostname", "nodes": ["hollow-002", NODE]}
    )
    nodes = {p["spec"]["nodeName"] for p in fleet.ready_engines(3)}
    assert len(nodes) == 1
    assert nodes <= {"hollow-002", NODE}
    assert condition(fleet.get("enginepool", "e"), "Ready") == "False"


@pytest.mark.slow
def test_an_operator_that_dies_between_claim_and_pods_leaves_one_of_each(fleet: Fleet, operator: Operator) -> None:
    def claim() -> dict[str, Any]:
        found: dict[str, Any] = wait_until(
            lambda: fleet.cluster.get("resourceclaim", "-n", fleet.namespace)["items"], "a claim"
        )[0]
        return found

    fleet.pipeline(trainer={"blocks": [BLOCK]})
    made = claim()["metadata"]
    operator.kill()
    pool(fleet, 2)
    operator.start()
    pods = fleet.ready_engines(2)
    assert claim()["metadata"]["uid"] == made["uid"]
    # The last one that is to be removed goes although nobody was there when its block went.
    operator.kill()
    fleet.pipeline(trainer={"gpus": [{"node": NODE, "devices": ["GPU-x"]}]})
    operator.start()
    wait_until(lambda: claim()["metadata"].get("deletionTimestamp"), "the claim to go")
    assert {p["metadata"]["uid"] for p in fleet.engines()} == {p["metadata"]["uid"] for p in pods}
