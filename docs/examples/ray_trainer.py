"""A trainer whose weight sender is a Ray actor.

Run it in a pod of the RayCluster whose label `app: demo-trainer` the RLPipeline selects (pipeline.yaml), with the pod's
address and UID from the downward API. The actor must be on the same node's pod: it serves at that address.
"""

from __future__ import annotations

import os

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfleet.client import Client
from rlfleet.sender import ray as ray_sender


def build() -> torch.nn.Module:
    """Your model, with the names that engines know."""
    return torch.nn.Linear(8, 8)


def train(model: torch.nn.Module, step: int) -> None:
    """One step of training: yours."""
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


def main(steps: int = 100) -> None:
    """Publish and sync a model that changes at each step."""
    ray.init(ignore_reinit_error=True)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    model = build()
    with Client(os.environ["NAMESPACE"], "demo") as client:
        sender = ray_sender.start(
            os.environ["POD_IP"],
            pod_uid=os.environ["POD_UID"],
            public_keys=client.public_keys(),
            backends=("nccl",) if torch.cuda.is_available() else ("gloo",),
            actor_options={"name": "weight-sender", "scheduling_strategy": here},
        )
        for step in range(-1, steps):
            if step >= 0:
                train(model, step)
            digest = sender.publish(step, model.state_dict())
            client.sync(step, sender_incarnation=sender.incarnation, manifest_digest=digest)
        sender.close()


if __name__ == "__main__":
    main()
