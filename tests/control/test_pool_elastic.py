"""What a pool says of engines that are to sleep: whom it means, and when it waits."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.elastic.memory import PAUSE_MAX_SECONDS, ElasticMemory
from rlfleet.control.pool_elastic import facts_for_conditions, sleepers
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.plan.lifecycle import Sleep
from rlfleet.plan.topology import Device
from tests.plan import pool_kit
from tests.plan.elastic_kit import ALL_TAGS, NODE, awake, devices

POOL = pool_kit.pool(replicas=3, active=2, shrink="Offload")
FACTS = tuple(pool_kit.fact(i) for i in range(3))
NOBODY: frozenset[str] = frozenset()


def memory(*asleep: int, silent: frozenset[int] = frozenset()) -> PoolMemory:
    made = PoolMemory("pool-uid")
    for i in range(3):
        status = pool_kit.gate(holds=None if i in asleep else (12, pool_kit.DIGEST))
        released = ALL_TAGS if i in asleep else ()
        made.gates[f"uid-{i}"] = status.model_copy(update={"released": released, "devices": devices(f"GPU-{i}")})
        made.answered[f"uid-{i}"] = i not in silent
    return made


def pipeline(**status: Any) -> dict[str, Any]:
    return {"spec": {"sync": {"deadlines": {"stagingSeconds": 60, "pausedSeconds": 40}}}, "status": status}


def test_the_pool_means_those_that_the_pipeline_puts_to_sleep() -> None:
    found = sleepers(POOL, pipeline(), FACTS, NOBODY, memory())
    assert (found.resting, found.unmoved, found.awake) == ({"uid-2"}, {"uid-2"}, 2)
    assert found.of("uid-2", ElasticMemory()) == Sleep(going=True)
    assert found.of("uid-0", ElasticMemory()) == Sleep()
    found = sleepers(POOL, pipeline(), FACTS, NOBODY, memory(0))
    assert (found.resting, found.unmoved) == ({"uid-0"}, frozenset())
    assert sleepers(POOL, pipeline(), FACTS, frozenset({"uid-1"}), memory()).resting == NOBODY, "one goes anyway"


@pytest.mark.parametrize(
    ("kind", "deferred"), [("Refresh", True), ("CatchUp", True), ("Repair", True), ("Offload", False)]
)
def test_while_a_round_owns_the_engines_the_wish_waits_and_says_so(kind: str, deferred: bool) -> None:
    found = sleepers(POOL, pipeline(activeOperation={"kind": kind}), FACTS, NOBODY, memory())
    assert found.of("uid-2", ElasticMemory()).going is not deferred
    assert [reason for reason, _ in found.waits] == [Reason.ROUND_IN_PROGRESS] * deferred
    assert sleepers(POOL, pipeline(activeOperation={"kind": kind}), FACTS, NOBODY, memory(2)).waits == ()


def test_demanded_devices_lower_what_is_to_be_awake() -> None:
    row = {
        "cluster": "actor",
        "priority": "ActorTraining",
        "step": 3,
        "granted": True,
        "reason": "Granted",
        "devices": [{"node": NODE, "devices": ["GPU-0"]}],
    }
    every = pool_kit.pool(replicas=3, shrink="Offload")
    found = sleepers(every, pipeline(grants=[row]), FACTS, NOBODY, memory())
    assert (found.resting, found.awake) == ({"uid-0"}, 2)
    facts = facts_for_conditions(every, pipeline(grants=[row]), memory(), 0)
    assert facts.granted == {Device(NODE, "GPU-0")}
    assert facts_for_conditions(every, pipeline(grants=[{**row, "granted": False}]), memory(), 0).granted == NOBODY


def test_a_sleeper_that_falls_silent_is_not_taken_for_one_that_woke() -> None:
    quiet = memory(0, silent=frozenset({0}))
    quiet.states["uid-0"] = EngineState.OFFLOADED
    quiet.refusals["uid-0"] = ("StaleFence", "")
    assert sleepers(POOL, pipeline(), FACTS, NOBODY, quiet).resting == {"uid-0"}
    shown = {"engines": [{"podUID": "uid-0", "state": "Offloaded"}]}
    fresh = memory(0, silent=frozenset({0}))
    fresh.refusals["uid-0"] = ("StaleFence", "")
    assert sleepers({**POOL, "status": shown}, pipeline(), FACTS, NOBODY, fresh).resting == {"uid-0"}


def test_loading_for_longer_than_a_sync_may_take_is_stuck() -> None:
    known = memory()
    known.note_state(FACTS[0], EngineState.LOADING, 100_000)
    known.note_state(FACTS[0], EngineState.LOADING, 150_000)
    committed = pipeline(committed={"version": 1})
    assert facts_for_conditions(POOL, committed, known, 190_000).stuck == NOBODY
    assert facts_for_conditions(POOL, committed, known, 201_000).stuck == {"uid-0"}
    assert facts_for_conditions(POOL, pipeline(), known, 201_000).stuck == NOBODY, "the first round is still to come"
    known.note_state(FACTS[0], EngineState.ACTIVE, 202_000)
    assert facts_for_conditions(POOL, committed, known, 500_000).stuck == NOBODY


def test_a_new_operator_does_not_begin_to_count_anew() -> None:
    rows = [
        {"podUID": "uid-0", "state": "Loading", "loadingSince": rfc3339(100_000)},
        {"podUID": "uid-1", "state": "Active"},
    ]
    shown = {**POOL, "status": {"engines": rows}}
    known, committed = PoolMemory.of(shown), pipeline(committed={"version": 1})
    # Its gate has not answered this process yet: it is shown as booting, and is not taken for another engine.
    known.note_state(FACTS[0], EngineState.BOOTING, 180_000)
    known.note_state(FACTS[0], EngineState.LOADING, 190_000)
    known.note_state(FACTS[1], EngineState.LOADING, 190_000)
    assert facts_for_conditions(shown, committed, known, 201_000).stuck == {"uid-0"}
    known.note_state(FACTS[0], EngineState.OFFLOADED, 202_000)
    known.note_state(FACTS[0], EngineState.LOADING, 203_000)
    assert facts_for_conditions(shown, committed, known, 291_000).stuck == {"uid-1"}, "it slept meanwhile"


def test_what_failed_is_tried_ever_later_and_forgotten_when_it_is_done() -> None:
    tries, e = ElasticMemory(), awake(0)
    assert tries.due([e], 0.0) == (("a-0",), None)
    pauses = []
    for _ in range(9):
        tries.failed("p", e.pod_uid, (Reason.WAKE_FAILED, "no room"), 0.0)
        due, wait = tries.due([e, awake(1)], 0.0)
        assert due == ("a-1",)
        pauses.append(wait)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == PAUSE_MAX_SECONDS
    assert tries.problem(e.pod_uid) == (Reason.WAKE_FAILED, "no room")
    tries.keep_only("other", ())
    assert tries.problem(e.pod_uid) is not None, "of another pipeline"
    tries.keep_only("p", ())
    assert tries.due([e], 0.0) == (("a-0",), None)
