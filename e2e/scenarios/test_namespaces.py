"""Operators that serve some namespaces only: each with its own Lease, and with no right in the cluster."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.cluster.hollow.nodes import DRIVER
from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, http, wait_until

pytestmark = pytest.mark.cluster


@dataclass
class Tenant:
    """A release of the chart in namespaced mode."""

    cluster: LocalCluster
    release: str
    namespaces: list[str]
    kubeconfig: Path

    def allowed(self, verb: str, resource: str, namespace: str) -> bool:
        """Whether its service account may; ``namespace`` empty: in the whole cluster."""
        scope = f"--namespace={namespace}" if namespace else "--all-namespaces"
        done = subprocess.run(
            [str(self.cluster.program("kubectl")), "auth", "can-i", verb, resource, scope],
            env={"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.cluster.state)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() in ("yes", "no"), done.stderr
        return done.stdout.strip() == "yes"


@pytest.fixture
def tenants(cluster: LocalCluster, tmp_path: Path) -> Iterator[list[Tenant]]:
    """Two releases: one serves two namespaces, the other a third one. Each lives in a namespace of its own."""
    found = []
    names = []
    for number, count in enumerate((2, 1)):
        release = f"tenant-{uuid.uuid4().hex[:6]}"
        served = [f"{release}-{letter}" for letter in "ab"[:count]]
        for name in (release, *served):
            names.append(name)
            cluster.kubectl("create", "namespace", name)
            for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
                cluster.kubectl("wait", "--for=create", thing, f"--namespace={name}", "--timeout=180s")
        kubeconfig = tmp_path / f"tenant-{number}.kubeconfig"
        cluster.install_chart(release, release, kubeconfig, watchNamespaces="{" + ",".join(served) + "}")
        found.append(Tenant(cluster, release, served, kubeconfig))
    yield found
    for name in names:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        cluster.kubectl("delete", "pods", "--all", f"--namespace={name}", "--wait=false")


def test_roles_in_the_served_namespaces_are_enough(tenants: list[Tenant], tmp_path: Path) -> None:
    many, other = tenants
    for tenant in tenants:
        for verb, resource in (("list", "pods"), ("list", "namespaces"), ("watch", "enginepools.rlfleet.dev")):
            assert not tenant.allowed(verb, resource, ""), (verb, resource)
    assert many.allowed("create", "pods", many.namespaces[1])
    assert not many.allowed("list", "pods", other.namespaces[0])
    assert not many.allowed("list", "secrets", many.namespaces[0])

    def operator(tenant: Tenant, *more: str) -> Operator:
        return Operator(
            tenant.cluster,
            tmp_path / tenant.release,
            RLFLEET_KUBECONFIG=str(tenant.kubeconfig),
            RLFLEET_NAMESPACE=tenant.release,
            RLFLEET_WATCH_NAMESPACES=",".join([*tenant.namespaces, *more]),
            RLFLEET_LEADER_ELECT="true",
        )

    # The other one also names a namespace that is not there (any more): its Role has gone with it.
    operators = [operator(many), operator(other, "absent")]
    try:
        operators[0].start()
        operators[1].start(wait=False)
        # Both lead: their Leases are not the same.
        for tenant in tenants:
            wait_until(lambda t=tenant: holder(t), f"a leader of {tenant.release}")  # type: ignore[misc]
        # A whole round in the second of two namespaces, and a pool that becomes ready in each of the others.
        fleet = Fleet(many.cluster, many.namespaces[1])
        fleet.pipeline()
        fleet.pool(1)
        fleet.trainer()
        pods = fleet.ready_engines(1)
        assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
        assert not fleet.paused(pods[0])
        for tenant, name in ((many, many.namespaces[0]), (other, other.namespaces[0])):
            idle = Fleet(tenant.cluster, name)
            idle.pipeline()
            wait_until(lambda f=idle: condition(f.get("rlpipeline", "p"), "Ready"), f"{name} to be served")  # type: ignore[misc]
        assert "orbidden" not in operators[0].log.read_text(), operators[0].tail()
        # What may not be read is said, and holds up nobody else.
        pool = Fleet(other.cluster, other.namespaces[0])
        block = {"name": "a", "deviceClassName": DRIVER, "slots": 1}
        pool.pipeline(trainer={"blocks": [block]}, transport={"mode": "Auto", "backend": "gloo"})
        pool.pool(1, placement={"mode": "Claims", "blocks": ["a"]})
        wait_until(pool.engines, "the pool to be served")
        wait_until(lambda: "ResourceSlices can not be read" in topology(pool), "devices of claims to be unknown")
        code, answer = http("GET", f"http://127.0.0.1:{operators[1].port}/readyz")
        assert (code, answer.strip()) == (503, "view of pods is not complete: absent")
    finally:
        for one in operators:
            one.stop()


def topology(fleet: Fleet) -> str:
    """What TopologyValid says."""
    conditions = fleet.status("rlpipeline", "p").get("conditions") or []
    return next((f"{c['status']} {c['message']}" for c in conditions if c["type"] == "TopologyValid"), "")


def holder(tenant: Tenant) -> str:
    """Who holds the tenant's Lease."""
    listed = json.loads(tenant.cluster.kubectl("get", "leases", "-n", tenant.release, "-o", "json"))["items"]
    assert [x["metadata"]["name"] for x in listed] in ([], ["rlfleet-operator"])
    return str(listed[0]["spec"]["holderIdentity"]) if listed else ""
