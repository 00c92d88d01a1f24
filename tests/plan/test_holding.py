"""Holding: every exit, in the order in which they count, and that there always is one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.plan.holding import (
    LASTING_SECONDS,
    NEWCOMER_SECONDS,
    START_OVERS,
    Move,
    RefusedTurn,
    Turn,
    Wishes,
    inherited,
    left_closed,
    may_replace_pod,
    on_failure_of,
    overdue,
    planned_pods,
    refused_turn,
    turn,
)
from rlfleet.plan.rounds import Committed, Member, RoundPlan
from rlfleet.plan.verdicts import Entry, Next, enter
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, gate

HELD = Turn(Next.HOLD, Wishes(), can_heal=False, spent=False, on_failure="Replace")
REFUSED = RefusedTurn(1, Wishes(), can_start=False, start_overs=0, spent=False, on_failure="Replace")


@pytest.mark.parametrize(
    ("changes", "move"),
    [
        ({}, Move.WAIT),
        ({"next": Next.COMMIT}, Move.COMMIT),
        ({"next": Next.ABORT}, Move.ABORT),
        ({"wishes": Wishes(vanished=True), "next": Next.COMMIT}, Move.GONE),
        ({"wishes": Wishes(cancelled=True), "can_heal": True}, Move.CANCEL),
        ({"wishes": Wishes(cancelled=True), "next": Next.COMMIT}, Move.COMMIT),  # healed before it was read
        ({"wishes": Wishes(superseded=True), "can_heal": True}, Move.SUPERSEDE),
        ({"can_heal": True}, Move.HEAL),
        # Staged bytes need no sender.
        ({"wishes": Wishes(sender_gone=True), "can_heal": True}, Move.HEAL),
        ({"wishes": Wishes(sender_gone=True)}, Move.SENDER_GONE),
        ({"wishes": Wishes(sender_gone=True), "can_heal": True, "spent": True}, Move.SENDER_GONE),
        # Whole enough, only somebody is not fenced: a trainer that has ended must not take its last version along.
        ({"wishes": Wishes(sender_gone=True), "next": Next.WAIT_FENCE}, Move.WAIT),
        ({"wishes": Wishes(sender_replaced=True)}, Move.WAIT),  # a Refresh of the new process is to be expected
        ({"wishes": Wishes(sender_replaced=True), "spent": True}, Move.SENDER_GONE),
        # No load after pausedSeconds, and none beyond the tries.
        ({"can_heal": True, "spent": True}, Move.REPLACE),
        ({"spent": True, "on_failure": "Hold"}, Move.ASK),
        ({"spent": True, "next": Next.WAIT_FENCE}, Move.REPLACE),
    ],
)
def test_a_turn(changes: dict[str, Any], move: Move) -> None:
    assert turn(replace(HELD, **changes)) is move


def test_a_round_whose_allowance_is_spent_never_just_waits() -> None:
    for next_, gone, replaced, heal, on_failure in product(
        (Next.HOLD, Next.WAIT_FENCE), (False, True), (False, True), (False, True), ("Hold", "Replace")
    ):
        wishes = Wishes(sender_gone=gone, sender_replaced=replaced)
        move = turn(Turn(next_, wishes, can_heal=heal, spent=True, on_failure=on_failure))
        assert move in (Move.SENDER_GONE, Move.REPLACE, Move.ASK)


@pytest.mark.parametrize(
    ("changes", "move"),
    [
        ({}, Move.WAIT),
        ({"closed": 0}, Move.ABORT),  # all of them serve, or are gone: the refusal stands as it was
        ({"wishes": Wishes(vanished=True)}, Move.GONE),
        ({"wishes": Wishes(cancelled=True), "can_start": True}, Move.CANCEL),
        ({"wishes": Wishes(superseded=True), "can_start": True}, Move.SUPERSEDE),
        ({"can_start": True}, Move.START_OVER),
        ({"can_start": True, "start_overs": START_OVERS}, Move.WAIT),
        ({"can_start": True, "spent": True}, Move.REPLACE),
        ({"wishes": Wishes(sender_gone=True)}, Move.SENDER_GONE),
        ({"wishes": Wishes(sender_replaced=True)}, Move.WAIT),
        ({"wishes": Wishes(sender_replaced=True), "spent": True}, Move.SENDER_GONE),
        ({"spent": True, "on_failure": "Hold"}, Move.ASK),
    ],
)
def test_a_turn_of_a_refused_round(changes: dict[str, Any], move: Move) -> None:
    assert refused_turn(replace(REFUSED, **changes)) is move


SUPERSEDED: dict[str, Any] = {
    "status": {
        "outcome": "Superseded",
        "failure": {"stage": "Holding"},
        "plan": {"members": [{"podUID": "uid-a"}, {"podUID": "uid-b"}]},
    }
}


def test_only_a_round_that_was_superseded_while_holding_leaves_engines_to_its_successor() -> None:
    assert left_closed(SUPERSEDED) == {"uid-a", "uid-b"}
    status = SUPERSEDED["status"]
    assert left_closed({"status": {**status, "failure": {"stage": "Pending"}}}) == frozenset()
    assert left_closed({"status": {**status, "outcome": "Cancelled"}}) == frozenset()
    assert left_closed({"status": {**status, "plan": None, "refused": {"podUIDs": ["uid-c"]}}}) == {"uid-c"}
    assert left_closed({}) == frozenset()


def test_inherited_engines_are_those_that_nobody_else_would_open() -> None:
    uids = frozenset({"uid-whole", "uid-silent", "uid-serves", "uid-gone", "uid-poisoned"})
    engines = [
        engine("whole", gate(holds=(2, DIGEST_A), paused=True)),
        engine("silent", None),
        engine("serves", gate(holds=(1, DIGEST_B), paused=True)),  # resumes by itself
        engine("gone", gate(holds=(2, DIGEST_A), paused=True), gone=True),
        engine("poisoned", gate(holds=None, paused=True)),
        engine("joiner", gate(holds=None, paused=True)),  # was never held by anybody
    ]
    assert inherited(engines, uids, Committed(1, DIGEST_B)) == ("poisoned", "silent", "whole")


def test_a_takeover_of_a_refused_round_goes_on_holding() -> None:
    assert enter("Holding", committed=False, planned=False, refused=True) is Entry.REFUSED
    assert enter("Pending", committed=False, planned=False, refused=True) is Entry.PLAN  # it was starting over
    assert enter("Holding", committed=False, planned=True) is Entry.JUDGE
    assert enter("Holding", committed=True, planned=False, refused=True) is Entry.REOPEN


def test_whom_the_round_knew_is_replaced_soon_and_who_came_later_gets_the_time_to_start() -> None:
    plan = RoundPlan(
        (Member("a", "uid-a", "i1", wire.Transport.SERIALIZED),), 2, silent=("quiet", "gone"), blocked=("uid-stuck",)
    )
    engines = [engine("a"), engine("quiet"), engine("stuck"), engine("new")]
    planned = planned_pods(plan, engines)
    assert planned == {"uid-a", "uid-quiet", "uid-stuck"}
    since = {"uid-a": 10.0, "uid-stuck": 10.0 - LASTING_SECONDS, "uid-new": 10.0 - LASTING_SECONDS}
    assert overdue(since, planned=planned, now=10.0) == {"uid-stuck"}, "one lost answer is no reason"
    assert overdue(since, planned=planned, now=10.0 + LASTING_SECONDS) == {"uid-a", "uid-stuck"}
    assert "uid-new" in overdue(since, planned=planned, now=10.0 - LASTING_SECONDS + NEWCOMER_SECONDS)


def test_the_last_resort_takes_no_pod_that_a_person_keeps() -> None:
    kept, ours = engine("kept", quarantined=True), engine("ours")
    assert may_replace_pod(ours)
    assert not any(map(may_replace_pod, (kept, engine("theirs", owned=False), engine("leaves", leaving=True))))
    both = {"kept": kept, "ours": ours}
    assert on_failure_of(["kept", "ours"], both, asked="Replace")[0] == "Replace"
    assert on_failure_of(["kept"], both, asked="Replace") == ("Hold", "kept: in quarantine, which keeps the pod")
