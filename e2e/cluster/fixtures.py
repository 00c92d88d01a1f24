"""pytest fixtures for tests against the real control plane."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster.local import ClusterError, LocalCluster

NODES = 4
_GONE_SECONDS = 240.0
_POLICY_SECONDS = 180.0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One cluster for the whole run: control plane, CRDs, the chart's roles, hollow nodes."""
    with LocalCluster(tmp_path_factory.mktemp("cluster"), nodes=NODES, say=print, nursery=True) as started:
        yield started


def await_rights(cluster: LocalCluster, user: str, namespace: str, verb: str, resource: str) -> None:
    """Wait until the authorizer knows that ``user`` may: it reads new Roles and bindings a moment late."""
    may = ("auth", "can-i", verb, resource, f"--as={user}", f"--namespace={namespace}")
    deadline = time.monotonic() + _POLICY_SECONDS
    while True:
        try:
            cluster.kubectl(*may)
            return
        except ClusterError:  # it exits with 1 for "no"
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextmanager
def temporary_namespace(cluster: LocalCluster) -> Iterator[str]:
    """A new namespace, ready for pods. Afterwards it is deleted and its pods are waited for."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    cluster.kubectl("create", "namespace", name)
    for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
        cluster.kubectl("wait", "--for=create", thing, f"--namespace={name}", "--timeout=180s")
    yield name
    # The namespace itself goes in its own time (an object's finalizer may need a controller that no longer runs), but
    # its processes must not take the machine from the next test.
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    # A terminating namespace takes no new pods, but its controller would first wait five seconds.
    cluster.kubectl("delete", "pods", "--all", f"--namespace={name}", "--wait=false")
    deadline = time.monotonic() + _GONE_SECONDS
    while pods := cluster.get("pods", f"--namespace={name}")["items"]:
        assert time.monotonic() < deadline, f"pods stay in {name}: {[pod['metadata']['name'] for pod in pods]}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def admission_policy(cluster: LocalCluster) -> None:
    """The chart's admission policies are in force: the apiserver reads them a moment after they were applied."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    meta = {"name": "probe", "namespace": name}
    rules = [{"apiGroups": ["rlfleet.dev"], "resources": ["trainerdemands"], "verbs": ["create"]}]
    rbac = "rbac.authorization.k8s.io"
    cluster.kubectl("create", "namespace", name)
    cluster.apply(
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "probe"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "probe"}],
        },
    )
    spec = {"trainer": {"podUID": "u"}}
    demand = {"apiVersion": "rlfleet.dev/v1alpha1", "kind": "TrainerDemand", "metadata": meta, "spec": spec}
    deadline = time.monotonic() + _POLICY_SECONDS
    while True:
        try:
            cluster.kubectl("create", "--dry-run=server", "--as=probe", "-f", "-", input=json.dumps(demand))
        except ClusterError as refusal:
            if "ValidatingAdmissionPolicy" in str(refusal):
                break
            if "cannot create resource" not in str(refusal):  # the Role is read a moment late, too
                raise
        assert time.monotonic() < deadline, "the admission policies are not enforced"
        time.sleep(0.1)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(cluster: LocalCluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with temporary_namespace(cluster) as name:
        yield name
