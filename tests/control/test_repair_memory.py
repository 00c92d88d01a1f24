"""Repair is paced, looks twice at what may pass, and says "silent" only of a gate that stays so."""

from __future__ import annotations

import itertools

from rlfleet.control.repair.memory import (
    DOUBT_SECONDS,
    FORGET_SECONDS,
    PAUSE_MAX_SECONDS,
    RepairMemories,
    RepairMemory,
)
from rlfleet.control.silence import SECONDS as SILENT_SECONDS
from rlfleet.plan.repair import Act, Need
from tests.plan.rounds_kit import engine, gate

SURE = Need("e", "uid-e", "i1", Act.RESUME)
DOUBTFUL = Need("e", "uid-e", "i1", Act.RESUME, doubtful=True)


def test_an_engine_that_flaps_is_repaired_ever_more_slowly() -> None:
    memory, now, repairs = RepairMemory("p"), 0.0, []
    while now < 1000:
        due, wait = memory.due([SURE], now)
        if due:
            repairs.append(now)
            memory.repaired(due, {}, now)
        else:
            assert wait is not None
            now += wait
    assert repairs[0] == 0
    pauses = [b - a for a, b in itertools.pairwise(repairs)]
    assert pauses == sorted(pauses)
    assert max(pauses) == PAUSE_MAX_SECONDS
    assert len(repairs) < 25


def test_an_engine_that_was_well_for_long_starts_anew() -> None:
    memory = RepairMemory("p")
    for now in (0.0, 100.0, 200.0):
        memory.repaired([SURE], {}, now)
    later = 200 + FORGET_SECONDS + 1
    memory.repaired([SURE], {}, later)
    assert memory.due([SURE], later + 1.0)[0] == (SURE,)


def test_another_engine_process_is_another_engine() -> None:
    memory = RepairMemory("p")
    memory.repaired([SURE], {"e": "why"}, 0.0)
    other = Need("e", "uid-e", "i2", Act.RESUME)
    assert memory.due([other], 0.1)[0] == (other,)
    assert memory.problems([other]) == {}
    assert memory.problems([SURE]) == {"e": "why"}


def test_what_may_pass_is_looked_at_twice() -> None:
    memory = RepairMemory("p")
    assert memory.due([DOUBTFUL], 0.0) == ((), DOUBT_SECONDS)
    assert memory.due([DOUBTFUL], 1.0)[0] == ()
    assert memory.due([], 2.0)[0] == ()  # it has passed
    assert memory.due([DOUBTFUL], 3.0)[0] == ()
    assert memory.due([DOUBTFUL], 3.0 + DOUBT_SECONDS)[0] == (DOUBTFUL,)


def test_one_missed_look_is_no_silence() -> None:
    memory, known, silent = RepairMemory("p"), engine("e", gate()), engine("e", None)
    memory.observed([known], 0.0)
    memory.observed([silent], 1.0)
    assert memory.believed([silent]) == [known]
    memory.observed([silent], 1.5)
    assert memory.believed([silent]) == [known], "two looks at once are one look"
    memory.observed([silent], 1.0 + SILENT_SECONDS)
    assert memory.believed([silent]) == [silent]
    memory.observed([known], 10.0)
    memory.observed([silent], 20.0)
    assert memory.believed([silent]) == [known]


def test_a_gate_that_was_never_heard_is_not_made_up() -> None:
    memory, silent = RepairMemory("p"), engine("e", None)
    memory.observed([silent], 0.0)
    assert memory.believed([silent]) == [silent]


def test_what_is_gone_is_forgotten() -> None:
    memory, known = RepairMemory("p"), engine("e", gate())
    memory.observed([known], 0.0)
    memory.repaired([SURE], {"e": "why"}, 0.0)
    memory.observed([], 1.0)
    assert memory.problems([SURE]) == {}
    assert memory.believed([engine("e", None)])[0].status is None


def test_a_pipeline_made_anew_has_no_memory() -> None:
    memories = RepairMemories()
    first = memories.of("ns", "p", "uid-1")
    assert memories.of("ns", "p", "uid-1") is first
    assert memories.of("ns", "p", "uid-2") is not first
    second = memories.of("ns", "p", "uid-2")
    memories.forget("ns", "p")
    assert memories.of("ns", "p", "uid-2") is not second


def test_a_rule_rests_for_as_long_as_the_apiserver_asked_and_no_other_does() -> None:
    memory = RepairMemory("p")
    assert not memory.rests("History", 10.0)
    memory.put_off("History", 11.0)
    assert memory.rests("History", 10.9)
    assert not memory.rests("EndedRounds", 10.9)
    assert not memory.rests("History", 11.0)
