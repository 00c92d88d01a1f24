"""The fence at a gate: durable, never lower, one owner per generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlfleet.api.fencing import MAX_AHEAD_MS
from tests.gate.kit import Engine, Gate, Operator, Weights, until


def caller(gate: Gate, operation: str, generation: int, pipeline: str = "pipeline-uid") -> Operator:
    return Operator(gate, pipeline, operation, generation)


def test_equal_and_higher_are_accepted_and_stored(operator: Operator, gate: Gate) -> None:
    assert operator.fence().status_code == 200
    assert operator.fence().json()["fence"] == {
        "pipeline": "pipeline-uid",
        "operation": "round-1",
        "generation": 1000,
    }
    newer = caller(gate, "round-2", 1001)
    assert newer.fence().json()["fence"]["generation"] == 1001
    assert newer.status()["fence"]["operation"] == "round-2"


@pytest.mark.parametrize(
    ("operation", "generation", "pipeline", "reason"),
    [
        ("round-1", 999, "pipeline-uid", "StaleFence"),
        ("round-2", 1000, "pipeline-uid", "OtherOperation"),
        ("round-1", 1000, "other-uid", "OtherPipeline"),
        ("round-1", 999, "other-uid", "OtherPipeline"),
    ],
)
def test_refusals_name_what_is_held_and_store_nothing(
    operator: Operator, gate: Gate, operation: str, generation: int, pipeline: str, reason: str
) -> None:
    operator.fence()
    answer = caller(gate, operation, generation, pipeline).fence()
    assert answer.status_code == 412
    held = {"pipeline": "pipeline-uid", "operation": "round-1", "generation": 1000}
    assert (answer.json()["reason"], answer.json()["held"]) == (reason, held)
    assert operator.status()["fence"] == held


def test_a_generation_far_ahead_is_refused_instead_of_locking_everybody_out(operator: Operator, gate: Gate) -> None:
    ahead = int(time.time() * 1000) + MAX_AHEAD_MS + 60_000
    answer = caller(gate, "round-2", ahead).fence()
    assert (answer.status_code, answer.json()["reason"]) == (412, "FencePoisoned")
    assert caller(gate, "round-2", 1001).fence().status_code == 200


def test_operations_are_fenced_and_raise_the_fence_before_they_act(operator: Operator, gate: Gate) -> None:
    newer = caller(gate, "round-2", 2000)
    newer.ok("Discard")
    assert newer.status()["fence"]["generation"] == 2000
    answer = operator.start("Discard")
    assert (answer.status_code, answer.json()["reason"]) == (412, "StaleFence")
    assert answer.json()["held"]["generation"] == 2000
    assert "round-1/Discard" not in newer.status()["attempts"]


def test_another_pipeline_takes_over_only_a_closed_engine(operator: Operator, gate: Gate, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    taker = caller(gate, "repair-1", 2000, "other-uid")
    open_answer = taker.fence()
    assert (open_answer.status_code, open_answer.json()["reason"]) == (412, "OtherPipeline")
    operator.ok("Pause", attempt=2)
    assert engine.ready() == 503
    assert caller(gate, "repair-1", 1000, "other-uid").fence().json()["reason"] == "OtherPipeline"
    assert taker.fence().status_code == 200
    assert taker.status()["fence"]["pipeline"] == "other-uid"
    # An operation also needs the enrolment to be the new pipeline's.
    assert taker.refused("Discard") == "OtherPipeline"
    assert taker.enroll().status_code == 200
    taker.ok("Discard")


def test_enroll_does_not_raise_a_held_fence_and_is_refused_below_it(operator: Operator, gate: Gate) -> None:
    operator.fence()
    later = caller(gate, "", 1500)
    assert later.enroll().status_code == 200
    assert operator.status()["fence"]["generation"] == 1000
    assert caller(gate, "", 999).enroll().json()["reason"] == "StaleFence"
    # Below an enrolment that was accepted already, a late one must not bring back its routers.
    assert caller(gate, "", 1400).enroll().json()["reason"] == "StaleFence"


def test_every_way_in_names_what_is_held_when_it_refuses(operator: Operator, gate: Gate) -> None:
    """Fence, operation, enrolment and push: whoever loses learns to what, and can claim above it."""
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    newest = caller(gate, "round-9", 2000)
    newest.fence()
    held = {"pipeline": "pipeline-uid", "operation": "round-9", "generation": 2000}
    poison = int(time.time() * 1000) + MAX_AHEAD_MS + 60_000
    answers = {
        "fence, lower": operator.fence(),
        "fence, equal": caller(gate, "round-8", 2000).fence(),
        "fence, other pipeline": caller(gate, "round-8", 2000, "other-uid").fence(),
        "fence, poisoned": caller(gate, "round-8", poison).fence(),
        "operation, lower": operator.start("Discard"),
        "operation, poisoned": caller(gate, "round-8", poison).start("Discard"),
        "operation, other pipeline": caller(gate, "round-8", 3000, "other-uid").start("Discard"),
        "enrolment, lower": caller(gate, "", 1500).enroll(),
        "enrolment, other pipeline": caller(gate, "", 1500, "other-uid").enroll(),
        "push, lower": operator.push("buckets/0", weights.buckets[0]),
        "push, equal": caller(gate, "round-8", 2000).push("buckets/0", weights.buckets[0]),
    }
    assert {name: (a.status_code, a.json().get("held")) for name, a in answers.items()} == dict.fromkeys(
        answers, (412, held)
    )
    assert newest.status()["fence"] == held


def test_the_fence_survives_sigkill(operator: Operator, gate: Gate) -> None:
    newer = caller(gate, "round-2", 3000)
    assert newer.fence().status_code == 200
    gate.kill()
    gate.start()
    assert operator.fence().json()["held"]["generation"] == 3000


def test_a_push_dies_with_the_fence(operator: Operator, gate: Gate) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    assert operator.push_manifest(weights).status_code == 200
    caller(gate, "round-2", 1001).fence()
    answer = operator.push("buckets/0", weights.buckets[0])
    assert (answer.status_code, answer.json()["reason"]) == (412, "StaleFence")


@pytest.mark.parametrize("change", [{"podUid": "pod-other"}, {"incarnation": "0" * 32}])
def test_other_identities_are_refused_before_the_fence_is_stored(
    operator: Operator, gate: Gate, change: dict[str, Any]
) -> None:
    newer = caller(gate, "round-2", 2000)
    answer = newer.post(newer.body("Discard") | change)
    assert (answer.status_code, answer.json()["reason"]) == (409, "IdentityMismatch")
    assert operator.status()["fence"]["generation"] == 1000


def test_without_enrolment_no_operation(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    fresh = Operator(make_gate(engine.url))
    assert fresh.refused("Discard") == "NotEnrolled"
    assert fresh.status()["fence"]["generation"] == 0
    assert fresh.gate.startupz().json()["reason"] == "NotEnrolled"
    assert fresh.gate.http.get("/readyz").status_code == 503


def test_an_order_that_a_higher_fence_overtakes_does_not_start(operator: Operator, gate: Gate, engine: Engine) -> None:
    """The fence rises between the order's admission and its start, while its check asks the engine."""
    operator.serve(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2)
    newer.prepare(weights, 2)
    newer.push_all(weights)
    newer.ok("Pause")
    raised = caller(gate, "round-2", 1002)
    body = raised.body("Load", **raised.load_order(weights, 2))
    engine.faults(ready={"action": "delay", "seconds": 1.2})
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(raised.post, body)
        stale = caller(gate, "round-0", 1)  # its refusal tells what is held, without asking the engine
        until("the load is admitted", lambda: stale.fence().json()["held"]["generation"] == 1002)
        assert caller(gate, "round-3", 1003).fence().status_code == 200
        answer = late.result(20)
    assert (answer.status_code, answer.json()["reason"]) == (412, "StaleFence")
    assert [load["version"] for load in operator.status()["loads"]] == [1]
