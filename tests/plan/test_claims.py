"""The arithmetic of the fence, and the barrier's steps in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlfleet.plan.claims import (
    CLAIM_TRIES,
    Barrier,
    Step,
    barrier_step,
    claim_landed,
    is_deposed,
    next_fence,
)


@pytest.mark.parametrize(
    ("held", "shown", "date", "expected"),
    [(0, 0, 0, 1), (5, 0, 0, 6), (5, 9, 0, 10), (9, 5, 0, 10), (5, 9, 1_000, 1_000), (2_000, 0, 1_000, 2_001)],
)
def test_a_claim_is_above_everything_seen(held: int, shown: int, date: int, expected: int) -> None:
    assert next_fence(held, shown, date) == expected


def test_any_other_fence_deposes() -> None:
    assert not is_deposed(5, 5)
    assert is_deposed(6, 5)
    assert is_deposed(0, 5)  # the status was lost: whoever claims next must not be overwritten


def test_a_lost_answer_is_read_back_whole() -> None:
    mine = {"uid": "r", "generation": 5, "holder": "a"}
    assert claim_landed(dict(mine), mine)
    assert not claim_landed(None, mine)
    assert not claim_landed({**mine, "holder": "b"}, mine)
    assert not claim_landed({**mine, "generation": 6}, mine)


def test_the_barrier_goes_round_gates_rest() -> None:
    at = Barrier(5, needs_round=True)
    assert barrier_step(at) is Step.WRITE_ROUND
    at = replace(at, written=True)
    assert barrier_step(at) is Step.FENCE
    at = replace(at, fenced=True, shown=4)
    assert barrier_step(at) is Step.WAIT
    assert barrier_step(replace(at, waited=True)) is Step.DECIDE
    assert barrier_step(Barrier(5, needs_round=False)) is Step.FENCE


def test_a_refusal_deposes_or_is_claimed_above() -> None:
    at = Barrier(5, needs_round=False, fenced=True, shown=5)
    assert barrier_step(at) is Step.READ_PIPELINE
    assert barrier_step(replace(at, fence=6)) is Step.DEPOSED
    assert barrier_step(replace(at, fence=5)) is Step.CLAIM_ABOVE
    assert barrier_step(replace(at, fence=5, claims=CLAIM_TRIES)) is Step.DEPOSED
