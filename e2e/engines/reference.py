"""Were these tokens chosen by the weights that an engine names? The policy's own forward judges, token by token.

Invariant: a token counts as greedy when its logit is within ``TOLERANCE`` of the largest one; other weights miss that
by far more, rounding by far less. (That this forward is the real model's is shown by the answers of transformers.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from e2e.engines.tiny import MODEL
from e2e.sim.model import MODELS
from e2e.sim.model_torch import forward, torch_state

TOLERANCE = 1e-3


def lags(seed: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """By how much each token's logit is below the largest, under the weights of ``seed``."""
    return _lags(seed, tuple(prompt), tuple(tokens))


# Greedy answers under load are the same ones over and over, and to judge one takes as long as to ask for it.
@functools.cache
def _lags(seed: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    whole = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = forward(MODELS[MODEL], _weights(seed), whole)[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return [float(x) for x in logits.max(-1).values - chosen]


@functools.cache
def _weights(seed: int) -> dict[str, torch.Tensor]:
    return torch_state(MODELS[MODEL], seed)


def untrue(
    prompt: Sequence[int], tokens: Sequence[int], spans: Sequence[tuple[str, int, int]], seeds: Mapping[str, int]
) -> str | None:
    """What is wrong with an answer's claim about versions, or None. ``seeds``: by version."""
    if [i for _, start, end in spans for i in range(start, end)] != list(range(len(tokens))):
        return f"spans {spans} do not cover {len(tokens)} tokens"
    for version, start, end in spans:
        if version not in seeds:
            return f"version {version} was never published"
        worst = max(lags(seeds[version], prompt, tokens)[start:end])
        if worst > TOLERANCE:
            return f"tokens {start}..{end} are not version {version}'s: one lags by {worst:.3g}"
    return None
