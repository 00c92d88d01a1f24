"""Every object that the chart renders, and the kustomize base, are accepted by the real apiserver (dry run).

Monitoring objects are validated against Prometheus Operator's published CRDs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.chart.monitoring import KINDS, crd_files
from e2e.cluster.local import ROOT, ClusterError, LocalCluster
from tests.chart.kit import ON, VARIANTS, chart, of_kind

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def monitored(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster with the namespaces that the variants name, and Prometheus Operator's CRDs."""
    crds = [word for file in crd_files() for word in ("-f", str(file))]
    cluster.kubectl("apply", "--server-side", *crds)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=180s", *crds)
    for name in ("team-a", "team-b"):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield cluster
    cluster.kubectl("delete", "namespace", "team-a", "team-b", "--wait=false")
    cluster.kubectl("delete", *crds, "--wait=false")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_accepted(monitored: LocalCluster, tmp_path: Path, variant: str) -> None:
    objects = chart(tmp_path, VARIANTS[variant])
    # A pod is refused without its service account, also in a dry run.
    for account in of_kind(objects, "ServiceAccount"):
        if account["metadata"]["name"] != "rlfleet":
            monitored.apply(account)
    answer = monitored.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", input=yaml.safe_dump_all(objects)
    )
    assert len(answer.splitlines()) == len(objects)


def test_monitoring_objects_are_validated_by_published_schemas(monitored: LocalCluster, tmp_path: Path) -> None:
    objects = chart(tmp_path, ON)
    for kind, plural in (("ServiceMonitor", KINDS[0]), ("PodMonitor", KINDS[1]), ("PrometheusRule", KINDS[2])):
        found = of_kind(objects, kind)[0]
        found["spec"]["selctor"] = {}
        with pytest.raises(ClusterError, match=r"selctor"):
            monitored.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", input=yaml.safe_dump(found))
        assert monitored.get("crd", f"{plural}.monitoring.coreos.com")


def test_the_kustomize_base_can_be_applied(monitored: LocalCluster) -> None:
    answer = monitored.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(ROOT / "config/default")
    )
    for line in ("deployment.apps/rlfleet-operator", "enginepools.rlfleet.dev", "namespace/rlfleet-system"):
        assert f"{line} serverside-applied" in answer
