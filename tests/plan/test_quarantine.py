"""Engines that a person keeps out of service: closed, in no round, resumed by nobody, and kept."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1 import EngineState
from rlfleet.api.wire import MemoryTag, OperationState, Transport
from rlfleet.plan.catchup import needs as needs_catch_up
from rlfleet.plan.drops import removable
from rlfleet.plan.drops import to_close as round_closes
from rlfleet.plan.lifecycle import derive, pod_fact
from rlfleet.plan.quarantine import plan_quarantine, quarantine_of, to_close
from rlfleet.plan.repair import needs
from rlfleet.plan.rounds import Committed, Engine, Member, RoundPlan
from rlfleet.plan.verdicts import Verdict as V
from rlfleet.plan.verdicts import abort, could_serve, reopening, replaceable, to_replace, unfenced, verdict
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, frozen, gate, load

COMMITTED = Committed(1, DIGEST_A, "s1", {"L": "E"})
HOLDS = (1, DIGEST_A)


def held(name: str = "a", **how: Any) -> Engine:
    return engine(name, gate(holds=HOLDS, pipeline="p", **how), quarantined=True)


def due(*engines: Engine) -> tuple[str, ...]:
    return plan_quarantine(engines, pipeline="p")


def test_the_annotation_is_what_counts_also_without_a_reason() -> None:
    def pod(**annotations: str) -> dict[str, Any]:
        return {"metadata": {"name": "x", "annotations": annotations}}

    assert quarantine_of({"metadata": {"name": "x"}}) is None
    assert quarantine_of(pod(other="x")) is None
    assert quarantine_of(pod(**{"rlfleet.dev/quarantine": " bad GPU "})) == "bad GPU"
    assert quarantine_of(pod(**{"rlfleet.dev/quarantine": ""})) == "no reason given"
    assert len(quarantine_of(pod(**{"rlfleet.dev/quarantine": "x" * 999})) or "") == 200


def test_an_open_engine_is_closed_and_one_that_is_closed_is_left_alone() -> None:
    assert due(held()) == ("a",)
    assert due(held(paused=True, routed={"r": True})) == ("a",)
    assert due(held(paused=True, routed={"r": None})) == ("a",)
    assert due(held(paused=True, routed={"r": False})) == ()
    assert due(engine("a", gate(holds=HOLDS, pipeline="p"))) == ()


def test_who_is_silent_busy_or_uncertain_is_looked_at_again() -> None:
    assert due(held(in_flight="x")) == ()
    assert due(held(uncertain=True)) == ()
    silent = engine("a", None, quarantined=True)
    assert due(silent) == ()
    assert to_close(silent)


@pytest.mark.parametrize("how", ["gone", "leaving", "unborn", "unwanted"])
def test_who_goes_anyway_or_never_ran_is_not_closed(how: str) -> None:
    assert due(engine("a", gate(holds=HOLDS, pipeline="p"), quarantined=True, **{how: True})) == ()


def test_one_that_sleeps_is_closed_as_it_is() -> None:
    asleep = held(released=(MemoryTag.WEIGHTS, MemoryTag.KV_CACHE), paused=None)
    assert not to_close(asleep)


def test_no_round_takes_it_along_or_waits_for_it() -> None:
    plan = frozen(
        [held(), engine("b", gate()), engine("c", None, quarantined=True)],
        max_unavailable=0,
    )
    assert isinstance(plan, RoundPlan)
    assert [m.engine for m in plan.members] == ["b"]
    assert plan.silent == ()


def test_in_a_round_it_is_dropped_and_closed_instead_of_being_reopened() -> None:
    member = Member("a", "uid-a", "i1", Transport.SERIALIZED)

    def judge(e: Engine) -> V:
        return verdict(member, e, operation="r", version=1, manifest_digest=DIGEST_A)

    assert judge(engine("a", gate(), quarantined=True)) is V.DROPPED
    assert judge(engine("a", gate(loads=(load(state=OperationState.FAILED),)), quarantined=True)) is V.DROPPED
    whole = engine("a", gate(loads=(load(published=True),), holds=HOLDS, paused=True), quarantined=True)
    doors = reopening({"a": judge(whole)}, {"a": whole})
    assert doors.resume == ()
    assert doors.close == ("a",)
    assert round_closes(engine("a", gate(), quarantined=True))
    plan = RoundPlan((member,), 1)
    assert abort(plan, {"a": held(paused=True)}, COMMITTED, operation="other").resume == ()


def test_it_is_fenced_like_any_other_before_a_commit() -> None:
    assert unfenced([engine("a", None, quarantined=True)], pipeline="p", generation=10) == ("a",)
    assert could_serve({"a": held()}, {}) == ("a",)


def test_nobody_resumes_routes_catches_up_replaces_or_removes_it() -> None:
    closed = held(paused=True, routed={"r": False})
    assert needs([closed], COMMITTED, pipeline="p") == ()
    old = engine("a", gate(holds=(0, DIGEST_B), pipeline="p", paused=True), quarantined=True)
    assert not needs_catch_up(old, COMMITTED, "p")
    poisoned = engine("a", gate(loads=(load(state=OperationState.FAILED),)), quarantined=True)
    assert to_replace([poisoned], on_failure="Replace") == ()
    assert replaceable([poisoned], {"a"}, on_failure="Replace") == ()
    assert not removable(closed)
    # Each of these would happen without the quarantine.
    assert [n.act.value for n in needs([engine("a", closed.status)], COMMITTED, pipeline="p")] == ["Resume"]
    assert needs_catch_up(engine("a", old.status), COMMITTED, "p")
    assert to_replace([engine("a", poisoned.status)], on_failure="Replace") == ("a",)


def test_the_pool_shows_it_quarantined_with_the_persons_reason() -> None:
    pod = {
        "metadata": {
            "name": "a-0", "uid": "u", "labels": {"rlfleet.dev/engine-index": "0"},
            "annotations": {"rlfleet.dev/quarantine": "bad GPU"},
        },
        "spec": {"containers": []},
        "status": {"phase": "Running"},
    }  # fmt: skip
    fact = pod_fact(pod, owner_uid="x")
    for paused in (False, True):
        status = gate(holds=HOLDS, paused=paused)
        found = derive(fact, status, committed=COMMITTED, routers=frozenset(), previous=EngineState.ACTIVE)
        assert (found.state, found.reason) == (EngineState.QUARANTINED, Reason.QUARANTINE_REQUESTED)
        assert found.failure == "QuarantineRequested: bad GPU"
    again = derive(
        pod_fact({**pod, "metadata": {**pod["metadata"], "annotations": {}}}, owner_uid="x"),
        gate(holds=HOLDS),
        committed=COMMITTED,
        routers=frozenset(),
        previous=EngineState.QUARANTINED,
    )
    assert again.state is EngineState.ACTIVE
