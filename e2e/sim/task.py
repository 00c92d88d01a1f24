"""The task that the demo's policy learns: continue a prompt with tokens of the class that its first token names.

A prompt is ``[rule, noise, noise, noise]`` with ``rule`` below ``CLASSES``; a generated token is right when its id
modulo ``CLASSES`` equals the rule. Chance gives a mean reward of 1 / CLASSES; a perfect policy gets 1.
Invariant: rewards depend on the answer alone, so only an engine that holds learned weights can raise them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

CLASSES = 8
PROMPT_TOKENS = 4

#: Mean reward of a policy that knows nothing.
CHANCE = 1 / CLASSES


def prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    """``count`` prompts; every rule comes up equally often, the noise is random and never a rule token."""
    noise = PROMPT_TOKENS - 1
    return [[i % CLASSES, *(rng.randrange(CLASSES, vocab_size) for _ in range(noise))] for i in range(count)]


def rewards(prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """1.0 for each right token of ``answer``, else 0.0."""
    return [float(token % CLASSES == prompt[0]) for token in answer]
