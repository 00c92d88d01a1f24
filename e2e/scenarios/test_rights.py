"""What the operator asks of the apiserver, recorded by its audit log, against what the chart's roles grant: both ways.

One run through the life of a pipeline: rounds, a CatchUp, claims, scaling, history, deletion. What is granted and not
used in it stands in UNUSED with the reason why it is granted all the same; docs/guides/security.md has the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e.chart.base import render
from e2e.cluster.audit import AuditEvent
from e2e.cluster.hollow.nodes import DRIVER, PCIE_ROOT
from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster
from e2e.scenarios.kit import Fleet, Operator, wait_until

pytestmark = pytest.mark.cluster

USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:rlfleet"
#: (verb, resource.group) -> why it is granted although this run may get by without it.
UNUSED: dict[tuple[str, str], str] = {
    (
        "sync",
        "rlpipelines.rlfleet.dev",
    ): "asked for by the admission policy when a CatchUp is created, not by a request",
    ("update", "rlpipelines/finalizers.rlfleet.dev"): "asked for when an owner reference blocks the owner's deletion",
    ("update", "enginepools/finalizers.rlfleet.dev"): "asked for when an owner reference blocks the owner's deletion",
    ("create", "secrets"): "the signing key, at the first start",
    ("create", "leases.coordination.k8s.io"): "the Lease, at the first start",
    ("get", "pods"): "whether a pod of the same name is ours, and whether the pod of a trainer or claim is gone",
    ("get", "syncrounds.rlfleet.dev"): "a round as it stands, after a write that lost against another",
    ("patch", "events.events.k8s.io"): "an Event that repeats is counted on",
    ("list", "events.events.k8s.io"): "why the kubelet evicted a pod whose status does not say so",
    ("delete", "resourceclaims.resource.k8s.io"): "a train block that is taken out of its pipeline",
    ("create", "poddisruptionbudgets.policy"): "the budget of a new pool",
    ("update", "poddisruptionbudgets.policy"): "a budget follows its pool's spec",
    ("delete", "poddisruptionbudgets.policy"): "a budget that its pool does not ask for any more",
    ("list", "poddisruptionbudgets.policy"): "the budgets that a rolling update keeps to",
    ("create", "pods/eviction"): "a rolling update evicts, so that every budget counts",
}

Right = tuple[str, str]


def granted(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    """The rights that a role's rules give, without the names that they are limited to."""
    return {
        (verb, f"{resource}.{group}" if group else resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(events: Iterable[AuditEvent]) -> set[Right]:
    """The rights that requests needed."""
    return {
        (e.verb, resource + (f".{e.group}" if e.group else ""))
        for e in events
        if e.resource
        for resource in [e.resource + (f"/{e.subresource}" if e.subresource else "")]
    }


def roles() -> Iterator[Mapping[str, Any]]:
    """Every role that the chart binds to the operator."""
    objects = render()
    bound = {
        each["roleRef"]["name"]
        for each in objects
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding") and each["subjects"][0]["name"] == "rlfleet"
    }
    for each in objects:
        if each["kind"] in ("Role", "ClusterRole") and each["metadata"]["name"] in bound:
            yield each


def test_what_is_granted_is_what_is_used(cluster: LocalCluster, namespace: str, tmp_path: Path) -> None:
    mark = cluster.audit_mark()
    operator = Operator(cluster, tmp_path / "operator", RLFLEET_LEADER_ELECT="true")
    operator.start()
    try:
        live(Fleet(cluster, namespace))
    finally:
        operator.stop()
    events = [e for e in cluster.audit(mark) if e.user == USER]
    # In namespaces of other tests, which may be on their way out, the apiserver refuses to create anything.
    ours = [e for e in events if e.namespace in (namespace, "rlfleet-system", "")]
    assert [f"{e.verb} {e.uri}" for e in ours if e.code in (401, 403)] == []
    rights = set().union(*(granted(role["rules"]) for role in roles()))
    needed = used(events)
    assert needed - rights == set(), "RBAC would have refused these"
    assert rights - needed - set(UNUSED) == set(), "take away what is not used, or say in UNUSED why it is granted"
    assert set(UNUSED) - rights == set(), "these are not granted any more"


def live(fleet: Fleet) -> None:
    """Most of what a pipeline goes through."""
    block = {"name": "a", "deviceClassName": DRIVER, "slots": 2, "devicesPerSlot": 1, "matchAttributes": [PCIE_ROOT]}
    # The engine is Ready only after the first round, which waits for it to start.
    deadlines = {"pendingSeconds": 180, "stagingSeconds": 60, "pausedSeconds": 60}
    fleet.pipeline(trainer={"blocks": [block]}, historyLimit=1, sync={"deadlines": deadlines})
    routers = [{"name": "ready", "type": "Readiness"}, {"name": "gateway", "type": "InferencePool"}]
    fleet.pool(1, placement={"mode": "Claims", "blocks": ["a"]}, routers=routers)
    fleet.trainer()
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    # A joiner is brought to the committed version by a round of the operator's.
    fleet.cluster.kubectl("scale", "epool/e", "--replicas=2", "-n", fleet.namespace)
    pods = fleet.ready_engines(2)
    for pod in pods:
        fleet.serving(pod, -1)
    for version in range(2):
        assert fleet.sync(version)["status"]["phase"] == "Succeeded"
    wait_until(lambda: len(fleet.cluster.get("syncrounds", "-n", fleet.namespace)["items"]) < 4, "old rounds to go")
    for kind, name in (("epool", "e"), ("rlp", "p")):
        fleet.cluster.kubectl("delete", kind, name, "-n", fleet.namespace, "--wait=true", timeout=120)
