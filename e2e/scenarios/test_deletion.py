"""What remains when rounds, pools, pipelines and namespaces are deleted, in whatever they do: nothing of ours."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"
PHASES = ("Pending", "Staging", "Quiescing", "Transferring", "Holding", "Committed")
MODES = ("background", "foreground", "orphan")
SYNC: dict[str, Any] = {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}}


def reason(obj: dict[str, Any], kind: str) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["reason"]) for c in conditions if c["type"] == kind), "")


def message(obj: dict[str, Any], kind: str) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["message"]) for c in conditions if c["type"] == kind), "")


@contextlib.contextmanager
def round_in(fleet: Fleet, phase: str, pods: list[dict[str, Any]]) -> Any:
    """A round of version 1 that is in ``phase`` and, but for Pending and Holding, goes on by itself; its name."""
    frozen = ""
    hollow = fleet.cluster.hollow
    if phase == "Pending":
        name = fleet.order(1)  # the sender does not hold it
    else:
        if phase == "Quiescing":
            fleet.fault(pods[0], "pause_generation", action="delay", seconds=2, times=1)
        elif phase == "Transferring":
            fleet.fault(pods[0], DISK, action="delay", seconds=3, times=1, when="before")
        elif phase == "Committed":
            fleet.fault(pods[0], "continue_generation", action="delay", seconds=2, times=1)
        elif phase == "Holding":
            frozen = pods[0]["metadata"]["name"]
            hollow.freeze(fleet.namespace, frozen, "gate")
        fleet.publish(1, bulk=128 if phase == "Staging" else 0)
        name = fleet.order(1)
    try:
        wait_until(lambda: fleet.phase(name) == phase, phase, every=0.02)
        yield name
    finally:
        if frozen:
            hollow.thaw(fleet.namespace, frozen, "gate")


def left(fleet: Fleet, kind: str) -> list[str]:
    """Names of what is left of a kind."""
    return [str(o["metadata"]["name"]) for o in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]]


def held_by_us(fleet: Fleet) -> list[str]:
    """Objects in the namespace that bear a finalizer of ours."""
    found = []
    for kind in ("rlpipelines", "enginepools", "syncrounds", "pods"):
        for o in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]:
            if any(str(f).startswith("rlfleet.dev/") for f in o["metadata"].get("finalizers") or []):
                found.append(f"{kind}/{o['metadata']['name']}")
    return found


def delete(fleet: Fleet, what: str, *, mode: str = "background", wait: str = "--timeout=120s") -> None:
    fleet.cluster.kubectl("delete", *what.split("/"), "-n", fleet.namespace, f"--cascade={mode}", wait)


def closed(fleet: Fleet, pods: list[dict[str, Any]]) -> bool:
    return all(fleet.paused(p) for p in pods)


def delete_pipeline_in(fleet: Fleet, phase: str, mode: str) -> None:
    """Delete the pipeline in a phase of a round: the round ends, the engines close, only the pool stays."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, phase, pods):
        delete(fleet, "rlpipeline/p", mode=mode, wait="--wait=false")
        if phase == "Holding":
            # The engine that does not answer may serve: the pipeline says so and waits.
            said = wait_until(
                lambda: next((m for m in [message(fleet.get("rlpipeline", "p"), "Progressing")] if "closed:" in m), ""),
                "the pipeline to say what it waits for",
            )
            assert pods[0]["metadata"]["name"] in said
            assert reason(fleet.get("rlpipeline", "p"), "Progressing") == "Terminating"
            wait_until(
                lambda: reason(fleet.get("enginepool", "e"), "Ready") == "PipelineDeleting", "the pool to say so"
            )
    wait_until(lambda: not left(fleet, "rlpipelines"), "the pipeline to be gone")
    # It waited for its engines; orphaned rounds stay, ended, as orphaned objects do.
    assert closed(fleet, pods)
    if mode == "orphan":
        assert all(fleet.get("syncround", r)["status"].get("phase") in ENDED for r in left(fleet, "syncrounds"))
    else:
        wait_until(lambda: not left(fleet, "syncrounds"), "its rounds to be gone")
    assert [f for f in held_by_us(fleet) if not f.startswith("enginepools/")] == []
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "PipelineNotFound", "the pool to say so")
    assert {p["metadata"]["uid"] for p in fleet.engines()} == {p["metadata"]["uid"] for p in pods}


ENDED = ("Succeeded", "Failed", "Superseded", "Cancelled", "Expired")


def test_a_pipeline_deleted_in_holding_closes_its_engines_first(fleet: Fleet) -> None:
    delete_pipeline_in(fleet, "Holding", "foreground")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_pipeline_is_deleted_in_every_phase(fleet: Fleet, phase: str, mode: str) -> None:
    delete_pipeline_in(fleet, phase, mode)
