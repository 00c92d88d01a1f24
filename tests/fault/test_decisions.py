"""Decisions that a faulty run must not get wrong: who could still serve, who resumes, who holds up a commit."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.control.rounds.pods import engine_of
from rlfleet.plan.freeze import ASKED_AGAIN, ASKED_WHILE_STARTING, ask_again
from rlfleet.plan.rounds import Committed, Engine, Member, RoundPlan
from rlfleet.plan.transport import Refusal
from rlfleet.plan.triage import newer_than
from rlfleet.plan.verdicts import Verdict, abort, could_serve, unfenced
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, frozen, gate, load, ref

COMMITTED = Committed(0, DIGEST_B)


def by_name(*engines: Engine) -> dict[str, Engine]:
    return {e.name: e for e in engines}


def test_an_open_engine_with_other_proven_weights_could_serve() -> None:
    engines = by_name(
        engine("silent-before", gate(holds=(0, DIGEST_B), paused=False)),
        engine("resumed-by-an-abort", gate(holds=(0, DIGEST_B), paused=None)),
        engine("closed", gate(holds=(0, DIGEST_B), paused=True)),
        engine("whole", gate(holds=(1, DIGEST_A), paused=False)),
        engine("fresh", gate(holds=None, paused=False)),
        engine("gone", gate(holds=(0, DIGEST_B), paused=False), gone=True),
    )
    verdicts = {"resumed-by-an-abort": Verdict.UNTOUCHED, "closed": Verdict.UNTOUCHED, "whole": Verdict.WHOLE}
    assert could_serve(engines, verdicts) == ("resumed-by-an-abort", "silent-before")


def test_an_abort_resumes_closed_engines_that_are_not_members() -> None:
    plan = RoundPlan((Member("m", "uid-m", "i1", wire.Transport.SERIALIZED),), 1)
    engines = by_name(
        engine("m", gate(holds=(0, DIGEST_B), paused=True)),
        engine("inherited", gate(holds=(0, DIGEST_B), paused=True)),
        engine("ahead", gate(holds=(1, DIGEST_A), paused=True)),
        engine("leaving", gate(holds=(0, DIGEST_B), paused=True), leaving=True),
        engine("uncertain", gate(holds=(0, DIGEST_B), paused=True, uncertain=True)),
        engine("serving", gate(holds=(0, DIGEST_B), paused=False)),
    )
    rule = abort(plan, engines, COMMITTED, operation="r")
    assert sorted(rule.resume) == ["inherited", "m"]
    assert rule.close == ()


def test_an_abort_closes_a_member_that_was_loaded_and_resumes_its_neighbour() -> None:
    members = tuple(Member(n, f"uid-{n}", "i1", wire.Transport.SERIALIZED) for n in ("a", "b"))
    engines = by_name(
        engine("a", gate(holds=None, paused=True, loads=(load(),))), engine("b", gate(holds=(0, DIGEST_B), paused=True))
    )
    rule = abort(RoundPlan(members, 1), engines, COMMITTED, operation="r")
    assert (rule.resume, rule.close) == (("b",), ("a",))


def test_a_pod_that_never_ran_holds_up_nothing() -> None:
    pending = {
        "metadata": {"name": "x", "uid": "u"},
        "spec": {"containers": [], "restartPolicy": "Never"},
        "status": {"phase": "Pending"},
    }
    waiting = {"name": "gate", "restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    pulling = {**pending, "status": {"podIP": "127.1.1.1", "initContainerStatuses": [waiting]}}
    for pod in (pending, pulling):
        assert unfenced([engine_of(pod)], pipeline="p", generation=1) == ()
    running = {"name": "gate", "restartCount": 0, "state": {"running": {}}}
    again = {**waiting, "restartCount": 1}
    for status in ({"podIP": "127.1.1.1"} | {"initContainerStatuses": [s]} for s in (running, again)):
        assert unfenced([engine_of({**pending, "status": status})], pipeline="p", generation=1) == ("x",)


def test_pods_that_never_ran_are_not_silent_gates() -> None:
    silent = [engine("a", gate()), engine("b", None)]
    assert isinstance(frozen(silent, max_unavailable=0), Refusal)
    plan = frozen([silent[0], engine("b", None, unborn=True)], max_unavailable=0)
    assert isinstance(plan, RoundPlan)
    assert (len(plan.members), plan.silent) == (1, ())


def test_a_gate_that_is_being_started_is_asked_for_longer_than_one_that_fell_silent() -> None:
    def asked(*others: Engine) -> int:
        engines = [engine("a", gate()), *others]
        tries = 0
        while ask_again(engines, frozen(engines, max_unavailable=0), tries) is not None:
            tries += 1
        return tries

    assert asked() == 0
    assert asked(engine("b", None, unborn=True)) == 0
    assert asked(engine("b", None)) == ASKED_AGAIN
    assert asked(engine("b", None, starting=True)) == ASKED_WHILE_STARTING > ASKED_AGAIN
    # It answers now: another one's silence is not excused by it.
    assert asked(engine("b", gate(), starting=True), engine("c", None)) == ASKED_AGAIN
    allowed = [engine("a", gate()), engine("b", None, starting=True)]
    plan = frozen(allowed, max_unavailable=1)
    assert isinstance(plan, RoundPlan)
    assert (ask_again(allowed, plan, 0) is None, ask_again(allowed, plan, 1) is None) == (False, True)


@pytest.mark.parametrize(
    ("told", "starting"),
    [
        ({"state": {"running": {}}, "started": False}, True),
        ({"state": {"running": {}}, "started": True}, False),
        ({"state": {"running": {}}}, False),
        ({"state": {"waiting": {"reason": "PodInitializing"}}, "started": False}, False),
        ({"state": {"running": {}}, "started": False, "restartCount": 1}, False),
        ({"state": {"running": {}}, "started": False, "lastState": {"terminated": {"exitCode": 1}}}, False),
    ],
)
def test_only_the_first_start_of_a_gate_is_one(told: dict[str, Any], starting: bool) -> None:
    pod = {
        "metadata": {"name": "x", "namespace": "n", "uid": "u", "labels": {}},
        "spec": {"containers": [], "restartPolicy": "Never"},
        "status": {"podIP": "127.1.1.1", "initContainerStatuses": [{"name": "gate", "restartCount": 0, **told}]},
    }
    assert engine_of(pod).starting is starting


def test_only_a_newer_round_supersedes_one_that_holds() -> None:
    holding = ref("now", 5)
    assert newer_than(ref("next", 6), holding)
    assert newer_than(ref("retry", 5, attempt=2), holding)
    assert not newer_than(ref("late", 4), holding)
    assert newer_than(ref("back", 4, allow_rollback=True, created_ms=holding.created_ms + 1), holding)
