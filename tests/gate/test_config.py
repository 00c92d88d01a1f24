"""A wrong configuration names its variable and never listens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlfleet.gate.config import ConfigError, load_config
from tests.gate.kit import KEY, ROOT, public

GOOD = {
    "RLFLEET_POD_UID": "uid",
    "RLFLEET_POD_IP": "127.9.9.9",
    "RLFLEET_STATE_DIR": "/nonexistent/state",
    "RLFLEET_STAGING_DIR": "/nonexistent/staging",
    "RLFLEET_ENGINE_URL": "http://127.9.9.9:30000",
    "RLFLEET_STAGING_LIMIT_BYTES": "1073741824",
    "RLFLEET_PUBLIC_KEYS": '{"k": "' + public(KEY) + '"}',
}


def test_defaults() -> None:
    config = load_config(GOOD)
    assert (config.port, config.engine_type, config.devices, config.router_quiet_seconds) == (9440, "SGLang", None, 5.0)
    assert config.capacity_bytes == 2**30
    assert not config.ready_when_proven
    assert load_config(GOOD | {"RLFLEET_READY_WHEN_PROVEN": "true"}).ready_when_proven


def test_devices_and_memory_limit() -> None:
    more = {"RLFLEET_DEVICES": "GPU-a, GPU-b", "RLFLEET_MEMORY_LIMIT_BYTES": str(2**29)}
    config = load_config(GOOD | more)
    assert config.devices == ("GPU-a", "GPU-b")
    assert config.capacity_bytes == 2**29 - 128 * 2**20


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config({k: v for k, v in GOOD.items() if k != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLFLEET_POD_IP", "gate.example"),
        ("RLFLEET_GATE_PORT", "0"),
        ("RLFLEET_GATE_PORT", "http"),
        ("RLFLEET_ENGINE_TYPE", "Ollama"),
        ("RLFLEET_ENGINE_URL", "127.0.0.1:30000"),
        ("RLFLEET_ENGINE_URL", "http://127.0.0.1:70000"),
        ("RLFLEET_ENGINE_URL", "http://127.0.0.1:port"),
        ("RLFLEET_DEVICES", "GPU-a GPU-b"),
        ("RLFLEET_PUBLIC_KEYS", "{}"),
        ("RLFLEET_PUBLIC_KEYS", '{"k": "AAAA"}'),
        ("RLFLEET_STAGING_LIMIT_BYTES", "1Gi"),
        ("RLFLEET_MEMORY_LIMIT_BYTES", "-1"),
        ("RLFLEET_ROUTER_QUIET_SECONDS", "soon"),
        ("RLFLEET_ROUTER_QUIET_SECONDS", "nan"),
        ("RLFLEET_READY_WHEN_PROVEN", "True"),
    ],
)
def test_a_malformed_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(GOOD | {name: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "RLFLEET_POD_IP is not set"),
        (GOOD | {"RLFLEET_LOG_LEVEL": "loud"}, "RLFLEET_LOG_LEVEL is 'LOUD': use DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_the_program_says_what_to_set(given: dict[str, str], said: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLFLEET_")} | given
    env["PYTHONPATH"] = f"{ROOT}/operator:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "rlfleet.gate"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
