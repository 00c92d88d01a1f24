"""When a silent gate is left out of "everyone is fenced", and how this process knows that it may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.control.rounds.memory import GateMemory
from rlfleet.plan.everyone import Silence, closable_routers, may_be_asked_to_leave, removal_suffices
from rlfleet.plan.rounds import Member, RoundPlan
from rlfleet.plan.verdicts import Next, Verdict, conclude
from tests.plan.pool_kit import pool
from tests.plan.rounds_kit import gate

SAFE = Silence(led_since=5, answered=5, refuses=False, unanswered=False, routers=1, removed=True)


def test_a_silent_engine_out_of_every_router_counts_as_closed() -> None:
    assert removal_suffices(SAFE)
    assert removal_suffices(replace(SAFE, answered=9))


def test_where_readiness_is_a_router_no_removal_closes_an_engine() -> None:
    """Its pod stays Ready while its gate is silent, so a Service goes on sending requests to it."""
    router = {"name": "r", "type": "SGLangRouter", "url": "http://r:1"}
    service, gateway = {"name": "s", "type": "Readiness"}, {"name": "g", "type": "InferencePool"}
    pools = ([], [router], [service], [router, service], [gateway], [router, gateway])
    assert [closable_routers(pool(routers=routers)) for routers in pools] == [0, 1, 0, 0, 0, 0]
    assert closable_routers(None) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"led_since": None},  # somebody else has claimed since, or before us
        {"answered": None},  # it never said anything to us
        {"answered": 4},  # an order of the owner before us may still be on its way to it
        {"refuses": True},  # not silent at all: it stands behind somebody else
        {"unanswered": True},  # so may one of ours
        {"routers": 0},  # it has another door
    ],
)
def test_nothing_is_left_out_on_less(changes: dict[str, Any]) -> None:
    assert not may_be_asked_to_leave(replace(SAFE, **changes))
    assert not removal_suffices(replace(SAFE, **changes))


def test_a_router_that_was_not_read_back_counts_as_open() -> None:
    assert may_be_asked_to_leave(replace(SAFE, removed=False))
    assert not removal_suffices(replace(SAFE, removed=False))


def answer(generation: int, pipeline: str = "p", **changes: Any) -> wire.GateStatus:
    status = gate(**changes)
    return status.model_copy(update={"fence": wire.Held(pipeline=pipeline, operation="r", generation=generation)})


def test_an_unbroken_row_of_claims_is_a_reign() -> None:
    memory = GateMemory()
    assert memory.led_since("p", 0) is None
    memory.claimed("p", before=3, now=5)
    memory.claimed("p", before=5, now=8)
    assert memory.led_since("p", 8) == 5
    assert memory.led_since("p", 5) is None  # not the present claim
    memory.claimed("p", before=9, now=12)  # somebody claimed 9 in between
    assert memory.led_since("p", 12) == 12
    assert memory.led_since("other", 12) is None


def test_what_may_open_an_engine_is_remembered_until_it_can_not() -> None:
    memory = GateMemory()
    assert memory.last_answer("uid") is None
    memory.answered("p", answer(8))
    assert memory.last_answer("uid") == 8
    memory.sent("uid", "op", 8)
    assert memory.unanswered("uid")
    memory.answered("p", answer(8))  # it does nothing now, but the order may still arrive
    assert memory.unanswered("uid")
    memory.answered("p", answer(9, in_flight="op"))  # it arrived, and runs
    assert memory.unanswered("uid")
    memory.answered("p", answer(9))  # fenced above it, and idle
    assert not memory.unanswered("uid")
    memory.sent("uid", "op", 9)
    memory.ended("uid", "op")
    assert not memory.unanswered("uid")


def test_an_answer_under_another_pipeline_proves_nothing() -> None:
    memory = GateMemory()
    memory.answered("p", answer(8, pipeline="q"))
    assert memory.last_answer("uid") is None


def test_gates_of_pods_that_are_gone_are_forgotten() -> None:
    memory = GateMemory()
    memory.answered("p", answer(8))
    memory.forget("q", set())
    assert memory.last_answer("uid") == 8
    memory.forget("p", set())
    assert memory.last_answer("uid") is None


def test_who_is_left_out_still_counts_as_unavailable() -> None:
    plan = RoundPlan((Member("a", "uid-a", "i", wire.Transport.SERIALIZED),), 1, silent=("s",))
    whole = {"a": Verdict.WHOLE}
    assert conclude(plan, whole, unfenced=(), left_out=("s",), max_unavailable=1).next is Next.COMMIT
    assert conclude(plan, whole, unfenced=(), left_out=("s",), max_unavailable=0).next is Next.HOLD
    assert conclude(plan, whole, unfenced=("s",), max_unavailable=1).next is Next.WAIT_FENCE
