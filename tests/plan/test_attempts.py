"""Tries to move a round: the closed list of reasons, checked in its order; replays; the bounded list."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.syncround_status import MAX_ATTEMPTS, AttemptOp, RefusalReason
from rlfleet.plan.attempts import (
    Applied,
    Decision,
    Duplicate,
    Presented,
    Rejected,
    RoundRecord,
    append,
    applied,
    decide,
    request_id,
    row,
)

OPEN = RoundRecord(phase="Staging", holder="me", generation=5, slot="r")
MINE = Presented(AttemptOp.ADVANCE, "x", "r", "me", 5)
SETTLE = replace(MINE, op=AttemptOp.SETTLE, outcome="Failed")


def test_the_owner_moves_its_round() -> None:
    assert decide(OPEN, MINE) == Applied()
    assert decide(OPEN, SETTLE) == Applied()
    # A fresh claim writes its first phase before any lease stands in the round.
    assert decide(RoundRecord(phase="Pending"), MINE) == Applied()
    assert decide(replace(OPEN, holder="dead", generation=4), MINE) == Applied()


@pytest.mark.parametrize(
    ("record", "asked", "reason"),
    [
        (replace(OPEN, exists=False), MINE, RefusalReason.UNKNOWN_ROUND),
        (replace(OPEN, phase="Failed"), MINE, RefusalReason.NOT_OPEN),
        (replace(OPEN, phase="Failed"), replace(MINE, op=AttemptOp.CLAIM, generation=9), RefusalReason.NOT_OPEN),
        (replace(OPEN, holder="other", generation=6), MINE, RefusalReason.NOT_OWNER),
        (replace(OPEN, holder="other", generation=6), SETTLE, RefusalReason.NOT_OWNER),
        (replace(OPEN, generation=6), MINE, RefusalReason.STALE_FENCE),  # our earlier self, under the same name
        (replace(OPEN, holder="", generation=6), MINE, RefusalReason.STALE_FENCE),  # the slot has been freed since
        (OPEN, replace(MINE, op=AttemptOp.HANDOFF), RefusalReason.STALE_FENCE),  # a hand-off must bring a generation
        (replace(OPEN, phase="Succeeded"), SETTLE, RefusalReason.ALREADY_SETTLED),
        (replace(OPEN, slot="another"), replace(MINE, op=AttemptOp.CLAIM, generation=6), RefusalReason.EXCLUDED),
    ],
)
def test_each_reason(record: RoundRecord, asked: Presented, reason: RefusalReason) -> None:
    assert decide(record, asked) == Rejected(reason)


def test_the_reasons_are_checked_in_the_order_of_the_list() -> None:
    """Everything that can be wrong at once, in every mixture: the word told is the first that applies."""
    for exists, phase, holder, generation, slot, op in product(
        (True, False), ("Staging", "Succeeded"), ("me", "other"), (4, 5, 6), ("r", "another"), AttemptOp
    ):
        record = RoundRecord(exists, phase, holder, generation, slot)
        asked = Presented(op, "x", "r", "me", 5, outcome="Failed")
        moves = op in (AttemptOp.CLAIM, AttemptOp.HANDOFF)
        ended = phase == "Succeeded"
        wrong = {
            RefusalReason.UNKNOWN_ROUND: not exists,
            RefusalReason.NOT_OPEN: ended and op is not AttemptOp.SETTLE,
            RefusalReason.NOT_OWNER: not moves and holder != "me" and generation >= 5,
            RefusalReason.STALE_FENCE: generation > 5 or (moves and generation == 5),
            RefusalReason.ALREADY_SETTLED: ended and op is AttemptOp.SETTLE,
            RefusalReason.EXCLUDED: slot != "r",
        }
        expected: Decision = next((Rejected(r) for r in RefusalReason if wrong[r]), Applied())
        assert decide(record, asked) == expected, (record, asked)


def test_an_identical_settle_is_a_success_and_another_one_is_not() -> None:
    mine = request_id(AttemptOp.SETTLE, 5, "Failed")
    ended = replace(OPEN, phase="Failed", applied=frozenset({mine}))
    assert decide(ended, replace(SETTLE, request_id=mine)) == Duplicate()
    # The successor of an owner that died after it had settled the round.
    assert decide(ended, replace(SETTLE, request_id="other", generation=9, holder="next")) == Duplicate()
    assert decide(ended, replace(SETTLE, generation=9, outcome="Succeeded")) == Rejected(RefusalReason.ALREADY_SETTLED)
    assert decide(ended, replace(SETTLE, generation=4, holder="old")) == Rejected(RefusalReason.NOT_OWNER)


def test_a_lost_answer_is_recognised_by_the_id_of_the_try() -> None:
    asked = replace(MINE, request_id=request_id(AttemptOp.ADVANCE, 5, "Staging"))
    rows = [row(asked, Applied(), "2026-01-01T00:00:00Z")]
    assert decide(replace(OPEN, applied=applied(rows)), asked) == Duplicate()
    refused = [row(asked, Rejected(RefusalReason.NOT_OWNER), "2026-01-01T00:00:00Z")]
    assert applied(refused) == frozenset()


def test_the_list_is_bounded_and_keeps_the_newest() -> None:
    rows: list[dict[str, object]] = []
    for n in range(MAX_ATTEMPTS + 5):
        rows = append(rows, [row(replace(MINE, request_id=str(n)), Applied(), "t")])
    assert len(rows) == MAX_ATTEMPTS
    assert rows[-1]["requestId"] == str(MAX_ATTEMPTS + 4)


def test_the_same_refusal_is_said_once() -> None:
    entry = row(MINE, Rejected(RefusalReason.STALE_FENCE), "2026-01-01T00:00:00Z")
    later = {**entry, "at": "2026-01-01T00:00:09Z"}
    assert append([entry], [later]) == [entry]


def test_every_reason_has_a_word_in_the_vocabulary() -> None:
    assert {Reason.parse(r.value).value for r in RefusalReason} == {r.value for r in RefusalReason}
