"""Status of a pipeline: what people read at 3 a.m. must follow from what was observed."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import EngineReport, EngineState
from rlfleet.plan.pipeline import FleetFacts, conditions, count
from rlfleet.plan.rounds import Committed
from tests.plan.elastic_kit import asleep, awake
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, cache, engine, gate, sender

COMMITTED = Committed(1, DIGEST_A)
GOOD = gate(holds=(1, DIGEST_A), routed={"main": True})


def test_active_is_proven_running_and_listed_by_every_router() -> None:
    engines = [
        engine("good", GOOD),
        engine("no-router", gate(holds=(1, DIGEST_A))),
        engine("other-bytes", gate(holds=(1, DIGEST_B))),
        engine("paused", gate(holds=(1, DIGEST_A), paused=True)),
        engine("pause-unknown", gate(holds=(1, DIGEST_A), paused=None)),
        engine("unlisted", gate(holds=(1, DIGEST_A), routed={"main": False})),
        engine("router-unknown", gate(holds=(1, DIGEST_A), routed={"main": True, "b": None})),
        engine("uncertain", gate(holds=(1, DIGEST_A), uncertain=True)),
        engine("silent", None),
        engine("gone", GOOD, gone=True),
        engine("leaving", GOOD, leaving=True),
    ]
    facts = count(engines, COMMITTED)
    assert (facts.total, facts.active) == (9, 2)
    assert facts.silent == ("silent",)
    assert "good" not in facts.closed
    assert "no-router" not in facts.closed
    assert len(facts.closed) == 6
    assert count(engines, None).active == 0


def test_who_sleeps_because_it_is_to_is_nobodys_want_and_who_should_be_awake_is() -> None:
    engines = [awake(0), asleep(1, resting=True), asleep(2), awake(3, resting=True)]
    facts = count(engines, COMMITTED)
    # a-2 is to wake; a-3 is on its way to sleep.
    assert (facts.total, facts.active, facts.asleep, facts.closed) == (2, 1, 1, ("a-2",))
    assert facts.counts == {"total": 2, "active": 1, "asleep": 1}


def test_a_fleet_asleep_is_ready_and_not_empty() -> None:
    found = state(facts=count([asleep(0, resting=True)], COMMITTED))
    assert found["Ready"] == ("True", "EnginesOffloaded")
    assert found["Degraded"] == ("False", "AsExpected")
    assert state(facts=FleetFacts(0, 0, (), ()))["Ready"] == ("True", "NoEngines")


def state(**changes: Any) -> dict[str, tuple[str, str]]:
    fields: dict[str, Any] = {
        "facts": FleetFacts(2, 2, (), ()),
        "committed": COMMITTED,
        "sender": sender(cache()),
        "sender_problem": None,
        "working": None,
        "trouble": None,
        "topology": (True, Reason.TOPOLOGY_NOT_NEEDED, "fine"),
        "generation": 3,
        "now": "2026-01-01T00:00:00Z",
    }
    out = conditions([], **{**fields, **changes})
    assert all(c["observedGeneration"] == 3 for c in out)
    return {c["type"]: (c["status"], c["reason"]) for c in out}


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({}, "Ready", ("True", "AllEnginesActive")),
        ({"committed": None}, "Ready", ("False", "NothingCommitted")),
        ({"facts": FleetFacts(0, 0, (), ())}, "Ready", ("True", "NoEngines")),
        ({"facts": FleetFacts(2, 1, ("a",), ())}, "Ready", ("False", "EnginesNotActive")),
        ({"facts": FleetFacts(2, 1, ("a",), ()), "awaiting": "a"}, "Ready", ("False", "AwaitingRound")),
        ({"facts": FleetFacts(2, 2, (), ()), "awaiting": "a"}, "Ready", ("True", "AllEnginesActive")),
        ({"facts": FleetFacts(2, 1, (), ("a",))}, "Ready", ("Unknown", "GatesUnreachable")),
        ({"facts": FleetFacts(2, 1, (), ("a",))}, "Degraded", ("True", "GatesUnreachable")),
        ({}, "Degraded", ("False", "AsExpected")),
        # Degraded as long as an engine is not routed, and Ready meanwhile never; mended, it is over.
        (
            {"trouble": (Reason.ROUTING_DEGRADED, "x"), "facts": FleetFacts(2, 1, ("a",), ())},
            "Degraded",
            ("True", "RoutingDegraded"),
        ),
        (
            {"trouble": (Reason.ROUTING_DEGRADED, "x"), "facts": FleetFacts(2, 1, ("a",), ())},
            "Ready",
            ("False", "EnginesNotActive"),
        ),
        ({"trouble": (Reason.ROUTING_DEGRADED, "x")}, "Degraded", ("False", "AsExpected")),
        ({"trouble": (Reason.TRANSFER_FAILED, "x")}, "Degraded", ("True", "TransferFailed")),
        ({}, "Progressing", ("False", "Idle")),
        ({"working": (Reason.SENDER_NOT_READY, "x")}, "Progressing", ("True", "SenderNotReady")),
        ({}, "SenderReady", ("True", "SenderReady")),
        ({"sender": None}, "SenderReady", ("False", "SenderUnreachable")),
        (
            {"sender": None, "sender_problem": (Reason.SENDER_ABSENT, "x")},
            "SenderReady",
            ("False", "SenderAbsent"),
        ),
        ({"sender": sender(None)}, "SenderReady", ("False", "SenderNotReady")),
        ({"sender": sender(cache(), protocol_version=0)}, "SenderReady", ("False", "SenderTooOld")),
        (
            {"sender": sender(cache().model_copy(update={"nan_tensors": ("w",)}))},
            "SenderReady",
            ("True", "NaNWeights"),
        ),
    ],
)
def test_conditions(changes: dict[str, Any], kind: str, expected: tuple[str, str]) -> None:
    assert state(**changes)[kind] == expected


def test_an_unchanged_world_changes_no_condition() -> None:
    engines = [engine("good", GOOD), engine("starting", gate(engine=EngineReport(state=EngineState.STARTING)))]
    fields: dict[str, Any] = {
        "facts": count(engines, COMMITTED),
        "committed": COMMITTED,
        "sender": sender(cache()),
        "sender_problem": None,
        "working": None,
        "trouble": None,
        "topology": (True, Reason.TOPOLOGY_NOT_NEEDED, "fine"),
        "generation": 1,
    }
    first = conditions([], now="2026-01-01T00:00:00Z", **fields)
    assert conditions(first, now="2026-01-02T00:00:00Z", **fields) == first


def test_a_lost_record_is_told_from_one_that_never_was() -> None:
    lost = state(committed=None, facts=FleetFacts(2, 0, ("a", "b"), (), unrecorded=("a", "b")))
    assert lost["Ready"] == ("False", "CommittedUnknown")
    assert lost["Degraded"] == ("True", "CommittedUnknown")
    never = state(committed=None, facts=FleetFacts(2, 0, ("a", "b"), ()))
    assert never["Ready"] == ("False", "NothingCommitted")
    assert never["Degraded"] == ("False", "AsExpected")
