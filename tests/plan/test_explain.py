"""A dry run says in full what triage and freeze decide: verdict, steps, and each engine's part with why."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.wire import MemoryTag, PauseMode
from rlfleet.plan.explain import Explanation, Would, explain
from rlfleet.plan.freeze import AS_PUBLISHED
from rlfleet.plan.rounds import Committed, Engine, RoundPlan, RoundRef, can_join, held
from rlfleet.plan.transport import Cut, Refusal
from rlfleet.plan.triage import triage
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, cache, engine, frozen, gate, ref, sender

COMMITTED = Committed(0, DIGEST_B, "s1", {})


def ask(
    *engines: Engine,
    wanted: RoundRef | None = None,
    others: tuple[RoundRef, ...] = (),
    holds: wire.SenderStatus | None = None,
    mode: str = "CPUSerialize",
    cut: Cut = AS_PUBLISHED,
    owner: str | None = None,
    **how: Any,
) -> Explanation:
    """As control.explaining asks: triage first, and freeze for the round that would run."""
    status = holds if holds is not None else sender(cache())
    me = wanted or ref("me", 1, uid="dry-run")
    found = triage(
        [*others, me],
        committed=COMMITTED,
        sender=status,
        sender_problem=None,
        now_ms=1_000,
        pending_ms=60_000,
        joinable=sum(can_join(e) for e in engines),
        expected=len(engines),
    )
    plan: RoundPlan | Refusal | None = None
    slot = held(status, me.version, me.manifest_digest)
    if found.run is not None and found.run.uid == me.uid and slot is not None:
        plan = frozen(
            engines,
            mode=mode,
            sender=status,
            total_bytes=slot.total_bytes,
            max_unavailable=how.get("max_unavailable", 1),
            cut=cut,
        )
    return explain(
        me, found, plan, engines, max_unavailable=how.get("max_unavailable", 1), mode=PauseMode.RETRACT,
        total_bytes=slot.total_bytes if slot else 0, owner=owner,
    )  # fmt: skip


def test_a_round_that_would_run_names_members_steps_and_how_many_may_be_missing() -> None:
    said = ask(engine("a", gate()), engine("b", gate()), owner="Repair repair")
    assert (said.would, said.reason) == (Would.RUN, "Planned")
    assert [(e.engine, e.joins, e.transport) for e in said.engines] == [
        ("a", True, "Serialized"), ("b", True, "Serialized")
    ]  # fmt: skip
    assert said.steps[0] == "wait until Repair repair has left the engines"
    assert "stage 1000 bytes into the gates of 2 engines, which serve meanwhile" in said.steps
    assert "pause them (Retract), verified" in said.steps
    assert said.steps[-1].startswith("commit")
    assert said.may_miss == 1


def test_streamed_buckets_are_not_said_to_be_staged() -> None:
    said = ask(engine("a", gate()), cut=Cut(staging=wire.StagingMode.BUCKET, bucket_mib=1))
    assert any("stream buckets" in s for s in said.steps)
    assert not any("stage " in s or s == "load what is staged" for s in said.steps)


STAYS_OUT: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({"gone": True}, None, "its pod has ended"),
    ({"leaving": True}, {}, "is being deleted"),
    ({"unwanted": True}, {}, "its pool wants fewer engines"),
    ({"quarantined": True}, {}, "a person keeps it out of service"),
    ({"resting": True}, {}, "sleeps, or is to sleep"),
    ({"unborn": True}, None, "nothing of its pod has run yet"),
    ({}, None, "its gate does not answer"),
    ({}, {"enrolled": False}, "does not know its pipeline yet"),
    ({}, {"incarnation": None}, "its engine process is not up"),
    ({}, {"released": (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)}, "its device memory is released"),
    ({}, {"uncertain": True}, "no known end"),
]


@pytest.mark.parametrize(("how", "status", "why"), STAYS_OUT)
def test_who_stays_out_is_told_why(how: dict[str, Any], status: dict[str, Any] | None, why: str) -> None:
    odd = engine("odd", gate(**status) if status is not None else None, **how)
    said = ask(engine("a", gate()), odd)
    assert said.would is Would.RUN
    row = next(e for e in said.engines if e.engine == "odd")
    assert not row.joins
    assert why in row.why


def test_a_refusal_of_the_planner_is_passed_on_word_for_word() -> None:
    said = ask(engine("a", gate()), engine("b", None), max_unavailable=0)
    assert (said.would, said.reason, said.outcome) == (Would.REFUSE, Reason.GATES_UNREACHABLE.value, "Failed")
    assert "mend the network or delete these pods" in said.message


def test_what_would_end_or_wait_says_so() -> None:
    backwards = ask(engine("a", gate()), wanted=ref("me", -1, uid="dry-run"))
    assert (backwards.would, backwards.outcome, backwards.reason) == (Would.END, "Failed", "VersionGoesBackwards")
    done = ask(engine("a", gate()), wanted=ref("me", 0, uid="dry-run"), holds=sender(cache(0, DIGEST_B)))
    assert (done.would, done.outcome) == (Would.END, "Succeeded")
    early = ask(engine("a", gate()), wanted=ref("me", 5, uid="dry-run"))
    assert (early.would, early.reason) == (Would.WAIT, "SenderNotReady")
    assert "does not hold version 5 yet" in early.message


def test_rounds_that_it_would_supersede_or_that_go_first_are_named() -> None:
    older = ref("older", 1, attempt=1)
    said = ask(engine("a", gate()), wanted=ref("me", 1, uid="dry-run", attempt=2), others=(older,))
    assert said.supersedes == ("older",)
    ahead = ask(
        engine("a", gate()), wanted=ref("me", 9, uid="dry-run"), others=(ref("first", 1, manifest_digest=DIGEST_A),)
    )
    assert ahead.would is Would.WAIT
    assert "first" in ahead.message
