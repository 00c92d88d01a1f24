"""Engines that are to go: who they are, what a round does with them, and what it does not wait for."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.wire import OperationState, Transport
from rlfleet.plan.drops import is_unwanted, removable
from rlfleet.plan.rounds import Committed, Engine, Member, RoundPlan
from rlfleet.plan.verdicts import Next, Verdict, abort, conclude, reopening, verdict
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, frozen, gate, load

POOL: dict[str, Any] = {"metadata": {"name": "pool", "uid": "pool-uid"}, "spec": {"replicas": 2}}
MEMBER = Member("a", "uid-a", "i1", Transport.SERIALIZED)


def pod(index: str) -> dict[str, Any]:
    return {"metadata": {"name": "x", "labels": {"rlfleet.dev/engine-index": index}}}


@pytest.mark.parametrize(("index", "unwanted"), [("0", False), ("1", False), ("2", True), ("x", False), ("", False)])
def test_an_index_beyond_replicas_is_to_go(index: str, unwanted: bool) -> None:
    assert is_unwanted(pod(index), POOL) is unwanted


def test_an_index_without_devices_is_to_go() -> None:
    devices = [{"node": "n0", "devices": ["0"]}]
    spec = {"replicas": 2, "engine": {"gpusPerEngine": 1}, "placement": {"mode": "Pinned", "devices": devices}}
    assert not is_unwanted(pod("0"), {**POOL, "spec": spec})
    assert is_unwanted(pod("1"), {**POOL, "spec": spec})


def test_with_its_pool_every_engine_goes() -> None:
    assert is_unwanted(pod("0"), None)
    assert is_unwanted(pod("0"), {**POOL, "metadata": {**POOL["metadata"], "deletionTimestamp": "now"}})


def judge(e: Engine) -> Verdict:
    return verdict(MEMBER, e, operation="r", version=1, manifest_digest=DIGEST_A)


@pytest.mark.parametrize("how", ["unwanted", "leaving"])
def test_a_member_that_is_to_go_is_dropped_and_waited_for_by_nobody(how: str) -> None:
    for status in (gate(), gate(loads=(load(state=OperationState.FAILED),)), None):
        assert judge(engine("a", status, **{how: True})) is Verdict.DROPPED
    # What is whole counts as whole: whether it opens is asked when engines reopen.
    assert judge(engine("a", gate(loads=(load(published=True),), holds=(1, DIGEST_A)), **{how: True})) is Verdict.WHOLE
    plan = RoundPlan((MEMBER, Member("b", "uid-b", "i1", Transport.SERIALIZED)), 1)
    out = conclude(plan, {"a": Verdict.DROPPED, "b": Verdict.WHOLE}, unfenced=(), max_unavailable=0)
    assert out.next is Next.COMMIT


def test_nobody_who_is_to_go_is_frozen_or_counted_as_silent() -> None:
    plan = frozen(
        [engine("a", gate()), engine("b", gate(), unwanted=True), engine("c", None, unwanted=True)],
        max_unavailable=0,
    )
    assert isinstance(plan, RoundPlan)
    assert ([m.engine for m in plan.members], plan.silent) == (["a"], ())


def test_a_whole_member_that_is_to_go_stays_closed_instead_of_reopening() -> None:
    whole = gate(holds=(1, DIGEST_A), paused=True)
    engines = {"a": engine("a", whole), "b": engine("b", whole, unwanted=True), "c": engine("c", None, unwanted=True)}
    verdicts = {"a": Verdict.WHOLE, "b": Verdict.WHOLE, "c": Verdict.DROPPED}
    doors = reopening(verdicts, engines)
    assert (doors.resume, doors.close, doors.dropped) == (("a",), ("b",), ("b",))
    # One whose gate answers is taken out of the routers; a silent one is left to the fence, nobody waits for it.
    engines["c"] = engine("c", gate(), unwanted=True)
    assert reopening(verdicts, engines).close == ("c", "b")


def test_an_abort_does_not_resume_who_is_to_go() -> None:
    engines = {
        "a": engine("a", gate(holds=(0, DIGEST_B), paused=True), unwanted=True),
        "other": engine("other", gate(holds=(0, DIGEST_B), paused=True), unwanted=True),
    }
    rule = abort(RoundPlan((MEMBER,), 1), engines, Committed(0, DIGEST_B), operation="r")
    assert (rule.resume, rule.close) == ((), ("a",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"unwanted": False}, False),
        ({"owned": False}, False),
        ({"leaving": True}, False),
        ({"gone": True}, False),
        ({"status": None}, False),
        ({"status": gate(paused=False)}, False),
        ({"status": gate(paused=None)}, False),
        ({"status": gate(paused=True, routed={"r": None})}, False),
        ({"status": gate(paused=True, routed={"r": True})}, False),
        ({"status": gate(paused=True, routed={"r": False})}, True),
        ({"status": gate(paused=True, in_flight="op")}, False),
    ],
)
def test_only_what_is_proven_closed_is_removed(changes: dict[str, Any], expected: bool) -> None:
    fields: dict[str, Any] = {"status": gate(paused=True), "unwanted": True, **changes}
    assert removable(engine("a", fields.pop("status"), **fields)) is expected
