"""Settings of the operator process: one documented list, read from flags, then the environment, then defaults.

Invariant: a value that cannot be used stops the program at start with the setting's name; nothing is ignored.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rlfleet.control.context import ControlSettings


class SettingsError(Exception):
    """A setting has a value that cannot be used."""


def _setting(default: Any, env: str, help: str, *, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"env": env, "help": help, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of ``rlfleet operator``. The flag of each is its name with dashes."""

    namespace: str = _setting("rlfleet-system", "RLFLEET_NAMESPACE", "the operator's own namespace (signing key)")
    watch_namespace: str = _setting("", "RLFLEET_WATCH_NAMESPACE", "the only namespace to serve; empty: all of them")
    kubeconfig: str = _setting("", "RLFLEET_KUBECONFIG", "kubeconfig file; empty: service account, then KUBECONFIG")
    identity: str = _setting("", "RLFLEET_IDENTITY", "name of this process in status; empty: host name and a suffix")
    health_bind: str = _setting(
        "127.0.0.1:9460", "RLFLEET_HEALTH_BIND", "address:port of /healthz, /readyz and /metrics; port 0: any free one"
    )
    loop_stall_seconds: float = _setting(
        20.0, "RLFLEET_LOOP_STALL_SECONDS", "/healthz fails when the main loop did not move for so long", minimum=0.1
    )
    concurrency: int = _setting(32, "RLFLEET_CONCURRENCY", "objects reconciled at the same time", minimum=1)
    api_qps: float = _setting(50.0, "RLFLEET_API_QPS", "calls to the apiserver per second", minimum=0.1)
    api_burst: int = _setting(100, "RLFLEET_API_BURST", "calls to the apiserver at once", minimum=1)
    api_timeout: float = _setting(10.0, "RLFLEET_API_TIMEOUT", "seconds for one call to the apiserver", minimum=0.1)
    router_timeout: float = _setting(5.0, "RLFLEET_ROUTER_TIMEOUT", "seconds for one change at a router", minimum=0.1)
    poll_seconds: float = _setting(5.0, "RLFLEET_POLL_SECONDS", "seconds between looks at idle gates", minimum=0.1)
    boot_poll_seconds: float = _setting(
        1.0, "RLFLEET_BOOT_POLL_SECONDS", "seconds between looks at gates of starting engines", minimum=0.05
    )
    drain_seconds: float = _setting(
        10.0, "RLFLEET_DRAIN_SECONDS", "seconds that running reconciles may take to end on SIGTERM", minimum=0
    )
    log_format: str = _setting("json", "RLFLEET_LOG_FORMAT", "json or text")
    log_level: str = _setting("INFO", "RLFLEET_LOG_LEVEL", "DEBUG, INFO, WARNING or ERROR")

    def __post_init__(self) -> None:
        for f in fields(self):
            low = f.metadata["minimum"]
            if low is not None and getattr(self, f.name) < low:
                raise SettingsError(f"{_flag(f.name)} ({f.metadata['env']}) must be at least {low:g}")
        if self.log_format not in ("json", "text"):
            raise SettingsError("--log-format (RLFLEET_LOG_FORMAT) must be json or text")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise SettingsError("--log-level (RLFLEET_LOG_LEVEL) must be DEBUG, INFO, WARNING or ERROR")
        self.health_address()

    def health_address(self) -> tuple[str, int]:
        """Host and port to serve probes on."""
        host, _, port = self.health_bind.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise SettingsError("--health-bind (RLFLEET_HEALTH_BIND) must be address:port")
        return host.strip("[]"), int(port)

    def control(self) -> ControlSettings:
        """The part that reconcilers read."""
        identity = self.identity or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        return ControlSettings(
            namespace=self.namespace,
            identity=identity[:128],
            api_timeout=self.api_timeout,
            router_timeout=self.router_timeout,
            poll_seconds=self.poll_seconds,
            boot_poll_seconds=self.boot_poll_seconds,
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting."""
    for f in fields(Settings):
        default = f"; default {f.default}" if f.default != "" else ""
        parser.add_argument(
            _flag(f.name), dest=f.name, metavar="VALUE", help=f"{f.metadata['help']} ({f.metadata['env']}{default})"
        )


def load(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then ``environ``, then defaults. Raises SettingsError."""
    values: dict[str, Any] = {}
    for f in fields(Settings):
        text = getattr(arguments, f.name, None)
        if text is None:
            text = environ.get(f.metadata["env"])
        if text is None:
            continue
        kind: type[Any] = type(f.default)
        try:
            values[f.name] = kind(text)
        except ValueError as e:
            raise SettingsError(f"{_flag(f.name)} ({f.metadata['env']}): {text!r} is no {kind.__name__}") from e
    return Settings(**values)
