"""A training script for rlix's MILES coordinator, with that coordinator's own calls and keywords; runs in a pod.

``Miles`` knows nothing of rlfleet but where it imports the coordinator from. The rest is the demo's training loop; the
trainer takes more device memory for a step than is free beside an engine that is awake.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from e2e.sim.device.ledger import Account, visible
from e2e.sim.fleet import TRAIN_BYTES
from e2e.sim.loop import Settings, train
from e2e.sim.rollouts import RolloutClient
from rlfleet.client import Client
from rlfleet.client.compat import MilesCoordinator, ProgressReport
from rlfleet.sender import WeightSender

ENGINES = (0, 1)


class Miles:
    """A rlix MILES job: bootstrap, then for each step shrink, train, sync, expand."""

    def __init__(self, sender: Any, *, pipeline_id: str, config: dict[str, Any]) -> None:
        self._sender = sender
        self._gpus = Account(visible(os.environ), "trainer")
        self.coordinator = MilesCoordinator(pipeline_id=pipeline_id, pipeline_config=config)
        self.coordinator.create_pipeline_actor(pipeline_config=config)
        self.coordinator.remove_resource_manager_node_pg()

    def publish(self, version: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Build the buckets and sync them; the first time bootstrap as well."""
        self._sender.publish(version, state)
        if version < 0:
            self._bootstrap(ENGINES)
        step = self.coordinator.sync_base_weights_to_active(version)
        if step != version:
            raise RuntimeError(f"synced {step} instead of {version}")
        return {"active": sorted(self.coordinator.get_active_engines())}

    def _bootstrap(self, engines: Sequence[int]) -> None:
        if self.coordinator.publish_cache_ready_step(-1) != -1:
            raise RuntimeError("the base is not ready")
        self.coordinator.register_model_update_resources(
            cache_owner_actor=self._sender,
            rollout_manager=object(),
            train_gpu_ids=list(engines),
            infer_gpu_ids=list(engines),
            rollout_num_gpus_per_engine=1,
        )
        active: set[int] = set() if os.environ.get("MILES_INIT_DEFER_ADD_WORKER") == "1" else set(engines)
        self.coordinator.bootstrap_active_engines(active)
        if self.coordinator.get_active_engines() != active:
            raise RuntimeError("the active engines are not those that were set")

    @contextmanager
    def step(self, version: int) -> Iterator[None]:
        """GPUs for a step."""
        self._report(version, collected=None)
        self._report(version, collected=64)
        if not self.coordinator.resize_infer(dp_ranks_to_remove=list(ENGINES), dp_ranks_to_add=[]).success:
            raise RuntimeError("no success, and no error")
        self._gpus.add(TRAIN_BYTES)
        try:
            yield
        finally:
            self._gpus.add(-TRAIN_BYTES)
            self.coordinator.resize_infer(dp_ranks_to_remove=[], dp_ranks_to_add=list(ENGINES))
        if self.coordinator.get_active_engines() != set(ENGINES):
            raise RuntimeError("not all engines are active after the expand")

    def _report(self, version: int, *, collected: int | None) -> None:
        metrics = {"new_batch": True} if collected is None else {"collected": collected}
        report = ProgressReport(
            pipeline_id="p", step_target_trajectories=64, fifo_timestamp=float(version), metrics=metrics
        )
        self.coordinator.report_progress_from_scheduler(report)


def main() -> None:
    """Train STEPS steps; one line of progress for each."""
    with ExitStack() as stack:
        client = stack.enter_context(Client(os.environ["RLFLEET_NAMESPACE"], os.environ["RLFLEET_PIPELINE"]))
        sender = stack.enter_context(
            WeightSender(
                os.environ["RLFLEET_POD_IP"], pod_uid=os.environ["RLFLEET_POD_UID"], public_keys=client.public_keys
            )
        )
        miles = Miles(sender, pipeline_id="p", config={"verify_model_after_sync": True, "num_gpus_per_node": 2})
        if os.environ.get("MILES_INIT_DEFER_ADD_WORKER") == "1":
            # Nobody serves before the first expand: it brings the base.
            publish = miles.publish

            def first(version: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
                said = publish(version, state)
                if version < 0:
                    miles.coordinator.resize_infer(dp_ranks_to_remove=[], dp_ranks_to_add=list(ENGINES))
                return said

        else:
            first = miles.publish
        rollouts = stack.enter_context(RolloutClient(os.environ["ROUTER_URL"]))
        progress = stack.enter_context(Path(os.environ["JOURNAL"]).open("a"))
        settings = Settings(steps=int(os.environ["STEPS"]), carried=0)
        train(settings, rollouts, first, progress, Path(os.environ["CHECKPOINT"]), step=miles.step)
        miles.coordinator.clear_progress_stream(mode="actor_train", adapter_id=None)


if __name__ == "__main__":
    main()
