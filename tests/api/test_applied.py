"""Tests apply objects without kubectl: what comes of it, and what is refused, must be as with kubectl."""

from __future__ import annotations

import pytest

from e2e.cluster.local import ClusterError, LocalCluster

pytestmark = pytest.mark.cluster


def test_what_is_applied_and_refused_is_as_with_kubectl(cluster: LocalCluster, namespace: str) -> None:
    meta = {"name": "c", "namespace": namespace}
    first = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"kept": "1", "gone": "1"}}
    cluster.apply(first, {**first, "metadata": {**meta, "name": "other"}})
    cluster.apply({**first, "data": {"kept": "2"}})
    found = cluster.get("configmap", "c", "-n", namespace, "--show-managed-fields")
    assert found["data"] == {"kept": "2"}, "what is applied no more goes"
    assert [m["manager"] for m in found["metadata"]["managedFields"]] == ["kubectl"]
    pipeline = {"apiVersion": "rlfleet.dev/v1alpha1", "kind": "RLPipeline", "metadata": meta, "spec": {"wieghts": {}}}
    with pytest.raises(ClusterError, match="wieghts"):
        cluster.apply(first, pipeline)
