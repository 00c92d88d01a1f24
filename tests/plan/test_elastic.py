"""Who sleeps, who is awake, and in which order it comes about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import MemoryTag, OperationState
from rlfleet.plan.asleep import is_offloaded, is_touched
from rlfleet.plan.catchup import needs as needs_catch_up
from rlfleet.plan.drops import is_unwanted, removable, to_close
from rlfleet.plan.elastic import (
    awaited,
    ceiling,
    in_the_way,
    last_draining,
    on_devices,
    plan_elastic,
    wanted_pods,
    wish,
)
from rlfleet.plan.pool import PoolView, plan_pods
from rlfleet.plan.repair import Act, needs
from rlfleet.plan.rounds import Committed, Engine
from rlfleet.plan.topology import Device
from rlfleet.plan.verdicts import Verdict, reopening, to_replace
from tests.plan import pool_kit
from tests.plan.elastic_kit import ALL_TAGS, NODE, asleep, awake, ceilings, silent
from tests.plan.rounds_kit import DIGEST_A, frozen, gate, load


def resting(engines: list[Engine], active: int, **how: Any) -> set[str]:
    pools = how.pop("pools", None) or ceilings(active, replicas=how.pop("replicas", max(4, len(engines))))
    return set(wish(engines, pools, **how).resting)


def marked(engines: list[Engine], active: int, **how: Any) -> list[Engine]:
    names = resting(engines, active, **how)
    return [replace(e, resting=e.name in names) for e in engines]


def plan(engines: list[Engine], active: int, *, cache_ready: bool = True, **how: Any) -> Any:
    return plan_elastic(marked(engines, active, **how), pipeline="p", cache_ready=cache_ready)


def test_whom_a_pool_takes_away_is_read_from_its_status() -> None:
    rows = [{"podUID": "a", "state": "Draining"}, {"podUID": "b", "state": "Active"}, {"state": "Draining"}]
    assert last_draining({"status": {"engines": rows}}) == {"a"}
    assert last_draining({}) == set()


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("released", "releasing", "offloaded", "half"),
    [
        ((), False, False, False),
        (ALL_TAGS, False, True, False),
        ((*ALL_TAGS, MemoryTag.CUDA_GRAPH), False, True, False),
        ((MemoryTag.WEIGHTS,), False, False, True),
        ((MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH), False, False, True),
        (ALL_TAGS, True, False, True),
        ((), True, False, True),
    ],
)
def test_asleep_is_all_or_nothing(
    released: tuple[MemoryTag, ...], releasing: bool, offloaded: bool, half: bool
) -> None:
    status = gate(released=released, releasing=releasing)
    assert is_offloaded(status) is offloaded
    assert is_touched(status) == (offloaded or half)


def test_silence_proves_nothing_about_memory() -> None:
    assert not is_offloaded(None)
    assert not is_touched(None)


# ------------------------------------------------------------------------------------------------ who


@pytest.mark.parametrize(
    ("engines", "active", "expected"),
    [
        ([awake(0), awake(1), awake(2)], 3, set()),
        ([awake(0), awake(1), awake(2)], 2, {"a-2"}),
        ([awake(0), awake(1), awake(2)], 0, {"a-0", "a-1", "a-2"}),
        # Nobody is moved without need: who sleeps sleeps on, whatever its index.
        ([asleep(0), awake(1), awake(2)], 2, {"a-0"}),
        ([asleep(0), awake(1), awake(2)], 1, {"a-0", "a-2"}),
        # The sleeper with the lowest index wakes first.
        ([asleep(0), asleep(1), awake(2)], 2, {"a-1"}),
        # Half released counts as asleep: what it lacks must be loaded anew in any case.
        ([asleep(0, tags=(MemoryTag.WEIGHTS,)), awake(1)], 1, {"a-0"}),
        # Those that go anyway are nobody's ceiling.
        ([awake(0, leaving=True), awake(1), awake(2)], 2, set()),
        ([awake(0), awake(1), awake(2, unwanted=True)], 2, set()),
        ([awake(0, gone=True), awake(1)], 1, set()),
        # Silence is no sleep.
        ([silent(0), awake(1)], 1, {"a-1"}),
    ],
)
def test_the_rule_of_who_goes_first(engines: list[Engine], active: int, expected: set[str]) -> None:
    assert resting(engines, active) == expected


def test_a_silent_engine_that_was_last_seen_asleep_still_sleeps() -> None:
    engines = [silent(0), awake(1), awake(2)]
    assert resting(engines, 2, last_asleep=frozenset({"uid-a-0"})) == {"a-0"}
    assert resting(engines, 2) == {"a-2"}, "without that it counts as awake"


HELD = frozenset({Device(NODE, "GPU-1"), Device(NODE, "GPU-9")})


def test_a_demand_puts_exactly_the_engines_on_its_devices_to_sleep() -> None:
    assert resting([awake(i) for i in range(4)], 4, held=HELD) == {"a-1"}
    # The others' ceiling is not theirs to fill: nobody wakes for the one that gave way.
    assert resting([awake(0), awake(1), asleep(2), asleep(3)], 2, held=HELD) == {"a-1", "a-2", "a-3"}
    assert resting([awake(0), asleep(1), asleep(2), asleep(3)], 2, held=HELD) == {"a-1", "a-2", "a-3"}
    # Given back, it wakes again.
    assert resting([awake(0), asleep(1), asleep(2), asleep(3)], 2) == {"a-2", "a-3"}
    assert resting([awake(i) for i in range(4)], 4, held=frozenset({Device("n7", "GPU-1")})) == set(), "another node"


def test_a_pool_that_shrinks_by_deletion_puts_nobody_to_sleep() -> None:
    pools = ceilings(1, offloads=False)
    assert resting([awake(0), awake(1)], 1, pools=pools, held=HELD) == set()


def test_engines_that_are_owed_are_counted_up_to_the_ceiling() -> None:
    assert wish([awake(0)], ceilings(3)).owed == 2
    assert wish([awake(0), awake(1), awake(2)], ceilings(2)).owed == 0
    assert wish([], ceilings(0)).owed == 0


ENGINES = st.lists(
    st.sampled_from(["awake", "asleep", "half", "silent", "leaving", "gone"]), min_size=0, max_size=8
).map(
    lambda kinds: [
        {
            "awake": lambda i=i: awake(i),
            "asleep": lambda i=i: asleep(i),
            "half": lambda i=i: asleep(i, tags=(MemoryTag.WEIGHTS,)),
            "silent": lambda i=i: silent(i),
            "leaving": lambda i=i: awake(i, leaving=True),
            "gone": lambda i=i: awake(i, gone=True),
        }[kind]()
        for i, kind in enumerate(kinds)
    ]
)
DEVICES = st.sets(st.integers(0, 7), max_size=8).map(lambda s: frozenset(Device(NODE, f"GPU-{i}") for i in s))


@given(engines=ENGINES, active=st.integers(0, 9), held=DEVICES, data=st.data())
def test_wishes_are_what_the_rule_says_for_any_fleet(
    engines: list[Engine], active: int, held: frozenset[Device], data: st.DataObject
) -> None:
    names = resting(engines, active, held=held, replicas=8)
    there = {e.name: e for e in engines if not e.gone and not e.leaving}
    stay = set(there) - names
    assert names <= set(there)
    assert len(stay) <= active
    assert all(not (e.devices or frozenset()) & held for n, e in there.items() if n in stay)
    shuffled = data.draw(st.permutations(engines))
    assert resting(list(shuffled), active, held=held, replicas=8) == names, (
        "the order in which they are seen is nothing"
    )
    # Whoever sleeps although the ceiling has room lies on a demanded device, or gives room to one that does.
    if not held:
        assert len(stay) == min(active, len(there))
        # Carried out, the wish is what it was: nothing swings to and fro.
        done = [asleep(e.index) if e.name in names else awake(e.index) for e in there.values()]
        assert resting(done, active, replicas=8) == names


# ------------------------------------------------------------------------------------------------ what


def test_shrinks_are_done_before_anybody_wakes() -> None:
    # a-0 lies on a demanded device; a-2 and a-3 could wake.
    engines = [awake(0), awake(1), asleep(2), asleep(3)]
    both = [replace(e, resting=e.name == "a-0") for e in engines]
    found = plan_elastic(both, pipeline="p", cache_ready=True)
    assert (found.shrink, found.wake) == (("a-0",), ())
    assert found.waits is not None
    assert found.waits[0] is Reason.OFFLOADING
    assert "a-2" in found.waits[1]
    # A sleeper that must be told of a higher generation is moved, too: by the claim alone.
    quiet = [replace(asleep(0), resting=True), asleep(2)]
    assert plan_elastic(quiet, pipeline="p", cache_ready=True).wake == ("a-2",)
    assert plan_elastic(quiet, pipeline="p", cache_ready=True, behind={"a-0"}).shrink == ("a-0",)
    # One that can not be moved now keeps the others asleep, too.
    busy = replace(awake(0, gate={"in_flight": "x"}), resting=True)
    assert plan_elastic([busy, *both[1:]], pipeline="p", cache_ready=True).wake == ()
    mute = replace(silent(0), resting=True)
    found = plan_elastic([mute, *both[1:]], pipeline="p", cache_ready=True)
    assert (found.shrink, found.wake) == ((), ())
    # A pod of which nothing ever ran holds nothing.
    unborn = replace(silent(0), resting=True, unborn=True)
    assert plan_elastic([unborn, *both[1:]], pipeline="p", cache_ready=True).wake == ("a-2", "a-3")


def test_the_awake_engine_with_the_highest_index_goes_first() -> None:
    assert plan([awake(i) for i in range(4)], 1).shrink == ("a-3", "a-2", "a-1")
    assert plan([asleep(i) for i in range(4)], 2).wake == ("a-0", "a-1")


def test_nobody_wakes_before_the_sender_is_ready() -> None:
    found = plan([asleep(0)], 1, cache_ready=False)
    assert found.wake == ()
    assert found.waits is not None
    assert found.waits[0] is Reason.SENDER_NOT_READY
    assert plan([asleep(0)], 1).wake == ("a-0",)


def test_half_released_engines_are_tried_again_either_way() -> None:
    half = asleep(0, tags=(MemoryTag.KV_CACHE,))
    assert plan([half], 0).shrink == ("a-0",)
    assert plan([half], 1).wake == ("a-0",)


def test_what_is_not_settled_is_left_alone() -> None:
    for wrong in ({"uncertain": True}, {"in_flight": "x"}, {"enrolled": False}, {"pipeline": "other"}):
        assert plan([awake(0, gate=wrong)], 0).shrink == (), wrong
        assert plan([asleep(0, gate=wrong)], 1).wake == (), wrong


def test_an_engine_that_can_not_release_memory_is_named_with_the_remedy() -> None:
    found = plan([awake(0, gate={"capabilities": ("Serialized",)}), awake(1)], 0)
    assert found.shrink == ("a-1",)
    assert found.trouble is not None
    assert found.trouble[0] is Reason.UNSUPPORTED
    assert "a-0" in found.trouble[1]
    assert "shrink: Delete" in found.trouble[1]
    # It never will sleep, so nobody waits for it.
    lone = plan([awake(0, gate={"capabilities": ()}), asleep(1)], 1)
    assert lone.shrink == ()


def test_nothing_to_do_is_nothing_to_say() -> None:
    found = plan([awake(0), asleep(1)], 1)
    assert (found.shrink, found.wake, found.waits, found.trouble) == ((), (), None, None)


@given(engines=ENGINES, active=st.integers(0, 9), held=DEVICES, ready=st.booleans())
def test_plans_move_only_what_may_be_moved(
    engines: list[Engine], active: int, held: frozenset[Device], ready: bool
) -> None:
    found = plan_elastic(marked(engines, active, held=held, replicas=8), pipeline="p", cache_ready=ready)
    by_name = {e.name: e for e in marked(engines, active, held=held, replicas=8)}
    assert not (found.shrink and found.wake)
    assert all(by_name[n].resting and not is_offloaded(by_name[n].status) for n in found.shrink)
    assert all(not by_name[n].resting and is_touched(by_name[n].status) for n in found.wake)
    assert ready or not found.wake


# ------------------------------------------------------------------------------------------------ rounds


def test_sleepers_and_those_that_are_to_sleep_are_no_members() -> None:
    engines = [awake(0), replace(awake(1), resting=True), asleep(2), replace(silent(3), resting=True)]
    found = frozen(engines, max_unavailable=0)
    assert ([m.engine for m in found.members], found.silent) == (["a-0"], ())
    half = asleep(4, tags=(MemoryTag.KV_CACHE,))
    assert [m.engine for m in frozen([awake(0), half], max_unavailable=0).members] == ["a-0"], (
        "it can not be loaded before it is woken"
    )


def test_a_fleet_asleep_is_in_nobodys_way_but_an_unknown_one_is() -> None:
    assert in_the_way([asleep(0), asleep(1), silent(2, gone=True)]) == ()
    assert in_the_way([]) == ()
    unsure = [asleep(0), silent(1), asleep(2, tags=(MemoryTag.WEIGHTS,)), replace(awake(3), resting=True)]
    assert in_the_way(unsure) == ("a-1", "a-2", "a-3")


def test_a_round_waits_for_engines_until_they_are_asleep() -> None:
    assert awaited([asleep(0), asleep(1)], pods=2) == 0
    assert awaited([asleep(0), replace(awake(1), resting=True)], pods=2) == 1
    assert awaited([asleep(0), silent(1)], pods=2) == 1, "it may serve"
    assert awaited([asleep(0)], pods=3) == 2, "their pods are still to come"
    assert awaited([], pods=0) == 0


@pytest.mark.parametrize("to_sleep", [True, False])
def test_a_member_that_is_to_sleep_by_now_is_closed_and_keeps_its_pod(to_sleep: bool) -> None:
    member = replace(awake(0, gate={"paused": True}), resting=to_sleep)
    doors = reopening({"a-0": Verdict.WHOLE}, {"a-0": member})
    assert (doors.resume, doors.dropped) == (((), ("a-0",)) if to_sleep else (("a-0",), ()))
    assert not removable(member)
    assert to_close(replace(awake(0), resting=to_sleep)) == to_sleep
    assert not to_close(replace(awake(0, gate={"paused": True, "routed": {"r": False}}), resting=True))
    assert to_close(replace(awake(0, gate={"paused": True, "routed": {"r": None}}), resting=True)), "it may be open"


def test_repair_does_not_open_what_is_to_sleep_nor_touch_what_sleeps() -> None:
    closed = awake(0, gate={"paused": True, "routed": {"r": False}})
    committed = Committed(1, DIGEST_A)
    assert [n.act for n in needs([closed], committed, pipeline="p")] == [Act.RESUME]
    assert needs([replace(closed, resting=True)], committed, pipeline="p") == ()
    assert needs([asleep(0), replace(asleep(1), resting=True)], committed, pipeline="p") == ()
    routed = asleep(0, gate={"routed": {"r": True}})
    assert [n.act for n in needs([routed], committed, pipeline="p")] == [Act.CLOSE], "it can not answer"


def test_an_engine_that_woke_is_caught_up_and_a_sleeper_is_not() -> None:
    committed = Committed(1, DIGEST_A)
    woken = awake(0, held=False, gate={"paused": True})
    assert needs_catch_up(woken, committed, "p")
    assert not needs_catch_up(replace(woken, resting=True), committed, "p")
    assert not needs_catch_up(asleep(0), committed, "p")


def test_what_a_sleeper_once_loaded_does_not_poison_it() -> None:
    failed = (load(state=OperationState.FAILED),)
    assert to_replace([awake(0, held=False, gate={"loads": failed})], on_failure="Replace") == ("a-0",)
    assert to_replace([asleep(0, gate={"loads": failed})], on_failure="Replace") == ()


# ------------------------------------------------------------------------------------------------ specs


def test_the_default_of_shrink_follows_the_placement() -> None:
    scheduler = pool_kit.pool(replicas=4, active=2)
    assert wanted_pods(scheduler) == 2, "a sleeping engine would keep its GPU from the scheduler"
    assert not ceiling(scheduler).offloads
    asked = pool_kit.pool(replicas=4, active=2, shrink="Offload")
    assert (wanted_pods(asked), ceiling(asked).active, ceiling(asked).offloads) == (4, 2, True)
    nodes = [{"node": "n0", "devices": ["GPU-0", "GPU-1"]}, {"node": "n1", "devices": ["GPU-0"]}]
    pinned = pool_kit.pool(replicas=3, placement={"mode": "Pinned", "devices": nodes})
    assert ceiling(pinned).offloads
    assert Device("n1", "GPU-0") in ceiling(pinned).devices
    assert on_devices(pinned, frozenset({Device("n0", "GPU-1"), Device("n9", "GPU-0")})) == {1}


def test_a_pool_that_shrinks_by_deletion_leaves_demanded_devices_and_stays_away() -> None:
    devices = [{"node": NODE, "devices": ["GPU-0", "GPU-1"]}]
    spec = {"placement": {"mode": "Pinned", "devices": devices}, "shrink": "Delete"}
    pool = pool_kit.pool(replicas=2, **spec)
    pod = {"metadata": {"name": "x", "labels": {"rlfleet.dev/engine-index": "1"}}}
    assert is_unwanted(pod, pool, held=frozenset({Device(NODE, "GPU-1")}))
    assert not is_unwanted(pod, pool, held=frozenset({Device(NODE, "GPU-0")}))
    assert not is_unwanted(pod, pool_kit.pool(replicas=2, **{**spec, "shrink": "Offload"}), held=HELD)
    view = PoolView("a", "u", 2, (pool_kit.fact(0), pool_kit.fact(1)), slots=2, demanded=frozenset({1}))
    assert plan_pods(view).draining == frozenset(), "one that sleeps keeps its pod"
    assert plan_pods(replace(view, vacate=frozenset({1}))).draining == {"uid-1"}
    without = replace(view, pods=(pool_kit.fact(0),))
    assert plan_pods(without).create == ()
    assert plan_pods(without).waits[0][0] is Reason.DEVICES_HELD
    assert [c.index for c in plan_pods(replace(without, demanded=frozenset())).create] == [1]


def test_while_a_trainer_has_devices_no_engine_boots_that_may_lie_on_them() -> None:
    claims = pool_kit.pool(replicas=3, placement={"mode": "Claims"})
    assert on_devices(claims, HELD) == {0, 1, 2}
    assert on_devices(claims, frozenset()) == frozenset()
    assert on_devices(pool_kit.pool(replicas=3), HELD) == frozenset(), "the scheduler gives a device to one pod only"


def test_the_ceiling_is_all_unless_said_otherwise() -> None:
    assert ceiling(pool_kit.pool(replicas=3, shrink="Offload")).active == 3
    assert ceiling(pool_kit.pool(replicas=3, active=0, shrink="Offload")).active == 0
    assert ceiling(pool_kit.pool(replicas=3, active=9, shrink="Offload")).active == 3
    assert ceiling(pool_kit.pool(residualMemoryGiB=0.5)).residual_bytes == 2**29
    assert ceiling(pool_kit.pool()).residual_bytes == 13 * 2**30
