"""What the pool reconciler remembers: endings, pauses between replacements, addresses of pods that are gone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.pool_memory import CREATE_PAUSE_MAX, Departure, PoolMemory
from rlfleet.control.silence import SECONDS
from rlfleet.plan.pool_observed import Observed
from rlfleet.plan.pool_status import build_status
from rlfleet.plan.start_failures import PAUSE_MAX_SECONDS
from tests.plan.pool_kit import fact
from tests.plan.rounds_kit import gate


def test_each_ending_is_told_once() -> None:
    memory = PoolMemory("pool")
    memory.see([fact(0), fact(1)], 0)
    dead = replace(fact(0), finished=True, phase="Failed")
    assert memory.see([dead, fact(1)], 1) == ([dead], [])
    assert memory.see([dead, fact(1)], 2) == ([], [])
    _, lost = memory.see([dead], 3)
    assert [p.uid for p in lost] == ["uid-1"]
    assert memory.see([dead], 4) == ([], [])


def test_an_ending_is_told_with_what_the_kubelet_says_of_it_in_the_end() -> None:
    ended = replace(fact(0), finished=True, phase="Running", failure="engine ended with exit code 0")
    evicted = replace(ended, phase="Failed", failure="Evicted: the node was low on memory")
    memory = PoolMemory("pool")
    memory.see([fact(0)], 0)
    assert memory.see([ended], 1) == ([], [])
    assert memory.held_back(1) or memory.failures  # it counts at once
    assert memory.see([evicted], 2) == ([evicted], [])
    assert memory.see([evicted], 3) == ([], [])


@pytest.mark.parametrize(
    ("then", "now_ms", "told"),
    [
        ({"deleting": True}, 2, False),
        ({"deleting": True, "phase": "Failed"}, 2, True),
        (None, 2, True),
        ({}, 29_999, False),
        ({}, 30_001, True),  # another container of it runs on
    ],
)
def test_an_ending_is_told_although_the_kubelet_never_says_more(
    then: dict[str, Any] | None, now_ms: int, told: bool
) -> None:
    ended = replace(fact(0), finished=True, phase="Running")
    memory = PoolMemory("pool")
    memory.see([fact(0)], 0)
    memory.see([ended], 1)
    failed, lost = memory.see([] if then is None else [replace(ended, **then)], now_ms)
    assert ([p.uid for p in failed], lost) == (["uid-0"] if told else [], [])
    assert [p.uid for p in memory.see([], now_ms + 1)[0]] == ([] if told else ["uid-0"])


def test_the_end_of_what_is_no_engine_any_more_is_told_only_where_it_was_one_just_now() -> None:
    """Finished pods of an adopted Deployment lie about: a new operator meets them all at once."""
    memory = PoolMemory("pool")
    old = replace(fact(-1, "old"), finished=True)
    assert memory.see([old, fact(0)], 0) == ([], [])
    over = replace(fact(-1, "uid-0"), finished=True, phase="Failed")
    assert memory.see([old, over], 1) == ([over], [])
    assert memory.held_back(1) == {}
    assert memory.see([old, over], 2) == ([], [])


def test_pod_that_goes_on_request_is_neither_failed_nor_lost() -> None:
    memory = PoolMemory("pool")
    memory.see([fact(0)], 0)
    assert memory.see([replace(fact(0), deleting=True)], 1) == ([], [])
    assert memory.see([replace(fact(0), deleting=True, finished=True)], 2) == ([], [])
    assert memory.see([], 3) == ([], [])


def test_first_replacement_is_immediate_and_later_ones_wait_longer() -> None:
    memory = PoolMemory("pool")
    waits = []
    for i in range(12):
        memory.see([replace(fact(0, f"u{i}"), finished=True)], 1_000_000 * i)
        waits.append(memory.held_back(1_000_000 * i).get(0, 0.0))
    assert waits[:4] == [0.0, 5.0, 10.0, 20.0]
    assert waits[-1] == PAUSE_MAX_SECONDS
    assert memory.held_back(1_000_000 * 11 + round(PAUSE_MAX_SECONDS * 1000)) == {}


def restarted(memory: PoolMemory, *rows: dict[str, Any]) -> PoolMemory:
    """What a successor knows."""
    observed = Observed(1, 1, (), "a", frozenset(), None, failures=memory.failures, refused_since=memory.refused_since)
    status = build_status(observed, {}, now="2026-01-01T00:00:00Z")
    return PoolMemory.of({"metadata": {"uid": "pool"}, "status": {**status, "engines": list(rows)}})


def test_a_restart_neither_shortens_a_pause_nor_counts_an_ending_twice() -> None:
    memory = PoolMemory("pool")
    dead = [replace(fact(0, f"u{i}", node="n1"), finished=True) for i in range(3)]
    for pod in dead:
        memory.see([pod], 1_000_000)
    assert memory.held_back(1_004_000) == {0: 6.0}
    memory = restarted(memory)
    assert memory.held_back(1_004_000) == {0: 6.0}
    memory.see([dead[2]], 1_005_000)
    assert memory.held_back(1_005_000) == {0: 5.0}


def test_an_engine_that_served_under_an_earlier_operator_is_forgiven() -> None:
    memory = restarted(PoolMemory("pool"), {"podUID": "uid-0", "state": "Active"})
    for i in range(2):
        memory.see([replace(fact(0), finished=True)], i)
    assert memory.failures == {}


def test_a_poisoned_engine_that_is_replaced_before_it_ever_served_counts_as_one_that_ended() -> None:
    memory = PoolMemory("pool")
    for i in range(3):
        bad = fact(0, f"u{i}", node="n1")
        memory.see([bad], 1_000_000)
        memory.note_state(bad, EngineState.QUARANTINED, 0)
        gone = [] if i == 1 else [replace(bad, deleting=True)]  # by force, or not
        for _ in range(2):
            memory.see(gone, 1_000_000)
    assert (memory.failures[0].count, memory.failures[0].on_node) == (3, 3)
    assert memory.held_back(1_000_000) == {0: 10.0}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"quarantine": "why"}, EngineState.QUARANTINED),
        ({"withheld": (Reason.WORKER_NOT_LISTED, "")}, EngineState.QUARANTINED),
        ({}, EngineState.LOADING),
        ({}, EngineState.BOOTING),
    ],
)
def test_a_pod_that_somebody_moves_is_no_failure_of_its_start(changes: dict[str, Any], state: EngineState) -> None:
    memory = PoolMemory("pool")
    pod = replace(fact(0), **changes)
    memory.see([pod], 0)
    memory.note_state(pod, state, 0)
    memory.see([replace(pod, deleting=True)], 0)
    assert memory.failures == {}


def test_a_pod_that_the_pool_takes_away_is_no_failure_of_its_start() -> None:
    memory = PoolMemory("pool")
    pod = fact(0)
    memory.see([pod], 0)
    memory.note_state(pod, EngineState.QUARANTINED, 0)
    memory.departures[pod.uid] = Departure(pod)
    memory.see([replace(pod, deleting=True)], 0)
    assert memory.failures == {}


def test_indices_that_nobody_wants_are_forgotten() -> None:
    memory = PoolMemory("pool")
    memory.see([replace(fact(i), finished=True) for i in range(3)], 0)
    memory.keep_indices(2)
    assert sorted(memory.failures) == [0, 1]


def test_creating_pods_is_tried_again_after_as_long_as_it_has_been_refused() -> None:
    memory, now, tries = PoolMemory("pool"), 0.0, []
    while now < 300:
        memory.note_refused((), generation=1, now=now, now_ms=round(now * 1000))
        tries.append(now)
        now += memory.create_pause(1, now)
    assert tries[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert max(b - a for a, b in itertools.pairwise(tries)) == CREATE_PAUSE_MAX
    assert memory.create_pause(2, now) == 0, "the spec was changed: it is tried at once"
    # A successor tries once, and goes on from where its predecessor was.
    memory = restarted(memory)
    assert memory.refused_since == 0
    assert memory.create_pause(1, 0.0) == 0
    memory.note_refused((), generation=1, now=0.0, now_ms=300_000)
    assert memory.create_pause(1, 0.0) == CREATE_PAUSE_MAX
    memory.note_made()
    assert restarted(memory).refused_since is None
    assert memory.create_pause(1, 0.0) == 0


def test_an_apiserver_that_names_a_time_is_not_asked_before() -> None:
    memory = PoolMemory("pool")
    memory.note_refused((), generation=1, now=0.0, now_ms=0, retry_after=7.0)
    assert memory.create_pause(1, 1.0) == 6.0


def test_engine_that_served_is_forgiven() -> None:
    memory = PoolMemory("pool")
    for i in range(3):
        memory.see([replace(fact(0, f"u{i}"), finished=True)], i)
    assert memory.held_back(2)
    good = fact(0, "good")
    memory.see([good], 3)
    memory.note_state(good, EngineState.ACTIVE, 0)
    memory.see([replace(good, finished=True)], 4)
    assert memory.held_back(4) == {}


def test_address_of_a_pod_that_vanished_is_kept_until_it_left_the_routers() -> None:
    memory = PoolMemory("pool")
    memory.see([fact(0), replace(fact(1), ip="")], 0)
    memory.see([], 1)
    assert {u: d.pod.ip for u, d in memory.departures.items()} == {"uid-0": "10.0.0.1"}


def test_successor_of_a_pod_that_is_gone_is_derived_from_it() -> None:
    memory = PoolMemory("pool")
    memory.see([fact(0, "u1", created="1"), fact(0, "u2", created="2")], 0)
    assert memory.predecessors == {0: "u2"}
    memory.see([], 1)
    assert memory.predecessors == {0: "u2"}
    memory.see([fact(0, "u3", created="3")], 2)
    assert memory.predecessors == {0: "u3"}


def test_one_lost_answer_is_not_shown() -> None:
    memory = PoolMemory("pool")
    assert not memory.shown("uid-0"), "never heard"
    memory.answered["uid-0"], memory.gates["uid-0"] = True, gate()
    memory.answered["uid-0"] = False
    memory.silence.missed("uid-0", 0.0)
    assert memory.shown("uid-0")
    memory.silence.missed("uid-0", 0.1)
    assert memory.shown("uid-0"), "two looks at once are one"
    memory.silence.missed("uid-0", SECONDS)
    assert not memory.shown("uid-0")
    memory.silence.heard("uid-0")
    assert memory.shown("uid-0")
    memory.refusals["uid-0"] = ("StaleFence", "held")
    assert not memory.shown("uid-0"), "a refusal is an answer: nothing of the past is shown for it"
