"""The operator's service account may do what the operator does, and nothing else. Asked at the real apiserver."""

from __future__ import annotations

import json
import subprocess

import pytest

from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster

pytestmark = pytest.mark.cluster

ALLOWED = [
    *((verb, "pods", "x") for verb in ("get", "list", "watch", "create", "delete", "patch")),
    *((verb, f"{kind}.rlfleet.dev", "x") for kind in ("rlpipelines", "enginepools", "syncrounds") for verb in
      ("get", "list", "watch", "patch")),
    *(("patch", f"{kind}.rlfleet.dev/status", "x") for kind in ("rlpipelines", "enginepools", "syncrounds")),
    ("sync", "rlpipelines.rlfleet.dev", "x"),
    *(("update", f"{kind}.rlfleet.dev/finalizers", "x") for kind in ("rlpipelines", "enginepools")),
    *((verb, "trainerdemands.rlfleet.dev", "x") for verb in ("get", "list", "watch")),
    ("patch", "pods/status", "x"),
    ("create", "syncrounds.rlfleet.dev", "x"),
    ("delete", "syncrounds.rlfleet.dev", "x"),
    *((verb, "resourceclaims.resource.k8s.io", "x") for verb in ("list", "create", "delete")),
    ("list", "resourceslices.resource.k8s.io", ""),
    *((verb, "poddisruptionbudgets.policy", "x") for verb in ("get", "list", "create", "update", "delete")),
    ("create", "pods/eviction", "x"),
    ("create", "events.events.k8s.io", "x"),
    *((verb, "events.events.k8s.io", "x") for verb in ("patch", "list")),
    ("watch", "customresourcedefinitions.apiextensions.k8s.io", ""),
    ("create", "secrets", OPERATOR_NAMESPACE),
    ("get", "secrets/rlfleet-signing-key", OPERATOR_NAMESPACE),
    ("create", "leases.coordination.k8s.io", OPERATOR_NAMESPACE),
    *((verb, "leases.coordination.k8s.io/rlfleet-operator", OPERATOR_NAMESPACE) for verb in ("get", "watch", "update")),
]  # fmt: skip

REFUSED = [
    ("update", "pods/status", "x"),
    ("update", "pods", "x"),
    ("update", "syncrounds.rlfleet.dev/finalizers", "x"),
    ("list", "namespaces", ""),
    ("update", "rlpipelines.rlfleet.dev", "x"),
    ("update", "syncrounds.rlfleet.dev/status", "x"),
    ("create", "rlpipelines.rlfleet.dev", "x"),
    ("sync", "enginepools.rlfleet.dev", "x"),
    ("create", "events", "x"),
    ("deletecollection", "pods", "x"),
    ("create", "pods/exec", "x"),
    ("deletecollection", "poddisruptionbudgets.policy", "x"),
    ("patch", "trainerdemands.rlfleet.dev", "x"),
    ("delete", "trainerdemands.rlfleet.dev", "x"),
    ("delete", "enginepools.rlfleet.dev", "x"),
    ("delete", "rlpipelines.rlfleet.dev", "x"),
    ("get", "secrets", "x"),
    ("list", "secrets", OPERATOR_NAMESPACE),
    ("get", "secrets/another", OPERATOR_NAMESPACE),
    ("delete", "secrets/rlfleet-signing-key", OPERATOR_NAMESPACE),
    ("create", "leases.coordination.k8s.io", "x"),
    ("update", "leases.coordination.k8s.io/another", OPERATOR_NAMESPACE),
    ("delete", "leases.coordination.k8s.io/rlfleet-operator", OPERATOR_NAMESPACE),
    ("list", "leases.coordination.k8s.io", OPERATOR_NAMESPACE),
    ("patch", "resourceclaims.resource.k8s.io/status", "x"),
    ("update", "resourceclaims.resource.k8s.io", "x"),
    ("create", "resourceslices.resource.k8s.io", ""),
    ("list", "nodes", ""),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io", ""),
    ("escalate", "clusterroles.rbac.authorization.k8s.io", ""),
]


def permitted(cluster: LocalCluster, verb: str, target: str, namespace: str) -> bool:
    """The apiserver's verdict for the operator's service account. ``target``: resource.group, /subresource or /name."""
    resource, _, rest = target.partition("/")
    plural, _, group = resource.partition(".")
    subresource = rest if rest in ("status", "finalizers", "exec") else ""
    attributes = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
        "name": "" if subresource else rest,
        "namespace": namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{OPERATOR_NAMESPACE}:rlfleet",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }
    answer = cluster.kubectl("create", "-f", "-", "-o", "json", input=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


@pytest.mark.parametrize("case", ALLOWED, ids=" ".join)
def test_the_operator_may(cluster: LocalCluster, case: tuple[str, str, str]) -> None:
    assert permitted(cluster, *case)


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_the_operator_may_not(cluster: LocalCluster, case: tuple[str, str, str]) -> None:
    assert not permitted(cluster, *case)


def test_the_operators_kubeconfig_is_that_service_account(cluster: LocalCluster) -> None:
    done = subprocess.run(
        [str(cluster.program("kubectl")), "auth", "whoami", "-o", "json"],
        env={"KUBECONFIG": str(cluster.operator_kubeconfig), "HOME": str(cluster.state)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    user = json.loads(done.stdout)["status"]["userInfo"]["username"]
    assert user == f"system:serviceaccount:{OPERATOR_NAMESPACE}:rlfleet"
