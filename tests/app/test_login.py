"""How the operator finds the apiserver and its identity in a pod, for both of its clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlfleet.app.login import login
from rlfleet.kube.config import ConfigError, in_cluster_server, load

#: A certificate that nobody trusts; only its form matters here.
CA = (Path(__file__).parent / "ca.crt").read_text()


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a pod; the folder of its service account."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("first\n")
    (folder / "ca.crt").write_text(CA)
    monkeypatch.setenv("RLFLEET_SERVICE_ACCOUNT_DIR", str(folder))
    return folder


def kubeconfig(folder: Path) -> Path:
    """A kubeconfig of another cluster."""
    file = folder / "kubeconfig"
    user = {"name": "u", "user": {"token": "mine"}}
    cluster = {"name": "c", "cluster": {"server": "https://example.test:6443"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    body = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
    file.write_text(yaml.safe_dump({**body, "users": [user], "clusters": [cluster], "contexts": [context]}))
    return file


async def test_both_clients_talk_to_the_apiserver_that_the_environment_names(pod: Path) -> None:
    ours = await load()
    theirs = login(kubeconfig="", settings=None)
    assert theirs is not None
    assert ours.server == theirs.server == "https://10.0.0.1:443"
    assert ours.authorization == "bearer first"
    assert theirs.token == "first"
    assert theirs.ca_path == pod / "ca.crt"


async def test_a_token_that_was_replaced_is_read_again(pod: Path) -> None:
    (pod / "token").write_text("second")
    found = login(kubeconfig="", settings=None)
    assert found is not None
    assert found.token == "second"
    assert (await load()).authorization == "bearer second"


def test_an_address_of_ipv6_stands_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert in_cluster_server() == "https://[fd00::1]:443"


def test_outside_of_a_cluster_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert in_cluster_server() == ""


async def test_a_kubeconfig_that_is_named_goes_first(
    pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(kubeconfig(tmp_path))
    monkeypatch.setenv("KUBECONFIG", file)
    for named in ("", file):
        found = login(kubeconfig=named, settings=Settings())
        assert found is not None
        assert found.server == (await load(file)).server == "https://example.test:6443"


class Settings:
    """What kopf's own login asks of its settings."""

    class networking:
        trust_env = False


async def test_a_pod_without_a_token_says_so(pod: Path) -> None:
    (pod / "token").unlink()
    assert login(kubeconfig="", settings=Settings()) is None
    with pytest.raises(ConfigError, match="token"):
        await load()
