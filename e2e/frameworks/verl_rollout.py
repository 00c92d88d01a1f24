"""``python -m e2e.frameworks.verl_rollout``: docs/examples/refit_hook.py as a rollout of verl's own base class.

Runs in the environment of e2e.frameworks.verl. NAMESPACE and KUBECONFIG name the pipeline ``p``, HOST is where its
sender is expected, VERSION is synced. Prints the class's order of resolution when engines serve it.
"""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version

from verl.workers.rollout.base import BaseRollout

from e2e.scenarios.examples import example, state
from rlfleet.client import Client
from rlfleet.sender import WeightSender


def main() -> None:
    """Sync one version as verl's workers do."""
    hook = example("refit_hook")

    class Rollout(hook.RlfleetRollout, BaseRollout):  # type: ignore[misc, name-defined]
        """Has everything that verl's base class leaves open; otherwise it could not be made."""

    step = int(os.environ["VERSION"])
    with (
        Client(os.environ["NAMESPACE"], "p") as client,
        WeightSender(os.environ["HOST"], public_keys=client.public_keys) as sender,
    ):
        rollout = Rollout(hook.Refit(client, sender))
        assert isinstance(rollout, BaseRollout)

        async def after_a_step() -> None:
            await rollout.resume(tags=["weights"])
            await rollout.update_weights(iter(state(step).items()), global_steps=step)
            await rollout.resume(tags=["kv_cache"])

        asyncio.run(after_a_step())
    print("verl", version("verl"), [c.__name__ for c in Rollout.__mro__], flush=True)


if __name__ == "__main__":
    main()
