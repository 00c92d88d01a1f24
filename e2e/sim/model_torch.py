"""The model in torch: a differentiable forward over a state dict (trainer), and the engine's cached forward.

Invariant: both compute the same function as ``model_numpy`` (tested to 1e-4 on the logits), so a trainer can
recompute an engine's log-probabilities whichever backend the engine runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .model import NORM_EPS, Array, ModelConfig, initial_state, rotary_tables
from .model_numpy import Ints, cache_shape, zeros


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def torch_state(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The same fresh state dict as :func:`e2e.sim.model.initial_state`, as torch tensors."""
    return {name: torch.from_numpy(value) for name, value in initial_state(config, seed).items()}


def forward(config: ModelConfig, state: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [B, T, vocab] of whole sequences ``tokens`` [B, T] (right padding is harmless: attention is causal)."""
    c = config
    batch, width = tokens.shape
    cos_table, sin_table = rotary_tables(c)
    cos = torch.from_numpy(cos_table[:width])[None, :, None, :]
    sin = torch.from_numpy(sin_table[:width])[None, :, None, :]
    x = F.embedding(tokens, state["model.embed_tokens.weight"])
    for i in range(c.layers):
        at = f"model.layers.{i}."
        h = _norm(x, state[at + "input_layernorm.weight"])
        q = F.linear(h, state[at + "self_attn.q_proj.weight"]).view(batch, width, c.heads, c.head_size)
        k = F.linear(h, state[at + "self_attn.k_proj.weight"]).view(batch, width, c.kv_heads, c.head_size)
        v = F.linear(h, state[at + "self_attn.v_proj.weight"]).view(batch, width, c.kv_heads, c.head_size)
        q, k = _rotate(q, cos, sin).transpose(1, 2), _rotate(k, cos, sin).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, width, -1), state[at + "self_attn.o_proj.weight"])
        h = _norm(x, state[at + "post_attention_layernorm.weight"])
        gate = F.linear(h, state[at + "mlp.gate_proj.weight"])
        up = F.linear(h, state[at + "mlp.up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, state[at + "mlp.down_proj.weight"])
    return F.linear(_norm(x, state["model.norm.weight"]), state["lm_head.weight"])


class TorchModel:
    """The engine's cached forward in torch, over the same memory as the engine's numpy parameters."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Array],
        slots: int,
        new: Callable[[tuple[int, ...]], Array] = zeros,
    ) -> None:
        torch.set_num_threads(1)  # many engines share few cores
        self.config = config
        self._parameters = {name: torch.from_numpy(value) for name, value in parameters.items()}
        cos, sin = rotary_tables(config)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)
        shape = cache_shape(config, slots)
        self._keys, self._values = torch.from_numpy(new(shape)), torch.from_numpy(new(shape))

    @torch.inference_mode()
    def forward(self, tokens: Ints, starts: Ints, lengths: Ints, slots: Ints) -> Array:
        """As :meth:`e2e.sim.model_numpy.NumpyModel.forward`."""
        c, p = self.config, self._parameters
        batch, width = tokens.shape
        padded = np.minimum(starts[:, None] + np.arange(width)[None, :], c.context_length - 1)
        positions = torch.from_numpy(padded)
        real = np.nonzero(np.arange(width)[None, :] < lengths[:, None])
        reach = int((starts + lengths).max())
        visible = (torch.arange(reach)[None, None, :] <= positions[:, :, None])[:, None]
        cos, sin = self._cos[positions][:, :, None, :], self._sin[positions][:, :, None, :]
        row, column = torch.from_numpy(real[0]), torch.from_numpy(real[1])
        slot = torch.from_numpy(slots)
        cache_slots, cache_positions = slot[row], positions[row, column]
        queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size

        x = F.embedding(torch.from_numpy(tokens), p["model.embed_tokens.weight"])
        for i in range(c.layers):
            at = f"model.layers.{i}."
            h = _norm(x, p[at + "input_layernorm.weight"])
            qkv = F.linear(h, p[at + "self_attn.qkv_proj.weight"])
            q, k, v = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
            q = _rotate(q.reshape(batch, width, c.heads, c.head_size), cos, sin)
            k = _rotate(k.reshape(batch, width, c.kv_heads, c.head_size), cos, sin)
            v = v.reshape(batch, width, c.kv_heads, c.head_size)
            self._keys[i, cache_slots, cache_positions] = k[row, column]
            self._values[i, cache_slots, cache_positions] = v[row, column]
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                self._keys[i, slot, :reach].transpose(1, 2),
                self._values[i, slot, :reach].transpose(1, 2),
                attn_mask=visible,
                scale=1 / math.sqrt(c.head_size),
                enable_gqa=True,
            )
            attended = mixed.transpose(1, 2).reshape(batch, width, queries)
            x = x + F.linear(attended, p[at + "self_attn.o_proj.weight"])
            h = _norm(x, p[at + "post_attention_layernorm.weight"])
            gate, up = F.linear(h, p[at + "mlp.gate_up_proj.weight"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, p[at + "mlp.down_proj.weight"])
        last = x[torch.arange(batch), torch.from_numpy(lengths) - 1]
        result: Array = F.linear(_norm(last, p["model.norm.weight"]), p["lm_head.weight"]).numpy()
        return result
