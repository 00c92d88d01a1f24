"""Broadcast groups over real gloo: the weights become the sender's, and what goes wrong does so as documented."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from e2e.sim.model import MODELS, initial_state
from e2e.sim.tensors import write_safetensors
from tests.rank0 import Rank0

CONFIG = MODELS["tiny"]
NAMES = list(initial_state(CONFIG, 0))


class Sender(Rank0):
    """What a trainer sends."""

    def broadcast(self, data: torch.Tensor) -> None:
        self.group.broadcast(data, 0).wait()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


class Background:
    """One blocking call in a thread."""

    def __init__(self, call: Any) -> None:
        self.answer: Any = None

        def run() -> None:
            self.answer = call()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answer


def group_body(sender: Sender, rank: int, world_size: int, name: str = "g") -> dict[str, Any]:
    return {
        "master_address": "127.0.0.1",
        "master_port": sender.port,
        "rank_offset": rank,
        "world_size": world_size,
        "group_name": name,
        "backend": "gloo",
    }


def update_body(names: list[str], shapes: list[list[int]], **more: Any) -> dict[str, Any]:
    return {
        "names": names,
        "dtypes": ["float32"] * len(names),
        "shapes": shapes,
        "group_name": "g",
        "flush_cache": False,
        **more,
    }


def flat(state: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(v.tobytes() for v in state.values()), np.uint8).copy())


def test_broadcast_and_disk_give_the_same_checksums_on_all_engines(
    start_engine: Any, sender: Sender, tmp_path: Any
) -> None:
    new = initial_state(CONFIG, 7)
    engines = [start_engine("torch"), start_engine("torch")]
    base = engines[0].checksum()
    assert engines[1].checksum() == base
    for engine in engines:
        assert engine.post("/pause_generation", {"mode": "retract"}).status_code == 200
    joins = [
        Background(lambda e=e, r=r: e.post("/init_weights_update_group", group_body(sender, r, 3)))
        for r, e in enumerate(engines, 1)
    ]
    sender.open("g", 3)
    assert [j.result().status_code for j in joins] == [200, 200]
    again = engines[0].post("/init_weights_update_group", group_body(sender, 1, 3))
    assert again.status_code == 400
    assert "already been created" in again.text

    assert all(e.post("/begin_weight_update").status_code == 200 for e in engines)
    assert engines[0].post("/begin_weight_update").status_code == 400
    # one bucket as raw bytes, the rest tensor by tensor: both forms of the real engine
    first = {n: new[n] for n in NAMES[:10]}
    body = update_body(list(first), [list(v.shape) for v in first.values()], load_format="flattened_bucket")
    calls = [Background(lambda e=e: e.post("/update_weights_from_distributed", body)) for e in engines]
    sender.broadcast(flat(first))
    assert [c.result().json()["success"] for c in calls] == [True, True]
    rest = {n: new[n] for n in NAMES[10:]}
    plain = update_body(list(rest), [list(v.shape) for v in rest.values()])
    calls = [Background(lambda e=e: e.post("/update_weights_from_distributed", plain)) for e in engines]
    for value in rest.values():
        sender.broadcast(torch.from_numpy(value))
    assert [c.result().json()["success"] for c in calls] == [True, True]
    assert all(e.post("/end_weight_update").status_code == 200 for e in engines)
    assert engines[0].post("/end_weight_update").status_code == 400
    assert engines[0].http.get("/model_info").json()["weight_version"] == "default"  # the label is the caller's work

    directory = tmp_path / "ckpt"
    directory.mkdir()
    write_safetensors(directory / "model-00001-of-00001.safetensors", new)
    disk = start_engine("numpy")
    assert disk.checksum() == base
    assert disk.post("/update_weights_from_disk", {"model_path": str(directory)}).status_code == 200
    assert {engines[0].checksum(), engines[1].checksum(), disk.checksum()} == {disk.checksum()}
    assert disk.checksum() != base

    for engine in engines:
        engine.post("/continue_generation")
        assert engine.post("/destroy_weights_update_group", {"group_name": "g"}).status_code == 200
        assert engine.post("/destroy_weights_update_group", {"group_name": "g"}).status_code == 400
    greedy = [e.generate([1, 2, 3], 6, temperature=0)["output_ids"] for e in (*engines, disk)]
    assert greedy[0] == greedy[1] == greedy[2]


def test_update_needs_session_and_group_and_says_success_for_unknown_names(start_engine: Any, sender: Sender) -> None:
    engine = start_engine("torch")
    before = engine.checksum()
    one = update_body(["model.norm.weight"], [[CONFIG.hidden_size]])
    refused = engine.post("/update_weights_from_distributed", one)
    assert refused.status_code == 400
    assert "begin_weight_update" in refused.text
    engine.post("/begin_weight_update")
    assert engine.post("/update_weights_from_distributed", one).status_code == 400  # no such group
    join = Background(lambda: engine.post("/init_weights_update_group", group_body(sender, 1, 2)))
    sender.open("g", 2)
    assert join.result().status_code == 200

    unknown = update_body(["model.no_such.weight"], [[4]], weight_version="9")
    call = Background(lambda: engine.post("/update_weights_from_distributed", unknown))
    sender.broadcast(torch.ones(4))
    assert call.result().status_code == 200
    assert engine.http.get("/model_info").json()["weight_version"] == "9"  # a success that loaded nothing
    assert engine.checksum() == before

    good = initial_state(CONFIG, 5)["lm_head.weight"]
    wrong = update_body(["lm_head.weight", "model.norm.weight"], [list(good.shape), [3]], weight_version="10")
    call = Background(lambda: engine.post("/update_weights_from_distributed", wrong))
    sender.broadcast(torch.from_numpy(good))
    sender.broadcast(torch.ones(3))
    answer = call.result()
    assert answer.status_code == 400
    assert "partially updated" in answer.text
    assert engine.http.get("/model_info").json()["weight_version"] == "9"
    assert engine.checksum() != before  # a failure that was not a no-op


def test_a_missing_trainer_blocks_the_engine_and_a_late_one_heals_it(start_engine: Any, sender: Sender) -> None:
    engine = start_engine("torch")
    join = Background(lambda: engine.post("/init_weights_update_group", group_body(sender, 1, 2)))
    stuck = Background(lambda: engine.generate([1, 2], 3))
    # The scheduler is inside the rendezvous: the front end still answers, the request does not move.
    engine.wait_for(lambda: engine.http.get("/model_info").status_code == 200)
    assert engine.http.get("/ready").status_code == 200
    assert stuck.answer is None
    sender.open("g", 2)
    assert join.result().status_code == 200
    assert len(stuck.result()["output_ids"]) == 3


def test_a_rendezvous_that_nobody_joins_ends_in_a_refusal(start_engine: Any, sender: Sender) -> None:
    engine = start_engine("torch", "--group-timeout", "1")
    sender.close()  # nothing listens there any more
    answer = engine.post("/init_weights_update_group", group_body(sender, 1, 2))
    assert answer.status_code == 400
    assert not answer.json()["success"]
    assert len(engine.generate([1], 2)["output_ids"]) == 2  # and the engine is well again


def test_a_trainer_that_dies_in_mid_broadcast_loads_nothing(start_engine: Any, sender: Sender) -> None:
    engine = start_engine("torch")
    before = engine.checksum()
    join = Background(lambda: engine.post("/init_weights_update_group", group_body(sender, 1, 2)))
    sender.open("g", 2)
    join.result()
    engine.post("/begin_weight_update")
    new = initial_state(CONFIG, 5)
    body = update_body(NAMES, [list(new[n].shape) for n in NAMES])
    call = Background(lambda: engine.post("/update_weights_from_distributed", body))
    sender.broadcast(torch.from_numpy(new[NAMES[0]]))
    sender.close()
    assert call.result().status_code == 400
    assert engine.checksum() == before
    assert engine.post("/end_weight_update").status_code == 200
    assert engine.post("/destroy_weights_update_group", {"group_name": "g"}).status_code == 200


def test_the_numpy_engine_has_no_groups(start_engine: Any, sender: Sender) -> None:
    answer = start_engine("numpy").post("/init_weights_update_group", group_body(sender, 1, 2))
    assert answer.status_code == 400
    assert not answer.json()["success"]
