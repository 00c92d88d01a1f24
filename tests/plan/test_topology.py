"""Identity of devices from several sources: who is believed, what is a contradiction, and what stays unknown."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.plan.rounds import RoundPlan
from rlfleet.plan.topology import (
    Device,
    Evidence,
    assigned_evidence,
    identify,
    report_evidence,
    spec_evidence,
)
from rlfleet.plan.topology_valid import topology_valid
from rlfleet.plan.transport import Refusal
from tests.plan.rounds_kit import engine, frozen, gate

A, B, C = Device("n0", "GPU-a"), Device("n0", "GPU-b"), Device("n1", "GPU-c")


def told(source: str, *devices: Device, part: bool = False) -> Evidence:
    return Evidence(source, frozenset(devices) or None, part)


def test_the_first_source_that_knows_is_believed() -> None:
    found = identify([told("claims"), told("gate", A, B), told("spec", A, B)])
    assert (found.devices, found.source, found.conflict) == (frozenset({A, B}), "gate", "")


def test_a_contradiction_names_both_sources_and_their_devices_and_leaves_nothing_known() -> None:
    found = identify([told("the claim", A), told("the gate", B)])
    assert found.devices is None
    assert found.conflict == "the claim says n0/GPU-a, but the gate says n0/GPU-b"


def test_a_sender_that_sees_one_node_contradicts_nobody_who_knows_both() -> None:
    found = identify([told("the sender", A, part=True), told("spec.trainer.gpus", A, B, C)])
    assert (found.devices, found.source) == (frozenset({A, B, C}), "spec.trainer.gpus")
    wrong = identify([told("the sender", C, part=True), told("spec.trainer.gpus", A, B)])
    assert wrong.conflict == "spec.trainer.gpus says n0/GPU-a, n0/GPU-b, but the sender says n1/GPU-c"


def test_two_parts_must_agree_where_they_look_at_the_same_node() -> None:
    claims, other = told("claims", A, part=True), told("sender", B, part=True)
    assert identify([claims, other]).conflict
    assert identify([claims, told("sender", C, part=True)]).devices == frozenset({A})


def test_nobody_knows_is_unknown_with_every_reason() -> None:
    sources = [Evidence("ResourceClaim p.a", None, why="not allocated"), Evidence("the gate", None), told("spec")]
    assert identify(sources).why == "ResourceClaim p.a: not allocated"
    assert identify([]).devices is None


def test_what_reports_pins_and_specs_say() -> None:
    nvml = wire.DeviceReport(source="NVML", node="n0", uuids=("GPU-a", "GPU-b"))
    assert report_evidence("g", nvml).devices == frozenset({A, B})
    assert report_evidence("g", None).devices is None
    unknown = wire.DeviceReport(source="Unknown", node="n0", problem="no driver")
    assert (report_evidence("g", unknown).devices, report_evidence("g", unknown).why) == (None, "no driver")
    nowhere = wire.DeviceReport(source="Declared", uuids=("GPU-a",))
    assert report_evidence("g", nowhere).devices is None, "a UUID without its node is no identity"
    for node, uuids in (("n0", ("GPU-a GPU-b",)), ("n 0", ("GPU-a",)), ("n0", tuple(f"GPU-{i}" for i in range(65)))):
        odd = report_evidence("g", wire.DeviceReport(source="Declared", node=node, uuids=uuids))
        assert odd.devices is None, "status would not take it, and it is compared with nothing"
        assert odd.why
    assert assigned_evidence("n0/GPU-a,GPU-b").devices == frozenset({A, B})
    gpus = [{"node": "n0", "devices": ["GPU-a"]}, {"node": "n1", "devices": ["GPU-c"]}]
    assert spec_evidence(gpus).devices == frozenset({A, C})
    assert spec_evidence(None).devices is None


devices = st.frozensets(st.sampled_from([A, B, C, Device("n1", "GPU-a")]), max_size=3)
evidence = st.builds(Evidence, st.sampled_from("abcd"), st.none() | devices, st.booleans(), st.sampled_from(["", "x"]))


@given(st.lists(evidence, max_size=4))
def test_identity_is_what_some_source_said_and_nobody_contradicts(sources: list[Evidence]) -> None:
    found = identify(sources)
    known = [s for s in sources if s.devices]
    if found.devices is not None:
        assert not found.conflict
        assert any(s.devices == found.devices for s in known)
        for s in known:
            if not s.part and any(not o.part and o.devices == found.devices for o in known):
                assert s.devices == found.devices
            if s.part and any(not o.part for o in known):
                assert (s.devices or frozenset()) <= found.devices
    else:
        assert bool(found.conflict) == bool(known)


@given(st.lists(evidence, max_size=4))
def test_whether_sources_disagree_does_not_depend_on_their_order(sources: list[Evidence]) -> None:
    whole = [s for s in sources if not s.part]
    verdicts = {bool(identify(order).conflict) for order in itertools.permutations(whole)}
    assert len(verdicts) == 1


@given(st.lists(evidence, max_size=4), evidence)
def test_another_source_never_turns_a_contradiction_into_knowledge(sources: list[Evidence], more: Evidence) -> None:
    if identify(sources).conflict and all(not s.part for s in sources):
        assert identify([*sources, more]).devices is None
        assert identify([more, *sources]).devices is None


# ------------------------------------------------------------------------------------------ where it is used


def plan(mode: str, *engines: Any, disputes: tuple[str, ...] = ()) -> RoundPlan | Refusal:
    return frozen(
        list(engines),
        mode=mode,
        train=frozenset({B}),
        disputes=disputes,
    )


@pytest.mark.parametrize("mode", ["Broadcast", "Auto"])
def test_engines_whose_sources_disagree_are_refused_with_both_named(mode: str) -> None:
    split = engine("e", gate(devices=("GPU-a",)), claimed=Evidence("ResourceClaim p.a", frozenset({C})))
    result = plan(mode, split)
    assert isinstance(result, Refusal)
    assert result.reason is Reason.DEVICE_SOURCES_DISAGREE
    assert "ResourceClaim p.a says n1/GPU-c, but the gate of e says n0/GPU-a" in result.message
    assert isinstance(plan("CPUSerialize", split), RoundPlan), "serialized weights go anywhere"


def test_a_trainer_whose_sources_disagree_is_refused() -> None:
    result = plan("Auto", engine("e", gate(devices=("GPU-a",))), disputes=("x says 1, but y says 2",))
    assert isinstance(result, Refusal)
    assert "x says 1, but y says 2" in result.message


def test_an_engine_is_where_its_claims_say_else_its_gate_else_its_pin() -> None:
    pin, claim = assigned_evidence("n0/GPU-a"), Evidence("claim", frozenset({A}))
    assert engine("e", gate(devices=("GPU-a",)), claimed=claim).identity.source == "claim"
    assert engine("e", gate(devices=("GPU-a",)), assigned=pin).identity.source == "the gate of e"
    silent = engine("e", None, assigned=pin)
    assert (silent.identity.source, silent.devices) == ("spec.placement.devices", frozenset({A}))
    assert engine("e", gate()).devices is None


def test_the_condition_says_what_is_unknown_and_what_is_wrong() -> None:
    def said(*engines: Any, train: list[Evidence], mode: str = "Auto", sizes: dict[str, int] | None = None) -> Any:
        return topology_valid(
            engines, identify(train), mode=mode, assert_mixed=False, broken=(), sizes=sizes or {"pool": 1}
        )

    spec = told("spec.trainer.gpus", B)
    here = engine("e", gate(devices=("GPU-a",)))
    assert said(here, train=[spec])[:2] == (True, Reason.TOPOLOGY_KNOWN)
    assert said(train=[spec])[:2] == (None, Reason.TOPOLOGY_UNKNOWN)
    value, reason, message = said(here, train=[Evidence("ResourceClaim p.a", None, why="p.a is not allocated yet")])
    assert (value, reason) == (None, Reason.TOPOLOGY_UNKNOWN)
    assert message.endswith("ResourceClaim p.a: p.a is not allocated yet")
    value, reason, message = said(here, train=[spec, told("the sender", C, part=True)])
    assert (value, reason) == (False, Reason.DEVICE_SOURCES_DISAGREE)
    two = said(here, train=[spec, told("claim", C)], sizes={"pool": 2}, mode="CPUSerialize")
    assert two[:2] == (False, Reason.DEVICE_SOURCES_DISAGREE), "also where the transport does not care"
    assert "EngineSizeMismatch: e has 1 devices, spec.engine.gpusPerEngine of pool pool is 2" in two[2]
    assert said(engine("e", gate()), train=[], mode="CPUSerialize")[:2] == (True, Reason.TOPOLOGY_NOT_NEEDED)
    on_train = engine("e", gate(devices=("GPU-b",)))
    assert said(on_train, train=[spec], mode="Broadcast")[:2] == (False, Reason.ENGINES_ON_TRAIN_DEVICES)
