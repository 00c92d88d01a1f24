"""The apiserver's clock as we carry it on: rounding, steps, and no use of our own wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.kube.server_time import ServerTime

HOUR = 3_600_000


def test_nothing_is_known_before_the_first_answer() -> None:
    assert ServerTime().now_ms(5.0) is None


@given(st.lists(st.floats(min_value=0, max_value=30), min_size=1, max_size=20))
def test_answers_rounded_to_seconds_leave_the_time_right_to_a_second_and_never_turn_it_back(gaps: list[float]) -> None:
    true, mono, time = 1_700_000_000_250, 1000.0, ServerTime()
    before = 0
    for gap in gaps:
        true, mono = true + round(gap * 1000), mono + gap
        time.note(true // 1000 * 1000, mono)
        now = time.now_ms(mono)
        assert now is not None
        assert true - 1000 <= now <= true + 1
        assert now >= before
        before = now


def test_a_clock_that_is_set_back_is_followed() -> None:
    time = ServerTime()
    time.note(10 * HOUR, 100.0)
    time.note(9 * HOUR, 101.0)
    assert time.now_ms(102.0) == 9 * HOUR + 1000
    assert time.last_date_ms == 9 * HOUR
