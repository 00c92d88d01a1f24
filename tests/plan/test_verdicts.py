"""What happened to members, from evidence only, and what follows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.v1alpha1.rlpipeline_status import CommittedVersion
from rlfleet.api.wire import GateStatus, OperationState, Transport
from rlfleet.plan.rounds import Committed, Engine, Member, RoundPlan, digest_rows
from rlfleet.plan.verdicts import (
    STUCK_GRACE_SECONDS,
    Agreement,
    Entry,
    Evidence,
    Next,
    Outcome,
    Verdict,
    abort,
    agree,
    conclude,
    enter,
    reopening,
    replaceable,
    still_blocked,
    to_replace,
    unfenced,
    verdict,
)
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, gate, load

MEMBER = Member("a", "uid-a", "i1", Transport.SERIALIZED)


def judge(e: Engine | None) -> Verdict:
    return verdict(MEMBER, e, operation="r", version=1, manifest_digest=DIGEST_A)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (None, Verdict.LOST),
        (engine("a", gate(), gone=True), Verdict.LOST),
        (engine("a", gate(), pod_uid="another"), Verdict.LOST),
        (engine("a", gate(incarnation="i2")), Verdict.LOST),
        (engine("a", None), Verdict.UNKNOWN),
        (engine("a", gate()), Verdict.UNTOUCHED),
        (engine("a", gate(), leaving=True), Verdict.DROPPED),
        (engine("a", gate(loads=(load("earlier"),))), Verdict.UNTOUCHED),
        (engine("a", gate(loads=(load(),))), Verdict.LOADED),
        (engine("a", gate(loads=(load(),), uncertain=True)), Verdict.POISONED),
        (engine("a", gate(loads=(load(state=OperationState.RUNNING),))), Verdict.POISONED),
        (engine("a", gate(loads=(load(state=OperationState.FAILED),))), Verdict.POISONED),
        (engine("a", gate(loads=(load(state=OperationState.UNKNOWN),))), Verdict.POISONED),
        # Published, but the gate's record names other bytes or another version: not proof of this round's.
        (engine("a", gate(loads=(load(published=True),), holds=(1, DIGEST_B))), Verdict.LOADED),
        (engine("a", gate(loads=(load(published=True),), holds=(0, DIGEST_A))), Verdict.LOADED),
        (engine("a", gate(loads=(load(published=True),), holds=(1, DIGEST_A))), Verdict.WHOLE),
        # The label alone proves nothing: holds at the target without this round's load.
        (engine("a", gate(holds=(1, DIGEST_A))), Verdict.UNTOUCHED),
    ],
)
def test_verdict(observed: Engine | None, expected: Verdict) -> None:
    assert judge(observed) is expected


def four(**verdicts: Verdict) -> tuple[RoundPlan, dict[str, Verdict]]:
    plan = RoundPlan(tuple(Member(n, f"uid-{n}", "i1", Transport.SERIALIZED) for n in verdicts), 1)
    return plan, dict(verdicts)


W, U, P, K, L, D = (
    Verdict.WHOLE,
    Verdict.UNTOUCHED,
    Verdict.POISONED,
    Verdict.UNKNOWN,
    Verdict.LOST,
    Verdict.DROPPED,
)


@pytest.mark.parametrize(
    ("verdicts", "open_ones", "expected"),
    [
        ([W, W, W, W], [], Next.COMMIT),
        ([W, W, W, P], [], Next.COMMIT),  # 10 % of 4 is 1
        ([W, W, P, U], [], Next.HOLD),
        ([W, W, L, L], [], Next.COMMIT),  # lost pods do not count
        ([W, L, D, P], [], Next.COMMIT),
        ([U, U, P, L], [], Next.ABORT),
        ([L, L, L, L], [], Next.ABORT),
        ([W, W, W, W], ["x"], Next.WAIT_FENCE),
        ([W, K, K, W], [], Next.HOLD),
    ],
)
def test_what_a_round_does_next(verdicts: list[Verdict], open_ones: list[str], expected: Next) -> None:
    plan, by_name = four(**dict(zip("abcd", verdicts, strict=True)))
    assert conclude(plan, by_name, unfenced=open_ones, max_unavailable="10%").next is expected


@given(st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=8), st.booleans(), st.integers(0, 8))
def test_never_commits_without_a_whole_member_or_past_the_limit_or_unfenced(
    verdicts: list[Verdict], silent: bool, limit: int
) -> None:
    plan, by_name = four(**{f"e{i}": v for i, v in enumerate(verdicts)})
    out = conclude(plan, by_name, unfenced=["x"] if silent else [], max_unavailable=limit)
    if out.next is Next.COMMIT:
        assert W in verdicts
        assert not silent
        assert sum(v not in (W, L, D) for v in verdicts) <= limit
    if W not in verdicts:
        assert out.next is Next.ABORT


def test_who_could_not_be_a_member_counts_as_missing_while_it_lives() -> None:
    plan = RoundPlan(tuple(Member(n, f"uid-{n}", "i1", Transport.SERIALIZED) for n in "ab"), 1, (), ("uid-c",))
    blocked = engine("c", gate(uncertain=True))

    def outcome(c: Engine, b: Verdict) -> Outcome:
        verdicts = {"a": Verdict.WHOLE, "b": b}
        return conclude(plan, verdicts, unfenced=(), max_unavailable=1, blocked=still_blocked(plan, [c]))

    assert outcome(blocked, Verdict.WHOLE).next is Next.COMMIT
    assert outcome(blocked, Verdict.POISONED) == Outcome(Next.HOLD, ("a",), ("b",), (), 1, ("c",))
    # It came out of it, but it does not hold the target: nothing that heals it brings it into this round.
    assert outcome(engine("c", gate()), Verdict.POISONED).next is Next.HOLD
    for over in (
        engine("c", blocked.status, gone=True),
        engine("c", blocked.status, leaving=True),
        engine("c", gate(), pod_uid="another"),  # its pod was replaced: a newcomer is nobody that is missed
    ):
        assert outcome(over, Verdict.POISONED).next is Next.COMMIT


def test_a_gate_that_takes_no_orders_has_stored_the_fence_or_holds_the_commit_up() -> None:
    stuck = {"uncertain": True, "wedged": True}
    engines = [engine("fenced", gate(fence=10, **stuck)), engine("behind", gate(fence=9, **stuck))]
    assert unfenced(engines, pipeline="p", generation=10) == ("behind",)


def test_a_live_engine_that_is_silent_or_behind_is_unfenced() -> None:
    engines = [
        engine("fenced", gate(fence=10)),
        engine("behind", gate(fence=9)),
        engine("silent", None),
        engine("gone", None, gone=True),
        engine("leaving", gate(fence=9), leaving=True),
    ]
    assert unfenced(engines, pipeline="p", generation=10) == ("behind", "silent", "leaving")
    assert unfenced([engine("other", gate(fence=11))], pipeline="q", generation=10) == ("other",)


OLD = Committed(0, DIGEST_B, engine_digests={"L": "E0"})


def test_required_verification_takes_no_member_that_nothing_confirms() -> None:
    def judged(*evidence: Evidence, agreed_on: dict[str, str] | None = None, verify: str = "Required") -> Agreement:
        return agree(evidence, committed=OLD, manifest_digest=DIGEST_A, verify=verify, agreed_on=agreed_on)

    lone, blind = Evidence("a", "L", "x", True), Evidence("b", "L", None, None)
    assert judged(lone).agreed == judged(blind).agreed == ()
    assert "Required" in judged(lone).rejected["a"]
    assert judged(lone, Evidence("c", "L", "x", True), blind).agreed == ("a", "c")
    # Others of the round were found to have this digest before: the late one is confirmed by them.
    assert judged(lone, agreed_on={"L": "x"}).agreed == ("a",)
    assert judged(lone, agreed_on={"L": "y"}).agreed == ()
    assert judged(lone, agreed_on={"L": "x"}, verify="IfSupported").unconfirmed == ()
    assert judged(lone, verify="IfSupported").unconfirmed == ("a",)


def test_abort_resumes_only_untouched_members_that_hold_the_committed_weights() -> None:
    engines = {
        "good": engine("good", gate(holds=(0, DIGEST_B))),
        "new": engine("new", gate()),
        "loaded": engine("loaded", gate(holds=(0, DIGEST_B), loads=(load(),))),
        "silent": engine("silent", None),
        "leaving": engine("leaving", gate(holds=(0, DIGEST_B)), leaving=True),
        "gone": engine("gone", None, gone=True),
        # Untouched, but its loop is stuck in a rendezvous: it would serve nobody.
        "wedged": engine("wedged", gate(holds=(0, DIGEST_B), uncertain=True, wedged=True)),
    }
    plan = RoundPlan(tuple(Member(n, f"uid-{n}", "i1", Transport.SERIALIZED) for n in engines), 1)
    out = abort(plan, engines, OLD, operation="r")
    assert out.resume == ("good",)
    assert set(out.close) == {"new", "loaded", "silent", "leaving", "wedged"}
    assert abort(plan, engines, None, operation="r").resume == ()


def ev(name: str, digest: str | None, *, layout: str = "L", changed: bool | None = True) -> Evidence:
    return Evidence(name, layout, digest, changed)


@pytest.mark.parametrize(
    ("evidence", "committed", "agreed", "rejected"),
    [
        ([ev("a", "x"), ev("b", "x")], OLD, ["a", "b"], []),
        ([ev("a", "x"), ev("b", "y")], OLD, [], ["a", "b"]),
        ([ev("a", "x"), ev("b", "x"), ev("c", "y")], OLD, ["a", "b"], ["c"]),
        ([ev("a", "x"), ev("b", "y"), ev("c", "z")], OLD, [], ["a", "b", "c"]),
        ([ev("a", "x", changed=False), ev("b", "x")], OLD, ["b"], ["a"]),
        # Equal bytes: the committed digest decides, and an unmoved checksum is right.
        ([ev("a", "E0", changed=False), ev("b", "y")], Committed(0, DIGEST_A, "", {"L": "E0"}), ["a"], ["b"]),
        # Layouts are compared among themselves only.
        ([ev("a", "x"), ev("b", "y", layout="M")], OLD, ["a", "b"], []),
        ([ev("a", None)], OLD, ["a"], []),
    ],
)
def test_agreement(evidence: list[Evidence], committed: Committed, agreed: list[str], rejected: list[str]) -> None:
    out = agree(evidence, committed=committed, manifest_digest=DIGEST_A, verify="IfSupported")
    assert sorted(out.agreed) == agreed
    assert sorted(out.rejected) == rejected


def test_a_lone_engine_and_one_without_checksum_are_unconfirmed() -> None:
    out = agree([ev("a", "x"), ev("b", None)], committed=OLD, manifest_digest=DIGEST_A, verify="IfSupported")
    assert set(out.unconfirmed) == {"a", "b"}
    off: Agreement = agree([ev("a", "x"), ev("b", "y")], committed=OLD, manifest_digest=DIGEST_A, verify="Off")
    assert off.agreed == ("a", "b")


def test_where_a_takeover_enters() -> None:
    table: dict[tuple[str, bool, bool], Entry] = {}
    for phase, committed, planned in product(
        ["", "Pending", "Planned", "Staging", "Quiescing", "Transferring", "Holding", "Committed"],
        [False, True],
        [False, True],
    ):
        table[phase, committed, planned] = enter(phase, committed=committed, planned=planned)
    assert all(e is Entry.REOPEN for (_, committed, _), e in table.items() if committed)
    assert all(e is Entry.PLAN for (_, committed, planned), e in table.items() if not committed and not planned)
    expected: dict[str, Any] = {
        "Planned": Entry.PLAN,
        "Staging": Entry.PLAN,
        "Quiescing": Entry.QUIESCE,
        "Transferring": Entry.JUDGE,
        "Holding": Entry.JUDGE,
    }
    for phase, entry in expected.items():
        assert table[phase, False, True] is entry


def test_only_poisoned_pods_of_ours_are_replaced_and_only_if_asked() -> None:
    failed, whole = load(state=OperationState.FAILED), load(published=True)
    engines = [
        engine("poisoned", gate(loads=(failed,))),
        engine("loaded-unpublished", gate(loads=(load(),))),
        engine("whole", gate(loads=(whole,), holds=(1, DIGEST_A))),
        engine("healed", gate(loads=(failed, whole), holds=(1, DIGEST_A))),
        engine("fresh", gate()),
        engine("working", gate(loads=(failed,), in_flight="x")),
        engine("silent", None),
        engine("foreign", gate(loads=(failed,)), owned=False),
        engine("leaving", gate(loads=(failed,)), leaving=True),
    ]
    assert to_replace(engines, on_failure="Replace") == ("poisoned", "loaded-unpublished")
    assert to_replace(engines, on_failure="Hold") == ()


def test_an_engine_that_stays_stuck_past_the_grace_is_replaced_and_not_before() -> None:
    def stuck(name: str, seconds: float, **changes: Any) -> Engine:
        return engine(name, gate(holds=(0, DIGEST_B), uncertain=True, uncertain_seconds=seconds), **changes)

    engines = [
        stuck("recent", STUCK_GRACE_SECONDS),
        stuck("stuck", STUCK_GRACE_SECONDS + 1),
        stuck("adopted", STUCK_GRACE_SECONDS + 1, owned=False),
        stuck("leaving", STUCK_GRACE_SECONDS + 1, leaving=True),
        engine("healed", gate(holds=(0, DIGEST_B), uncertain=False, uncertain_seconds=0)),
    ]
    assert to_replace(engines, on_failure="Replace") == ("stuck",)
    assert to_replace(engines, on_failure="Hold") == ()


def test_only_our_own_pods_on_their_feet_are_replaced_and_only_with_replace() -> None:
    engines = [
        engine("other", gate()),
        engine("theirs", gate()),
        engine("leaving", gate(), leaving=True),
        engine("gone", gate(), gone=True),
        engine("adopted", gate(), owned=False),
    ]
    names = {"theirs", "leaving", "gone", "adopted"}
    assert replaceable(engines, names, on_failure="Replace") == ("theirs",)
    assert replaceable(engines, names, on_failure="Hold") == ()


def test_after_a_takeover_a_lone_checksum_waits_for_those_that_have_loaded_nothing() -> None:
    lone = [Evidence("a", "L", "E", None)]

    def judge(others: dict[str, int]) -> Agreement:
        return agree(lone, committed=None, manifest_digest=DIGEST_A, verify="IfSupported", others=others)

    # An engine that said "success" and loaded garbage would else be what all the others are measured by.
    assert judge({"L": 2}).agreed == ()
    assert "nothing confirms" in judge({"L": 2}).rejected["a"]
    assert judge({"other layout": 2}).agreed == ("a",)
    both = [*lone, Evidence("b", "L", "E", None)]
    assert agree(both, committed=None, manifest_digest=DIGEST_A, verify="IfSupported", others={"L": 1}).agreed == (
        "a",
        "b",
    )


def test_reopening_names_who_is_missing() -> None:
    verdicts = {
        "a": Verdict.WHOLE,
        "b": Verdict.UNKNOWN,
        "c": Verdict.POISONED,
        "d": Verdict.LOST,
        "e": Verdict.DROPPED,
    }
    fleet = {n: engine(n, gate(routed={"r": True})) for n in (*verdicts, "f")}
    doors = reopening(verdicts, fleet)
    assert doors.resume == ("a",)
    assert doors.close == ("c", "e", "f")
    assert doors.missing == ("b", "c")


def test_layouts_that_no_engine_has_any_more_make_room_among_the_digests() -> None:
    """A commit that the apiserver refuses would be made again for ever."""
    known = {f"L{i:02}": f"E{i}" for i in range(20)}

    def of(layout: str) -> GateStatus:
        found = gate()
        return found.model_copy(update={"engine": found.engine.model_copy(update={"layout": layout})})

    live = [engine("e-0", of("L19")), engine("e-1", of("L18"), gone=True)]
    rows = digest_rows(known, live)
    CommittedVersion(version=1, manifest_digest=DIGEST_A, sender_incarnation="s", engine_digests=rows)
    assert [r["layout"] for r in rows] == [*(f"L{i:02}" for i in range(15)), "L19"]
    assert digest_rows({"b": "2", "a": "1"}, []) == [{"layout": "a", "digest": "1"}, {"layout": "b", "digest": "2"}]
