"""Pods and rounds that nobody invited: spoofed labels, and engines of a deleted pipeline of the same name."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, wait_until

pytestmark = pytest.mark.cluster


def stranger(namespace: str) -> dict[str, Any]:
    """A pod that bears an engine's labels and that no pool made; nobody listens in it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "stranger",
            "namespace": namespace,
            "labels": {"rlfleet.dev/pipeline": "p", "rlfleet.dev/pool": "e", "rlfleet.dev/engine-index": "0"},
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "engine", "image": "x", "command": ["sleep", "600"]}],
        },
    }


def test_a_pod_with_an_engines_labels_is_no_member_and_holds_nothing_up(fleet: Fleet, cluster: LocalCluster) -> None:
    fleet.pipeline()
    fleet.pool(1)
    fleet.trainer()
    pod = fleet.ready_engines(1)[0]
    cluster.apply(stranger(fleet.namespace))
    wait_until(lambda: fleet.pod("stranger")["status"].get("podIP"), "the stranger's address")
    done = fleet.sync(-1, seed=100)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert [m["podUID"] for m in done["status"]["plan"]["members"]] == [pod["metadata"]["uid"]]
    assert not done["status"]["plan"].get("silent")
    counts = {"total": 1, "active": 1, "asleep": 0}
    wait_until(lambda: fleet.status("rlpipeline", "p")["engines"] == counts, "the pipeline to count its own engine")


def test_a_pipeline_made_anew_replaces_engines_that_the_deleted_one_left_open(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    fleet.pipeline()
    fleet.pool(1)
    fleet.trainer()
    old = fleet.ready_engines(1)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    before = fleet.get("rlpipeline", "p")["metadata"]["uid"]
    # Somebody takes our finalizer away, so that nobody closes the engines before the pipeline is gone.
    unheld = ("--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    cluster.kubectl("patch", "rlpipeline", "p", f"--namespace={fleet.namespace}", *unheld)
    cluster.kubectl("delete", "rlpipeline", "p", f"--namespace={fleet.namespace}")
    assert not fleet.paused(old[0])
    fleet.pipeline()
    assert fleet.get("rlpipeline", "p")["metadata"]["uid"] != before
    new = fleet.replaced(old)
    done = fleet.sync(0)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert fleet.label(new[0]) == "0"
