"""Which round runs next, and what is settled without touching anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.conditions import Reason
from rlfleet.plan.rounds import Committed, RoundRef
from rlfleet.plan.triage import Triage, ended_waiting, may_replace, triage
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, cache, ref, sender


def decide(rounds: list[RoundRef], **changes: Any) -> Triage:
    fields: dict[str, Any] = {
        "committed": None,
        "sender": sender(cache(1)),
        "sender_problem": None,
        "now_ms": 2_000,
        "pending_ms": 600_000,
        "joinable": 2,
        "expected": 2,
    }
    return triage(rounds, **{**fields, **changes})


def test_a_round_whose_version_the_sender_holds_runs() -> None:
    assert decide([ref()]).run == ref()


def test_the_newest_runs_and_older_ones_are_superseded() -> None:
    old, new = ref("old", 1), ref("new", 2)
    out = decide([old, new], sender=sender(cache(2)))
    assert out.run == new
    assert [(s.round.name, s.outcome, s.reason) for s in out.settle] == [("old", "Superseded", Reason.SUPERSEDED)]


def test_a_higher_attempt_at_the_same_version_is_newer() -> None:
    out = decide([ref("first"), ref("second", attempt=2)])
    assert out.run is not None
    assert out.run.name == "second"


@pytest.mark.parametrize("change", [{"cancel": True}, {"deleting": True}])
def test_cancel_and_deletion_end_an_unclaimed_round(change: dict[str, bool]) -> None:
    out = decide([ref(**change)])
    assert out.run is None
    assert [s.outcome for s in out.settle] == ["Cancelled"]


def test_a_round_of_a_sender_process_that_is_gone_is_superseded() -> None:
    out = decide([ref(sender_incarnation="s0")])
    assert [(s.outcome, s.reason) for s in out.settle] == [("Superseded", Reason.SENDER_INCARNATION_GONE)]


def test_a_version_that_nobody_publishes_does_not_stop_the_trainer() -> None:
    slip, good = ref("slip", 2**50), ref("good", 1)
    out = decide([slip, good])
    assert out.run == good
    assert out.later == (slip,)
    assert out.settle == ()


def test_an_order_that_fails_supersedes_nobody() -> None:
    wrong = ref("wrong", 4, allow_rollback=True, expected_committed=9, created_ms=2_000)
    good = ref("good", 6, created_ms=1_000)
    out = decide([wrong, good], committed=Committed(5, DIGEST_A), sender=sender(cache(6, DIGEST_B)))
    assert out.run == good
    assert [(s.round.name, s.reason) for s in out.settle] == [("wrong", Reason.COMMITTED_MISMATCH)]


def test_an_unreachable_sender_settles_nothing_before_the_deadline() -> None:
    problem = (Reason.SENDER_UNREACHABLE, "no answer")
    out = decide([ref(sender_incarnation="s0")], sender=None, sender_problem=problem)
    assert out.settle == ()
    assert out.waiting is not None
    assert out.why == problem


def test_waiting_for_the_sender_ends_with_the_pending_deadline() -> None:
    early = decide([ref(version=2)], now_ms=2_000, pending_ms=600_000)
    assert early.waiting is not None
    assert early.why is not None
    assert early.why[0] is Reason.SENDER_NOT_READY
    late = decide([ref(version=2)], now_ms=700_000, pending_ms=600_000)
    assert [(s.outcome, s.reason) for s in late.settle] == [("Expired", Reason.PENDING_DEADLINE)]
    assert late.waiting is None


def test_a_round_behind_the_one_that_runs_expires_too() -> None:
    slip, good = ref("slip", 2**50), ref("good", 1, created_ms=500_000)
    out = decide([slip, good], now_ms=700_000, pending_ms=600_000)
    assert out.run == good
    assert out.later == ()
    assert [(s.round.name, s.outcome, s.reason) for s in out.settle] == [("slip", "Expired", Reason.PENDING_DEADLINE)]


def test_rounds_end_while_another_one_owns_the_slot() -> None:
    rounds = [
        ref("cancelled", 2, cancel=True),
        ref("deleted", 2, deleting=True),
        ref("stranger", 2, sender_incarnation="s0"),
        ref("overdue", 2, created_ms=0),
        ref("young", 2, created_ms=500_000),
    ]
    out = ended_waiting(rounds, sender=sender(cache(1)), now_ms=700_000, pending_ms=600_000)
    assert {s.round.name: s.outcome for s in out} == {
        "cancelled": "Cancelled",
        "deleted": "Cancelled",
        "stranger": "Superseded",
        "overdue": "Expired",
    }


def test_an_unreported_sender_ends_no_waiting_round_before_its_time() -> None:
    assert ended_waiting([ref(sender_incarnation="s0")], sender=None, now_ms=2_000, pending_ms=600_000) == ()


def test_a_new_sender_process_may_replace_a_held_round_with_any_version() -> None:
    holding = ref("old", 9, sender_incarnation="s0")
    fresh = ref("new", 3, sender_incarnation="s1")
    assert may_replace(fresh, holding, sender(cache(3)))
    assert not may_replace(fresh, holding, None)  # nobody has said that s0 is gone
    assert not may_replace(ref("stranger", 3, sender_incarnation="s9"), holding, sender(cache(3)))
    assert not may_replace(fresh, holding, sender(cache(9), incarnation="s0"))
    assert not may_replace(ref("late", 3), ref("now", 9), sender(cache(9)))


def test_a_version_that_the_sender_has_passed_fails_at_once() -> None:
    out = decide([ref(version=1)], sender=sender(cache(3)))
    assert [(s.outcome, s.reason) for s in out.settle] == [("Failed", Reason.VERSION_NOT_HELD)]


def test_a_digest_that_the_sender_does_not_hold_fails_at_once() -> None:
    out = decide([ref(manifest_digest=DIGEST_B)])
    assert [(s.outcome, s.reason) for s in out.settle] == [("Failed", Reason.VERSION_NOT_HELD)]


@pytest.mark.parametrize(
    ("joinable", "expected", "committed", "waited_ms", "runs"),
    [
        (0, 2, None, 1_000, False),  # engines are starting: nobody could hold the version
        (0, 2, Committed(0, DIGEST_B), 1_000, False),
        (1, 2, None, 1_000, False),  # the first round waits for all of them ...
        (1, 2, None, 300_000, True),  # ... but not for ever
        (1, 2, Committed(0, DIGEST_B), 1_000, True),  # later rounds leave late joiners to the next one
        (2, 2, None, 1_000, True),
        (0, 0, None, 1_000, True),  # an empty fleet is legal
    ],
)
def test_waiting_for_engines(
    joinable: int, expected: int, committed: Committed | None, waited_ms: int, runs: bool
) -> None:
    out = decide([ref(created_ms=0)], joinable=joinable, expected=expected, committed=committed, now_ms=waited_ms)
    assert (out.run is not None) is runs
    assert runs or (out.why is not None and out.why[0] is Reason.WAITING_FOR_ENGINES)


def test_engines_that_never_come_end_the_round_with_the_pending_deadline() -> None:
    out = decide([ref(created_ms=0)], joinable=0, expected=2, now_ms=600_001)
    assert [(s.outcome, s.reason) for s in out.settle] == [("Expired", Reason.PENDING_DEADLINE)]


COMMITTED = Committed(5, DIGEST_A)


@pytest.mark.parametrize(
    ("round_", "held", "outcome", "reason"),
    [
        (ref(version=4), cache(4, DIGEST_B), "Failed", Reason.VERSION_GOES_BACKWARDS),
        (ref(version=5), cache(5, DIGEST_A), "Succeeded", Reason.ALREADY_COMMITTED),
        (ref(version=5), cache(5, DIGEST_B), "Failed", Reason.VERSION_GOES_BACKWARDS),
        (
            ref(version=4, allow_rollback=True, expected_committed=6),
            cache(4, DIGEST_B),
            "Failed",
            Reason.COMMITTED_MISMATCH,
        ),
    ],
)
def test_against_what_is_committed(round_: RoundRef, held: Any, outcome: str, reason: Reason) -> None:
    out = decide([round_], committed=COMMITTED, sender=sender(held))
    assert out.run is None
    assert [(s.outcome, s.reason) for s in out.settle] == [(outcome, reason)]


def test_a_rollback_that_knows_what_is_committed_runs() -> None:
    back = ref(version=4, allow_rollback=True, expected_committed=5)
    assert decide([back], committed=COMMITTED, sender=sender(cache(4, DIGEST_B))).run == back


def test_a_later_rollback_beats_an_earlier_higher_version() -> None:
    back = ref("back", version=4, allow_rollback=True, expected_committed=5, created_ms=2_000)
    forward = ref("forward", version=6, created_ms=1_000)
    out = decide([forward, back], committed=COMMITTED, sender=sender(cache(4, DIGEST_B)))
    assert out.run == back


rounds = st.lists(
    st.builds(
        ref,
        name=st.uuids().map(str),
        version=st.integers(-1, 4),
        attempt=st.integers(1, 3),
        created_ms=st.integers(0, 5_000),
        cancel=st.booleans(),
        sender_incarnation=st.sampled_from(["s0", "s1"]),
    ),
    max_size=6,
)


@given(rounds, st.integers(-1, 4), st.booleans(), st.none() | st.integers(-1, 4))
def test_every_round_gets_exactly_one_answer_and_at_most_one_runs(
    some: list[RoundRef], held: int, answers: bool, committed: int | None
) -> None:
    out = decide(
        some,
        sender=sender(cache(held)) if answers else None,
        sender_problem=None if answers else (Reason.SENDER_ABSENT, "none"),
        committed=None if committed is None else Committed(committed, DIGEST_B),
    )
    answered = [s.round.name for s in out.settle]
    answered += [r.name for r in (out.run, out.waiting, *out.later) if r is not None]
    assert sorted(answered) == sorted(r.name for r in some)
    assert out.run is None or out.waiting is None
    if out.run is not None:
        assert answers
        assert out.run.version == held
        assert not out.run.cancel
        assert committed is None or out.run.version > committed
