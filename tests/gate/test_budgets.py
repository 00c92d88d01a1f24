"""Time limits that the gate keeps by itself, and the engine that a rendezvous leaves stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gate.kit import Engine, Gate, Operator, Weights, until
from tests.gate.test_broadcast import Sender, load_order, make_sender, staged

__all__ = ["make_sender"]  # a fixture

LONG = 3600


def prepared(operator: Operator, weights: Weights, version: int) -> None:
    operator.prepare(weights, version)
    operator.push_all(weights)
    operator.ok("Pause")


def test_a_load_ends_with_what_is_left_of_the_whole_not_with_its_share(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    prepared(operator, weights, 6)
    engine.faults(update_weights_from_disk={"action": "hang"})
    record = operator.run("Load", **operator.load_order(weights, 6), transportSeconds=LONG, budgetSeconds=1)
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "DeadlineExceeded")


def test_an_order_that_comes_when_the_time_is_over_touches_nothing(operator: Operator) -> None:
    committed, weights = Weights.of(1), Weights.of(6)
    operator.deliver(committed, 1)
    newer = operator.next()
    prepared(newer, weights, 6)
    record = newer.run("Load", **newer.load_order(weights, 6), budgetSeconds=1e-9)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "DeadlineExceeded")
    status = newer.status()
    assert [load["version"] for load in status["loads"]] == [1]
    assert (status["holds"]["version"], status["uncertain"]) == (1, False)


def test_a_successor_with_less_time_joins_and_refills_nothing(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    prepared(operator, weights, 6)
    engine.faults(update_weights_from_disk={"action": "hang"})
    first = operator.start("Load", **operator.load_order(weights, 6), budgetSeconds=2)
    successor = Operator(operator.gate, operator.pipeline, operator.operation, operator.generation + 1)
    assert successor.fence().status_code == 200
    again = successor.start("Load", **operator.load_order(weights, 6), transportSeconds=LONG, budgetSeconds=LONG)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert again.json()["startedMs"] == first.json()["startedMs"]
    assert successor.wait(first.json()["id"])["state"] == "Unknown"


def test_a_pause_that_drains_ends_with_its_budget(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    operator.serve(weights, 6)
    # An engine that never says that nothing runs: without the budget the drain would go on.
    engine.faults(**{"v1/loads": {"action": "hang"}})
    newer = operator.next()
    record = newer.run("Pause", mode="Wait", drainSeconds=LONG, budgetSeconds=1)
    # What still runs then is retracted, which the scheduler's answer proves, in time or not.
    assert record["state"] != "Running"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    # Its own group time-out would free it only long after every deadline here.
    started = Engine(tmp_path, "--group-timeout", "600", backend="torch")
    try:
        yield started.up()
    finally:
        started.close()


def wedge(operator: Operator, weights: Weights, port: int, **more: Any) -> dict[str, Any]:
    staged(operator, weights, 3)
    return operator.run("Load", **load_order(weights, 3, port, **more), rendezvousSeconds=0.5)


def test_a_late_trainer_frees_a_wedged_engine_and_the_gate_sees_it_by_itself(
    operator: Operator, engine: Engine, gate: Gate, make_sender: Callable[[], Sender]
) -> None:
    committed, weights, late = Weights.of(1), Weights.of(3), make_sender()
    operator.deliver(committed, 1)
    newer = operator.next()
    record = wedge(newer, weights, late.port)
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "RendezvousTimeout")
    status = newer.status()
    assert (status["wedged"], status["uncertain"]) == (True, True)
    assert newer.refused("Resume", **newer.names(committed, 1)) == "Uncertain"
    assert newer.refused("Load", attempt=2, **load_order(weights, 3, late.port)) == "Uncertain"
    until("the time it has been so to be told", lambda: newer.status()["uncertainSeconds"] > 0)
    # Everyone is fenced before a commit, whoever hangs in a rendezvous, too: orders of those before are refused then.
    newest = newer.next("round-3")
    answer = newest.fence().json()
    assert (answer["fence"]["generation"], answer["wedged"]) == (newest.generation, True)
    assert newer.refused("Pause", attempt=2) == "StaleFence"
    # Nobody orders anything from here on.
    late.serve("g", [])
    until("healed", lambda: newer.status()["wedged"] is False)
    status = newer.status()
    assert (status["uncertain"], status["uncertainSeconds"]) == (False, 0.0)
    assert status["holds"]["version"] == 1
    assert engine.http.post("/destroy_weights_update_group", json={"group_name": "g"}).status_code == 400  # left
    newest.ok("Resume", **newest.names(committed, 1))


def test_a_wedged_engine_stays_wedged_through_a_restart_of_its_gate(
    operator: Operator, engine: Engine, gate: Gate, make_sender: Callable[[], Sender]
) -> None:
    weights, late = Weights.of(3), make_sender()
    wedge(operator, weights, late.port)
    gate.kill()
    gate.start()
    assert operator.status()["wedged"] is True
    late.serve("g", [])
    until("healed", lambda: operator.status()["wedged"] is False)
