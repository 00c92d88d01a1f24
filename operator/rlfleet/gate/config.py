"""The gate's configuration: environment variables, read once, each error naming its variable.

Invariant: nothing is guessed. A variable that is missing or malformed stops the gate before it listens, with what is
wrong and what to set.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlfleet.api.tokens import PublicKeys, TokenError
from rlfleet.api.wire import DEFAULT_GATE_PORT
from rlfleet.engine import ADAPTERS

#: Memory that the process itself needs beside staged bytes; they share the container's limit.
RESERVE_BYTES = 128 * 2**20
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


class ConfigError(Exception):
    """A variable is missing or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Everything that the pod tells its gate. ``memory_limit_bytes`` 0: no limit. ``devices`` None: unknown."""

    pod_uid: str
    pod_name: str
    namespace: str
    pod_ip: str
    node: str
    port: int
    state_dir: Path
    staging_dir: Path
    engine_type: str
    engine_url: str
    staging_limit_bytes: int
    memory_limit_bytes: int
    public_keys: PublicKeys
    devices: tuple[str, ...] | None
    pipeline: str
    pool: str
    engine_name: str
    engine_index: str
    engine_api_key: str | None
    engine_admin_key: str | None
    router_quiet_seconds: float
    ready_when_proven: bool = False
    """Not ready before the first weights came; False: ready as soon as a model is loaded."""
    checkpoint_dir: Path | None = None
    """Where checkpoints lie, here and in the engine; None: the pod mounts none."""
    allow_unknown_version: bool = False
    """Drive an engine of a version that rlfleet.engine.known does not list."""
    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key; None: plain HTTP."""
    router_keys_dir: Path | None = None
    """Folder with a file for each router that demands a key, called as the pool calls the router; None: none does."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be staged: the volume's size, and what the container's limit leaves beside the process."""
        if not self.memory_limit_bytes:
            return self.staging_limit_bytes
        return max(0, min(self.staging_limit_bytes, self.memory_limit_bytes - RESERVE_BYTES))


def load_config(env: Mapping[str, str]) -> GateConfig:
    """Read the configuration; ConfigError names the first variable that is wrong."""
    pod_ip = _required(env, "RLFLEET_POD_IP")
    try:
        ipaddress.ip_address(pod_ip)
    except ValueError as e:
        raise ConfigError(f"RLFLEET_POD_IP={pod_ip!r} is not an IP address") from e
    engine_type = env.get("RLFLEET_ENGINE_TYPE") or "SGLang"
    if engine_type not in ADAPTERS:
        raise ConfigError(f"RLFLEET_ENGINE_TYPE={engine_type!r} is not known; set one of {', '.join(sorted(ADAPTERS))}")
    engine_url = _required(env, "RLFLEET_ENGINE_URL")
    if not engine_url.startswith(("http://", "https://")) or not _has_port(engine_url):
        raise ConfigError(f"RLFLEET_ENGINE_URL={engine_url!r} is not an http(s) URL")
    try:
        keys = PublicKeys.from_json(_required(env, "RLFLEET_PUBLIC_KEYS"))
    except TokenError as e:
        raise ConfigError(f"RLFLEET_PUBLIC_KEYS: {e}") from e
    return GateConfig(
        pod_uid=_required(env, "RLFLEET_POD_UID"),
        pod_name=env.get("RLFLEET_POD_NAME", ""),
        namespace=env.get("RLFLEET_POD_NAMESPACE", ""),
        pod_ip=pod_ip,
        node=env.get("RLFLEET_NODE_NAME", ""),
        port=_integer(env, "RLFLEET_GATE_PORT", DEFAULT_GATE_PORT, low=1, high=65535),
        state_dir=Path(_required(env, "RLFLEET_STATE_DIR")),
        staging_dir=Path(_required(env, "RLFLEET_STAGING_DIR")),
        engine_type=engine_type,
        engine_url=engine_url,
        staging_limit_bytes=_integer(env, "RLFLEET_STAGING_LIMIT_BYTES", None, low=0),
        memory_limit_bytes=_integer(env, "RLFLEET_MEMORY_LIMIT_BYTES", 0, low=0),
        public_keys=keys,
        devices=_devices(env),
        pipeline=env.get("RLFLEET_PIPELINE", ""),
        pool=env.get("RLFLEET_POOL", ""),
        engine_name=env.get("RLFLEET_ENGINE_NAME", ""),
        engine_index=env.get("RLFLEET_ENGINE_INDEX", ""),
        engine_api_key=env.get("RLFLEET_ENGINE_API_KEY") or None,
        engine_admin_key=env.get("RLFLEET_ENGINE_ADMIN_KEY") or None,
        router_quiet_seconds=_number(env, "RLFLEET_ROUTER_QUIET_SECONDS", 5.0),
        ready_when_proven=_switch(env, "RLFLEET_READY_WHEN_PROVEN"),
        checkpoint_dir=Path(text) if (text := env.get("RLFLEET_CHECKPOINT_DIR", "").strip()) else None,
        allow_unknown_version=_switch(env, "RLFLEET_ENGINE_ALLOW_UNKNOWN_VERSION"),
        tls_dir=Path(text) if (text := env.get("RLFLEET_TLS_DIR", "").strip()) else None,
        router_keys_dir=Path(text) if (text := env.get("RLFLEET_ROUTER_KEYS_DIR", "").strip()) else None,
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigError(f"{name} is not set")
    return value


def _has_port(url: str) -> bool:
    """The port of the URL, or the scheme's own, is one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    found = tuple(d for text in env.get("RLFLEET_DEVICES", "").split(",") if (d := text.strip()))
    for device in found:
        if not _DEVICE.fullmatch(device):
            raise ConfigError(f"RLFLEET_DEVICES: {device!r} is no UUID of a device; set UUIDs with commas between them")
    return found or None


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip() or "false"
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text!r} is neither true nor false")
    return text == "true"


def _integer(env: Mapping[str, str], name: str, default: int | None, *, low: int, high: int = 2**62) -> int:
    text = env.get(name, "").strip()
    if not text:
        if default is None:
            raise ConfigError(f"{name} is not set")
        return default
    try:
        value = int(text)
    except ValueError as e:
        raise ConfigError(f"{name}={text!r} is not an integer") from e
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is not between {low} and {high}")
    return value


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError as e:
        raise ConfigError(f"{name}={text!r} is not a number of seconds") from e
    if not 0 <= value <= 3600:
        raise ConfigError(f"{name}={value:g} is not between 0 and 3600 seconds")
    return value
