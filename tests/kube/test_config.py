"""Where the apiserver is, with and without who we are."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlfleet.kube.config import load


def kubeconfig(folder: Path, **user: Any) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443", "tls-server-name": "kubernetes"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return str(file)


async def test_an_anonymous_load_knows_the_server_and_takes_no_token_along(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, token="ours")
    assert (await load(file)).authorization == "Bearer ours"
    anonymous = await load(file, anonymous=True)
    assert (anonymous.server, anonymous.tls_server_name) == ("https://10.0.0.1:6443", "kubernetes")
    assert anonymous.authorization is None
    assert anonymous.tls is not None
    assert anonymous.tls.verify_mode is ssl.CERT_REQUIRED


async def test_an_anonymous_load_takes_no_certificate_along(tmp_path: Path) -> None:
    """The apiserver would believe a certificate of the operator's before the viewer's token."""
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_text("no certificate")
    key.write_text("no key")
    file = kubeconfig(tmp_path, **{"client-certificate": str(cert), "client-key": str(key)})
    with pytest.raises(ssl.SSLError):
        await load(file)  # it would be loaded, and can not be
    assert (await load(file, anonymous=True)).authorization is None
