"""One fleet behind a fault proxy for the whole module: points of a sweep are successive versions, not new fleets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.conftest import fleet, operator
from e2e.scenarios.kit import Fleet, Operator
from tests.fault.proxy import FaultProxy

ENGINES = 2
__all__ = ["Stand", "fleet", "operator", "stand"]


@dataclass
class Stand:
    """Operator, proxy, fleet, and the versions used so far."""

    operator: Operator
    proxy: FaultProxy
    fleet: Fleet
    pods: list[dict[str, Any]]
    version: int = 0

    def next_version(self) -> int:
        """A version that nobody has published yet."""
        self.version += 1
        return self.version

    def restart(self) -> None:
        """A new operator process, without a fault."""
        self.proxy.watch()
        self.operator.kill()
        self.operator.start()


@pytest.fixture(scope="module")
def stand(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A fleet of numpy engines whose base is committed, driven through the proxy."""
    folder = tmp_path_factory.mktemp("fault")
    operator = Operator(cluster, folder / "operator")

    def kill() -> None:
        assert operator.process is not None
        operator.process.kill()
        operator.process.wait()

    namespace = f"t-{uuid.uuid4().hex[:10]}"
    cluster.kubectl("create", "namespace", namespace)
    for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
        cluster.kubectl("wait", "--for=create", thing, f"--namespace={namespace}", "--timeout=60s")
    with FaultProxy(cluster.operator_kubeconfig, folder, kill) as proxy:
        operator.env["RLFLEET_KUBECONFIG"] = str(proxy.kubeconfig)
        operator.start()
        try:
            fleet = Fleet(cluster, namespace)
            fleet.pipeline(
                sync={"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}}, historyLimit=3
            )
            fleet.pool(ENGINES)
            fleet.trainer()
            pods = fleet.ready_engines(ENGINES)
            base = fleet.sync(-1, seed=100)
            assert base["status"]["phase"] == "Succeeded", base["status"]
            yield Stand(operator, proxy, fleet, pods)
        finally:
            operator.kill()
            cluster.kubectl("delete", "namespace", namespace, "--wait=false")
            cluster.kubectl("delete", "pods", "--all", f"--namespace={namespace}", "--wait=false")
