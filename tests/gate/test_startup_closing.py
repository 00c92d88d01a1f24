"""An engine that nothing proves is closed by its gate, without being told."""

from __future__ import annotations

from collections.abc import Callable

from tests.gate.kit import Engine, Gate, Operator, Weights, until


def test_a_fresh_engine_is_closed_before_any_order(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    assert engine.ready() == 200
    operator = Operator(make_gate(engine.url))
    operator.enroll()
    until("closed", lambda: engine.ready() == 503)
    until("known", lambda: operator.status()["engine"].get("paused") is True)
    assert operator.status()["attempts"] == {}


def test_before_the_start_up_promise_the_engine_is_left_alone(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    operator = Operator(make_gate(engine.url))
    until("observed", lambda: operator.status()["engine"]["state"] == "Ready")
    assert engine.ready() == 200


def test_an_engine_that_somebody_resumed_without_proof_is_closed_again(operator: Operator, engine: Engine) -> None:
    engine.http.post("/continue_generation", json={}).raise_for_status()
    until("closed again", lambda: engine.ready() == 503)


def test_a_proven_engine_is_left_open(operator: Operator, engine: Engine, gate: Gate) -> None:
    operator.serve(Weights.of(1), 1)
    gate.kill()
    gate.start()
    until("observed", lambda: operator.status()["engine"].get("paused") is False)
    assert engine.ready() == 200
