"""Engines that fail before they serve, again and again: pauses that no restart refills, and what a person is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.plan.start_failures import PAUSE_MAX_SECONDS, SLACK_MS, StartFailure, failures_of, keep_failing, one_more


def many(*nodes: str, at_ms: int = 0) -> StartFailure:
    """One engine after the other fails on these nodes."""
    found = None
    for i, node in enumerate(nodes):
        found = one_more(found, node=node, pod_uid=f"u{i}", now_ms=at_ms)
    assert found is not None
    return found


def test_the_first_successor_comes_at_once_and_later_ones_wait_longer() -> None:
    pauses = [many(*["n"] * count).pause_seconds() for count in range(1, 12)]
    assert pauses[:4] == [0.0, 5.0, 10.0, 20.0]
    assert pauses[-1] == PAUSE_MAX_SECONDS
    assert pauses == sorted(pauses)


def test_the_same_pod_counts_once() -> None:
    one = one_more(None, node="n", pod_uid="u", now_ms=1_000)
    assert one_more(one, node="n", pod_uid="u", now_ms=9_000) == one


@given(st.integers(1, 30), st.integers(0, 10**6), st.sampled_from(["", "n1"]))
def test_what_is_recorded_is_what_was_known(count: int, seconds: int, node: str) -> None:
    known = many(*[node] * count, at_ms=seconds * 1000)
    assert failures_of({"startFailures": [known.row(3)]}) == {3: known}
    assert failures_of({}) == {}


def test_a_pause_runs_by_the_recorded_time_and_a_clock_that_was_set_back_ends_it() -> None:
    known = many("n", "n", "n", at_ms=1_000_000)
    assert known.left_seconds(1_000_000) == 10
    assert known.left_seconds(1_004_000) == 6
    assert known.left_seconds(1_010_000) == 0
    assert known.left_seconds(1_000_000 - SLACK_MS) > 0, "the estimate of the clock wavers"
    assert known.left_seconds(1_000_000 - SLACK_MS - 1) == 0


def test_a_node_is_named_once_its_engines_failed_three_times_in_a_row() -> None:
    assert keep_failing({0: many("a", "a"), 1: many("b")}) == ""
    assert "on node a 3 engines in a row (index 0, 4)" in keep_failing(
        {0: many("a", "a"), 4: many("b", "a"), 1: many("b")}
    )
    assert "on node a 3 engines in a row (index 0)" in keep_failing({0: many("b", "a", "a", "a")})
    assert "see the pods' logs" in keep_failing({0: many("a", "a", "a")}), "a wrong argument fails on one node, too"
    # No node is to blame for what happens wherever the engine runs.
    text = keep_failing({2: many("a", "b", "c")})
    assert "node" not in text
    assert "3 in a row (index 2)" in text
    assert "3 in a row (index 2)" in keep_failing({2: many("", "", "")}), "never scheduled"
