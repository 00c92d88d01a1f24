"""An engine with a key of its pod's own: its gate drives it, and nobody else changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gate.kit import Engine, Gate, Operator, Weights, until

KEY = "key-of-this-pod"
#: What could change or stop an engine behind its gate's back.
CONTROL = {
    "update_weights_from_disk": {"model_path": "/nowhere"},
    "update_weight_version": {"new_version": "evil", "abort_all_requests": True},
    "pause_generation": {},
    "continue_generation": {},
    "abort_request": {"abort_all": True},
    "release_memory_occupation": {},
    "init_weights_update_group": {},
    "flush_cache": {},
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, "--admin-api-key", KEY)
    yield made.up()
    made.close()


def guarded(operator: Operator) -> bool | None:
    """What the gate saw, once it has seen it."""
    until("tried out", lambda: "guarded" in operator.status()["engine"])
    seen: bool | None = operator.status()["engine"]["guarded"]
    return seen


def test_only_the_gate_changes_the_engine(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_ADMIN_KEY=KEY)).ready()
    operator.serve(Weights.of(5), 5)
    assert engine.label() == "5"
    for headers in ({}, {"Authorization": "Bearer guess"}, operator.headers()):
        for path, body in CONTROL.items():
            assert engine.http.post(f"/{path}", json=body, headers=headers).status_code == 401, path
    assert engine.label() == "5"
    assert engine.ready() == 200
    # And with it: the key is what counts.
    right = {"Authorization": f"Bearer {KEY}"}
    assert engine.http.post("/pause_generation", json={}, headers=right).status_code == 200


def test_the_gate_says_that_it_saw_strangers_refused(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_ADMIN_KEY=KEY)).ready()
    assert guarded(operator) is True


def test_an_engine_that_obeys_anybody_is_not_guarded(tmp_path: Path, make_gate: Callable[..., Gate]) -> None:
    keyless = Engine(tmp_path)
    try:
        operator = Operator(make_gate(keyless.up().url)).ready()
        assert guarded(operator) is False
        assert keyless.label() == "default", "the question changed nothing"
    finally:
        keyless.close()
