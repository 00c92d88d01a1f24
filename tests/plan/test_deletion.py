"""What a deletion waits for, and that it never waits longer than its ceiling."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api import labels, wire
from rlfleet.api.timestamps import epoch_ms, rfc3339
from rlfleet.plan.deletion import (
    CEILING_SECONDS,
    FINALIZERS,
    belongs,
    holds_up,
    overdue,
    pool_waits_for,
    seconds_left,
    still_open,
    waits_for,
)
from tests.plan.rounds_kit import DIGEST_A, engine, gate

DELETED = epoch_ms("2026-01-01T00:00:00Z")
HOLDS = (1, DIGEST_A)


def obj(*finalizers: str, deleted: bool = True, **status: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": "x", "uid": "u-x", "finalizers": list(finalizers)}
    if deleted:
        meta["deletionTimestamp"] = rfc3339(DELETED)
    return {"metadata": meta, "status": status}


def test_every_kind_of_ours_has_its_finalizer() -> None:
    assert set(FINALIZERS) == {"rlpipelines", "enginepools", "syncrounds"}
    assert len(set(FINALIZERS.values())) == 3


@pytest.mark.parametrize("finalizer", FINALIZERS.values())
def test_a_finalizer_goes_at_its_ceiling_and_not_before(finalizer: str) -> None:
    held = obj(finalizer, "somebody/else")
    end = DELETED + CEILING_SECONDS * 1000
    assert not overdue(held, finalizer, now_ms=end - 1)
    assert seconds_left(held, now_ms=end - 1500) == 1.5
    assert overdue(held, finalizer, now_ms=end)
    assert seconds_left(held, now_ms=end + 10_000) == 0


def test_only_a_deletion_that_we_hold_up_is_ours_to_end() -> None:
    late = DELETED + 10 * CEILING_SECONDS * 1000
    assert not overdue(obj("somebody/else"), labels.ROUND_FINALIZER, now_ms=late)
    assert not overdue(obj(labels.ROUND_FINALIZER, deleted=False), labels.ROUND_FINALIZER, now_ms=late)
    assert holds_up(obj(labels.ROUND_FINALIZER), labels.ROUND_FINALIZER)


def test_a_round_of_an_earlier_pipeline_of_the_name_is_not_ours() -> None:
    def owned(*uids: str) -> dict[str, Any]:
        return {"metadata": {"name": "r", "ownerReferences": [{"kind": "RLPipeline", "uid": u} for u in uids]}}

    assert belongs(owned("p"), pipeline="p")
    assert belongs({"metadata": {"name": "by hand"}}, pipeline="p")
    assert not belongs(owned("earlier"), pipeline="p")


def opened(**changes: Any) -> str:
    """What is said of one engine of pipeline p; empty: it counts as closed."""
    found = still_open([engine("e", gate(holds=HOLDS, **changes))], pipeline="p")
    return found[0].why if found else ""


def test_closed_is_paused_and_in_no_router() -> None:
    assert opened(paused=True, routed={"a": False, "b": False}) == ""
    assert opened(paused=True) == ""
    assert "not paused" in opened(paused=False)
    assert "not known" in opened(paused=None)
    assert "router b" in opened(paused=True, routed={"a": False, "b": True})
    assert "router b" in opened(paused=True, routed={"b": None}), "a router that does not say counts as open"
    assert "operation runs" in opened(paused=True, in_flight="id")


def test_an_engine_that_has_never_served_is_closed_by_its_own_gate() -> None:
    booting = gate(paused=None).model_copy(update={"engine": wire.EngineReport(state=wire.EngineState.STARTING)})
    assert still_open([engine("e", booting)], pipeline="p") == ()
    assert still_open([engine("e", gate(paused=False))], pipeline="p"), "up, and not paused yet"


def test_silence_is_open_unless_nothing_ever_ran_there() -> None:
    silent = still_open([engine("e"), engine("refuses", refusal="StaleFence")], pipeline="p")
    assert [(o.engine, o.answers) for o in silent] == [("e", False), ("refuses", False)]
    assert silent[1].why == "StaleFence"
    assert still_open([engine("e", unborn=True), engine("f", gone=True)], pipeline="p") == ()
    assert still_open([engine("e", leaving=True)], pipeline="p"), "a pod that goes may serve until it is gone"


def test_engines_of_another_pipeline_are_not_ours_to_close() -> None:
    theirs = gate(holds=HOLDS, paused=False).model_copy(update={"fence": wire.Held(pipeline="other", generation=9)})
    assert still_open([engine("e", theirs)], pipeline="p") == ()


def test_a_pipeline_says_what_it_waits_for_in_order() -> None:
    active = {"kind": "Refresh", "name": "r", "uid": "u-x"}
    running = obj(labels.ROUND_FINALIZER, phase="Transferring")
    ended = obj(phase="Succeeded")
    left = still_open([engine("e")], pipeline="p")
    assert waits_for([running], active, left) == "waits for round r to be settled (it is in Transferring)"
    assert waits_for([], active, left) == "waits for round r to be settled"
    assert waits_for([running, ended], None, left) == "waits for rounds to be settled: x"
    assert waits_for([ended], {"kind": "Quarantine", "name": "p", "uid": "p"}, left).startswith("waits for 1 engines")
    assert waits_for([ended], None, ()) == ""


@pytest.mark.parametrize("kind", ["Refresh", "CatchUp"])
def test_a_pool_waits_for_a_round_then_for_routers_then_for_pods(kind: str) -> None:
    active = {"kind": kind, "name": "r", "uid": "u"}
    assert "round r" in pool_waits_for(active, ("a", "b"), ("main does not answer",))
    assert pool_waits_for(active, (), ()) == "", "a round can not use engines that are not there"
    assert "main does not answer" in pool_waits_for(None, ("a",), ("main does not answer",))
    assert pool_waits_for({"kind": "Quarantine", "name": "p"}, ("b", "a"), ()) == "waits for 2 pods to end: a, b"
    assert pool_waits_for(None, (), ()) == ""
