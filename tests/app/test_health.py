"""Probes judge the main loop from outside it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlfleet.app.health import HealthServer, LoopStamp

ROOT = Path(__file__).resolve().parents[2]


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def until(port: int, path: str, code: int, seconds: float = 120.0) -> str:
    deadline = time.monotonic() + seconds
    while (found := get(port, path))[0] != code:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found[1]


def test_blocked_loop_fails_healthz_and_a_free_one_passes_again() -> None:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    command = [sys.executable, str(ROOT / "tests/app/stalling.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        # The loop is blocked on its input from here on; the server answers all the same.
        assert "did not move" in until(port, "/healthz", 503)
        assert get(port, "/metrics") == (200, "x 1\n")
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "free\n"
        until(port, "/healthz", 200)
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0


def test_readiness_says_what_is_missing() -> None:
    missing = ["view of pods is not complete"]
    server = HealthServer(
        "127.0.0.1",
        0,
        stamp=LoopStamp(),
        stall_seconds=60,
        not_ready=lambda: missing[0] if missing else "",
        metrics=bytes,
    )
    server.start()
    try:
        assert get(server.port, "/readyz") == (503, "view of pods is not complete\n")
        missing.clear()
        assert get(server.port, "/readyz") == (200, "ok\n")
    finally:
        server.stop()


def test_address_in_use_is_an_error_at_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = HealthServer(
            "127.0.0.1", port, stamp=LoopStamp(), stall_seconds=1, not_ready=lambda: "", metrics=bytes
        )
        with pytest.raises(OSError, match="in use"):
            server.start()
