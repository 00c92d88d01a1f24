"""docs/examples/bootstrap_trainer.py as a trainer of the reference model on simulated GPUs: ``python -m`` in a pod.

Invariant: the job takes more device memory than is free beside an engine that is awake, each time it goes to its GPUs,
so it ends with an error where an engine was not asleep.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from e2e.cluster.local import ROOT
from e2e.sim.device.ledger import Account, visible
from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.client import Client

TRAIN_BYTES = 60 << 30
SEED = 7
STEPS = 2


def weights(step: int) -> Mapping[str, torch.Tensor]:
    """The reference model as it is after a step; -1: as it was built."""
    return torch_state(MODELS["tiny"], SEED + 1 + step)


def example() -> Any:
    """The example, as it stands in the documentation."""
    spec = importlib.util.spec_from_file_location("bootstrap_trainer", ROOT / "docs/examples/bootstrap_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Job:
    """See bootstrap_trainer.Job."""

    def __init__(self, client: Client, journal: Path) -> None:
        self._client = client
        self._journal = journal
        self._gpus = Account(visible(os.environ), "trainer")
        self._step = -1

    def _note(self, what: str) -> None:
        with self._journal.open("a") as file:
            file.write(f"{what}\n")

    def build(self) -> None:
        self._gpus.add(TRAIN_BYTES)
        self._note("built")

    def offload(self) -> None:
        self._gpus.add(-TRAIN_BYTES)
        self._note("offloaded")

    def weights(self) -> Mapping[str, torch.Tensor]:
        return weights(self._step)

    def rollouts(self, step: int) -> None:
        """Engines that serve what is committed are all that this one needs."""
        self._note(f"waits for rollouts of step {step}")
        while True:
            (pool,) = self._client.pools()
            if pool.status.counts is not None and pool.status.counts.active == pool.spec.replicas:
                break
            time.sleep(0.2)
        self._note(f"rollouts of step {step}")

    def train(self, step: int) -> None:
        self._gpus.add(TRAIN_BYTES)
        self._step = step
        self._note(f"trained {step}")


def main() -> None:
    """Bootstrap and train STEPS steps."""
    torch.set_num_threads(1)
    namespace = os.environ["NAMESPACE"]
    with Client(namespace, "demo") as client:
        example().main(Job(client, Path(os.environ["JOURNAL"])), STEPS)


if __name__ == "__main__":
    main()
