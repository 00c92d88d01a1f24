"""Who is caught up, when, and how often; what an engine process may cost, whatever goes wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import MAX_COUNTED
from rlfleet.plan.allowance import ALLOWANCE, Count, attempts, caught_up, count, note, spent
from rlfleet.plan.catchup import (
    BATCH,
    MAX_RETRY_MS,
    RETRY_MS,
    Failure,
    Transporting,
    choose_members,
    enter_catch_up,
    left_closed,
    needs,
    outdated,
    plan_catch_up,
    retry_ms,
    triage_catch_ups,
)
from rlfleet.plan.rounds import Committed, Engine
from rlfleet.plan.topology import Device
from rlfleet.plan.verdicts import Entry, Verdict
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, cache, engine, gate, load, ref, sender

COMMITTED = Committed(7, DIGEST_A, "s1", {"L": "E"})
HOW = Transporting(mode="CPUSerialize", backend="gloo", train=None, verify="IfSupported")
HOLDS = cache(7, DIGEST_A)
OTHERS = wire.Held(pipeline="another", operation="x", generation=1)


def fresh(name: str = "e-0", **changes: Any) -> Engine:
    """An engine that just came up: paused by its gate, nothing proven."""
    return engine(name, gate(paused=True, **changes))


def plan(*engines: Engine, **changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "pipeline": "p",
        "committed": COMMITTED,
        "sender": sender(HOLDS),
        "sender_problem": None,
        "counts": (),
        "failures": (),
        "how": HOW,
        "on_failure": "Replace",
        "now_ms": 1_000_000,
    }
    return plan_catch_up(list(engines), **{**inputs, **changes})


def opened(found: Any) -> list[str]:
    return [e.name for e in found.open]


def counted(e: Engine, n: int, **changes: Any) -> Count:
    fields: dict[str, Any] = {"version": 7, "attempts": n, "round": "r"}
    return Count(e.name, e.incarnation, **{**fields, **changes})


# ------------------------------------------------------------------------------------------------ who needs it


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (fresh(), True),
        (fresh(holds=(6, DIGEST_B)), True),
        (fresh(holds=(7, DIGEST_B)), True),
        (fresh(holds=(6, DIGEST_A)), True),
        (fresh(holds=(7, DIGEST_A)), False),
        (fresh(uncertain=True), True),
        (engine("e-0", None), False),
        (engine("e-0", gate(paused=True), unwanted=True), False),  # it is to go
        (replace(fresh(), gone=True), False),
        (replace(fresh(), leaving=True), False),
        (fresh(incarnation=None), False),
        (fresh(enrolled=False), False),
        (fresh(in_flight="op"), False),
        (engine("e-0", gate(pipeline="another").model_copy(update={"fence": OTHERS})), False),
        (fresh(pipeline="p"), True),
        (fresh(engine=wire.EngineReport(state=wire.EngineState.UNREACHABLE)), False),
        (fresh(engine=wire.EngineReport(state=wire.EngineState.STARTING)), False),
    ],
)
def test_who_needs_to_catch_up(found: Engine, wanted: bool) -> None:
    assert needs(found, COMMITTED, "p") is wanted


def test_the_engine_digest_of_its_layout_must_be_reached_too() -> None:
    same = fresh(holds=(7, DIGEST_A))
    assert caught_up(same, COMMITTED)
    assert not caught_up(same, replace(COMMITTED, engine_digests={"L": "other"}))
    assert needs(same, replace(COMMITTED, engine_digests={"L": "other"}), "p")
    # Nothing is known of what this layout makes of the bytes.
    assert caught_up(same, replace(COMMITTED, engine_digests={"M": "other"}))


def test_without_a_commit_nobody_needs_anything() -> None:
    assert not needs(fresh(), None, "p")
    assert plan(fresh(), committed=None).open == ()


# ------------------------------------------------------------------------------------------------ when


def test_all_that_are_closed_are_caught_up_at_once() -> None:
    found = plan(fresh("e-1"), fresh("e-0"), fresh("e-2", holds=(7, DIGEST_A)))
    assert opened(found) == ["e-1", "e-0"]
    assert (found.replace, found.awaiting, found.trouble, found.again_ms) == ((), "", None, None)


def test_a_large_fleet_catches_up_in_batches() -> None:
    everyone = [fresh(f"e-{i}") for i in range(BATCH + 9)]
    assert len(plan(*everyone).open) == BATCH


def test_a_trainer_that_waits_to_publish_is_not_made_to_wait_longer() -> None:
    assert plan(fresh(), sender=sender(HOLDS, publish_waiting=True)).open == ()


def test_the_sender_without_the_bytes_means_waiting_for_a_refresh() -> None:
    found = plan(fresh(), sender=sender(cache(8, DIGEST_B)))
    assert found.open == ()
    assert "does not hold the committed version 7" in found.awaiting
    assert "e-0" in found.awaiting
    assert "next Refresh" in found.awaiting
    # The number alone is not the bytes.
    assert plan(fresh(), sender=sender(cache(7, DIGEST_B))).open == ()
    # A second slot that still has them will do.
    both = sender(cache(8, DIGEST_B), slots=(HOLDS, cache(8, DIGEST_B)))
    assert opened(plan(fresh(), sender=both)) == ["e-0"]


def test_an_absent_sender_means_waiting_for_a_refresh() -> None:
    found = plan(fresh(), sender=None, sender_problem=(Reason.SENDER_ABSENT, "no running pod matches 'app=x'"))
    assert found.open == ()
    assert "no running pod matches" in found.awaiting


def test_one_engine_that_can_not_take_part_does_not_keep_the_others_closed() -> None:
    small = fresh("e-0", staging_capacity_bytes=10)
    found = plan(small, fresh("e-1"))
    assert opened(found) == ["e-1"]
    assert found.trouble is not None
    assert found.trouble[0] is Reason.STAGING_TOO_LARGE
    assert "e-0" in found.trouble[1]


def test_a_failed_engine_waits_longer_each_time_and_the_others_do_not_wait_for_it() -> None:
    failed = [Failure(frozenset({"e-0"}), 1_000_000, Reason.TRANSFER_FAILED, "no")]
    found = plan(fresh("e-0"), fresh("e-1"), failures=failed, now_ms=1_000_001)
    assert opened(found) == ["e-1"]
    assert found.again_ms == 1_000_000 + RETRY_MS
    assert found.trouble == (Reason.CATCH_UP_FAILED, "e-0: TransferFailed: no")
    assert opened(plan(fresh("e-0"), failures=failed, now_ms=1_000_000 + RETRY_MS)) == ["e-0"]
    delays = [retry_ms(failed * n, "e-0") - 1_000_000 for n in range(1, 20)]
    assert delays == sorted(delays)
    assert (delays[0], delays[1], delays[-1]) == (RETRY_MS, 2 * RETRY_MS, MAX_RETRY_MS)
    assert retry_ms(failed, "e-1") == 0


# ------------------------------------------------------------------------------------------------ allowance


def poisoned(name: str = "e-0", **changes: Any) -> Engine:
    return fresh(name, loads=(load("x", state=wire.OperationState.UNKNOWN),), **changes)


def test_a_poisoned_engine_is_healed_as_long_as_its_allowance_lasts() -> None:
    e = poisoned()
    for n in range(ALLOWANCE):
        found = plan(e, counts=[counted(e, n)] if n else [])
        assert (opened(found), found.replace) == (["e-0"], ())
    found = plan(e, counts=[counted(e, ALLOWANCE)])
    assert (opened(found), found.replace) == ([], ("e-0",))


def test_with_hold_a_person_is_asked_by_name() -> None:
    e = fresh()
    found = plan(e, counts=[counted(e, ALLOWANCE, reason="VerifyFailed")], on_failure="Hold")
    assert (opened(found), found.replace) == ([], ())
    assert found.trouble is not None
    reason, message = found.trouble
    assert reason is Reason.CATCH_UP_EXHAUSTED
    assert "e-0" in message
    assert "VerifyFailed" in message
    assert "delete" in message


def test_pods_of_others_are_never_replaced() -> None:
    e = replace(fresh(), owned=False)
    found = plan(e, counts=[counted(e, ALLOWANCE)])
    assert found.replace == ()
    assert found.trouble is not None


def test_another_process_has_its_own_allowance() -> None:
    e = fresh()
    spent_before = [replace(counted(e, ALLOWANCE), incarnation="earlier")]
    assert opened(plan(e, counts=spent_before)) == ["e-0"]


def test_a_poisoned_engine_is_replaced_where_nothing_can_heal_it() -> None:
    e = poisoned()
    lacking = sender(cache(8, DIGEST_B))
    assert plan(e, sender=lacking).replace == ("e-0",)
    assert plan(e, sender=None, sender_problem=(Reason.SENDER_ABSENT, "")).replace == ("e-0",)
    assert plan(e, committed=None).replace == ("e-0",)
    # A sender that does not answer proves nothing: it may hold the bytes.
    assert plan(e, sender=None, sender_problem=(Reason.SENDER_UNREACHABLE, "")).replace == ()
    assert plan(e, sender=lacking, on_failure="Hold").replace == ()
    # A fresh one that waits is as good as any other.
    assert plan(fresh(), sender=lacking).replace == ()


def test_a_poisoned_engine_that_can_not_take_part_is_replaced() -> None:
    hung = poisoned(engine=wire.EngineReport(state=wire.EngineState.UNREACHABLE))
    found = plan(hung, fresh("e-1"))
    assert (opened(found), found.replace) == (["e-1"], ("e-0",))


@pytest.mark.parametrize("committed", [COMMITTED, None])
def test_a_refresh_that_waits_takes_along_whoever_can_take_part_and_holds_up_nobody_else(
    committed: Committed | None,
) -> None:
    lost = engine("e-0", gate(paused=True, loads=(load(),), incarnation=None))
    poisoned = fresh("e-1", loads=(load(),))
    waits = {"committed": committed, "refresh_waits": True, "sender": sender(cache(8, DIGEST_B))}
    found = plan(lost, poisoned, fresh("e-2"), **waits)
    assert (opened(found), found.replace) == ([], ("e-0",))
    assert set(plan(lost, poisoned, fresh("e-2"), **{**waits, "refresh_waits": False}).replace) == {"e-0", "e-1"}
    spent_one = plan(fresh(), counts=[counted(fresh(), ALLOWANCE)], refresh_waits=True)
    assert spent_one.replace == ()


def test_counting_is_once_per_round() -> None:
    e = fresh()
    present = {e.name: e}
    first, names = count((), [e], round_uid="r1", version=7, present=present, committed=COMMITTED)
    assert names == {"e-0"}
    assert [c.attempts for c in first] == [1]
    again, names = count(first, [e], round_uid="r1", version=7, present=present, committed=COMMITTED)
    assert (again, names) == (first, {"e-0"})
    second, _ = count(again, [e], round_uid="r2", version=7, present=present, committed=COMMITTED)
    assert attempts(second, e) == 2
    said = note(second, {"e-0": Reason.VERIFY_FAILED}, round_uid="r2")
    assert [c.reason for c in said] == ["VerifyFailed"]
    assert note(second, {"e-0": Reason.VERIFY_FAILED}, round_uid="r1") == second
    # The next attempt has not failed yet.
    third, _ = count(said, [e], round_uid="r3", version=7, present=present, committed=COMMITTED)
    assert [c.reason for c in third] == [""]


def test_what_is_forgotten() -> None:
    e, well = fresh("e-0"), fresh("e-1", holds=(7, DIGEST_A))
    present = {x.name: x for x in (e, well)}
    counts = [
        counted(e, 2),
        counted(well, 1, version=6),  # proven at a version committed since
        replace(counted(well, 2), engine="gone"),
        replace(counted(e, 2), incarnation="earlier"),
    ]
    left, _ = count(counts, [], round_uid="r9", version=7, present=present, committed=COMMITTED)
    assert left == (counted(e, 2),)
    # Proven at the very version of its attempt is no progress since: it may lose it again.
    left, _ = count([counted(well, 1)], [], round_uid="r9", version=7, present=present, committed=COMMITTED)
    assert left == (counted(well, 1),)
    # A silent engine may be the same process.
    silent = {"e-0": engine("e-0", None)}
    left, _ = count([counted(e, 2)], [], round_uid="r9", version=7, present=silent, committed=COMMITTED)
    assert left == (counted(e, 2),)


@pytest.mark.parametrize(
    ("since", "left"),
    [
        ({"holds": (7, DIGEST_A)}, 1),  # held on from the Refresh that brought it, and untouched by the next one
        ({"loads": (load("r7", version=7, verified=True, published=True),)}, 1),  # it lost them in the next one
        ({"loads": (load("r7", version=7, verified=True, published=False),)}, 3),
        ({"loads": (load("r6", version=6, verified=True, published=True),)}, 3),
        ({"holds": (6, DIGEST_B)}, 3),
        ({"holds": (5, DIGEST_B)}, 3),
        ({"loads": (load("r", version=6), load("r5", version=5, published=True))}, 1),  # the fleet was rolled back
        ({"loads": (load("r", version=6), load("r5", version=5))}, 3),
        ({"loads": (load("r5", version=5, published=True), load("r", version=6))}, 3),  # that was before
        ({"loads": (load("r", version=6, published=True),)}, 3),
    ],
)
def test_who_was_whole_in_a_refresh_since_begins_anew_though_the_next_one_left_it_behind(
    since: dict[str, Any], left: int
) -> None:
    """Version 8 is committed without it, and nobody has counted since version 7 was."""
    e = fresh(**since)
    counts = [counted(e, 2, version=6)]
    latest = replace(COMMITTED, version=8)
    assert attempts(counts, e) == left - 1
    anew, _ = count(counts, [e], round_uid="r-c", version=8, present={e.name: e}, committed=latest)
    assert [c.attempts for c in anew] == [left]


def test_an_engine_that_is_put_to_sleep_after_it_caught_up_begins_anew() -> None:
    def woken(of: str, **load_: bool) -> Engine:
        slept = load(of, verified=True, published=load_.get("published", True))
        return fresh(loads=(slept.model_copy(update={"released": load_.get("released", True)}),))

    count_ = replace(counted(fresh(), ALLOWANCE), round="r-last")
    e = woken("r-last")
    assert attempts([count_], e) == 0
    assert opened(plan(e, counts=[count_])) == ["e-0"]
    anew, _ = count([count_], [e], round_uid="r-new", version=8, present={e.name: e}, committed=COMMITTED)
    assert [c.attempts for c in anew] == [1]
    # What it was not proven to hold, what was not taken from it on purpose, and what another round did, stay counted.
    for other in (woken("r-last", published=False), woken("r-last", released=False), woken("r-before")):
        assert attempts([count_], other) == ALLOWANCE
        assert plan(other, counts=[count_]).replace == ("e-0",)


def test_the_list_is_bounded_and_nobody_is_touched_uncounted() -> None:
    well = [fresh(f"w-{i:03}", holds=(7, DIGEST_A)) for i in range(MAX_COUNTED)]
    e = fresh("e-0")
    present = {x.name: x for x in [*well, e]}
    full = [counted(x, 1) for x in well]
    left, names = count(full, [e], round_uid="r9", version=7, present=present, committed=COMMITTED)
    assert (len(left), names) == (MAX_COUNTED, {"e-0"})
    ill = [fresh(f"i-{i:03}") for i in range(MAX_COUNTED)]
    present = {x.name: x for x in [*ill, e]}
    full = [counted(x, 1) for x in ill]
    left, names = count(full, [e], round_uid="r9", version=7, present=present, committed=COMMITTED)
    assert (left, names) == (tuple(sorted(full, key=lambda c: c.engine)), frozenset())
    assert opened(plan(*ill, e, counts=full, failures=[Failure(frozenset(x.name for x in ill), 10**6, *SAID)])) == []


SAID = (Reason.TRANSFER_FAILED, "no")
#: One thing that happens to one of three engines: an attempt of a round, a note, a silence, a proof, another process.
EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["try", "retry", "note", "silent", "proven"])), max_size=40
)


@given(EVENTS)
def test_attempts_only_add_up_while_the_process_lives_at_one_version(events: list[tuple[int, str]]) -> None:
    engines = {f"e-{i}": fresh(f"e-{i}") for i in range(3)}
    counts: tuple[Count, ...] = ()
    tried = dict.fromkeys(engines, 0)
    round_no = 0
    for i, what in events:
        name = f"e-{i}"
        before = {n: sum(c.attempts for c in counts if c.engine == n) for n in engines}
        present = {**engines, name: engine(name, None)} if what == "silent" else engines
        if what == "proven":
            present = {**engines, name: fresh(name, holds=(7, DIGEST_A))}
        if what == "try":
            round_no += 1
            tried[name] += 1
        members = [engines[name]] if what in ("try", "retry") and tried[name] else []
        last = next((c.round for c in counts if c.engine == name), f"r{round_no}")
        uid = last if what == "retry" else f"r{round_no}"
        counts, accepted = count(counts, members, round_uid=uid, version=7, present=present, committed=COMMITTED)
        assert accepted == {e.name for e in members}
        if what == "note":
            counts = note(counts, {name: Reason.VERIFY_FAILED}, round_uid=f"r{round_no}")
        after = {n: sum(c.attempts for c in counts if c.engine == n) for n in engines}
        assert all(after[n] >= before[n] for n in engines)
        assert after == tried
        assert {n for n in engines if spent(counts, engines[n])} == {n for n in tried if tried[n] >= ALLOWANCE}


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 5), st.booleans())
def test_whoever_is_planned_has_an_attempt_left(before: list[int], extra: int, hold: bool) -> None:
    engines = [fresh(f"e-{i}") for i in range(len(before))]
    counts = [counted(e, n) for e, n in zip(engines, before, strict=True) if n]
    found = plan(*engines, counts=counts, on_failure="Hold" if hold else "Replace")
    assert all(attempts(counts, e) < ALLOWANCE for e in found.open)
    assert not set(opened(found)) & set(found.replace)
    gone = {e.name for e in engines if attempts(counts, e) >= ALLOWANCE}
    assert set(found.replace) == (set() if hold else gone)


# ------------------------------------------------------------------------------------------------ members


def members(*engines: Engine, how: Transporting = HOW, committed: Committed = COMMITTED) -> Any:
    return choose_members(engines, committed=committed, how=how, sender=sender(HOLDS), total_bytes=1000)


def test_transports_are_chosen_for_the_members_alone() -> None:
    train = frozenset({Device("n0", "GPU-t")})
    shared = fresh("e-0", devices=("GPU-t",))
    apart = fresh("e-1", devices=("GPU-x",))
    auto = replace(HOW, mode="Auto", train=train)
    found, refused = members(shared, apart, how=auto)
    assert [m.transport for m in found.members] == [wire.Transport.SERIALIZED, wire.Transport.BROADCAST]
    assert not refused
    # One class alone is fine: assertMixed is about a whole fleet.
    found, refused = members(apart, how=auto)
    assert [(m.transport, m.rank_offset) for m in found.members] == [(wire.Transport.BROADCAST, 1)]
    # Broadcast can not reach the engine beside the trainer; that one stays out, not the others.
    found, refused = members(shared, apart, how=replace(auto, mode="Broadcast"))
    assert [m.engine for m in found.members] == ["e-1"]
    assert refused["e-0"].reason is Reason.ENGINES_ON_TRAIN_DEVICES


def test_one_engine_is_enough_where_its_layout_has_a_committed_digest() -> None:
    strict = replace(HOW, verify="Required")
    found, refused = members(fresh(), how=strict)
    assert [m.engine for m in found.members] == ["e-0"]
    unknown = replace(COMMITTED, engine_digests={})
    found, refused = members(fresh(), how=strict, committed=unknown)
    assert found.members == ()
    assert refused["e-0"].reason is Reason.VERIFY_UNSUPPORTED
    found, refused = members(fresh("e-0"), fresh("e-1"), how=strict, committed=unknown)
    assert len(found.members) == 2
    assert not refused


# ------------------------------------------------------------------------------------------------ unclaimed


def catch_up(name: str = "c", **changes: Any) -> Any:
    fields: dict[str, Any] = {"kind": "CatchUp", "engines": ("e-0",), "manifest_digest": DIGEST_A}
    return ref(name, 7, **{**fields, **changes})


def triaged(*rounds: Any, **changes: Any) -> tuple[list[tuple[str, str, Reason]], str | None]:
    inputs: dict[str, Any] = {"refresh": None, "committed": COMMITTED, "sender": sender(HOLDS)}
    ends, run = triage_catch_ups(rounds, **{**inputs, **changes})
    return [(e.round.name, e.outcome, e.reason) for e in ends], run.name if run else None


def test_a_refresh_that_runs_absorbs_catch_ups() -> None:
    ends, run = triaged(catch_up(), refresh=ref("new", 8))
    assert (ends, run) == ([("c", "Superseded", Reason.SUPERSEDED)], None)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"cancel": True}, "Cancelled", Reason.CANCELLED),
        ({"deleting": True}, "Cancelled", Reason.CANCELLED),
        ({"sender_incarnation": "s0"}, "Superseded", Reason.SENDER_INCARNATION_GONE),
        ({"version": 6, "manifest_digest": DIGEST_B}, "Superseded", Reason.SUPERSEDED),
        ({"manifest_digest": DIGEST_B}, "Failed", Reason.COMMITTED_MISMATCH),
        ({"version": 8}, "Failed", Reason.COMMITTED_MISMATCH),
    ],
)
def test_catch_ups_that_end_before_they_start(changes: dict[str, Any], outcome: str, reason: Reason) -> None:
    assert triaged(replace(catch_up(), **changes)) == ([("c", outcome, reason)], None)


def test_the_oldest_catch_up_runs_and_the_others_wait() -> None:
    assert triaged(catch_up("b", created_ms=2000), catch_up("a", created_ms=1000)) == ([], "a")


def test_without_a_commit_a_catch_up_says_so() -> None:
    end = outdated(catch_up(), None)
    assert end is not None
    assert (end.outcome, end.reason) == ("Failed", Reason.NOTHING_COMMITTED)


@pytest.mark.parametrize("phase", ["", "Pending", "Planned", "Staging", "Quiescing"])
def test_before_weights_move_a_takeover_plans_anew(phase: str) -> None:
    assert enter_catch_up(phase, planned=True) is Entry.PLAN
    assert enter_catch_up("Transferring", planned=True) is Entry.JUDGE
    assert enter_catch_up("Transferring", planned=False) is Entry.PLAN


def test_members_that_are_gone_are_no_failure() -> None:
    verdicts = {
        "whole": Verdict.WHOLE,
        "stuck": Verdict.WHOLE,
        "lost": Verdict.LOST,
        "dropped": Verdict.DROPPED,
        "silent": Verdict.UNKNOWN,
        "poisoned": Verdict.POISONED,
        "untouched": Verdict.UNTOUCHED,
        "loaded": Verdict.LOADED,
    }
    assert left_closed(verdicts, ["stuck", "lost"]) == {"stuck", "silent", "poisoned", "untouched", "loaded"}
