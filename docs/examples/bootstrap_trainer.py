"""How a trainer that shares its GPUs with engines starts, and how it goes on: the order of things, for bootstrap.yaml.

1. Engines boot and go to sleep (`active: 0`): they are neither routed nor synced, whatever they have read from disk.
2. The trainer demands its GPUs, builds its model there, and publishes the base, version -1, from its own memory: the
   sender comes before any engine wakes. Then it leaves the GPUs.
3. Version -1 is committed for those that will wake. From now on the ceiling may be raised:
   kubectl patch enginepool demo-engines --type=merge -p '{"spec":{"active":null}}'
   Engines wake, a CatchUp brings them the base, and only then do they serve.
4. Each step: rollouts; engines sleep for the step; the new version is committed while they sleep; they wake with it.

Run it in the pod that bootstrap.yaml selects as the sender, with the rights of trainer-rbac.yaml, and from the downward
API RLFLEET_POD_IP, RLFLEET_POD_UID, RLFLEET_POD_NAME and RLFLEET_NODE_NAME: with the last one the sender reads its
GPUs' memory, which nobody else can while no engine's pod is on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

import torch

from rlfleet.client import Client
from rlfleet.sender import WeightSender


class Job(Protocol):
    """What is yours."""

    def build(self) -> None:
        """Make model and optimizer on the GPUs."""

    def offload(self) -> None:
        """Leave the GPUs. Weights stay readable."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The present weights by the names that engines know."""

    def rollouts(self, step: int) -> None:
        """Have engines generate what the step learns from; wait for them while they are on their way up."""

    def train(self, step: int) -> None:
        """Go back to the GPUs and take one step."""


def run(client: Client, sender: WeightSender, job: Job, steps: int) -> None:
    """Bootstrap, then train."""
    with client.train_gpus(-1, priority="Initialization"):
        job.build()
        base = sender.publish(-1, job.weights())
        job.offload()
    # The GPUs are given back, or an error was raised: nothing below begins while they are still demanded.
    client.sync(-1, sender_incarnation=sender.incarnation, manifest_digest=base.digest)
    for step in range(steps):
        job.rollouts(step)
        client.before_train_step(step)
        try:
            job.train(step)
            manifest = sender.publish(step, job.weights())
            job.offload()
        except BaseException:
            client.release_gpus()  # no version, no sync: only the GPUs go back
            raise
        # Syncs, and gives the GPUs back also if that failed. Sleepers get the version as they wake.
        client.after_train_step(step, sender_incarnation=sender.incarnation, manifest_digest=manifest.digest)
    # Engines that wake get the last version from this sender, so it must not end before they serve.
    job.rollouts(steps)


def main(job: Job, steps: int) -> None:
    """Connect as the pod that this runs in."""
    with (
        Client(os.environ["NAMESPACE"], "demo") as client,
        WeightSender(
            os.environ["RLFLEET_POD_IP"], pod_uid=os.environ["RLFLEET_POD_UID"], public_keys=client.public_keys
        ) as sender,
    ):
        run(client, sender, job, steps)
