"""The chart's admission policies at the real apiserver: a trainer orders rounds of its own pipeline only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.fixtures import await_rights, temporary_namespace
from e2e.cluster.local import OPERATOR_NAMESPACE, ClusterError, LocalCluster
from rlfleet.api import labels

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("admission_policy")]

RBAC = "rbac.authorization.k8s.io"
OPERATOR = f"system:serviceaccount:{OPERATOR_NAMESPACE}:rlfleet"


class Tenants:
    """One namespace with the pipelines ``mine`` and ``theirs``, each with a trainer that RBAC lets write anything."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        ours = {"apiGroups": [labels.GROUP]}
        for name in ("mine", "theirs"):
            meta = {"name": name, "namespace": namespace}
            sender = {"podSelector": {"matchLabels": {"app": name}}}
            cluster.apply(
                self.object("RLPipeline", name, {"weights": {"sender": sender}}),
                {
                    "apiVersion": f"{RBAC}/v1",
                    "kind": "Role",
                    "metadata": meta,
                    "rules": [
                        {**ours, "resources": ["rlpipelines"], "verbs": ["sync"], "resourceNames": [name]},
                        {**ours, "resources": ["syncrounds", "trainerdemands"], "verbs": ["create", "get", "patch"]},
                    ],
                },
                {
                    "apiVersion": f"{RBAC}/v1",
                    "kind": "RoleBinding",
                    "metadata": meta,
                    "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
                    "subjects": [{"apiGroup": RBAC, "kind": "User", "name": name}],
                },
            )
            await_rights(cluster, name, namespace, "create", "trainerdemands.rlfleet.dev")

    def object(self, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        meta = {"name": name, "namespace": self.namespace}
        return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": meta, "spec": spec}

    def create(self, user: str, kind: str, name: str, spec: dict[str, Any], *more: str) -> str:
        text = json.dumps(self.object(kind, name, spec))
        return self.cluster.kubectl("create", f"--as={user}", "-f", "-", *more, input=text)

    def patch(self, user: str, what: str, patch: dict[str, Any]) -> str:
        how = ("--type=merge", "-p", json.dumps(patch), f"--as={user}", "-n", self.namespace)
        return self.cluster.kubectl("patch", what, *how)

    def refusal(self, user: str, pipeline: str) -> str:
        """What the message must say."""
        return f'needs the verb "sync" on rlpipelines.rlfleet.dev/{pipeline} in namespace {self.namespace}'


@pytest.fixture(scope="module")
def tenants(cluster: LocalCluster) -> Iterator[Tenants]:
    with temporary_namespace(cluster) as namespace:
        yield Tenants(cluster, namespace)


def round_of(pipeline: str, version: int = 1) -> dict[str, Any]:
    return {"pipeline": pipeline, "version": version, "senderIncarnation": "i"}


def test_a_neighbour_can_order_no_round(tenants: Tenants) -> None:
    tenants.create("mine", "SyncRound", "own", round_of("mine"))
    with pytest.raises(ClusterError) as refused:
        tenants.create("theirs", "SyncRound", "foreign", round_of("mine"))
    assert tenants.refusal("theirs", "mine") in str(refused.value)
    assert "theirs may not order or change rounds of RLPipeline mine" in str(refused.value)


def test_a_neighbour_cannot_cancel_a_round_but_its_metadata_is_not_the_policys_business(tenants: Tenants) -> None:
    tenants.create("mine", "SyncRound", "cancelled", round_of("mine", 2))
    with pytest.raises(ClusterError) as refused:
        tenants.patch("theirs", "syncround/cancelled", {"spec": {"cancel": True}})
    assert tenants.refusal("theirs", "mine") in str(refused.value)
    tenants.patch("theirs", "syncround/cancelled", {"metadata": {"labels": {"seen": "yes"}}})
    tenants.patch("mine", "syncround/cancelled", {"spec": {"cancel": True}})


def test_a_demand_is_its_trainers_alone(tenants: Tenants) -> None:
    spec = {"trainer": {"podUID": "u"}}
    with pytest.raises(ClusterError) as refused:
        tenants.create("theirs", "TrainerDemand", "mine", spec)
    assert tenants.refusal("theirs", "mine") in str(refused.value)
    tenants.create("mine", "TrainerDemand", "mine", spec)
    with pytest.raises(ClusterError) as refused:
        tenants.patch("theirs", "trainerdemand/mine", {"spec": {"trainer": {"podUID": "evil"}}})
    assert tenants.refusal("theirs", "mine") in str(refused.value)
    tenants.patch("mine", "trainerdemand/mine", {"spec": {"trainer": {"podUID": "v"}}})


def test_the_operator_may_order_rounds_of_every_pipeline(tenants: Tenants) -> None:
    spec = {**round_of("mine", 3), "kind": "CatchUp", "engines": ["e-0"], "manifestDigest": "sha256:" + "a" * 64}
    tenants.create(OPERATOR, "SyncRound", "catchup", spec)
