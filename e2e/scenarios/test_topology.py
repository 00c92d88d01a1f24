"""Topology: rules between objects, sources that disagree."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import Fleet, condition, wait_until

pytestmark = pytest.mark.cluster

TRAIN = ["GPU-train-0", "GPU-train-1"]


def pinned(devices: list[str]) -> dict[str, Any]:
    return {"mode": "Pinned", "devices": [{"node": "hollow-000", "devices": devices}]}


def verdict(fleet: Fleet, reason: str, kind: str = "rlpipeline", name: str = "p") -> str:
    """Wait until TopologyValid (of a pool: Ready) has this reason; ``<status>: <message>``."""
    type_ = "TopologyValid" if kind == "rlpipeline" else "Ready"

    def look() -> str | None:
        found = next((c for c in fleet.status(kind, name).get("conditions") or [] if c["type"] == type_), None)
        return f"{found['status']}: {found['message']}" if found and found["reason"] == reason else None

    return wait_until(look, f"{type_} with reason {reason}")


def test_broken_rules_are_said_at_once_before_any_pod_is_made(fleet: Fleet) -> None:
    trainer = {"gpus": [{"node": "hollow-000", "devices": TRAIN}]}
    fleet.pipeline(trainer=trainer)
    fleet.pool(1, placement=pinned(TRAIN[:1]), engine_args=("--dp-size", "2"))
    said = verdict(fleet, "EngineDataParallel")
    assert said.startswith("False: EngineDataParallel: the engine of pool e runs with --dp-size 2")
    assert "PartialOverlap: engines are pinned to hollow-000/GPU-train-0 of the train pool and not to" in said
    assert verdict(fleet, "EngineDataParallel", "enginepool", "e").startswith("False: the engine of pool e runs with")
    assert fleet.engines() == []
    fleet.pool(1, placement=pinned(TRAIN))
    fleet.ready_engines(1)
    assert verdict(fleet, "TopologyNotNeeded").startswith("True")
    # Two pools on one device: the older one keeps it and goes on, the younger one makes no pod.
    fleet.pool(1, name="late", placement=pinned(["GPU-train-1"]))
    assert "pools e and late are both pinned to hollow-000/GPU-train-1" in verdict(fleet, "DevicesSharedByPools")
    verdict(fleet, "DevicesSharedByPools", "enginepool", "late")
    fleet.cluster.kubectl("delete", "pod", fleet.engines()[0]["metadata"]["name"], "-n", fleet.namespace)
    assert [p["metadata"]["labels"]["rlfleet.dev/pool"] for p in fleet.ready_engines(1)] == ["e"]


@pytest.mark.slow
def test_two_sources_that_disagree_are_named_and_only_serialized_weights_go_on(fleet: Fleet) -> None:
    trainer = {"gpus": [{"node": "hollow-000", "devices": TRAIN}]}
    fleet.pipeline(trainer=trainer)
    fleet.pool(1, placement=pinned(["GPU-free-0"]))
    fleet.trainer(DEVICES="hollow-000/GPU-other")
    fleet.ready_engines(1)
    said = verdict(fleet, "DeviceSourcesDisagree")
    assert said.startswith(
        "False: spec.trainer.gpus says hollow-000/GPU-train-0, hollow-000/GPU-train-1, but the sender says "
        "hollow-000/GPU-other"
    )
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    fleet.pipeline(trainer=trainer, transport={"mode": "Auto", "backend": "gloo"})
    failure = fleet.sync(1)["status"]["failure"]
    assert (failure["stage"], failure["reason"]) == ("Planned", "DeviceSourcesDisagree")
    assert "GPU-other" in failure["message"]
    assert condition(fleet.get("rlpipeline", "p"), "TopologyValid") == "False"
