"""Room for a starved rolling update between rounds that follow each other at once: when, for how long, how often."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.plan.room import ROOM_MS, STARVED_MS, UNUSED, Room, Update, makes_room, update_of
from rlfleet.plan.rounds import Committed, Engine
from tests.plan.pool_kit import pool
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, gate

ROOM = ROOM_MS + 30_000


def update(**changes: Any) -> Update:
    return Update(**{"pool": "a", "since_ms": 0, "step_ms": 0, "moving": False} | changes)


def asked(now_ms: int, *updates: Update, last: Room | None = None, drain: float = 30) -> tuple[Room | None, str]:
    return makes_room(updates, last=last, now_ms=now_ms, drain_seconds=drain)


def room(since_ms: int) -> Room:
    return Room(since_ms, since_ms + ROOM)


def test_a_round_waits_for_an_update_that_had_no_step_for_long() -> None:
    assert asked(STARVED_MS) == (None, ""), "nobody updates"
    assert asked(STARVED_MS - 1, update()) == (None, "")
    assert asked(STARVED_MS, update()) == (room(STARVED_MS), "a")
    assert asked(STARVED_MS, update(step_ms=1)) == (None, ""), "its last step is not long ago"
    assert asked(STARVED_MS, update(moving=True)) == (None, ""), "it takes one now"
    assert asked(STARVED_MS, update(stuck=True)) == (None, ""), "the round brings back whom it needs"
    assert asked(STARVED_MS, update(stuck=True), update(pool="b")) == (room(STARVED_MS), "b")


def test_the_wait_is_bounded_and_not_repeated_at_once_where_it_was_for_nothing() -> None:
    start = STARVED_MS
    last = room(start)
    assert asked(start + ROOM - 1, update(), last=last) == (last, "a")
    assert asked(start + ROOM, update(), last=last) == (last, "")
    assert asked(start + (1 + UNUSED) * ROOM - 1, update(), last=last) == (last, "")
    again = start + (1 + UNUSED) * ROOM
    assert asked(again, update(), last=last) == (room(again), "a")
    # Where it was used the next step is due as soon as the update starves again.
    then = start + ROOM + STARVED_MS
    assert asked(then, update(step_ms=start + ROOM), last=last) == (room(then), "a")


def test_a_room_lasts_as_long_as_was_recorded_whatever_becomes_of_operators_and_specs() -> None:
    opened, _ = asked(STARVED_MS + 999, update())
    assert opened == room(STARVED_MS), "whole seconds, as the record has them"
    recorded = Room.of({"updateRoom": opened.row()}) if opened is not None else None
    assert recorded == opened
    for now in (STARVED_MS, STARVED_MS + ROOM - 1):
        assert asked(now, update(), last=recorded, drain=300) == (recorded, "a")
    assert asked(STARVED_MS + ROOM, update(), last=recorded, drain=300) == (recorded, "")
    assert Room.of({}) is None


@pytest.mark.parametrize("back", [1, 3_600_000])
def test_a_room_of_a_clock_that_was_set_back_holds_nobody_up(back: int) -> None:
    last = room(STARVED_MS + back)
    assert asked(STARVED_MS, update(), last=last) == (last, "")


@given(st.integers(1, 5), st.integers(1, 90), st.booleans(), st.integers(0, 20_000))
def test_rounds_without_a_pause_starve_no_update_and_are_not_starved(
    pods: int, drain: int, possible: bool, restart_ms: int
) -> None:
    """Rounds of 20 s that follow each other at once; a step is possible only where no round runs for as long as an
    engine drains. Of an operator that is restarted all the time only what is recorded is left."""
    now, status, step, left, waited, idle_since = 0, dict[str, Any](), 0, pods, 0, 0
    while left and now < 10_000_000:
        there = [update(step_ms=step)]
        opened, who = asked(now, *there, last=Room.of(status), drain=drain)
        status = {"updateRoom": opened.row()} if opened is not None else {}
        if not who:
            now += 20_000
            idle_since = now
            continue
        waited += 200 + restart_ms
        now += 200 + restart_ms
        if possible and now - idle_since >= drain * 1000 + 5_000:
            left, step = left - 1, now
    assert left == (0 if possible else pods)
    if not possible:
        assert waited / now < 1 / UNUSED + restart_ms / (UNUSED * ROOM_MS)


def pod(made: str, name: str = "", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": made, **meta}}


def updating(**spec: Any) -> dict[str, Any]:
    """A pool with pods of an earlier template."""
    mine = pool(updateStrategy={"type": "RollingUpdate", **spec})
    condition = {"type": "TemplateOutdated", "status": "True", "lastTransitionTime": "1970-01-01T00:00:05Z"}
    mine["status"] = {"conditions": [condition], "templateHash": "v1-new"}
    return mine


def test_what_a_pool_and_its_pods_say_of_an_update() -> None:
    mine = pool(updateStrategy={"type": "RollingUpdate"})
    there = [pod("1970-01-01T00:00:01Z"), pod("1970-01-01T00:00:09Z")]
    assert update_of(mine, there, wanted=2) is None
    mine = updating()
    assert update_of(mine, there, wanted=2) == Update("a", 5_000, 9_000, moving=False)
    for pods_now, wanted in ((there, 3), ([*there, pod("1970-01-01T00:00:02Z", deletionTimestamp="x")], 2)):
        found = update_of(mine, pods_now, wanted=wanted)
        assert found is not None
        assert found.moving
    assert update_of(pool() | {"status": mine["status"]}, there, wanted=2) is None, "OnDelete replaces nobody"
    # One that only quarantine holds up waits for a person, not for a round.
    kept = pod("1970-01-01T00:00:01Z", annotations={"rlfleet.dev/quarantine": "why"})
    new = pod("1970-01-01T00:00:09Z", labels={"rlfleet.dev/template-hash": "v1-new"})
    assert update_of(mine, [kept, new], wanted=2) is None
    assert update_of(mine, [kept, new, there[0]], wanted=3) is not None
    mine["status"]["conditions"][0]["status"] = "False"
    assert update_of(mine, there, wanted=2) is None


COMMITTED = Committed(7, DIGEST_A, "s1", {"L": "E"})
SERVES = gate(holds=(7, DIGEST_A))
CLOSED = gate(holds=(6, DIGEST_B), paused=True)
ASLEEP = gate(paused=True, released=("Weights", "KVCache"))


@pytest.mark.parametrize(
    ("gates", "old", "limit", "stuck"),
    [
        ((SERVES, SERVES), "ab", 1, False),
        ((SERVES, CLOSED), "a", 1, True),
        ((SERVES, CLOSED), "a", 2, False),
        ((SERVES, CLOSED), "ab", 1, False),  # the closed one goes first, and costs nothing
        ((SERVES, ASLEEP), "a", 1, False),
        ((SERVES, gate(holds=(7, DIGEST_A), paused=True)), "a", 1, False),  # repair resumes it
        ((SERVES, None), "a", 1, False),  # silence is no evidence that a round would help
    ],
)
def test_a_round_is_not_kept_waiting_for_a_step_that_only_it_makes_possible(
    gates: tuple[Any, ...], old: str, limit: int, stuck: bool
) -> None:
    names = "ab"[: len(gates)]
    engines: list[Engine] = [engine(n, g) for n, g in zip(names, gates, strict=True)]
    new = {"labels": {"rlfleet.dev/template-hash": "v1-new"}}
    pods = [pod("1970-01-01T00:00:01Z", n, **({} if n in old else new)) for n in names]
    mine = updating(maxUnavailable=limit)
    found = update_of(mine, pods, wanted=len(names), engines=engines, committed=COMMITTED, pipeline="p")
    assert found is not None
    assert found.stuck is stuck
