"""Who the SDK is and what it says when it may not, or when things are not there."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import pki
from e2e.cluster.fixtures import await_rights
from e2e.cluster.local import LocalCluster
from rlfleet.api import labels
from rlfleet.client import (
    ApiUnavailable,
    Client,
    ConfigError,
    Forbidden,
    NamespaceNotFound,
    PipelineNotFound,
    RoundNotFound,
    Unauthenticated,
    credentials,
)
from tests.client.fleet import INCARNATION, SECONDS, Fleet


def grant(cluster: LocalCluster, namespace: str, rules: list[dict[str, Any]]) -> str:
    """A service account ``trainer`` with these rules; its token."""
    meta = {"name": "trainer", "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trainer"},
            "subjects": [{"kind": "ServiceAccount", "name": "trainer", "namespace": namespace}],
        },
    )
    first = next(r for r in rules if "resourceNames" not in r)
    user, resource = f"system:serviceaccount:{namespace}:trainer", f"{first['resources'][0]}.{labels.GROUP}"
    await_rights(cluster, user, namespace, first["verbs"][0], resource)
    return cluster.kubectl("create", "token", "trainer", f"--namespace={namespace}").strip()


def rule(resource: str, *verbs: str) -> dict[str, Any]:
    """One rule about our kinds."""
    return {"apiGroups": [labels.GROUP], "resources": [resource], "verbs": list(verbs)}


@pytest.mark.cluster
def test_in_a_pod_the_service_account_is_used_and_its_token_read_again(
    cluster: LocalCluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = grant(cluster, fleet.namespace, [rule("rlpipelines", "get", "sync"), rule("syncrounds", "get", "create")])
    host, _, port = credentials.find(cluster.kubeconfig).server.removeprefix("https://").rpartition(":")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setenv("RLFLEET_SERVICE_ACCOUNT_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="service account"):
        Client(fleet.namespace, "demo")
    (tmp_path / "ca.crt").write_bytes((cluster.state / "pki" / "ca.crt").read_bytes())
    (tmp_path / "token").write_text("not a token")
    with Client(fleet.namespace, "demo") as client:
        with pytest.raises(Unauthenticated, match="service account"):
            client.pipeline()
        (tmp_path / "token").write_text(token)
        assert client.pipeline().metadata.name == "demo"
        # This role has no watch and no list: a sync works all the same.
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.sync, 1, sender_incarnation=INCARNATION, timeout=SECONDS)
            (made,) = fleet.wait_rounds()
            fleet.succeed(made["metadata"]["name"])
            assert running.result(SECONDS).version == 1
        with pytest.raises(Forbidden, match=r'Grant the verb "patch" on syncrounds\.rlfleet\.dev') as refused:
            client.cancel(made["metadata"]["name"])
        assert (refused.value.verb, refused.value.resource) == ("patch", "syncrounds")


@pytest.mark.cluster
def test_a_kubeconfig_without_rights_names_the_verb(cluster: LocalCluster, fleet: Fleet, tmp_path: Path) -> None:
    token = grant(cluster, fleet.namespace, [rule("rlpipelines", "get")])
    server = credentials.find(cluster.kubeconfig).server
    path = tmp_path / "kubeconfig"
    pki.write_kubeconfig(path, server, cluster.state / "pki" / "ca.crt", token=token, namespace=fleet.namespace)
    with (
        Client(fleet.namespace, "demo", path) as client,
        pytest.raises(Forbidden, match=r'Grant the verb "create" on syncrounds\.rlfleet\.dev') as refused,
    ):
        client.sync(1, sender_incarnation=INCARNATION, timeout=SECONDS)
    assert refused.value.verb == "create"


@pytest.mark.cluster
@pytest.mark.usefixtures("admission_policy")
def test_a_trainer_of_another_pipeline_is_told_which_verb_it_lacks(
    cluster: LocalCluster, fleet: Fleet, tmp_path: Path
) -> None:
    theirs = {**rule("rlpipelines", "sync"), "resourceNames": ["another"]}
    token = grant(cluster, fleet.namespace, [rule("rlpipelines", "get"), theirs, rule("syncrounds", "create")])
    path = tmp_path / "kubeconfig"
    server = credentials.find(cluster.kubeconfig).server
    pki.write_kubeconfig(path, server, cluster.state / "pki" / "ca.crt", token=token, namespace=fleet.namespace)
    with (
        Client(fleet.namespace, "demo", path) as client,
        pytest.raises(Forbidden, match=r'Grant the verb "sync" on rlpipelines\.rlfleet\.dev') as refused,
    ):
        client.sync(1, sender_incarnation=INCARNATION, timeout=SECONDS)
    assert (refused.value.verb, refused.value.resource) == ("sync", "rlpipelines")
    assert fleet.rounds() == []


@pytest.mark.cluster
def test_what_is_not_there_is_named(cluster: LocalCluster, fleet: Fleet) -> None:
    with Client(fleet.namespace, "other", cluster.kubeconfig) as client:
        with pytest.raises(PipelineNotFound, match=f"'other' in namespace '{fleet.namespace}'"):
            client.sync(1, timeout=SECONDS)
        with pytest.raises(RoundNotFound, match="'gone'"):
            client.cancel("gone")
    with (
        Client("no-such-namespace", "demo", cluster.kubeconfig) as client,
        pytest.raises(NamespaceNotFound, match="'no-such-namespace' does not exist"),
    ):
        client.sync(1, timeout=SECONDS)


@pytest.mark.cluster
def test_a_silent_apiserver_ends_in_time(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    pki.write_kubeconfig(path, "https://127.0.0.1:1", cluster.state / "pki" / "ca.crt", token="t", namespace="default")
    with Client("default", "demo", path) as client, pytest.raises(ApiUnavailable, match=r"127\.0\.0\.1:1"):
        client.pipeline(timeout=0.5)


@pytest.mark.parametrize("name", ["", "a" * 300, "Upper", "with space", "../etc"])
def test_impossible_names_are_refused_before_any_call(name: str) -> None:
    with pytest.raises(ValueError, match="pipeline: "):
        Client("default", name, "/no/such/kubeconfig")
    with pytest.raises(ValueError, match="namespace: "):
        Client(name, "demo", "/no/such/kubeconfig")


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing-here"):
        Client("default", "demo", tmp_path / "nothing-here")


def test_the_package_imports_without_torch_and_operator_code() -> None:
    program = (
        "import sys; import rlfleet.client, rlfleet.sender; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'kopf', 'ray') or m.startswith(("
        "'rlfleet.plan', 'rlfleet.kube', 'rlfleet.control', 'rlfleet.gate', 'rlfleet.engine', 'rlfleet.app'))]; "
        "sys.exit(', '.join(bad) or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "operator"}, timeout=SECONDS)
