"""What older CRDs of a cluster lack is named; newer ones are fine."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlfleet.api.crdgen import KINDS, schema
from rlfleet.api.served import kinds, lacking


@pytest.fixture
def served() -> dict[str, Any]:
    """The schemas of this version."""
    return {kind.name: copy.deepcopy(schema(kind)) for kind in KINDS}


def spec(served: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = served[kind]["properties"]["spec"]["properties"]
    return found


def test_schemas_of_this_version_lack_nothing(served: dict[str, Any]) -> None:
    assert lacking(served) == []


def test_newer_schemas_are_fine(served: dict[str, Any]) -> None:
    spec(served, "RLPipeline")["later"] = {"type": "string"}
    spec(served, "EnginePool")["replicas"]["maximum"] = 5000
    spec(served, "RLPipeline")["transport"]["properties"]["mode"]["enum"].append("Telepathy")
    assert lacking(served) == []


def test_what_is_missing_is_named(served: dict[str, Any]) -> None:
    del served["TrainerDemand"]
    del spec(served, "RLPipeline")["transport"]["properties"]["bucketMiB"]
    spec(served, "RLPipeline")["transport"]["properties"]["mode"]["enum"].remove("Auto")
    spec(served, "EnginePool")["replicas"]["maximum"] = 7
    status = served["EnginePool"]["properties"]["status"]["properties"]
    del status["engines"]["items"]["properties"]["fence"]
    assert lacking(served) == [
        "TrainerDemand is not served",
        "RLPipeline.spec.transport.mode does not take 'Auto'",
        "RLPipeline.spec.transport.bucketMiB is not known",
        "EnginePool.spec.replicas: maximum is 7, not 1024",
        "EnginePool.status.engines[].fence is not known",
    ]


def test_kinds_are_found_by_what_they_say_they_are() -> None:
    def entry(kind: str, group: str = "rlfleet.dev", version: str = "v1alpha1") -> dict[str, Any]:
        return {"x-kubernetes-group-version-kind": [{"group": group, "kind": kind, "version": version}]}

    schemas = {
        "a": entry("RLPipeline"),
        "b": entry("EnginePool", group="other"),
        "c": entry("X", version="v2"),
        "d": {},
    }
    assert list(kinds({"components": {"schemas": schemas}})) == ["RLPipeline"]
    assert kinds({}) == {}
