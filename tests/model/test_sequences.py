"""The sequences that broke earlier drafts of the protocol (DESIGN section 11), each told step by step or searched for.

A sequence that the protocol must survive is a scope of its own, small and explored to the end; ``reached`` proves that
the situation really occurs in it, so that the scope does not pass because it never gets there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model import accidents, explore, gate
from tests.model.gate import FENCE
from tests.model.invariants import broken
from tests.model.scopes import CLOSED, JOINER, SCOPES, SLEEPER, STRANGE, TWO_TRAINERS, budget, third
from tests.model.state import (
    BASE,
    CLOSE,
    GARBAGE,
    HERE,
    LOAD,
    OLD,
    OPEN,
    RELEASE,
    RELEASED,
    RESUME,
    RUNNING,
    WAKE,
    Column,
    Pipeline,
    Scope,
    State,
)


def reached(scope: Scope, situation: Callable[[State], bool]) -> bool:
    """Some state of the scope is the situation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "broken", lambda state: "there" if situation(state) else "")
        return explore.explore(scope).broken == "there"


def survives(scope: Scope, situation: Callable[[State], bool]) -> None:
    assert reached(scope, situation), "the situation does not occur"
    report = explore.explore(scope)
    assert report.exhausted, str(report)


def holding(state: State) -> bool:
    return any(r.phase == "Holding" for r in state[0].rounds)


def test_an_engine_restarted_in_place_behind_an_open_router() -> None:
    """Another operator's pods restart their containers: the gate sees it by the label, and takes the proof away."""
    c = Column(bytes=BASE, label=-9)  # the engine came back with base weights, its router entry is still there
    assert c.holds
    seen, said = gate.status(c)
    assert not seen.holds
    assert not said[3]
    assert accidents.closes_unproven(seen)
    # Whoever asked for a resume in the same moment is refused: the label is read once more first.
    order = (RESUME, 0, 5, c.pod, 1, 0, OLD)
    after, answer = gate.deliver(c._replace(admit=0, paused=1), order)
    assert answer == ("no",)
    assert not after.admit


def test_takeover_while_the_load_of_the_old_holder_is_in_flight() -> None:
    scope = Scope("load in flight", budget(2, slow=1, crash=1))
    survives(scope, lambda s: any(c.current == LOAD and c.fence[0] == 2 for c in s[1]))


def test_a_router_addition_that_comes_late() -> None:
    """The gate restarts while it adds: until a Close has waited long enough, an addition may still come."""
    c = Column(
        routed=0, late=1, pend=OPEN, current=OPEN, adding=1, fence=(5, 0), log=(0, 0, 0, 0, 0, 4 + RUNNING, 0, 0, 0)
    )
    c = accidents.restart_gate(c)
    assert c.adding
    assert c.unsettled
    c, answer = gate.deliver(c, (CLOSE, 0, 5, c.pod, 1, 0, OLD))
    assert answer[0] == "ok"
    assert not c.late
    assert not c.adding


@pytest.mark.slow
def test_a_router_addition_that_comes_late_meets_the_next_pod() -> None:
    """An Open was in flight when its pod died; the next pod gets the same address."""
    scope = Scope("late addition", budget(2, slow=1, kill=1), columns=third(CLOSED), slow_steps=(OPEN,))
    survives(scope, lambda s: any(c.late and not c.alive for c in s[1]))


@pytest.mark.slow
def test_a_gate_that_is_silent_at_planning() -> None:
    for missing in (0, 1):
        scope = Scope("silent at planning", budget(2, silence=1, crash=1), max_unavailable=missing)
        survives(scope, lambda s: any(not c.up and c.alive for c in s[1]))


@pytest.mark.slow
def test_a_failure_between_the_commit_and_the_last_reopen() -> None:
    scope = Scope("half reopened", budget(2, crash=2))
    survives(
        scope,
        lambda s: bool(
            s[0].pipeline.active
            and s[0].pipeline.active[4]
            and 0 < sum(c.admit for c in s[1]) < 3
            and s[0].operators[0].pc == "top"
        ),
    )


@pytest.mark.slow
def test_two_trainers_with_different_bytes_under_one_version() -> None:
    scope = Scope("two trainers", budget(2, sender=1, crash=1), versions=TWO_TRAINERS)
    survives(scope, lambda s: s[0].sender.incarnation == 2 and s[0].rounds[0].phase == "Transferring")
    # An engine that was left closed with the other trainer's bytes under the committed version stays closed.
    scope = Scope("strange bytes", budget(2, cancel=1, crash=1), columns=third(STRANGE))
    survives(scope, lambda s: s[0].rounds[0].phase == "Cancelled")


@pytest.mark.slow
def test_a_joiner_during_holding() -> None:
    scope = Scope("joiner while holding", budget(2, bad=1, kill=1), bad_loads=("failed",))
    survives(scope, lambda s: holding(s) and any(c.pod > 3 for c in s[1]))
    scope = Scope("a joiner from the start", budget(1, crash=1), columns=third(JOINER))
    survives(scope, lambda s: any(c.bytes == BASE for c in s[1]))


@pytest.mark.parametrize("step", [CLOSE, RESUME, OPEN, LOAD, FENCE, RELEASE, WAKE])
def test_an_order_of_a_frozen_leader_that_arrives_after_a_takeover_without_a_round(step: int) -> None:
    """A new leader raises the fence before its first call, whatever it does; what comes late finds it."""
    c = Column(fence=(1, 0))
    c, answer = gate.deliver(c, (FENCE, 1, 2, c.pod, 0, 0, OLD))  # work outside rounds: another operation
    assert answer[0] == "status"
    after, answer = gate.deliver(c, (step, 0, 1, c.pod, 1, 0, OLD))
    assert answer == ("held", 2)
    assert after == c


def test_an_offload_of_a_frozen_leader_that_arrives_after_a_takeover_without_a_round() -> None:
    """The release is still on its way when somebody else has put the engines right and freed the slot."""
    scope = Scope("late offload", budget(2, delay=1, crash=1), elastic=True, later=True, columns=(Column(), SLEEPER))

    def late(state: State) -> bool:
        world, columns = state
        orders = [(c, m) for c in columns for m in c.wire if m[0] == RELEASE]
        return not world.pipeline.active and any(c.alive and c.fence[0] > m[2] for c, m in orders)

    survives(scope, late)


def test_an_engine_asleep_is_proven_by_nothing_and_opened_by_nobody() -> None:
    closed = Column(routed=0, admit=0, paused=1, fence=(5, 0))
    c, answer = gate.deliver(closed, (RELEASE, 0, 5, closed.pod, 1, 0, 0))
    assert answer[0] == "ok"
    assert (c.memory, c.holds) == (RELEASED, ())
    for step in (RESUME, OPEN, LOAD):
        after, answer = gate.deliver(c._replace(staged=(0, OLD)), (step, 0, 5, c.pod, 1, 0, OLD))
        assert answer == ("no",)
        assert not after.admit
    woken, answer = gate.deliver(c, (WAKE, 0, 5, c.pod, 1, 0, 0))
    assert answer[0] == "ok"
    assert (woken.memory, woken.bytes) == (HERE, GARBAGE)
    for step in (RESUME, OPEN):
        assert gate.deliver(woken, (step, 0, 5, c.pod, 1, 0, OLD))[1] == ("no",)
    # Only a closed engine is put to sleep at all.
    for how in ({"routed": 1}, {"adding": 1}, {"admit": 1}, {"paused": 0, "admit": 1}):
        after, answer = gate.deliver(closed._replace(**how), (RELEASE, 0, 5, closed.pod, 1, 0, 0))
        assert (answer, after.memory) == (("no",), HERE), how


@pytest.mark.slow
def test_a_round_while_engines_go_to_sleep_and_wake() -> None:
    scope = Scope("round and sleep", budget(2, wish=1, crash=1), elastic=True, later=True, columns=third(SLEEPER))
    survives(scope, lambda s: s[0].rounds[0].phase == "Succeeded" and any(c.memory == RELEASED for c in s[1]))


@pytest.mark.slow
def test_a_lost_status_whose_highest_gate_can_not_be_reached() -> None:
    for missing in (0, 1):
        scope = Scope("lost status", budget(2, wipe=1, silence=1), max_unavailable=missing)
        survives(
            scope,
            lambda s: (
                s[0].pipeline == Pipeline(0, (), ()) and any(not c.up and c.fence[0] == s[0].highest for c in s[1])
            ),
        )


@pytest.mark.parametrize(
    ("name", "situation"),
    [
        # An evicted member still holds what was committed before, closed, when the others have committed without it.
        (
            "an engine is evicted",
            lambda s: (
                s[0].truth != OLD and any(c.alive and c.life.leaving and not c.admit and not c.holds for c in s[1])
            ),
        ),
        # What another process holds was verified and published as if it were that of the process before it.
        ("an engine starts again in place", lambda s: any(c.life.process != c.life.about and c.holds for c in s[1])),
        ("a quarantine in a round", lambda s: s[0].truth != OLD and any(c.life.shut and not c.routed for c in s[1])),
        (
            "a quarantine",
            lambda s: s[0].truth != OLD and any(c.life.shut and not c.routed and c.bytes == OLD for c in s[1]),
        ),
        ("a demand while holding", lambda s: holding(s) and bool(s[0].pipeline.grants)),
        ("a grant while holding", lambda s: holding(s) and (s[0].demand, 1) in s[0].pipeline.grants),
    ],
)
def test_what_befalls_engines_is_reached(name: str, situation: Callable[[State], bool]) -> None:
    """These are scopes of the default run, which explores them to their ends."""
    assert reached(next(s for s in SCOPES if s.name == name), situation)


def test_a_story_is_told_in_the_order_in_which_it_happens() -> None:
    scope = Scope("story", budget(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "broken", lambda state: "committed" if state[0].truth != OLD else broken(state))
        report = explore.explore(scope)
    assert "commits" in report.story[-1]
    assert report.story[0].startswith("operator 1 lists rounds")
    assert sum("Load at pod" in line for line in report.story) == 3
