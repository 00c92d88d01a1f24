"""Lost and restored statuses, engines of a deleted pipeline, and generations that nobody can have made."""

from __future__ import annotations

from typing import Any

from rlfleet.api import wire
from rlfleet.plan.identity import (
    Shown,
    is_outlived,
    is_poisoned,
    last_shown,
    poisoned_gates,
    still_committed,
    strays,
    unrecorded,
)
from rlfleet.plan.rounds import Committed, Engine
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, gate, sender

NOW = 1_000_000_000_000
DAY = 24 * 3600 * 1000
COMMITTED = Committed(1, DIGEST_A)


def held(name: str, generation: int, *, pipeline: str = "p", operation: str = "r", **changes: Any) -> Engine:
    fence = wire.Held(pipeline=pipeline, operation=operation, generation=generation)
    own = {k: changes.pop(k) for k in ("gone", "leaving", "unborn") if k in changes}
    return engine(name, gate(**changes).model_copy(update={"fence": fence}), **own)


def test_a_generation_more_than_a_day_ahead_is_poisoned() -> None:
    assert not is_poisoned(NOW + DAY, now_ms=NOW)
    assert is_poisoned(NOW + DAY + 1, now_ms=NOW)
    engines = [held("good", NOW), held("bad", NOW + 2 * DAY), held("gone", NOW + 2 * DAY, gone=True), engine("silent")]
    assert poisoned_gates(engines, now_ms=NOW) == ("bad",)


def test_the_last_claim_is_the_highest_of_this_pipeline_that_is_honest() -> None:
    engines = [
        held("a", 5, operation="old"),
        held("b", 7, operation="new"),
        held("c", 7, operation=""),
        held("d", 9, pipeline="other", operation="theirs"),
        held("e", NOW + 2 * DAY, operation="bad"),
        engine("silent"),
    ]
    assert last_shown(engines, None, pipeline="p", now_ms=NOW) == Shown("new", 7)
    trainer = sender(fence=wire.Held(pipeline="p", operation="later", generation=8))
    assert last_shown(engines, trainer, pipeline="p", now_ms=NOW) == Shown("later", 8)
    assert last_shown([], None, pipeline="p", now_ms=NOW) == Shown()


def test_committed_is_believed_while_nothing_contradicts_it() -> None:
    same = engine("same", gate(holds=(1, DIGEST_A)))
    closed = engine("closed", gate(holds=(2, DIGEST_B), paused=True))
    fresh = engine("fresh", gate(paused=None))
    assert still_committed([same, closed, fresh, engine("unborn", unborn=True)], COMMITTED)
    assert not still_committed([same], None)
    assert not still_committed([same, engine("ahead", gate(holds=(2, DIGEST_B)))], COMMITTED)
    assert not still_committed([engine("other bytes", gate(holds=(1, DIGEST_B)))], COMMITTED)
    assert not still_committed([engine("perhaps", gate(holds=(2, DIGEST_B), paused=None))], COMMITTED)
    assert not still_committed([same, engine("silent")], COMMITTED), "who does not answer may serve anything"
    assert still_committed([same, engine("gone", gone=True)], COMMITTED)


def test_engines_that_serve_tell_that_something_was_committed() -> None:
    engines = [
        held("serves", 5, holds=(1, DIGEST_A)),
        held("closed", 5, holds=(1, DIGEST_A), paused=True),
        held("fresh", 5),
        held("theirs", 5, pipeline="other", holds=(1, DIGEST_A)),
    ]
    assert unrecorded(engines, pipeline="p") == ("serves",)


def test_engines_of_a_deleted_pipeline_give_way_only_while_they_are_closed() -> None:
    engines = [
        held("ours", 9),
        held("fresh", 0, pipeline=""),
        held("closed", 7, pipeline="deleted", paused=True, routed={"main": False}),
        held("paused but listed", 8, pipeline="deleted", paused=True, routed={"main": None}),
        held("open", 6, pipeline="deleted"),
        held("leaving", 5, pipeline="deleted", leaving=True),
        held("damaged", NOW + 2 * DAY, pipeline="deleted", paused=True),
        engine("silent"),
    ]
    found = strays(engines, pipeline="p", now_ms=NOW)
    assert found.closed == ("closed",)
    assert found.open == ("open", "paused but listed")
    assert found.generation == 7


def test_a_round_whose_status_came_back_from_the_past_is_over() -> None:
    later = Shown("another", 9)
    assert is_outlived(uid="r", leased=5, shown=later)
    assert not is_outlived(uid="r", leased=5, shown=Shown("r", 9)), "the last claim was its own: it goes on"
    assert not is_outlived(uid="r", leased=0, shown=later), "it was never claimed"
    assert not is_outlived(uid="r", leased=5, shown=Shown()), "nobody remembers anything"
    assert not is_outlived(uid="r", leased=9, shown=later)
