"""The fence as a property: over any history of calls, what is held never decreases and has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.fencing import MAX_AHEAD_MS, MAX_GENERATION, Admission, Fence, admit

NOW = 1_790_000_000_000
PIPELINES = st.sampled_from(["p1", "p2"])
OPERATIONS = st.sampled_from(["o1", "o2", "o3"])
# Few values, so that equal generations meet often; and some around the limit of what is believed.
GENERATIONS = st.one_of(
    st.integers(1, 6), st.integers(NOW + MAX_AHEAD_MS - 2, NOW + MAX_AHEAD_MS + 2), st.just(MAX_GENERATION + 1)
)
FENCES = st.builds(Fence, pipeline=PIPELINES, operation=OPERATIONS, generation=GENERATIONS)
CALLS = st.lists(st.tuples(FENCES, st.booleans()), max_size=40)


def play(calls: list[tuple[Fence, bool]]) -> list[tuple[Fence, Fence, bool, Admission]]:
    """Feed the calls to one gate that stores what it accepts: (held before, asked, closed, verdict) of each."""
    held, history = Fence(), []
    for asked, closed in calls:
        verdict = admit(held, asked, now_ms=NOW, closed=closed)
        history.append((held, asked, closed, verdict))
        if verdict is Admission.ACCEPT:
            held = asked
    return history


@given(CALLS)
def test_what_is_held_never_decreases(calls: list[tuple[Fence, bool]]) -> None:
    accepted = [asked.generation for _, asked, _, verdict in play(calls) if verdict is Admission.ACCEPT]
    assert accepted == sorted(accepted)


@given(CALLS)
def test_a_generation_has_one_owner(calls: list[tuple[Fence, bool]]) -> None:
    owners: dict[int, set[tuple[str, str]]] = {}
    for _, asked, _, verdict in play(calls):
        if verdict is Admission.ACCEPT:
            owners.setdefault(asked.generation, set()).add((asked.pipeline, asked.operation))
    assert all(len(each) == 1 for each in owners.values())


@given(CALLS)
def test_the_pipeline_changes_only_upwards_and_while_closed(calls: list[tuple[Fence, bool]]) -> None:
    for held, asked, closed, verdict in play(calls):
        if verdict is Admission.ACCEPT and held.generation and asked.pipeline != held.pipeline:
            assert closed
            assert asked.generation > held.generation


@given(CALLS)
def test_a_call_that_was_accepted_is_accepted_again(calls: list[tuple[Fence, bool]]) -> None:
    # A lost answer makes the caller ask again with the same fence.
    for _, asked, _, verdict in play(calls):
        if verdict is Admission.ACCEPT:
            for closed in (True, False):
                assert admit(asked, asked, now_ms=NOW, closed=closed) is Admission.ACCEPT


@given(CALLS)
def test_an_honest_owner_is_never_locked_out(calls: list[tuple[Fence, bool]]) -> None:
    # Whatever was accepted before, the operator's next claim a day later gets through.
    held = Fence()
    for _, asked, _, verdict in play(calls):
        if verdict is Admission.ACCEPT:
            held = asked
    later = NOW + MAX_AHEAD_MS + 1
    claim = Fence("p1", "next", max(held.generation + 1, later))
    assert admit(held, claim, now_ms=later, closed=True) is Admission.ACCEPT


@pytest.mark.parametrize(
    ("held", "asked", "closed", "verdict"),
    [
        (Fence(), Fence("p", "o", 1), False, Admission.ACCEPT),
        (Fence("p", "o", 5), Fence("p", "o", 5), False, Admission.ACCEPT),
        (Fence("p", "o", 5), Fence("p", "o2", 6), False, Admission.ACCEPT),
        (Fence("p", "o", 5), Fence("p", "o", 4), True, Admission.STALE),
        (Fence("p", "o", 5), Fence("p", "o2", 5), True, Admission.OTHER_OPERATION),
        (Fence("p", "o", 5), Fence("q", "o2", 6), True, Admission.ACCEPT),
        (Fence("p", "o", 5), Fence("q", "o2", 6), False, Admission.OTHER_PIPELINE),
        (Fence("p", "o", 5), Fence("q", "o", 5), True, Admission.OTHER_PIPELINE),
        (Fence(), Fence("p", "o", NOW + MAX_AHEAD_MS), True, Admission.ACCEPT),
        (Fence(), Fence("p", "o", NOW + MAX_AHEAD_MS + 1), True, Admission.POISONED),
        (Fence("p", "o", 5), Fence("q", "o", MAX_GENERATION + 1), True, Admission.POISONED),
    ],
)
def test_verdicts(held: Fence, asked: Fence, closed: bool, verdict: Admission) -> None:
    assert admit(held, asked, now_ms=NOW, closed=closed) is verdict


def test_no_clock_makes_a_generation_believable_that_the_wire_cannot_carry() -> None:
    asked = Fence("p", "o", MAX_GENERATION + 1)
    assert admit(Fence(), asked, now_ms=MAX_GENERATION, closed=True) is Admission.POISONED
