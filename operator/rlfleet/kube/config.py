"""Where the apiserver is and how to log in: kubeconfig or service account, through the official client's loader.

Invariant: credentials are read again on demand (rotated service account tokens, exec plugins); nothing is cached
beyond one ``Credentials`` value.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import (
    ConfigException,
    load_kube_config,
)
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class ConfigError(Exception):
    """No usable kubeconfig or service account."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """One apiserver and one identity. ``tls`` is None for plain http (never outside tests)."""

    server: str
    tls: ssl.SSLContext | None = None
    authorization: str | None = None
    tls_server_name: str | None = None
    proxy: str | None = None


#: Reads the credentials anew; called at start and after a 401.
CredentialSource = Callable[[], Awaitable[Credentials]]


def service_account_folder() -> Path:
    """Where the pod's token and the cluster's CA lie (RLFLEET_SERVICE_ACCOUNT_DIR where a container has no mounts)."""
    return Path(os.environ.get("RLFLEET_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT)


def in_cluster_server() -> str:
    """The apiserver's URL as every pod's environment tells it; empty outside of a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def credential_source(kubeconfig: str | None = None, context: str | None = None) -> CredentialSource:
    """A source that reads ``kubeconfig`` (default: KUBECONFIG, ~/.kube/config), or in a pod the service account.

    In a pod the service account is used unless a kubeconfig is named explicitly (argument or KUBECONFIG).
    """

    async def read() -> Credentials:
        return await load(kubeconfig, context)

    return read


async def load(kubeconfig: str | None = None, context: str | None = None, *, anonymous: bool = False) -> Credentials:
    """Read the credentials once. Raises ConfigError with what is missing.

    ``anonymous``: only where the apiserver is and how to trust it, for calls in somebody else's name.
    """
    configuration = Configuration()
    explicit = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if not explicit and os.environ.get("KUBERNETES_SERVICE_HOST"):
            folder = service_account_folder()
            loader = InClusterConfigLoader(str(folder / "token"), str(folder / "ca.crt"))  # type: ignore[no-untyped-call]
            loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, context=context, client_configuration=configuration, persist_config=False
            )
        authorization = await configuration.get_api_key_with_prefix("BearerToken")
    except (ConfigException, OSError, ValueError) as e:
        raise ConfigError(f"cannot load Kubernetes credentials from {explicit or 'the default places'}: {e}") from e
    server = configuration.host.rstrip("/")
    if anonymous:
        # A certificate of ours would count before the token of whoever asks.
        configuration.cert_file = configuration.key_file = authorization = None
    tls = await asyncio.to_thread(_tls, configuration) if server.startswith("https") else None
    return Credentials(
        server=server,
        tls=tls,
        authorization=authorization.strip() if authorization else None,
        tls_server_name=configuration.tls_server_name or None,
        proxy=configuration.proxy or None,
    )


def _tls(configuration: Configuration) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    # Python 3.13 asks for key identifiers that many cluster CAs lack; the chain and the host are still checked.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file or None)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls
