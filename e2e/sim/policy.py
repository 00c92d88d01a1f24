"""The policy under training: REINFORCE with a baseline, Adam, and the recomputation of engines' log-probabilities.

Invariant: log-probabilities are recomputed with exactly the weights that were published under the version that the
engine claims, over the full prefix. An engine that answers from other weights, or from a stale cache, can not pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import ModelConfig
from .model_torch import forward, torch_state
from .rollouts import Sample
from .task import rewards


class LogprobError(Exception):
    """An engine's log-probabilities are not those of the weights that it claims to hold."""


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step saw and did."""

    mean_reward: float
    loss: float


def _padded(samples: Sequence[Sample]) -> Tensor:
    width = max(len(s.prompt) + len(s.output) for s in samples)
    tokens = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        whole = sample.prompt + sample.output
        tokens[row, : len(whole)] = torch.tensor(whole)
    return tokens


def _token_logprobs(config: ModelConfig, state: Mapping[str, Tensor], samples: Sequence[Sample]) -> list[Tensor]:
    """Per sample, the log-probability of each output token given everything before it."""
    tokens = _padded(samples)
    logprobs = torch.log_softmax(forward(config, state, tokens[:, :-1]), dim=-1)
    chosen = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return [chosen[row, len(s.prompt) - 1 : len(s.prompt) + len(s.output) - 1] for row, s in enumerate(samples)]


class History:
    """The weights of every version published so far, by label."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._states: dict[str, dict[str, Tensor]] = {}

    def add(self, label: str, state: Mapping[str, Tensor]) -> None:
        """Remember a copy of ``state`` as the weights of ``label``."""
        self._states[label] = {name: value.detach().clone() for name, value in state.items()}

    @torch.no_grad()
    def check(self, samples: Sequence[Sample], tolerance: float) -> float:
        """The largest difference between engines' and recomputed log-probabilities.

        LogprobError for a version that was never published, or a difference above ``tolerance`` (or not a number).
        """
        by_version: defaultdict[str, list[tuple[Sample, int, int]]] = defaultdict(list)
        for sample in samples:
            for span in sample.spans:
                by_version[span.version].append((sample, span.start, span.stop))
        worst = 0.0
        for version, parts in by_version.items():
            if version not in self._states:
                raise LogprobError(f"tokens from version {version!r}, which was never published")
            recomputed = _token_logprobs(self._config, self._states[version], [s for s, _, _ in parts])
            for (sample, start, stop), ours in zip(parts, recomputed, strict=True):
                theirs = torch.tensor(sample.logprobs[start:stop])
                difference = float((ours[start:stop] - theirs).abs().max())
                if not difference <= tolerance:
                    raise LogprobError(
                        f"tokens {start}..{stop} of an answer claim version {version}, but their log-probabilities are "
                        f"not those of its weights (largest difference {difference:.3g}, allowed {tolerance:.0e}; "
                        f"spans {[(s.version, s.start, s.stop) for s in sample.spans]}, "
                        f"{sample.retractions} retractions)"
                    )
                worst = max(worst, difference)
        return worst


class Policy:
    """Weights and optimiser. ``state`` is the live state dict under its checkpoint names."""

    def __init__(self, config: ModelConfig, *, seed: int, learning_rate: float) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.state = {name: value.requires_grad_() for name, value in torch_state(config, seed).items()}
        self._optimiser = torch.optim.Adam(self.state.values(), lr=learning_rate)

    def weights(self) -> dict[str, Tensor]:
        """The state dict to publish (detached; shares memory with the live one)."""
        return {name: value.detach() for name, value in self.state.items()}

    def learn(self, samples: Sequence[Sample]) -> StepResult:
        """One policy-gradient step. The baseline is the mean reward of the batch's samples of the same rule."""
        earned = torch.tensor([rewards(s.prompt, s.output) for s in samples])
        rules = [s.prompt[0] for s in samples]
        baseline = torch.zeros(len(samples), 1)
        for rule in set(rules):
            same = torch.tensor([r == rule for r in rules])
            baseline[same] = earned[same].mean()
        advantage = earned - baseline
        advantage = advantage / (advantage.std() + 1e-6)
        logprobs = torch.stack(_token_logprobs(self.config, self.state, samples))
        loss = -(advantage * logprobs).mean()
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return StepResult(float(earned.mean()), float(loss.detach()))
