"""How kopf's event streams log in: as the operator's own client does (kube.config).

Invariant: both talk to the same apiserver. kopf's own login with a service account would take a name from the cluster's
DNS, which an operator should not depend on.
"""

from __future__ import annotations

import os
from typing import Any

import kopf

from rlfleet.kube.config import in_cluster_server, service_account_folder


def login(*, kubeconfig: str, **kwargs: Any) -> kopf.ConnectionInfo | None:
    """A handler's result for ``kopf.on.login``: service account, then KUBECONFIG; a named ``kubeconfig`` goes first."""
    by_file, by_account = kopf.login_with_kubeconfig, _service_account
    first, second = (by_file, by_account) if kubeconfig or os.environ.get("KUBECONFIG") else (by_account, by_file)
    return first(**kwargs) or second(**kwargs)


def _service_account(**_: Any) -> kopf.ConnectionInfo | None:
    """The pod's service account. The token is read anew at each login, which kopf repeats when it has expired."""
    folder, server = service_account_folder(), in_cluster_server()
    if not server or not (folder / "token").is_file():
        return None
    return kopf.ConnectionInfo(
        server=server, ca_path=folder / "ca.crt", token=(folder / "token").read_text(encoding="utf-8").strip()
    )
