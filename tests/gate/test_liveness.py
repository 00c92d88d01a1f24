"""The liveness of an engine's container: its loop, as far as no operation of the gate may keep that busy."""

from __future__ import annotations

from typing import Any

from tests.gate.kit import Engine, Operator, Weights, until


def alive(operator: Operator) -> int:
    status: int = operator.gate.http.get("/enginez").status_code
    return status


#: The front end answers, the scheduler behind it does not.
DEAD: dict[str, Any] = {"server_info": {"action": "http500"}}


def test_a_pause_is_survived_and_a_dead_loop_is_not(operator: Operator, engine: Engine) -> None:
    assert alive(operator) == 200, "paused: nothing proves its weights yet"
    engine.faults(**DEAD)
    assert alive(operator) == 503
    engine.faults()
    operator.serve(Weights.of(1), 1)
    assert alive(operator) == 200
    engine.faults(**DEAD)
    assert alive(operator) == 503


def test_a_load_that_takes_its_time_is_survived(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    operator.push_all(weights)
    engine.faults(**DEAD, update_weights_from_disk={"action": "hang"})
    operator.start("Load", **operator.load_order(weights, 1))
    until("loading", lambda: engine.struck("update_weights_from_disk"))
    before = engine.struck("server_info")
    assert alive(operator) == 200
    assert engine.struck("server_info") == before, "an engine that loads is not even asked"
