"""The vocabulary of conditions, and how one condition is set."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlfleet.api import conditions, wire
from rlfleet.api.condition_list import MAX_MESSAGE, find_condition, set_condition
from rlfleet.api.conditions import ConditionStatus, PipelineCondition, PoolCondition, Reason, RoundCondition

ENUMS = (PipelineCondition, PoolCondition, RoundCondition, Reason)
EARLIER, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"


@pytest.mark.parametrize("enum", ENUMS, ids=lambda e: e.__name__)
def test_words_are_unique_camel_case_and_explained(enum: type[conditions.Reason]) -> None:
    values = [member.value for member in enum]
    assert len(values) == len(set(values)) == len(enum.__members__)
    for member in enum:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]{1,63}", member.value), member
        assert member.value.lower() == member.name.replace("_", "").lower()
        assert len(member.meaning) > 10


def test_every_answer_of_a_gate_or_sender_has_a_reason() -> None:
    for error in wire.ErrorReason:
        assert Reason(error.value).value == error.value


def set_ready(existing: list[dict[str, object]], **changes: object) -> list[dict[str, object]]:
    args: dict[str, object] = {
        "status": ConditionStatus.TRUE,
        "reason": Reason.ALL_ENGINES_ACTIVE,
        "message": "4 of 4",
        "observed_generation": 1,
        "now": EARLIER,
    }
    return set_condition(existing, PoolCondition.READY, **(args | changes))  # type: ignore[arg-type]


def test_a_new_condition_is_complete() -> None:
    assert set_ready([]) == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "AllEnginesActive",
            "message": "4 of 4",
            "observedGeneration": 1,
            "lastTransitionTime": EARLIER,
        }
    ]


def test_nothing_changed_gives_an_equal_list() -> None:
    first = set_ready([])
    assert set_ready(first, now=LATER) == first


@pytest.mark.parametrize(
    "change", [{"message": "3 of 4"}, {"reason": Reason.ENGINES_NOT_ACTIVE}, {"observed_generation": 2}]
)
def test_transition_time_stays_while_the_status_does(change: dict[str, object]) -> None:
    changed = set_ready(set_ready([]), now=LATER, **change)
    assert changed != set_ready([])
    assert changed[0]["lastTransitionTime"] == EARLIER


@pytest.mark.parametrize("status", [ConditionStatus.FALSE, ConditionStatus.UNKNOWN])
def test_transition_time_moves_with_the_status(status: ConditionStatus) -> None:
    changed = set_ready(set_ready([]), now=LATER, status=status)
    assert changed[0]["lastTransitionTime"] == LATER


def test_other_conditions_keep_their_place_and_the_input_is_not_changed() -> None:
    existing = set_condition(
        set_ready([]), PoolCondition.DEGRADED, ConditionStatus.FALSE, Reason.AS_EXPECTED, "", 1, EARLIER
    )
    before = [dict(c) for c in existing]
    changed = set_ready(existing, status=ConditionStatus.FALSE, now=LATER)
    assert [c["type"] for c in changed] == ["Ready", "Degraded"]
    assert changed[1] == existing[1]
    assert existing == before


@given(st.text(max_size=3000))
@example("x" * MAX_MESSAGE)
@example("x" * (MAX_MESSAGE + 1))
def test_messages_fit_the_schema_and_cutting_is_stable(message: str) -> None:
    once = set_ready([], message=message)
    assert len(str(once[0]["message"])) <= MAX_MESSAGE
    assert str(once[0]["message"])[:1000] == message[:1000]
    assert set_ready(once, message=message, now=LATER) == once


@pytest.mark.parametrize(
    ("value", "status"), [(True, "True"), (False, "False"), (None, "Unknown")], ids=["true", "false", "unknown"]
)
def test_unknown_is_neither_true_nor_false(value: bool | None, status: str) -> None:
    assert ConditionStatus.of(value).value == status
    made = set_ready([], status=ConditionStatus.of(value))
    found = find_condition(made, PoolCondition.READY)
    assert found is not None
    assert found["status"] == status


def test_an_absent_condition_is_found_nowhere() -> None:
    assert find_condition([], PoolCondition.READY) is None
