"""rlfleet_vllm inside of the real vLLM: who may control it, and what an update leaves behind, good or broken.

`make test-engines` runs this in a network namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file

from e2e.engines.environments import installed
from e2e.sim.model import MODELS, initial_state
from rlfleet.api import wire
from rlfleet.router import make_router
from rlfleet.sender import WeightSender
from rlfleet_vllm.control_key import is_open
from tests.gate.kit import Router
from tests.netns import INSIDE, ROOT
from tests.sender.caller import POD_UID, Operator, public
from tests.sender.test_broadcast import free_port, order, start
from tests.vllm_plugin.real import ADDRESS, KEY, USERS, VLLM, Trainer, announce, bucket, checkpoints, directory

pytestmark = pytest.mark.engines

DISK, NEW, OTHER = 103, 100, 101
Expected = dict[int, list[list[int]]]


def state(seed: int, *, without: str = "") -> dict[str, torch.Tensor]:
    """The weights of a seed."""
    weights = {name: torch.from_numpy(value) for name, value in initial_state(MODELS["llama"], seed).items()}
    return {name: tensor for name, tensor in weights.items() if not without or without not in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get(INSIDE):
        pytest.skip("vLLM listens on every interface: run this by `make test-engines`")
    if installed("VLLM") is None:
        pytest.fail("vLLM is not installed: make engines")
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return checkpoints(folder, DISK, NEW, OTHER)


@pytest.fixture(scope="module")
def one(folder: Path, expected: Expected) -> Iterator[VLLM]:
    engine = VLLM(folder, folder / str(DISK))
    try:
        yield engine.up()
    finally:
        engine.close()


@pytest.fixture
def engine(one: VLLM, folder: Path) -> VLLM:
    """The engine, paused, with the weights of DISK, whatever a test did before."""
    one.ok("/pause?mode=keep")
    one.call("/update_weights", {"update_info": {}})  # ends a session, if one is open
    load(one, folder / str(DISK))
    return one


@pytest.fixture
def trainer() -> Iterator[tuple[WeightSender, Operator]]:
    key = Ed25519PrivateKey.generate()
    # Small buckets: several for this model.
    sender = WeightSender(
        "127.0.0.1", 0, pod_uid=POD_UID, public_keys={"k1": public(key)}, bucket_bytes=400_000
    ).start()
    operator = Operator(sender.url, key, sender.incarnation)
    yield sender, operator
    operator.http.close()
    sender.close()


#: Layers as a load left them that brought some parts of fused parameters only; the tiny model has no biases.
SHARDS = """
from types import SimpleNamespace
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from rlfleet_vllm.backend import _missing_shards

def layer(kind, **given):
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, shards in given.items():
        for shard in shards:
            one = (name, SimpleNamespace(arguments={"loaded_shard_id": shard}))
            get_layerwise_info(made).loaded_weights.append(one)
    return made

model = torch.nn.Module()
model.qkv = layer(QKVParallelLinear, weight="qkv", bias="qv")
model.up = layer(MergedColumnParallelLinear, weight=[0], bias=[(0, 1)])
model.up.output_sizes = [2, 2]
model.whole = layer(QKVParallelLinear, weight=[None], bias="qkv")
print(*_missing_shards(model))
"""


def test_a_part_of_a_fused_bias_is_missed_as_one_of_a_weight_is() -> None:
    if (vllm := installed("VLLM")) is None:
        pytest.fail("vLLM is not installed: make engines")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT / "operator")}
    done = subprocess.run([str(vllm), "-c", SHARDS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["qkv.bias[k]", "up.weight[1]"]


def load(engine: VLLM, *paths: Path) -> None:
    engine.ok("/start_weight_update")
    for path in paths:
        engine.ok("/update_weights", directory(path))
    engine.ok("/finish_weight_update", {})


def test_every_published_path_that_is_none_of_users_needs_the_key(engine: VLLM) -> None:
    paths: dict[str, Any] = engine.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]
    closed = {path: methods for path, methods in paths.items() if not is_open(path)}
    assert {"/pause", "/collective_rpc", "/update_weights", "/sleep", "/weight_info"} <= closed.keys()
    for path, methods in closed.items():
        for method in methods:
            for key in (None, USERS):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = engine.http.request(method.upper(), path, headers=headers)
                assert answer.status_code == 401, f"{method} {path}"
    for path in ("/health", "/version", "/metrics"):
        assert engine.http.get(path).status_code == 200
    # What vLLM itself guards stays guarded, and the admin key is not the users'.
    assert engine.http.get("/v1/models").status_code == 401
    assert engine.http.get("/v1/models", headers={"Authorization": f"Bearer {USERS}"}).status_code == 200


async def test_a_router_that_passes_any_path_on_controls_nothing(engine: VLLM, tmp_path: Path) -> None:
    router = Router(tmp_path, "VLLMRouter")
    adapter = make_router("VLLMRouter", router.url)
    try:
        await asyncio.to_thread(router.start)
        await adapter.add(ADDRESS, seconds=30)
        for path in ("/resume", "/pause?mode=abort", "/start_weight_update", "/collective_rpc"):
            answer = await asyncio.to_thread(router.http.post, path, json={"method": "get_model"})
            assert answer.status_code == 401, path
        assert engine.http.get("/is_paused", headers={"Authorization": f"Bearer {KEY}"}).json() == {"is_paused": True}
    finally:
        await adapter.close()
        router.close()


def test_a_broadcast_of_several_buckets_makes_it_answer_as_the_new_weights(
    engine: VLLM, trainer: tuple[WeightSender, Operator], expected: Expected
) -> None:
    assert engine.greedy() == expected[DISK]
    sender, operator = trainer
    manifest = sender.publish(1, state(NEW))
    assert len(manifest.bucket_bytes) > 2
    of = order(manifest, world_size=2)
    joined = engine.join(of.group.master_port, of.group.group_name)
    sent = start(operator, of)
    assert joined.result().status_code == 200, joined.result().text
    engine.ok("/start_weight_update")
    for index in range(len(manifest.bucket_bytes)):
        engine.ok("/update_weights", bucket(manifest.bucket(index)))
    engine.ok("/finish_weight_update", {})
    engine.ok("/shutdown_weight_transfer_engine")
    assert operator.ended(sent).state is wire.OperationState.SUCCEEDED
    assert engine.greedy() == expected[NEW]


def test_staged_weights_load_part_by_part(engine: VLLM, expected: Expected, tmp_path: Path) -> None:
    parts = []
    # Parts of one fused parameter come in different directories.
    for i, (name, tensor) in enumerate(state(OTHER).items()):
        parts.append(tmp_path / str(i))
        parts[-1].mkdir()
        save_file({name: tensor}, parts[-1] / "part.safetensors")
    load(engine, *parts)
    assert engine.greedy() == expected[OTHER]


def test_a_trainer_that_sends_nothing_leaves_it_as_it_was(engine: VLLM, expected: Expected) -> None:
    trainer = Trainer(engine, free_port())
    engine.ok("/start_weight_update")
    said = engine.refused("/update_weights", announce(state(NEW), timeout_s=1))
    assert "nothing was loaded, weights are as before" in said
    assert engine.greedy() == expected[DISK]
    del trainer


@pytest.mark.parametrize("repair", ["session", "reload_weights"])
def test_an_update_that_breaks_off_is_not_whole_before_another_load(
    engine: VLLM, expected: Expected, folder: Path, repair: str
) -> None:
    trainer = Trainer(engine, free_port())
    names = list(state(NEW))
    first, rest = ({n: state(NEW)[n] for n in part} for part in (names[:5], names[5:]))
    engine.ok("/start_weight_update")
    loading = engine.soon("/update_weights", announce(first))
    trainer.send(first)
    assert loading.result().status_code == 200, loading.result().text
    assert "weights are incomplete now" in engine.refused("/update_weights", announce(rest, timeout_s=1))
    del trainer
    # Nothing that could be taken for success, and no checksum.
    engine.ok("/start_weight_update")
    assert "an earlier one left the weights incomplete" in engine.refused("/finish_weight_update", {})
    assert engine.call("/weight_checker", {"action": "checksum"}).status_code == 500
    engine.refused("/update_weights", {"update_info": {}})
    if repair == "session":
        load(engine, folder / str(OTHER))
    else:
        arguments = {"weights_path": str(folder / str(OTHER))}
        engine.ok("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
    assert engine.greedy() == expected[OTHER]


@pytest.mark.parametrize("lacking", ["layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_weights_that_lack_something_are_not_taken_for_whole(
    engine: VLLM, expected: Expected, folder: Path, tmp_path: Path, lacking: str
) -> None:
    save_file(state(NEW, without=lacking), tmp_path / "most.safetensors")
    engine.ok("/start_weight_update")
    engine.ok("/update_weights", directory(tmp_path))
    said = engine.refused("/finish_weight_update", {"weight_version": "9"})
    assert "were not sent or not whole, weights are incomplete now" in said
    fused = {"layers.1.self_attn.k_proj": "qkv_proj.weight[k]", "layers.0.mlp.up_proj": "gate_up_proj.weight[1]"}
    assert fused.get(lacking, lacking) in said
    told = engine.http.get("/weight_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert told["weight_version"] != "9"
    engine.refused("/update_weights", {"update_info": {}})
    load(engine, folder / str(OTHER))
    assert engine.greedy() == expected[OTHER]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.layers.0.mlp.down_proj.weight": torch.zeros(3, 5)}, "the load broke off"),
        ({"model.nothing": torch.zeros(4)}, "nothing"),
    ],
)
def test_weights_of_another_model_are_named_and_repaired(
    engine: VLLM, expected: Expected, folder: Path, tmp_path: Path, change: dict[str, torch.Tensor], says: str
) -> None:
    save_file(state(NEW) | change, tmp_path / "wrong.safetensors")
    engine.ok("/start_weight_update")
    said = engine.refused("/update_weights", directory(tmp_path))
    assert "weights are incomplete now" in said
    assert says in said
    load(engine, folder / str(OTHER))
    assert engine.greedy() == expected[OTHER]


def test_a_group_that_never_forms_ends_in_its_own_time(engine: VLLM, expected: Expected) -> None:
    answer = engine.join(9, "g", seconds=1).result()
    assert answer.status_code == 500
    assert "was not joined as rank 1 of 2 within 1 s" in answer.text
    assert engine.greedy() == expected[DISK]
