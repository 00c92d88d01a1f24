"""A Ray actor as the sender of mixed rounds through the operator, killed in the middle of one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_transports import FREE, NODE, TRAIN, pinned
from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.client import Client, SyncFailed, SyncResult
from tests.netns import inside
from tests.ray_kit import free_port, local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RECEIVE = "update_weights_from_distributed"


def state(version: int) -> dict[str, torch.Tensor]:
    """The reference model's weights for a version."""
    return dict(torch_state(MODELS["tiny"], 1000 + version))


@pytest.mark.timeout(900)
def test_mixed_rounds_from_a_ray_actor_that_is_killed_in_one(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not inside(request, tmp_path, seconds=880):
        return
    import ray

    from rlfleet.sender import ray as ray_sender

    fleet: Fleet = request.getfixturevalue("fleet")
    port = free_port()
    fleet.pipeline(
        weights={"sender": {"url": f"http://127.0.0.1:{port}"}},
        transport={"mode": "Auto", "assertMixed": True, "backend": "gloo"},
        trainer={"gpus": [{"node": NODE, "devices": TRAIN[:1]}]},
        sync={"deadlines": {"pendingSeconds": 120, "stagingSeconds": 60, "pausedSeconds": 60}},
    )
    fleet.pool(2, backend="torch", engine_args=("--group-timeout", "10"), placement=pinned([TRAIN[0], FREE[0]]))
    keys = {k["kid"]: k["key"] for k in wait_until(lambda: fleet.status("rlpipeline", "p").get("publicKeys"), "keys")}
    kubeconfig = fleet.cluster.kubeconfig
    with local_ray(), Client(fleet.namespace, "p", kubeconfig) as client:
        sender = ray_sender.start("127.0.0.1", port, public_keys=keys, bucket_bytes=40_000)
        pods = fleet.ready_engines(2, 300)
        digest = sender.publish(-1, state(-1))
        done = client.sync(-1, sender_incarnation=sender.incarnation, manifest_digest=digest)
        assert done.transports == {"Serialized": 1, "Broadcast": 1}
        for pod in pods:
            fleet.serving(pod, -1)
        assert len({fleet.checksum(pod) for pod in pods}) == 1

        # Killed while one engine is in the group and has not taken a byte.
        plan = next(iter(_rounds(fleet)))["status"]["plan"]["members"]
        receiver = next(m["engine"] for m in plan if m["transport"] == "Broadcast")
        late = next(p for p in pods if p["metadata"]["name"] == receiver)
        fleet.fault(late, RECEIVE, action="delay", seconds=8, times=1, when="before")
        first = sender.incarnation
        digest = sender.publish(1, state(1))
        ended: list[SyncResult | SyncFailed] = []

        def sync() -> None:
            try:
                ended.append(client.sync(1, sender_incarnation=first, manifest_digest=digest, on_holding="wait"))
            except SyncFailed as e:
                ended.append(e)

        syncing = threading.Thread(target=sync)
        syncing.start()
        wait_until(lambda: fleet.paused(pods[0]) and fleet.paused(pods[1]), "both engines to be paused", every=0.02)
        wait_until(
            lambda: any((r.get("status") or {}).get("phase") == "Transferring" for r in _rounds(fleet)),
            "weights to move",
            every=0.02,
        )
        ray.kill(sender.actor, no_restart=False)
        second = wait_until(lambda: found if (found := sender.incarnation) != first else None, "another process")
        # The trainer goes on as it would: it publishes what it has to the new process, and syncs again if it must.
        assert sender.publish(1, state(1)) == digest
        syncing.join(300)
        assert ended, "the sync does not end"
        if isinstance(ended[0], SyncFailed) and not ended[0].committed:
            again = client.sync(1, sender_incarnation=second, manifest_digest=digest)
            assert again.transports == {"Serialized": 1, "Broadcast": 1}
        engines = fleet.ready_engines(2, 300)
        for pod in engines:
            fleet.serving(pod, 1)
        assert len({fleet.checksum(pod) for pod in engines}) == 1

        digest = sender.publish(2, state(2))
        last = client.sync(2, sender_incarnation=second, manifest_digest=digest)
        assert last.transports == {"Serialized": 1, "Broadcast": 1}
        assert [fleet.label(pod) for pod in fleet.ready_engines(2)] == ["2", "2"]
        sender.close()


def _rounds(fleet: Fleet) -> list[dict[str, Any]]:
    return list(fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"])
