"""A plain torch loop: one process has the model, trains it, and engines follow after each step.

Run it in a pod whose label the RLPipeline `demo` selects (pipeline.yaml), with the pod's address and UID from the
downward API. Lines marked rlfleet are what the loop gains.
"""

from __future__ import annotations

import os

import torch

from rlfleet.client import Client  # rlfleet
from rlfleet.sender import WeightSender  # rlfleet


def build() -> torch.nn.Module:
    """Your model, with the names that engines know."""
    return torch.nn.Linear(8, 8)


def train(model: torch.nn.Module, step: int) -> None:
    """One step: rollouts from the engines, loss, backward, optimizer."""
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


def main(steps: int = 100) -> None:
    """Train."""
    model = build()
    with (
        Client(os.environ["NAMESPACE"], "demo") as client,  # rlfleet
        WeightSender(  # rlfleet
            os.environ["POD_IP"],  # rlfleet
            pod_uid=os.environ["POD_UID"],  # rlfleet
            public_keys=client.public_keys,  # rlfleet
            backends=("nccl",) if torch.cuda.is_available() else ("gloo",),  # rlfleet
        ) as sender,  # rlfleet
    ):
        for step in range(-1, steps):
            if step >= 0:
                train(model, step)
            digest = sender.publish(step, model.state_dict()).digest  # rlfleet
            client.sync(step, sender_incarnation=sender.incarnation, manifest_digest=digest)  # rlfleet


if __name__ == "__main__":
    main()
