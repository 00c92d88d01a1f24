"""The training loop of the demo, free of where rollouts and weights go: rollouts in, one version out, each step.

Invariant: the loop ends with an error as soon as an engine answers from weights other than those it claims
(LogprobError), claims others than the version committed last (LogprobError), or gives anything but a whole answer
(RolloutError).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from .model import MODELS, ModelConfig, save_config
from .policy import History, LogprobError, Policy
from .rollouts import RolloutClient, Sample
from .task import prompts


class SyncError(Exception):
    """A version did not reach the fleet."""


class Publish(Protocol):
    """Bring one version into the whole fleet; returns a JSON-ready report. Raises :class:`SyncError`."""

    def __call__(self, version: int, state: Mapping[str, Tensor]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Settings:
    """One training run. ``sync`` False: only the base version reaches the engines."""

    steps: int = 30
    seed: int = 0
    model: str = "tiny"
    batch: int = 64
    new_tokens: int = 8
    learning_rate: float = 0.01
    tolerance: float = 1e-3
    carried: int = 4
    carried_tokens: int = 96
    sync: bool = True
    serving_seconds: float = 180


def _only(version: int, samples: list[Sample]) -> None:
    """LogprobError unless every token was sampled under ``version``."""
    others = {s.version for sample in samples for s in sample.spans} - {str(version)}
    if others:
        raise LogprobError(f"version {version} is committed everywhere, yet answers came from {sorted(others)}")


def train(
    settings: Settings,
    rollouts: RolloutClient,
    publish: Publish,
    progress: IO[str],
    checkpoint: Path | None = None,
    *,
    step: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> list[float]:
    """Run the loop; returns the mean reward per step. One JSON line per version goes to ``progress``.

    ``checkpoint``: folder to create with the final weights, as an engine's ``--model`` takes it. ``step``: entered with
    the version before it is trained, left when it is committed; engines may be asleep in between.
    """
    config = MODELS[settings.model]
    policy = Policy(config, seed=settings.seed, learning_rate=settings.learning_rate)
    history = History(config)
    rng = random.Random(settings.seed)

    def report(line: dict[str, Any]) -> None:
        progress.write(json.dumps(line) + "\n")
        progress.flush()

    history.add("-1", policy.weights())
    report({"version": -1, "sync": publish(-1, policy.weights())})
    held = -1
    rollouts.wait_serving(prompts(rng, 1, config.vocab_size)[0], settings.serving_seconds)
    curve: list[float] = []
    for version in range(settings.steps):
        began = time.monotonic()
        samples = rollouts.submit(prompts(rng, settings.batch, config.vocab_size), settings.new_tokens).result()
        rolled_out = time.monotonic()
        _only(held, samples)
        worst = history.check(samples, settings.tolerance)
        with step(version):
            entered = time.monotonic()
            result = policy.learn(samples)
            curve.append(result.mean_reward)
            line: dict[str, Any] = {
                "version": version,
                "sampledFrom": held,
                "meanReward": result.mean_reward,
                "loss": result.loss,
                "logprobMaxDiff": worst,
                "rollouts": len(samples),
                "rolloutSeconds": rolled_out - began,
                "gpuSeconds": entered - rolled_out,
                "trainSeconds": time.monotonic() - entered,
            }
            if settings.sync:
                history.add(str(version), policy.weights())
                crossing = rollouts.submit(prompts(rng, settings.carried, config.vocab_size), settings.carried_tokens)
                before_sync = time.monotonic()
                line["sync"] = publish(version, policy.weights())
                line["syncSeconds"] = time.monotonic() - before_sync
                held = version
                if carried := crossing.result():
                    line["carried"] = {
                        "rollouts": len(carried),
                        "crossing": sum(len(s.spans) > 1 for s in carried),
                        "retracted": sum(s.retractions > 0 for s in carried),
                        "logprobMaxDiff": history.check(carried, settings.tolerance),
                    }
        rollouts.wait_serving(prompts(rng, 1, config.vocab_size)[0], settings.serving_seconds)
        report(line)
        print(
            f"version {version:3d}  reward {result.mean_reward:.3f}  loss {result.loss:+.4f}  "
            f"logprob diff {worst:.1e}  rollouts {line['rolloutSeconds']:.2f} s  "
            + (f"sync {line['syncSeconds']:.2f} s" if settings.sync else "not synced"),
            flush=True,
        )
    if checkpoint is not None:
        write_checkpoint(config, policy.weights(), checkpoint)
    return curve


def write_checkpoint(config: ModelConfig, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write config and weights into a new folder, which appears complete or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True)
    save_config(config, unfinished)
    save_file({name: value.contiguous() for name, value in state.items()}, unfinished / "model.safetensors")
    unfinished.rename(folder)
