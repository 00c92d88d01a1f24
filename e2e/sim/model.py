"""The tiny language model of the reference engine and of the demo's trainer: shape, names, deterministic weights.

A decoder-only transformer of the common open-weights form (RMSNorm, rotary positions, grouped-query attention, gated
MLP). This module is pure numpy; the forward passes live in ``model_numpy`` and ``model_torch``.

Invariant: there are two views of one set of weights. A *state dict* has the checkpoint names (``q_proj``, ``k_proj``,
``v_proj``, ``gate_proj``, ``up_proj``); an engine holds *fused* parameters (``qkv_proj``, ``gate_up_proj``), as real
engines do. :func:`fused_location` is the only place that knows how one lies in the other, so a checksum over fused
parameters is independent of how the bytes travelled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

#: Epsilon of every RMSNorm.
NORM_EPS = 1e-5


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``head_size`` must be even (rotary halves); ``heads`` a multiple of ``kv_heads``."""

    vocab_size: int = 32
    hidden_size: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    intermediate_size: int = 64
    context_length: int = 256
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.head_size % 2 or self.heads % self.kv_heads:
            raise ValueError("head_size must be even and heads a multiple of kv_heads")


#: Models that an engine and a trainer can name on the command line.
MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(),
    "small": ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=192, head_size=16),
    # Large enough for the kernels of real engines, which take it as a Llama (e2e.engines.tiny).
    "llama": ModelConfig(
        vocab_size=320, hidden_size=128, heads=4, kv_heads=2, head_size=32, intermediate_size=352, context_length=1024
    ),
}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict, in checkpoint order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (queries, hidden),
            at + "self_attn.k_proj.weight": (keys, hidden),
            at + "self_attn.v_proj.weight": (keys, hidden),
            at + "self_attn.o_proj.weight": (hidden, queries),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def initial_state(config: ModelConfig, seed: int) -> dict[str, Array]:
    """A fresh state dict: the same for the same ``config`` and ``seed`` on every machine (norms are ones)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    state: dict[str, Array] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            state[name] = np.ones(shape, np.float32)
        else:
            scale = 0.5 / np.sqrt(shape[1]) if name == "lm_head.weight" else 1.0 / np.sqrt(shape[1])
            state[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return state


@dataclass(frozen=True)
class Location:
    """Rows ``[start, stop)`` of one fused parameter."""

    parameter: str
    start: int
    stop: int


_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def fused_location(config: ModelConfig, name: str) -> Location | None:
    """Where the state-dict tensor ``name`` lies in an engine's fused parameters; None for an unknown name."""
    shapes = parameter_shapes(config)
    if name not in shapes:
        return None
    part = name.split(".")[-2]
    rows = shapes[name][0]
    if part not in _FUSED:
        return Location(name, 0, rows)
    start = 0
    for sibling, fused in _FUSED.items():
        if sibling == part:
            break
        if fused == _FUSED[part]:
            start += shapes[name.replace(part, sibling)][0]
    return Location(name.replace(part, _FUSED[part]), start, start + rows)


def fused_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an engine's own parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        at = fused_location(config, name)
        assert at is not None
        shapes[at.parameter] = (max(at.stop, shapes.get(at.parameter, (0,))[0]), *shape[1:])
    return shapes


def rotary_tables(config: ModelConfig) -> tuple[Array, Array]:
    """Cosine and sine per position, each [context_length, head_size / 2]."""
    half = config.head_size // 2
    inverse = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(config.context_length, dtype=np.float64)[:, None] * inverse[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def load_config(directory: Path) -> ModelConfig:
    """The ``config.json`` of a checkpoint directory that :func:`save_config` wrote. Raises OSError or ValueError."""
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    unknown = set(raw) - set(ModelConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(f"{directory}/config.json: unknown fields {sorted(unknown)}")
    return ModelConfig(**raw)


def save_config(config: ModelConfig, directory: Path) -> None:
    """Write ``config.json`` into a checkpoint directory."""
    (directory / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
