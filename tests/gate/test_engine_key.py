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


def test_slime_s_own_update_of_an_engine_that_it_did_not_start_changes_nothing(
    engine: Engine, make_gate: Callable[..., Gate]
) -> None:
    """The calls of slime/backends/sglang_utils/sglang_engine.py (03b32d8b) in the order of its update_weights
    (update_weight_from_distributed.py, 02a644a7); miles (mixin.py, 0015b711) begins and ends with the same ones."""
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_ADMIN_KEY=KEY)).ready()
    operator.serve(Weights.of(5), 5)
    group = {"group_name": "slime-pp_0"}
    rendezvous = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "nccl"}
    tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "flush_cache": False, "weight_version": "6"}
    calls = [
        ("POST", "init_weights_update_group", {**group, **rendezvous}),
        ("POST", "pause_generation", {}),
        ("GET", "flush_cache", None),
        ("POST", "update_weights_from_distributed", {**group, **tensors}),
        ("POST", "continue_generation", {}),
        ("POST", "destroy_weights_update_group", group),
    ]
    # Its first call fails, which ends its update; the others would, too.
    assert [engine.http.request(how, f"/{path}", json=body).status_code for how, path, body in calls] == [401] * 6
    assert (engine.label(), engine.ready()) == ("5", 200)
    status = operator.status()
    assert (status["holds"]["version"], status["engine"]["paused"]) == (5, False)
