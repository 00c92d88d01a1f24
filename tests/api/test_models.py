"""Reading objects into models: defaults, strictness, and errors that name object and field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlfleet.api.v1alpha1 import EnginePool, InvalidObject, RLPipeline, RoundPhase, SyncRound, SyncRoundStatus

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
Example = Callable[..., dict[str, Any]]
MODELS: dict[str, type[RLPipeline | EnginePool | SyncRound]] = {
    "RLPipeline": RLPipeline,
    "EnginePool": EnginePool,
    "SyncRound": SyncRound,
}


@pytest.mark.parametrize("kind", MODELS)
def test_examples_can_be_read(kind: str, example: Example) -> None:
    obj = example(kind, {"metadata.namespace": "rl", "metadata.resourceVersion": "7", "metadata.managedFields": [{}]})
    read = MODELS[kind].from_dict(obj)
    assert (read.kind, read.metadata.namespace, read.metadata.resource_version) == (kind, "rl", "7")


def test_the_example_of_checkpoints_can_be_read() -> None:
    pipeline, pool = yaml.safe_load_all((EXAMPLES / "checkpoint.yaml").read_text())
    made = {"namespace": "rl"}
    source = RLPipeline.from_dict(pipeline | {"metadata": pipeline["metadata"] | made}).spec.weights
    assert source.sender is None
    assert source.checkpoint is not None
    gate = EnginePool.from_dict(pool | {"metadata": pool["metadata"] | made}).spec.gate
    mount = pool["spec"]["source"]["template"]["spec"]["containers"][0]["volumeMounts"][0]
    assert gate.checkpoint_volume == mount["name"]
    assert source.checkpoint.path_template.startswith(mount["mountPath"] + "/")


def test_defaults_are_those_of_the_schema(example: Example) -> None:
    pipeline = RLPipeline.from_dict(example("RLPipeline", {"spec.transport": None})).spec
    assert pipeline.transport.mode.value == "CPUSerialize"
    assert pipeline.transport.backend.value == "nccl"
    ports = pipeline.transport.rendezvous_ports
    assert (ports.first, ports.last) == (29500, 29599)
    assert pipeline.weights.sender.port == 9450
    deadlines = pipeline.sync.deadlines
    assert (deadlines.pending_seconds, deadlines.staging_seconds, deadlines.paused_seconds) == (600, 600, 150)
    assert (pipeline.sync.max_unavailable, pipeline.sync.drain_seconds, pipeline.history_limit) == ("10%", 30, 20)
    assert (pipeline.sync.quiesce.mode, pipeline.sync.verify.value, pipeline.sync.on_failure.value) == (
        None,
        "IfSupported",
        "Replace",
    )
    pool = EnginePool.from_dict(example("EnginePool", {"spec.replicas": None, "spec.gate.stagingMiB": None})).spec
    assert (pool.replicas, pool.engine.port, pool.gate.port, pool.gate.staging_mi_b) == (1, 30000, 9440, 1024)
    assert (pool.placement.mode.value, pool.update_strategy.type) == ("Scheduler", "OnDelete")
    round_ = SyncRound.from_dict(example("SyncRound")).spec
    assert (round_.kind, round_.attempt, round_.allow_rollback, round_.cancel) == ("Refresh", 1, False, False)


@pytest.mark.parametrize(
    ("kind", "edits", "fault"),
    [
        ("RLPipeline", {"spec.transport.mode": "Fast"}, "spec.transport.mode: Input should be 'CPUSerialize'"),
        ("RLPipeline", {"spec.transport.bucketMB": 1}, "spec.transport.bucketMB: Extra inputs are not permitted"),
        ("EnginePool", {"spec.engine.gpusPerEngine": 0}, "spec.engine.gpusPerEngine: Input should be greater than"),
        ("SyncRound", {"spec.version": None}, "spec.version: Field required"),
    ],
)
def test_errors_name_the_object_and_the_field(kind: str, edits: dict[str, Any], fault: str, example: Example) -> None:
    with pytest.raises(InvalidObject) as caught:
        MODELS[kind].from_dict(example(kind, edits | {"metadata.namespace": "rl"}))
    assert str(caught.value).startswith(f"{kind} rl/")
    assert fault in str(caught.value)


@pytest.mark.parametrize("obj", [{}, {"metadata": None}, {"metadata": {"name": 3}}])
def test_what_is_no_object_at_all_is_refused_too(obj: dict[str, Any]) -> None:
    with pytest.raises(InvalidObject):
        SyncRound.from_dict(obj)


def test_status_of_a_newer_release_can_be_read(example: Example) -> None:
    # During an upgrade an older operator reads what a newer one wrote.
    obj = example("SyncRound", {"status.phase": "Staging", "status.fromTheFuture": 1})
    assert SyncRound.from_dict(obj).status.phase is RoundPhase.STAGING


def test_status_is_written_without_what_is_not_known() -> None:
    assert SyncRoundStatus(phase=RoundPhase.PENDING).to_dict() == {
        "observedGeneration": 0,
        "phase": "Pending",
        "members": [],
        "committed": False,
        "attempts": [],
        "conditions": [],
    }


def test_only_ends_are_terminal() -> None:
    ends = {phase.value for phase in RoundPhase if phase.terminal}
    assert ends == {"Succeeded", "Failed", "Superseded", "Cancelled", "Expired"}
