"""The independent proof: what the engines hold is what the trainer wrote to disk, read from the engines themselves.

One more engine process, outside of the fleet, loads the trainer's final state dict from its checkpoint folder. Engines
hash their own fused parameters, so equal checksums mean equal weights in memory, whichever way they travelled. Nothing
here is taken from a gate's, a round's or the operator's word.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from e2e.demo.follow import tail
from e2e.demo.stage import DemoError

ENGINE_PORT = 30000
_START_SECONDS = 90.0
_CALL_SECONDS = 20.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Proof:
    """Checksums by engine, and the one of an engine that loaded from disk. ``None``: no checksum could be read."""

    engines: Mapping[str, str | None]
    from_disk: str | None

    @property
    def holds(self) -> bool:
        """Whether every engine holds exactly what lies on disk."""
        return self.from_disk is not None and bool(self.engines) and set(self.engines.values()) == {self.from_disk}


def prove(addresses: Mapping[str, str], checkpoint: Path, log: Path, environment: Mapping[str, str]) -> Proof:
    """Compares the engines at ``addresses`` (name -> IP) with one that loads ``checkpoint``.

    ``environment`` goes to that engine's process, ``log`` takes its output. Raises DemoError when it does not start.
    """
    engines = {name: checksum(f"http://{address}:{ENGINE_PORT}") for name, address in sorted(addresses.items())}
    with _engine_from_disk(checkpoint, log, environment) as url:
        return Proof(engines, checksum(url))


def checksum(url: str) -> str | None:
    """An engine's checksum of its own weights; None when it gives none."""
    try:
        answer = httpx.post(
            f"{url}/weights_checker", json={"action": "checksum"}, timeout=_CALL_SECONDS, trust_env=False
        )
    except httpx.TransportError:
        return None
    if answer.status_code != httpx.codes.OK:
        return None
    value = answer.json().get("per_engine_checksum")
    return str(value) if value else None


@contextmanager
def _engine_from_disk(checkpoint: Path, log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    # An address of its own in the loopback block: the port cannot be anybody else's.
    host = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.254"
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "e2e.sim.engine",
                f"--host={host}",
                f"--port={port}",
                f"--model={checkpoint}",
                "--backend=torch",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
        )
    try:
        url = f"http://{host}:{port}"
        deadline = time.monotonic() + _START_SECONDS
        while checksum(url) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError("the engine that loads from disk did not start", [("engine from disk", tail(log))])
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
