"""``python -m e2e.sim.trainer``: a real policy-gradient loop whose rollouts come from the fleet that it keeps in sync.

Per version: rollouts through the router, log-probabilities recomputed and compared, one optimiser step, publish,
sync. A few long rollouts are started before each sync and collected after it, so that some cross the change of
weights in mid-answer; their tokens are checked span by span. They are not trained on.

Invariant: the run ends with a non-zero exit code as soon as an engine answers from weights other than those it
claims, or claims other weights than the version committed last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from .model import MODELS
from .policy import History, LogprobError, Policy
from .rollouts import RolloutClient, RolloutError, Sample
from .task import prompts

EXIT_LOGPROBS = 2
EXIT_SYNC = 3
EXIT_ROLLOUTS = 4


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


def train(settings: Settings, rollouts: RolloutClient, publish: Publish, progress: IO[str]) -> list[float]:
    """Run the loop; returns the mean reward per step. One JSON line per version goes to ``progress``."""
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
            "trainSeconds": time.monotonic() - rolled_out,
        }
        if settings.sync:
            history.add(str(version), policy.weights())
            crossing = rollouts.submit(prompts(rng, settings.carried, config.vocab_size), settings.carried_tokens)
            before_sync = time.monotonic()
            line["sync"] = publish(version, policy.weights())
            line["syncSeconds"] = time.monotonic() - before_sync
            held = version
            carried = crossing.result()
            line["carried"] = {
                "rollouts": len(carried),
                "crossing": sum(len(s.spans) > 1 for s in carried),
                "retracted": sum(s.retractions > 0 for s in carried),
                "logprobMaxDiff": history.check(carried, settings.tolerance),
            }
        report(line)
        print(
            f"version {version:3d}  reward {result.mean_reward:.3f}  loss {result.loss:+.4f}  "
            f"logprob diff {worst:.1e}  rollouts {line['rolloutSeconds']:.2f} s  "
            + (f"sync {line['syncSeconds']:.2f} s" if settings.sync else "not synced"),
            flush=True,
        )
    return curve


def _arguments() -> argparse.Namespace:
    defaults, env = Settings(), os.environ.get
    parser = argparse.ArgumentParser(prog="python -m e2e.sim.trainer", description=__doc__)
    parser.add_argument("--router", required=True, help="base URL that answers /generate")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pipeline", required=True, help="name of the RLPipeline")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--model", choices=sorted(MODELS), default=defaults.model)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--carried", type=int, default=defaults.carried, help="long rollouts across each sync")
    parser.add_argument("--carried-tokens", type=int, default=defaults.carried_tokens)
    parser.add_argument("--no-sync", action="store_true", help="engines keep the base version")
    parser.add_argument("--sync-timeout", type=float, default=300.0, help="seconds one sync may take")
    parser.add_argument("--base-timeout", type=float, default=300.0, help="seconds the first sync may take")
    parser.add_argument("--sender-host", default=env("RLFLEET_POD_IP", "127.0.0.1"))
    parser.add_argument("--sender-port", type=int, default=9450)
    parser.add_argument("--bucket-bytes", type=int, help="default: the sender's")
    parser.add_argument("--kubeconfig", help="default: the pod's service account, or KUBECONFIG")
    parser.add_argument("--progress", type=Path, default=Path(env("RLFLEET_PROGRESS_FILE", os.devnull)))
    parser.add_argument("--stay", action="store_true", help="after the last step keep the sender up until SIGTERM")
    return parser.parse_args()


def main() -> int:
    """Connect to the fleet, train, and say how it went; see the module's exit codes."""
    arguments = _arguments()
    settings = Settings(
        steps=arguments.steps,
        seed=arguments.seed,
        model=arguments.model,
        batch=arguments.batch,
        carried=arguments.carried,
        carried_tokens=arguments.carried_tokens,
        sync=not arguments.no_sync,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from .fleet import Fleet

    try:
        with ExitStack() as stack:
            fleet = stack.enter_context(
                Fleet(
                    namespace=arguments.namespace,
                    pipeline=arguments.pipeline,
                    host=arguments.sender_host,
                    port=arguments.sender_port,
                    pod_uid=os.environ.get("RLFLEET_POD_UID", "trainer"),
                    kubeconfig=arguments.kubeconfig,
                    bucket_bytes=arguments.bucket_bytes,
                    base_timeout=arguments.base_timeout,
                    timeout=arguments.sync_timeout,
                )
            )
            rollouts = stack.enter_context(RolloutClient(arguments.router))
            progress = stack.enter_context(arguments.progress.open("a"))
            curve = train(settings, rollouts, fleet.publish, progress)
            if curve:
                print(f"mean reward: first {curve[0]:.3f}, last {curve[-1]:.3f}", flush=True)
            while arguments.stay:
                signal.pause()
    except LogprobError as error:
        print(f"trainer: log-probability check failed: {error}", file=sys.stderr, flush=True)
        return EXIT_LOGPROBS
    except SyncError as error:
        print(f"trainer: sync failed: {error}", file=sys.stderr, flush=True)
        return EXIT_SYNC
    except RolloutError as error:
        print(f"trainer: rollout failed: {error}", file=sys.stderr, flush=True)
        return EXIT_ROLLOUTS
    return 0


if __name__ == "__main__":
    sys.exit(main())
