"""Forward pass in numpy over an engine's fused parameters, with a slot-based key/value cache.

Invariant: a forward pass reads keys and values only from the cache, and writes those of the new tokens there first;
so tokens that an engine computed under old weights stay old until their slot is recomputed. That is what makes
"retract recomputes, in_place mixes" real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from .model import NORM_EPS, Array, ModelConfig, rotary_tables

Ints = npt.NDArray[np.int64]


def _norm(x: Array, weight: Array) -> Array:
    scale: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(NORM_EPS))
    result: Array = x / scale * weight
    return result


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def zeros(shape: tuple[int, ...]) -> Array:
    """Memory of no device."""
    return np.zeros(shape, np.float32)


def cache_shape(config: ModelConfig, slots: int) -> tuple[int, ...]:
    """Shape of the keys, and of the values, of ``slots`` sequences."""
    return (config.layers, slots, config.context_length, config.kv_heads, config.head_size)


class NumpyModel:
    """The model with its cache of ``slots`` sequences; ``parameters`` are read at every call, never copied."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Array],
        slots: int,
        new: Callable[[tuple[int, ...]], Array] = zeros,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self._cos, self._sin = rotary_tables(config)
        self._keys, self._values = new(cache_shape(config, slots)), new(cache_shape(config, slots))

    def forward(self, tokens: Ints, starts: Ints, lengths: Ints, slots: Ints) -> Array:
        """Logits [B, vocab] after the last new token of each sequence.

        ``tokens`` [B, T] are the new tokens, right-padded; row b's are at positions ``starts[b]...`` and
        ``lengths[b]`` of them are real. What lies in the cache before ``starts[b]`` is used as it is.
        """
        c, p = self.config, self.parameters
        batch, width = tokens.shape
        rows = np.arange(batch)
        # Padding may point past the end of the context: clip it; a later real token overwrites what it wrote.
        positions = np.minimum(starts[:, None] + np.arange(width)[None, :], c.context_length - 1)
        real = np.arange(width)[None, :] < lengths[:, None]
        reach = int((starts + lengths).max())
        visible = np.arange(reach)[None, None, :] <= positions[:, :, None]
        cos, sin = self._cos[positions][:, :, None, :], self._sin[positions][:, :, None, :]
        groups = c.heads // c.kv_heads
        queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
        where = np.nonzero(real)
        cache_slots, cache_positions = slots[where[0]], positions[where]

        x: Array = p["model.embed_tokens.weight"][tokens]
        for i in range(c.layers):
            at = f"model.layers.{i}."
            h = _norm(x, p[at + "input_layernorm.weight"])
            qkv = h @ p[at + "self_attn.qkv_proj.weight"].T
            q = qkv[..., :queries].reshape(batch, width, c.heads, c.head_size)
            k = qkv[..., queries : queries + keys].reshape(batch, width, c.kv_heads, c.head_size)
            v = qkv[..., queries + keys :].reshape(batch, width, c.kv_heads, c.head_size)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self._keys[i, cache_slots, cache_positions] = k[where]
            self._values[i, cache_slots, cache_positions] = v[where]
            all_k, all_v = self._keys[i, slots, :reach], self._values[i, slots, :reach]
            q = q.reshape(batch, width, c.kv_heads, groups, c.head_size).transpose(0, 2, 3, 1, 4)  # b k g t d
            scores = q @ all_k.transpose(0, 2, 3, 1)[:, :, None] / np.float32(np.sqrt(c.head_size))
            scores = np.where(visible[:, None, None], scores, np.float32(-1e30))
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = scores / scores.sum(axis=-1, keepdims=True)
            mixed = weights @ all_v.transpose(0, 2, 1, 3)[:, :, None]  # b k g t d
            attended = mixed.transpose(0, 3, 1, 2, 4).reshape(batch, width, queries)
            x = x + attended @ p[at + "self_attn.o_proj.weight"].T
            h = _norm(x, p[at + "post_attention_layernorm.weight"])
            gate_up = h @ p[at + "mlp.gate_up_proj.weight"].T
            gate, up = gate_up[..., : c.intermediate_size], gate_up[..., c.intermediate_size :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p[at + "mlp.down_proj.weight"].T
        last = _norm(x[rows, lengths - 1], p["model.norm.weight"])
        logits: Array = last @ p["lm_head.weight"].T
        return logits
