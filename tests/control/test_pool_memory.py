"""What the pool reconciler remembers: endings, pauses between replacements, addresses of pods that are gone."""

from __future__ import annotations

from dataclasses import replace

from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.pool_memory import FAILURE_PAUSE_MAX, PoolMemory
from rlfleet.control.silence import SECONDS
from tests.plan.pool_kit import fact
from tests.plan.rounds_kit import gate


def test_each_ending_is_told_once() -> None:
    memory = PoolMemory("pool")
    memory.see([fact(0), fact(1)], 0)
    dead = replace(fact(0), finished=True)
    assert memory.see([dead, fact(1)], 1) == ([dead], [])
    assert memory.see([dead, fact(1)], 2) == ([], [])
    _, lost = memory.see([dead], 3)
    assert [p.uid for p in lost] == ["uid-1"]
    assert memory.see([dead], 4) == ([], [])


def test_the_end_of_what_is_no_engine_any_more_is_told_only_where_it_was_one_just_now() -> None:
    """Finished pods of an adopted Deployment lie about: a new operator meets them all at once."""
    memory = PoolMemory("pool")
    old = replace(fact(-1, "old"), finished=True)
    assert memory.see([old, fact(0)], 0) == ([], [])
    over = replace(fact(-1, "uid-0"), finished=True)
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
        memory.see([replace(fact(0, f"u{i}"), finished=True)], 1000.0 * i)
        waits.append(memory.held_back(1000.0 * i).get(0, 0.0))
    assert waits[:4] == [0.0, 5.0, 10.0, 20.0]
    assert waits[-1] == FAILURE_PAUSE_MAX
    assert memory.held_back(1000.0 * 11 + FAILURE_PAUSE_MAX) == {}


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
