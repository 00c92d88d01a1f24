"""Where the apiserver is and who we are: a kubeconfig, or the pod's service account.

Invariant: nothing secret is cached longer than it is valid. A service account's token file is read again because the
kubelet replaces it; a kubeconfig's plug-ins refresh theirs.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rlfleet import __version__
from rlfleet.client.errors import ConfigError

SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class Access:
    """One apiserver and one identity. ``authorization`` answers the header of the moment, or None (certificates)."""

    server: str
    tls: ssl.SSLContext | None
    authorization: Callable[[], str | None]
    tls_server_name: str | None = None
    proxy: str | None = None
    where: str = ""

    def connect(self, agent: str, *, seconds: float) -> httpx.Client:
        """A client for it, whose calls end after ``seconds`` unless they say otherwise; ``as_us`` belongs to each call.

        ``agent``: the program, for the apiserver's audit log. Proxies are the kubeconfig's, never the environment's.
        """
        return httpx.Client(
            base_url=self.server,
            verify=True if self.tls is None else self.tls,
            proxy=self.proxy,
            trust_env=False,
            timeout=seconds,
            headers={"User-Agent": f"{agent}/{__version__}", "Accept": "application/json"},
        )

    def as_us(self, content: str | None = None) -> dict[str, Any]:
        """Keywords of one call: our identity of this moment, the type of the body, and the name in the certificate."""
        header, name = self.authorization(), self.tls_server_name
        return {
            "headers": ({"Authorization": header} if header else {}) | ({"Content-Type": content} if content else {}),
            "extensions": {"sni_hostname": name} if name else {},
        }


def find(kubeconfig: str | os.PathLike[str] | None = None, context: str | None = None) -> Access:
    """The given kubeconfig; else KUBECONFIG; else, in a pod, its service account; else ~/.kube/config.

    ConfigError says what was tried.
    """
    if kubeconfig is None and context is None and not os.environ.get("KUBECONFIG"):
        folder = Path(os.environ.get("RLFLEET_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT_DIR)
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return from_service_account(folder)
    return from_kubeconfig(kubeconfig, context)


def from_service_account(folder: Path) -> Access:
    """The identity of the pod that we run in; ``folder`` holds token and ca.crt."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")

    def authorization() -> str:
        # Each time, because the kubelet replaces the token while we run.
        return f"Bearer {(folder / 'token').read_text().strip()}"

    try:
        authorization()
        tls = _context(str(folder / "ca.crt"))
    except OSError as e:
        raise ConfigError(
            f"this pod has no service account in {folder} ({e.strerror or e}); set automountServiceAccountToken: true, "
            "or give a kubeconfig"
        ) from e
    authority = f"[{host}]" if ":" in host else host
    return Access(f"https://{authority}:{port}", tls, authorization, where=f"service account in {folder}")


def from_kubeconfig(path: str | os.PathLike[str] | None, context: str | None) -> Access:
    """Through the official client's loader, so that every kind of kubeconfig works (exec plug-ins, certificates)."""
    # Imported when needed: a trainer in a pod can do without.
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, kube_config

    load: Any = kube_config.load_kube_config
    configuration: Any = Configuration()
    where = os.fspath(path) if path is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        load(
            config_file=None if path is None else os.fspath(path),
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
        server = str(configuration.host).rstrip("/")
        tls = None
        if server.startswith("https"):
            tls = _context(configuration.ssl_ca_cert or None)
            if configuration.cert_file:
                tls.load_cert_chain(configuration.cert_file, configuration.key_file or None)
            if not configuration.verify_ssl:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
    except (ConfigException, OSError, ValueError) as e:
        raise ConfigError(
            f"no usable Kubernetes credentials in {where}: {e}. Give Client(kubeconfig=...), set KUBECONFIG, or run in "
            "a pod with a service account"
        ) from e

    def authorization() -> str | None:
        header = configuration.get_api_key_with_prefix("BearerToken", "authorization")
        if header:
            text = str(header).strip()
            return text if " " in text else f"Bearer {text}"
        return str(configuration.get_basic_auth_token()) if configuration.username else None

    return Access(
        server,
        tls,
        authorization,
        tls_server_name=configuration.tls_server_name or None,
        proxy=configuration.proxy or None,
        where=f"kubeconfig {where}",
    )


def _context(ca: str | None) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=ca)
    # Python 3.13 asks for key identifiers that many cluster CAs lack; the chain and the host are still checked.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls
