"""The model's three forward passes are one function, and fused parameters are the state dict, only laid out anew."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from e2e.sim.engine.weights import LoadError, WeightStore
from e2e.sim.model import MODELS, ModelConfig, initial_state, parameter_shapes
from e2e.sim.model_numpy import NumpyModel
from e2e.sim.model_torch import TorchModel, forward, torch_state


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("cached", [NumpyModel, TorchModel])
def test_cached_forward_equals_the_trainers(name: str, cached: type[NumpyModel] | type[TorchModel]) -> None:
    config = MODELS[name]
    model = cached(config, WeightStore(config, initial_state(config, 3)).parameters, 5)
    rng = np.random.default_rng(0)
    lengths = np.array([7, 3, 12])
    sequences = rng.integers(0, config.vocab_size, (3, 12))
    slots = np.array([4, 0, 2])
    with torch.no_grad():
        wanted = forward(config, torch_state(config, 3), torch.from_numpy(sequences)).numpy()

    # prompts of different lengths in one padded batch, then one token at a time
    first = model.forward(sequences, np.zeros(3, np.int64), lengths, slots)
    np.testing.assert_allclose(first, wanted[np.arange(3), lengths - 1], atol=1e-4)
    for position in range(7, 12):
        step = model.forward(sequences[:1, position : position + 1], np.array([position]), np.array([1]), slots[:1])
        np.testing.assert_allclose(step, wanted[:1, position], atol=1e-4)


def test_initial_state_depends_on_the_seed_only() -> None:
    config = MODELS["tiny"]
    one, same, other = initial_state(config, 1), initial_state(config, 1), initial_state(config, 2)
    assert list(one) == list(parameter_shapes(config))
    assert all(np.array_equal(one[n], same[n]) for n in one)
    assert not np.array_equal(one["lm_head.weight"], other["lm_head.weight"])


def test_fused_parameters_hold_every_state_tensor_once() -> None:
    config = ModelConfig(heads=4, kv_heads=1, head_size=6)
    state = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(parameter_shapes(config).items())}
    store = WeightStore(config, state)
    for name, value in state.items():
        held = store.get(name)
        assert held is not None
        np.testing.assert_array_equal(held, value)
    assert sum(v.size for v in store.parameters.values()) == sum(v.size for v in state.values())
    assert "model.layers.0.self_attn.qkv_proj.weight" in store.parameters
    assert "model.layers.0.self_attn.q_proj.weight" not in store.parameters


def test_load_stops_at_the_first_wrong_shape_and_keeps_what_it_wrote() -> None:
    config = MODELS["tiny"]
    store = WeightStore(config, initial_state(config, 0))
    before = store.checksums()
    new = initial_state(config, 1)
    broken = [
        ("model.embed_tokens.weight", new["model.embed_tokens.weight"]),
        ("model.layers.0.self_attn.k_proj.weight", np.zeros((2, 2), np.float32)),
        ("lm_head.weight", new["lm_head.weight"]),
    ]
    with pytest.raises(LoadError, match="k_proj"):
        store.load(broken)
    after = store.checksums()
    assert {n for n in before if before[n] != after[n]} == {"model.embed_tokens.weight"}
    assert store.load([("model.no_such.weight", np.zeros(3, np.float32))]) == 0


def test_config_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        ModelConfig(**{**asdict(MODELS["tiny"]), "kv_heads": 3})
