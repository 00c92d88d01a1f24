"""What doctor judges, from what was read: each fault is named with what to do, and ignorance is not health."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from rlfleet.api import crdgen
from rlfleet.cli import checks
from rlfleet.cli.checks import Check, Level
from rlfleet.cli.doctor import drawn
from tests.cli.fleets import recorded

GIB = 2**30


def levels(found: list[Check]) -> list[str]:
    return [c.level.value for c in found]


def openapi(*, without: str = "") -> dict[str, Any]:
    schemas = {}
    for kind in crdgen.KINDS:
        named = {"group": "rlfleet.dev", "version": "v1alpha1", "kind": kind.name}
        if kind.name != without:
            schemas[kind.name] = {**crdgen.schema(kind), "x-kubernetes-group-version-kind": [named]}
    return {"components": {"schemas": schemas}}


def test_crds_are_judged_by_what_the_cluster_serves() -> None:
    assert checks.crds(openapi()).level is Level.OK
    old = checks.crds(openapi(without="TrainerDemand"))
    assert old.level is Level.FAIL
    assert "TrainerDemand is not served" in old.message
    assert "rlfleet crds | kubectl apply" in old.fix
    assert checks.crds({}).level is Level.FAIL


@pytest.mark.parametrize(("ahead", "level"), [(0, "Ok"), (-5000, "Ok"), (6000, "Warning"), (-31_000, "Failed")])
def test_clocks_matter_beyond_what_tokens_allow(ahead: int, level: str) -> None:
    assert checks.clock("x", ahead).level.value == level


def test_missing_rights_are_listed_and_no_failure() -> None:
    assert levels(checks.rights({("list", "pods"): True}, "ns")) == ["Ok"]
    found = checks.rights({("list", "pods"): True, ("create", "syncrounds"): False}, "ns")
    assert levels(found) == ["Warning"]
    assert "create syncrounds" in found[0].message


def lease(**spec: Any) -> dict[str, Any]:
    known = {
        "holderIdentity": "rlfleet-0_uid_n", "renewTime": "2026-11-30T03:56:00.000000Z", "leaseDurationSeconds": 15
    }  # fmt: skip
    return {"spec": {**known, **spec}}


def test_an_operator_leads_while_its_lease_is_renewed() -> None:
    now = checks.time_ms("2026-11-30T03:56:10Z")
    assert now is not None
    good = checks.lease(lease(), now, "ops")
    assert (good.level, good.message) == (Level.OK, "rlfleet-0 leads")
    assert checks.lease(lease(), now + 60_000, "ops").level is Level.FAIL
    assert checks.lease(lease(holderIdentity=""), now, "ops").level is Level.FAIL
    assert "--operator-namespace" in checks.lease(None, now, "ops").fix


def test_conditions_give_what_is_wrong_and_nothing_else() -> None:
    objects = recorded("failed")
    found = checks.conditions(objects["rlpipelines"][0], "RLPipeline")
    assert levels(found) == ["Warning", "Unknown"]
    assert "StagingDeadline" in found[0].message
    assert levels(checks.conditions(objects["enginepools"][1], "EnginePool")) == ["Ok"]
    objects["rlpipelines"][0].pop("status")
    unseen = checks.conditions(objects["rlpipelines"][0], "RLPipeline")
    assert levels(unseen) == ["Failed"]
    assert "--watch-namespaces" in unseen[0].fix


def test_dra_is_needed_only_by_those_who_use_it() -> None:
    objects = recorded("base")
    pipelines, pools = objects["rlpipelines"], objects["enginepools"]
    assert levels(checks.dra(pipelines, pools, None)) == ["Ok"]
    pools[0]["spec"]["placement"] = {"mode": "Claims"}
    pipelines[0]["spec"]["trainer"] = {"blocks": [{"name": "b", "deviceClassName": "gpu.nvidia.com"}]}
    assert levels(checks.dra(pipelines, pools, None)) == ["Failed"]
    missing = checks.dra(pipelines, pools, ["other"])
    assert levels(missing) == ["Failed"]
    assert "no DeviceClass gpu.nvidia.com" in missing[0].message
    assert levels(checks.dra(pipelines, pools, ["gpu.nvidia.com"])) == ["Ok"]


def test_staging_must_hold_the_model_within_the_gates_limit() -> None:
    objects = recorded("base")
    pipeline, pool = objects["rlpipelines"][0], objects["enginepools"][0]
    pool["spec"]["gate"]["stagingMiB"] = 1024
    assert checks.staging(pipeline, pool, GIB) == [], "no gate said what it can stage, and the spec is not all of it"
    assert levels(checks.staging(pipeline, pool, GIB, GIB)) == ["Ok"]
    # The volume would do, what the gate's limit leaves of it does not.
    tight = checks.staging(pipeline, pool, GIB // 2, GIB // 2 - 1)
    assert levels(tight) == ["Failed"]
    assert "memory limit" in tight[0].fix
    # An adopted pool's gates stand in somebody else's template: its own stagingMiB says nothing of them.
    assert levels(checks.staging(pipeline, pool, 4 * GIB, 8 * GIB)) == ["Ok"]
    small = checks.staging(pipeline, pool, GIB + 1)
    assert levels(small) == ["Failed"]
    assert "stagingMiB to 1025 or more" in small[0].fix
    assert checks.staging(pipeline, pool, None) == []
    pipeline["spec"]["transport"]["staging"] = "Bucket"
    assert checks.staging(pipeline, pool, 2 * GIB) == []
    # As the operator judges (StagingOverLimit): the gate itself needs room beside what is staged.
    pool["spec"]["gate"]["resources"] = {"limits": {"memory": "1100Mi"}}
    tight = checks.staging(pipeline, pool, None)
    assert levels(tight) == ["Failed"]
    assert "limits.memory" in tight[0].message
    assert "1280Mi" in tight[0].fix
    pool["spec"]["gate"]["resources"] = {"limits": {"memory": "1280Mi"}}
    assert checks.staging(pipeline, pool, None) == []


def test_a_pool_stages_what_its_smallest_gate_can_that_answers() -> None:
    pool = {"metadata": {"name": "e"}}
    rows = [{**ENGINE, "stagingCapacityBytes": n} for n in (7, 5)]
    rows += [{**ENGINE, "pool": "other", "stagingCapacityBytes": 1}, {**ENGINE, "gone": True}]
    silent = {k: v for k, v in ENGINE.items() if k != "stagingCapacityBytes"} | {"answers": False}
    assert checks.capacity(pool, [*rows, silent]) == 5
    assert checks.capacity(pool, [silent]) is None


ENGINE: dict[str, Any] = {
    "name": "e-0", "pool": "e", "answers": True, "url": "http://x:9440", "gone": False, "born": True,
    "protocolVersion": 1, "gateVersion": "0.1.0", "capabilities": [], "enrolled": True, "fence": 1, "clockAheadMs": 0,
    "engineState": "Ready", "engineVersion": "1", "uncertain": False, "inFlight": None, "routed": {"r": True},
    "stagingCapacityBytes": 1, "devices": "NVML", "devicesProblem": "", "startup": None,
}  # fmt: skip
SENDER: dict[str, Any] = {
    "protocolVersion": 1, "version": "0.1.0", "capabilities": [], "fence": 1, "newest": 3, "totalBytes": 10
}  # fmt: skip


def seen(*engines: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "protocolVersion": 1, "operatorClockMs": 0, "apiserverClockMs": 0, "sender": SENDER, "senderProblem": None
    }  # fmt: skip
    return {**known, "engines": list(engines), **changes}


def test_gates_and_sender_that_answer_as_they_should_are_one_line_each() -> None:
    assert levels(checks.live("ns/p", seen(ENGINE, ENGINE))) == ["Ok", "Ok", "Ok"]


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"answers": False}, "Failed", "does not answer the operator"),
        ({"protocolVersion": 0}, "Failed", "speaks protocol 0, not 1"),
        ({"clockAheadMs": 40_000}, "Failed", "+40 s"),
        ({"routed": {"r": None}}, "Warning", "router r"),
        ({"uncertain": True}, "Warning", "no known end"),
        ({"devicesProblem": "no driver"}, "Warning", "no driver"),
        ({"startup": {"reason": "RouterUnreachable", "message": "m", "meaning": "x"}}, "Warning", "RouterUnreachable"),
    ],
)
def test_each_fault_of_a_gate_is_named(change: dict[str, Any], level: str, words: str) -> None:
    bad = checks.live("ns/p", seen({**ENGINE, **change}))[2:]
    assert levels(bad) == [level]
    assert words in bad[0].message
    assert bad[0].fix
    assert bad[0].what.endswith("e-0")


def test_pods_that_are_gone_or_never_ran_are_no_fault_of_a_gate() -> None:
    idle = [{**ENGINE, "answers": False, "born": False}, {**ENGINE, "answers": False, "gone": True}]
    assert levels(checks.live("ns/p", seen(*idle))) == ["Ok", "Ok", "Ok"]


def test_a_sender_that_is_silent_or_old_is_said() -> None:
    silent = {"reason": "SenderAbsent", "message": "no running pod", "meaning": "m"}
    assert levels(checks.live("ns/p", seen(sender=None, senderProblem=silent)))[0] == "Failed"
    assert levels(checks.live("ns/p", seen(sender={**SENDER, "protocolVersion": 0})))[0] == "Failed"


def test_what_needs_somebody_stands_first_with_what_to_do() -> None:
    stream = StringIO()
    found = [Check(Level.OK, "a", "fine"), Check(Level.WARN, "b", "odd", "look"), Check(Level.FAIL, "c", "bad", "mend")]
    Console(file=stream, width=80, no_color=True, markup=False, highlight=False).print(drawn(found, wide=False))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0].split() == ["Failed", "c"]
    assert "-> mend" in lines[2]
    assert lines[-1] == "1 failed, 1 warning, 1 ok"
