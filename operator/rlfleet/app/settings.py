"""Settings of the operator process: one documented list, read from flags, then the environment, then defaults.

Invariant: a value that cannot be used stops the program at start with the setting's name; nothing is ignored. The one
exception are variables that are Dynamo's (DYN_*): they count as unset then, as they do there, and the log says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlfleet.control.context import ControlSettings
from rlfleet.logs import LEVELS
from rlfleet.plan.discovery import Naming
from rlfleet.plan.leader import MAX_LEASE_SECONDS, Timing
from rlfleet.tls import ClientTLS, TLSError

log = logging.getLogger(__name__)

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: A part of dyn://<namespace>.<component>.<endpoint>.
_DYNAMO_NAME = re.compile(r"[A-Za-z0-9_-]{1,253}")
_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class SettingsError(Exception):
    """A setting has a value that cannot be used."""


def _setting(default: Any, env: str, help: str, *, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"env": env, "help": help, "minimum": minimum, "usable": None})


def _dynamo(default: Any, env: str, help: str, usable: Callable[[Any], bool]) -> Any:
    """A setting that has Dynamo's variable, and is read as Dynamo reads it: what can not be used there counts as unset.

    The flag of the same setting is ours: it is refused.
    """
    return field(default=default, metadata={"env": env, "help": help, "minimum": None, "usable": usable})


def _is_dynamo_name(text: str) -> bool:
    return _DYNAMO_NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of ``rlfleet operator``. The flag of each is its name with dashes."""

    namespace: str = _setting(
        "rlfleet-system", "RLFLEET_NAMESPACE", "the operator's own namespace (signing key, Lease)"
    )
    watch_namespaces: tuple[str, ...] = _setting(
        (), "RLFLEET_WATCH_NAMESPACES", "namespaces to serve, by comma or repeated; none: all (needs a ClusterRole)"
    )
    kubeconfig: str = _setting("", "RLFLEET_KUBECONFIG", "kubeconfig file; empty: service account, then KUBECONFIG")
    identity: str = _setting(
        "", "RLFLEET_IDENTITY", "name of this process, a nonce is added; empty: pod name and UID, else the host name"
    )
    leader_elect: bool = _setting(
        True, "RLFLEET_LEADER_ELECT", "act only while holding the Lease; false: for one operator in development"
    )
    signing_key_secret: str = _setting(
        "rlfleet-signing-key",
        "RLFLEET_SIGNING_KEY_SECRET",
        "the Secret in --namespace with the signing key; made at the first start if it may be",
    )
    lease_name: str = _setting(
        "rlfleet-operator", "RLFLEET_LEASE_NAME", "the Lease in --namespace; one for each set of watched namespaces"
    )
    lease_seconds: int = _setting(
        15, "RLFLEET_LEASE_SECONDS", "seconds that standbys wait for a silent leader, at most 3600", minimum=1
    )
    lease_renew_seconds: float = _setting(
        10.0, "RLFLEET_LEASE_RENEW_SECONDS", "seconds without a renewal after which the leader ends", minimum=0.2
    )
    lease_retry_seconds: float = _setting(
        2.0, "RLFLEET_LEASE_RETRY_SECONDS", "seconds between two renewals", minimum=0.05
    )
    health_bind: str = _setting(
        "127.0.0.1:9460", "RLFLEET_HEALTH_BIND", "address:port of /healthz, /readyz and /metrics; port 0: any free one"
    )
    web_bind: str = _setting(
        "127.0.0.1:9470",
        "RLFLEET_WEB_BIND",
        "address:port of the web page and of dry runs, for kubectl port-forward; each viewer brings a token; empty: "
        "neither",
    )
    discovery: bool = _dynamo(
        False,
        "DYN_ENABLE_RL",
        "serve worker discovery, GET /v1/rl/workers, in the form that clients of NVIDIA Dynamo read",
        lambda _: True,
    )
    discovery_host: str = _setting("127.0.0.1", "RLFLEET_DISCOVERY_HOST", "address that worker discovery is served at")
    discovery_port: int = _dynamo(8001, "DYN_RL_PORT", "its port; 0: any free one", lambda port: 0 <= port <= 65535)
    discovery_auth: str = _setting(
        "none",
        "RLFLEET_DISCOVERY_AUTH",
        "none: whoever reaches it may read; token: readers send a bearer token that may read what their base URL names",
    )
    discovery_namespace: str = _dynamo(
        "dynamo", "DYN_NAMESPACE", "the namespace, in Dynamo's sense, of all workers", _is_dynamo_name
    )
    discovery_endpoint: str = _dynamo(
        "rl", "DYN_RL_ENDPOINT", "the endpoint, in Dynamo's sense, of all workers", _is_dynamo_name
    )
    discovery_components: tuple[str, ...] = _dynamo(
        (),
        "DYN_RL_COMPONENTS",
        "pools whose engines are listed, by comma or repeated; none, and no DYN_RL_COMPONENT (one pool): all",
        lambda _: True,
    )
    discovery_request_timeout_seconds: int = _dynamo(
        30,
        "DYN_RL_REQUEST_TIMEOUT_SECS",
        "seconds for a worker to answer, the wait for its turn included; then it is listed with an error",
        lambda seconds: seconds > 0,
    )
    discovery_max_concurrent_probes: int = _dynamo(
        32, "DYN_RL_MAX_CONCURRENT_PROBES", "workers asked at the same time, for all readers together", lambda n: n > 0
    )
    loop_stall_seconds: float = _setting(
        20.0, "RLFLEET_LOOP_STALL_SECONDS", "/healthz fails when the main loop did not move for so long", minimum=0.1
    )
    concurrency: int = _setting(32, "RLFLEET_CONCURRENCY", "objects reconciled at the same time", minimum=1)
    api_qps: float = _setting(50.0, "RLFLEET_API_QPS", "calls to the apiserver per second", minimum=0.1)
    api_burst: int = _setting(100, "RLFLEET_API_BURST", "calls to the apiserver at once", minimum=1)
    api_timeout: float = _setting(10.0, "RLFLEET_API_TIMEOUT", "seconds for one call to the apiserver", minimum=0.1)
    router_timeout: float = _setting(5.0, "RLFLEET_ROUTER_TIMEOUT", "seconds for one change at a router", minimum=0.1)
    peer_proxy: str = _setting(
        "", "RLFLEET_PEER_PROXY", "http:// URL of a forward proxy for calls to gates and senders; empty: none"
    )
    tls_secret: str = _setting(
        "",
        "RLFLEET_TLS_SECRET",
        "Secret (tls.crt, tls.key) of each served namespace that new gates serve TLS with; senders must, too; empty: "
        "plain HTTP",
    )
    peer_ca_file: str = _setting(
        "", "RLFLEET_PEER_CA_FILE", "PEM file of the authorities that certify gates and senders; with --tls-secret"
    )
    poll_seconds: float = _setting(5.0, "RLFLEET_POLL_SECONDS", "seconds between looks at idle gates", minimum=0.1)
    boot_poll_seconds: float = _setting(
        1.0, "RLFLEET_BOOT_POLL_SECONDS", "seconds between looks at gates of starting engines", minimum=0.05
    )
    key_seconds: float = _setting(
        30.0, "RLFLEET_KEY_SECONDS", "seconds between looks at the signing key, which may be rotated", minimum=0.1
    )
    drain_seconds: float = _setting(
        0.5,
        "RLFLEET_DRAIN_SECONDS",
        "seconds that running reconciles may take to end on SIGTERM; a round that needs longer is handed over",
        minimum=0,
    )
    otlp_endpoint: str = _setting(
        "",
        "RLFLEET_OTLP_ENDPOINT",
        "http(s):// URL of an OTLP collector that gets a trace per round (extra rlfleet[otel]); empty: none",
    )
    log_format: str = _setting("json", "RLFLEET_LOG_FORMAT", "json or text")
    log_level: str = _setting("INFO", "RLFLEET_LOG_LEVEL", "DEBUG, INFO, WARNING or ERROR")

    def __post_init__(self) -> None:
        for f in fields(self):
            low = f.metadata["minimum"]
            if low is not None and getattr(self, f.name) < low:
                raise SettingsError(f"{_flag(f.name)} ({f.metadata['env']}) must be at least {low:g}")
            usable = f.metadata["usable"]
            if usable is not None and not usable(getattr(self, f.name)):
                value = getattr(self, f.name)
                raise SettingsError(
                    f"{_flag(f.name)} ({f.metadata['env']}): {value!r} can not be used: {f.metadata['help']}"
                )
        if self.discovery_auth not in ("none", "token"):
            raise SettingsError("--discovery-auth (RLFLEET_DISCOVERY_AUTH) must be none or token")
        if self.log_format not in ("json", "text"):
            raise SettingsError("--log-format (RLFLEET_LOG_FORMAT) must be json or text")
        if self.log_level not in LEVELS:
            raise SettingsError("--log-level (RLFLEET_LOG_LEVEL) must be DEBUG, INFO, WARNING or ERROR")
        if self.lease_seconds > MAX_LEASE_SECONDS:
            raise SettingsError(f"--lease-seconds (RLFLEET_LEASE_SECONDS) must be at most {MAX_LEASE_SECONDS:g}")
        if not self.lease_retry_seconds < self.lease_renew_seconds < self.lease_seconds:
            raise SettingsError(
                "--lease-retry-seconds (RLFLEET_LEASE_RETRY_SECONDS) must be below --lease-renew-seconds "
                "(RLFLEET_LEASE_RENEW_SECONDS), and that below --lease-seconds (RLFLEET_LEASE_SECONDS)"
            )
        if not self.lease_name:
            raise SettingsError("--lease-name (RLFLEET_LEASE_NAME) must not be empty")
        if not self.signing_key_secret:
            raise SettingsError("--signing-key-secret (RLFLEET_SIGNING_KEY_SECRET) must not be empty")
        for name in self.watch_namespaces:
            if not _NAMESPACE.fullmatch(name):
                raise SettingsError(f"--watch-namespaces (RLFLEET_WATCH_NAMESPACES): {name!r} is no namespace's name")
        if self.peer_proxy and not self.peer_proxy.startswith("http://"):
            raise SettingsError("--peer-proxy (RLFLEET_PEER_PROXY) must be an http:// URL")
        if bool(self.tls_secret) != bool(self.peer_ca_file):
            raise SettingsError(
                "--tls-secret (RLFLEET_TLS_SECRET) and --peer-ca-file (RLFLEET_PEER_CA_FILE) go together"
            )
        if self.otlp_endpoint:
            if not self.otlp_endpoint.startswith(("http://", "https://")):
                raise SettingsError("--otlp-endpoint (RLFLEET_OTLP_ENDPOINT) must be an http:// or https:// URL")
            if not _can_trace():
                raise SettingsError(
                    "--otlp-endpoint (RLFLEET_OTLP_ENDPOINT) needs OpenTelemetry: pip install 'rlfleet[otel]'"
                )
        self.health_address()
        self.web_address()

    def authorities(self) -> ClientTLS | None:
        """Whom gates and senders must be certified by; None without TLS."""
        try:
            return ClientTLS(Path(self.peer_ca_file)) if self.peer_ca_file else None
        except TLSError as e:
            raise SettingsError(f"--peer-ca-file (RLFLEET_PEER_CA_FILE): {e}") from e

    def timing(self) -> Timing:
        """The Lease's times."""
        return Timing(float(self.lease_seconds), self.lease_renew_seconds, self.lease_retry_seconds)

    def health_address(self) -> tuple[str, int]:
        """Host and port to serve probes on."""
        return _address("health_bind", self.health_bind)

    def web_address(self) -> tuple[str, int] | None:
        """Host and port to serve the web page on; None: it is not served."""
        return _address("web_bind", self.web_bind) if self.web_bind else None

    def discovery_naming(self) -> Naming:
        """What stands for Dynamo's names."""
        return Naming(self.discovery_namespace, self.discovery_endpoint, frozenset(self.discovery_components))

    def control(self) -> ControlSettings:
        """The part that reconcilers read. Its identity is another one at each call: ask once per process."""
        pod = os.environ.get("RLFLEET_POD_NAME") or socket.gethostname()
        uid = os.environ.get("RLFLEET_POD_UID")
        name = self.identity or (f"{pod[:70]}_{uid}" if uid else pod)
        return ControlSettings(
            namespace=self.namespace,
            identity=f"{name[:117]}_{secrets.token_hex(5)}",
            api_timeout=self.api_timeout,
            router_timeout=self.router_timeout,
            poll_seconds=self.poll_seconds,
            boot_poll_seconds=self.boot_poll_seconds,
            namespaces=self.watch_namespaces,
            tls_secret=self.tls_secret,
        )


def _address(name: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{_flag(name)} (RLFLEET_{name.upper()}) must be address:port")
    return host.strip("[]"), int(port)


def _can_trace() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting."""
    for f in fields(Settings):
        default = f"; default {str(f.default).lower()}" if f.default not in ("", ()) else ""
        how: dict[str, Any] = {}
        if isinstance(f.default, bool):
            how = {"nargs": "?", "const": "true"}
        elif isinstance(f.default, tuple):
            how = {"action": "append"}
        parser.add_argument(
            _flag(f.name),
            dest=f.name,
            metavar="VALUE",
            help=f"{f.metadata['help']} ({f.metadata['env']}{default})",
            **how,
        )


def load(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then ``environ``, then defaults. Raises SettingsError."""
    values: dict[str, Any] = {}
    for f in fields(Settings):
        text = getattr(arguments, f.name, None)
        if text is None and f.metadata["usable"] is not None:
            values |= _as_dynamo_does(f, environ)
            continue
        if text is None:
            text = environ.get(f.metadata["env"])
        if text is None:
            continue
        try:
            values[f.name] = _parse(f.default, text)
        except (ValueError, KeyError) as e:
            kind = type(f.default).__name__
            raise SettingsError(f"{_flag(f.name)} ({f.metadata['env']}): {text!r} is no {kind}") from e
    return Settings(**values)


def _as_dynamo_does(setting: Field[Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The value of one of Dynamo's variables; nothing where it is unset or can not be used."""
    env = setting.metadata["env"]
    text = environ.get(env)
    if env == "DYN_RL_COMPONENTS" and not any(w.strip() for w in (text or "").split(",")):
        env = "DYN_RL_COMPONENT"
        text = environ.get(env)
    if text is None:
        return {}
    try:
        value = _parse(setting.default, text.strip())
    except (ValueError, KeyError):
        pass
    else:
        if setting.metadata["usable"](value):
            return {setting.name: value}
    log.warning("%s: %r can not be used; going on with the default, %r", env, text, setting.default)
    return {}


def _parse(default: Any, text: str | list[str]) -> Any:
    """``text`` as a value of ``default``'s type; a list of texts comes from a repeated flag."""
    if isinstance(default, tuple):
        words = [w.strip() for part in ([text] if isinstance(text, str) else text) for w in part.split(",")]
        return tuple(dict.fromkeys(w for w in words if w))
    if isinstance(default, bool):
        return _WORDS[str(text).lower()]
    return type(default)(text)
