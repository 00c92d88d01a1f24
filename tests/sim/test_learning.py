"""The training loop learns through an engine that it reloads over HTTP, and only so; lying engines are found out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from e2e.sim.loop import Settings, train
from e2e.sim.policy import LogprobError
from e2e.sim.rollouts import RolloutClient, RolloutError, parse
from e2e.sim.task import CHANCE, rewards
from e2e.sim.tensors import write_safetensors

Load = Callable[[int, Mapping[str, Tensor]], dict[str, Any]]


class Disk:
    """Brings a version into one engine through files, the safe way unless told otherwise."""

    def __init__(self, engine: Any, directory: Path) -> None:
        self.engine, self.directory = engine, directory
        self.pause, self.load, self.label = "retract", True, True

    def __call__(self, version: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
        engine = self.engine
        if version >= 0:  # the carried rollouts must be under way, so that the change of weights hits them
            engine.wait_for(lambda: engine.load()["num_running_reqs"] > 0)
        write_safetensors(self.directory / "model.safetensors", {n: t.numpy() for n, t in state.items()})
        assert engine.post("/pause_generation", {"mode": self.pause}).status_code == 200
        if self.load:
            body = {"model_path": str(self.directory), "flush_cache": False}
            assert engine.post("/update_weights_from_disk", body).status_code == 200
        if self.label:
            engine.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        engine.post("/continue_generation")
        return {}


@pytest.fixture
def disk(start_engine: Any, tmp_path: Path) -> Disk:
    directory = tmp_path / "weights"
    directory.mkdir()
    # The engine's own seed differs from the trainer's: its first weights are not the base version.
    return Disk(start_engine("numpy", "--seed", "99", "--step-ms", "5"), directory)


@pytest.fixture
def rollouts(disk: Disk) -> Iterator[RolloutClient]:
    with RolloutClient(disk.engine.url, timeout=60) as client:
        yield client


def test_reward_rises_with_syncs_and_every_token_is_accounted_for(disk: Disk, rollouts: RolloutClient) -> None:
    progress = io.StringIO()
    curve = train(Settings(steps=30, seed=0, carried_tokens=48), rollouts, disk, progress)
    assert curve[0] < CHANCE + 0.1
    assert sum(curve[-5:]) / 5 > 0.7
    lines = [json.loads(line) for line in progress.getvalue().splitlines()]
    assert [line["version"] for line in lines] == list(range(-1, 30))
    assert max(line["logprobMaxDiff"] for line in lines[1:]) <= 1e-3
    assert sum(line["carried"]["crossing"] for line in lines[1:]) > 0
    assert disk.engine.http.get("/model_info").json()["weight_version"] == "29"


def test_reward_does_not_rise_without_syncs(disk: Disk, rollouts: RolloutClient) -> None:
    curve = train(Settings(steps=30, seed=0, sync=False), rollouts, disk, io.StringIO())
    assert max(curve) < CHANCE + 0.1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"load": False}, "log-probabilities are not those of its weights"),  # labelled, nothing loaded
        ({"label": False}, "log-probabilities are not those of its weights"),  # loaded, label old
        ({"load": False, "label": False}, "version 0 is committed everywhere"),  # left out altogether
        ({"pause": "in_place"}, "log-probabilities are not those of its weights"),  # cache of the old weights kept
    ],
)
def test_an_engine_that_claims_what_it_does_not_hold_ends_the_run(
    disk: Disk, rollouts: RolloutClient, how: dict[str, Any], message: str
) -> None:
    def publish(version: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
        if version == 0:
            for name, value in how.items():
                setattr(disk, name, value)
        return disk(version, state)

    with pytest.raises(LogprobError, match=message):
        train(Settings(steps=2, seed=0, carried_tokens=200), rollouts, publish, io.StringIO())


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
        "num_retractions": 1,
        "output_token_logprobs": [[-0.5, 3, None], [-0.7, 4, None]],
    }
    return {"output_ids": [3, 4], "meta_info": {**meta, **changes}}


def test_parse_refuses_answers_that_can_not_be_believed() -> None:
    assert [s.version for s in parse([1], 2, answer()).spans] == ["1", "2"]
    for broken in (
        answer(finish_reason={"type": "abort"}),
        answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        answer(output_token_logprobs=[[-0.5, 3, None], [-0.7, 5, None]]),
        {"output_ids": [3, 4]},
    ):
        with pytest.raises(RolloutError):
            parse([1], 2, broken)
    with pytest.raises(RolloutError, match="asked for 3"):
        parse([1], 3, answer())


def test_rewards_count_tokens_of_the_prompts_class() -> None:
    assert rewards([3, 20, 9, 31], [3, 11, 12, 27]) == [1.0, 1.0, 0.0, 1.0]
