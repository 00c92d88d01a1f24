"""A pod template is Kubernetes' business, and its schema takes what it does not know: what of it is read here must be
of the right kind, or refused by that schema."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from rlfleet.api import crdgen
from rlfleet.plan import presets, template
from rlfleet.plan.pods import build_pod
from rlfleet.plan.validate import violations
from tests.plan.pool_kit import pool

KIND = next(k for k in crdgen.KINDS if k.name == "EnginePool")
SCHEMA = crdgen.schema(KIND)["properties"]["spec"]["properties"]["source"]["properties"]["template"]
PIPELINE = {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"transport": {"mode": "Auto"}}}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WRONG: list[Any] = [
    "text", 3, True, ["text"], [3], [None], [{}], [{"name": 3}], {"a": "b"}, {"limits": "x"}, {"limits": ["x"]},
    {"claims": "x"}, {"claims": [3]}, {"claims": [{}]}, {"nodeAffinity": "x"}, {"podAffinity": ["x"]},
    {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": "x"}}}, {"podAffinity": {REQUIRED: 3}},
    {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": 3}]}}},
]  # fmt: skip
PLACEMENTS: list[dict[str, Any]] = [
    {"mode": "Scheduler", "nodes": ["n"], "packDomain": "example.org/zone"},
    {"mode": "Pinned", "devices": [{"node": "n", "devices": ["GPU-1"]}]},
    {"mode": "Claims", "blocks": ["b"]},
]


def taken(found: dict[str, Any]) -> bool:
    return jsonschema.Draft7Validator(SCHEMA).is_valid(found["spec"]["source"]["template"])


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: p["mode"])
@pytest.mark.parametrize("part", ["env", "resources", "volumeMounts", "args", "command"])
def test_a_container_of_any_kind_is_refused_by_the_schema_or_ends_no_look(part: str, placement: dict[str, Any]) -> None:
    looked_at({"containers": part}, placement)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: p["mode"])
@pytest.mark.parametrize(
    "part", ["volumes", "initContainers", "resourceClaims", "readinessGates", "securityContext", "affinity"]
)
def test_a_pod_of_any_kind_is_refused_by_the_schema_or_ends_no_look(part: str, placement: dict[str, Any]) -> None:
    looked_at({"": part}, placement)


def looked_at(where: dict[str, str], placement: dict[str, Any]) -> None:
    ((of, part),) = where.items()
    for engine in ({"type": "SGLang"}, {"type": "VLLM", "model": "m"}):
        for wrong in WRONG:
            found = copy.deepcopy(pool())
            found["spec"] |= {"placement": placement, "engine": {**found["spec"]["engine"], **engine}}
            spec = found["spec"]["source"]["template"]["spec"]
            assert taken(found), "as it is it is well"
            (spec["containers"][0] if of else spec)[part] = copy.deepcopy(wrong)
            if not taken(found):
                continue
            violations(PIPELINE, [found])
            try:
                template.validate(found)
                presets.validate(found)
                build_pod(found, 0, "x", public_keys={})
            except template.InvalidPool:
                continue
