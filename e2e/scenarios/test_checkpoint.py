"""Checkpoint mode: no sender anywhere, engines take over what a trainer wrote to a shared path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, engine_url, http, wait_until
from e2e.scenarios.test_catchup import DISK, catch_ups, outcomes
from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api.checkpoint import INCARNATION, MARKER_FILE
from rlfleet.api.manifest import Manifest
from rlfleet.client import Client, SyncFailed, SyncRefused
from rlfleet.sender import checkpoint

pytestmark = pytest.mark.cluster


def write(folder: Path, version: int) -> Manifest:
    """A version of the reference model, as a trainer that mounts the folder elsewhere writes it."""
    state = torch_state(MODELS["tiny"], 1000 + version)
    return checkpoint.write(f"{folder}/run/{{version}}", version, state, bucket_bytes=40_000)


def test_rounds_and_catch_ups_from_checkpoints(fleet: Fleet, cluster: LocalCluster, tmp_path: Path) -> None:
    fleet.pipeline(weights={"checkpoint": {"pathTemplate": "/checkpoints/run/{version}"}})
    fleet.pool(2, checkpoints=tmp_path)
    pods = fleet.ready_engines(2)
    fleet.incarnation = INCARNATION
    with Client(fleet.namespace, "p", cluster.kubeconfig) as client:
        with pytest.raises(SyncRefused, match="the caller names the bytes"):
            client.sync(1)
        first = write(tmp_path, 1)
        done = client.sync(1, manifest_digest=first.digest)
        assert done.transports == {"Checkpoint": 2}
        for pod in pods:
            fleet.serving(pod, 1)
        proven = {fleet.checksum(pod) for pod in pods}
        assert len(proven) == 1
        wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")
        assert condition(fleet.get("rlpipeline", "p"), "SenderReady") == "True"

        # What is not complete, or not what the round names, touches nobody.
        second, third = write(tmp_path, 2), write(tmp_path, 3)
        (tmp_path / "run" / "2" / MARKER_FILE).unlink()
        file = min((tmp_path / "run" / "3").glob("*.safetensors"))
        spoilt = bytearray(file.read_bytes())
        spoilt[-1] ^= 1
        file.write_bytes(spoilt)
        for version, manifest, says in (
            (2, second, "CheckpointMissing"),
            (3, third, "HashMismatch"),
            (4, first, "CheckpointMissing"),
        ):
            with pytest.raises(SyncFailed, match=says) as failed:
                client.sync(version, manifest_digest=manifest.digest)
            assert failed.value.stage == "Staging"
        nameless = fleet.ended(fleet.order(5))
        assert nameless["status"]["failure"]["reason"] == "DigestRequired"
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert (committed["version"], committed["manifestDigest"]) == (1, first.digest)
    assert not any(fleet.paused(pod) for pod in pods)
    assert {fleet.checksum(pod) for pod in pods} == proven

    # A replaced engine reads the committed checkpoint again.
    fleet.cluster.kubectl("delete", "pod", pods[0]["metadata"]["name"], "-n", fleet.namespace, "--wait=false")
    old = pods[0]["metadata"]["uid"]
    fresh: dict[str, Any] = wait_until(
        lambda: next((p for p in fleet.ready_engines(2) if p["metadata"]["uid"] not in {old, _uid(pods[1])}), None),
        "a new engine",
    )
    fleet.serving(fresh, 1)
    assert fleet.checksum(fresh) in proven
    wait_until(lambda: outcomes(fleet)[-1:] == ["Succeeded"], "its round to end")
    [member] = catch_ups(fleet)[-1]["status"]["plan"]["members"]
    assert (member["engine"], member["transport"]) == (fresh["metadata"]["name"], "Checkpoint")


def _uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


@pytest.mark.slow
def test_an_operator_that_dies_while_engines_load_is_taken_over(
    fleet: Fleet, operator: Operator, tmp_path: Path
) -> None:
    fleet.pipeline(
        weights={"checkpoint": {"pathTemplate": "/checkpoints/run/{version}"}},
        sync={"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 100}},
    )
    fleet.pool(2, checkpoints=tmp_path)
    pods = fleet.ready_engines(2)
    fleet.incarnation = INCARNATION
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    assert fleet.ended(fleet.order(1, manifestDigest=first.digest))["status"]["phase"] == "Succeeded"
    # One load never ends well by itself: whoever takes over must know the path to heal it.
    fleet.fault(pods[0], DISK, action="http500", times=1, when="before")
    fleet.fault(pods[1], DISK, action="hold", times=1)
    name = fleet.order(2, manifestDigest=second.digest)

    def told(pod: dict[str, Any]) -> bool:
        return bool(http("GET", engine_url(pod) + "/_sim/faults")[1][DISK]["struck"])

    wait_until(lambda: all(told(pod) for pod in pods), "both engines to be told to load", every=0.05)
    operator.kill()
    fleet.heal(pods[1])
    operator.start()
    ended = fleet.ended(name)
    assert ended["status"]["phase"] == "Succeeded", ended["status"]
    for pod in pods:
        fleet.serving(pod, 2)
    assert len({fleet.checksum(pod) for pod in pods}) == 1


def test_a_pool_that_does_not_mount_the_path_is_refused(fleet: Fleet, cluster: LocalCluster, tmp_path: Path) -> None:
    fleet.pipeline(weights={"checkpoint": {"pathTemplate": "/elsewhere/{version}"}})
    fleet.pool(1, checkpoints=tmp_path)
    fleet.ready_engines(1)
    fleet.incarnation = INCARNATION
    ended = fleet.ended(fleet.order(1, manifestDigest=write(tmp_path, 1).digest))
    assert ended["status"]["failure"]["reason"] == "CheckpointNotMounted"
    assert "mounts its checkpoints at /checkpoints" in ended["status"]["failure"]["message"]
    assert "committed" not in fleet.status("rlpipeline", "p")
