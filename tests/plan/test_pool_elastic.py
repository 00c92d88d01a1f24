"""A pool's status while engines sleep: counts, Ready, and the three conditions with their remedies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import DeviceReport, MemoryTag
from rlfleet.plan.elastic import GIB
from rlfleet.plan.lifecycle import Derived, Sleep, derive
from rlfleet.plan.pool_elastic import Elastic, Row
from rlfleet.plan.topology import Device
from tests.plan import pool_kit
from tests.plan.elastic_kit import ALL_TAGS, NODE, devices
from tests.plan.test_pool_status import R, condition, status

LIMIT = Elastic(residual_bytes=13 * GIB)


def sleeper(
    index: int,
    *,
    tags: tuple[MemoryTag, ...] = ALL_TAGS,
    report: DeviceReport | None = None,
    answered: bool = True,
    sleep: Sleep | None = None,
) -> Row:
    found = pool_kit.gate(holds=None, paused=True, routed={"r": False}).model_copy(
        update={"released": tags, "devices": report or devices(f"GPU-{index}", used=2)}
    )
    pod = pool_kit.fact(index)
    derived = derive(
        pod,
        found if answered else None,
        committed=None,
        routers=R,
        previous=EngineState.OFFLOADED,
        sleep=sleep or Sleep(),
    )
    return Row(pod, derived, found, answered)


def serving(index: int, report: DeviceReport | None = None) -> Row:
    found = pool_kit.gate(routed={"r": True}).model_copy(update={"devices": report or devices(f"GPU-{index}", used=60)})
    return Row(pool_kit.fact(index), Derived(EngineState.ACTIVE), found, True)


def message(found: dict[str, Any], type_: str) -> str:
    return str(next(c["message"] for c in found["conditions"] if c["type"] == type_))


def test_a_pool_is_ready_when_those_that_are_to_be_awake_are_active() -> None:
    found = status(serving(0), sleeper(1), awake=1)
    assert (found["counts"]["active"], found["counts"]["offloaded"]) == (1, 1)
    assert condition(found, "Ready") == ("True", "AllEnginesActive")
    assert condition(found, "Degraded") == ("False", "AsExpected")
    assert condition(found, "Progressing") == ("False", "Idle")
    assert "failure" not in found["engines"][1]
    assert condition(status(serving(0), sleeper(1), awake=2), "Ready") == ("False", "EnginesNotActive")


def test_a_pool_in_which_all_sleep_is_ready_and_not_empty() -> None:
    found = status(sleeper(0), awake=0)
    assert condition(found, "Ready") == ("True", "EnginesOffloaded")
    assert condition(found, "AdmissionOpen") == ("False", "EnginesClosed")


def test_who_goes_to_sleep_is_no_trouble_and_who_can_not_is() -> None:
    going = sleeper(0, tags=(), sleep=Sleep(going=True))
    assert condition(status(going, awake=0), "Progressing") == ("True", "Offloading")
    assert condition(status(going, awake=0), "Degraded") == ("False", "AsExpected")
    failed = sleeper(0, tags=(), sleep=Sleep(True, (Reason.ENGINES_BUSY, "3 running")))
    found = status(failed, awake=0)
    assert condition(found, "Degraded") == ("True", "EnginesBusy")
    assert found["engines"][0]["failure"] == "EnginesBusy: 3 running"
    assert condition(found, "HeterogeneousStates")[0] == "False", "nothing of it is released"
    sleepless = status(serving(0), sleeper(1, sleep=Sleep(problem=(Reason.WAKE_FAILED, "no room"))), awake=2)
    assert condition(sleepless, "Degraded") == ("True", "WakeFailed")
    assert sleepless["engines"][1]["failure"] == "WakeFailed: no room"
    assert condition(sleepless, "HeterogeneousStates")[0] == "False", "it sleeps"


@pytest.mark.parametrize(
    ("rows", "elastic", "expected"),
    [
        ((serving(0),), LIMIT, ("False", "ResidualMemoryLow")),
        ((sleeper(0),), LIMIT, ("False", "ResidualMemoryLow")),
        ((sleeper(0, report=devices("GPU-0", used=20)),), LIMIT, ("True", "ResidualMemoryHigh")),
        ((sleeper(0, report=devices("GPU-0", used=20)),), Elastic(30 * GIB), ("False", "ResidualMemoryLow")),
        # A trainer that was granted the device uses it, and so may an engine that is awake on it.
        (
            (sleeper(0, report=devices("GPU-0", used=20)),),
            Elastic(13 * GIB, frozenset({Device(NODE, "GPU-0")})),
            ("False", "ResidualMemoryLow"),
        ),
        (
            (sleeper(0, report=devices("GPU-0", used=20)), serving(1, devices("GPU-0", used=20))),
            LIMIT,
            ("False", "ResidualMemoryLow"),
        ),
        ((sleeper(0, report=devices("GPU-0")),), LIMIT, ("Unknown", "MemoryUnreadable")),
        ((sleeper(0, answered=False),), LIMIT, ("False", "ResidualMemoryLow")),
    ],
)
def test_residual_memory(rows: tuple[Row, ...], elastic: Elastic, expected: tuple[str, str]) -> None:
    assert condition(status(*rows, elastic=elastic), "ResidualMemoryHigh") == expected


def test_residual_memory_names_the_device_and_who_else_is_there() -> None:
    found = status(sleeper(0, report=devices("GPU-0", used=20, others=("python",))), elastic=LIMIT)
    text = message(found, "ResidualMemoryHigh")
    for word in ("n0/GPU-0", "13 GiB", "python (pid 100)", "spec.residualMemoryGiB"):
        assert word in text
    more = status(sleeper(0, report=devices("GPU-0", used=21, others=("python",))), elastic=LIMIT, old=found)
    assert more["conditions"] == found["conditions"], "a figure that moves by itself is no news"


def test_half_released_engines_are_named_with_the_remedy() -> None:
    found = status(sleeper(0, tags=(MemoryTag.KV_CACHE,)), awake=0)
    assert condition(found, "HeterogeneousStates") == ("True", "HalfReleased")
    assert "a-0" in message(found, "HeterogeneousStates")
    assert "KVCache" in message(found, "HeterogeneousStates")
    assert condition(found, "Degraded") == ("True", "HalfReleased")
    assert condition(status(sleeper(0)), "HeterogeneousStates") == ("False", "StatesAgree")


def test_an_engine_that_loads_for_too_long_is_stuck_and_says_what_helps() -> None:
    waiting = Row(
        pool_kit.fact(0), Derived(EngineState.LOADING, Reason.AWAITING_ROUND, "closed"), pool_kit.gate(), True
    )
    since = "2026-01-01T00:00:00Z"
    shown = status(replace(waiting, loading_since=since))["engines"][0]
    assert shown["loadingSince"] == since
    assert "loadingSince" not in status(waiting)["engines"][0]
    patient = Elastic(stuck=frozenset({"uid-0"}), patience_seconds=750)
    found = status(waiting, elastic=patient)
    assert condition(found, "StuckLoading") == ("True", "StuckLoading")
    for word in ("a-0", "750 s", "spec.active", "AwaitingRound"):
        assert word in message(found, "StuckLoading")
    assert condition(status(waiting), "StuckLoading") == ("False", "LoadingNormally")
    assert condition(status(serving(0), elastic=patient), "StuckLoading")[0] == "False", "it serves by now"
