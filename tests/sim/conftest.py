"""Real engine processes for the tests of the reference engine, one loopback address each."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import starting


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Engine:
    """One engine process and its HTTP client."""

    def __init__(self, backend: str, arguments: list[str], log: Path) -> None:
        self.host = f"127.{random.randint(64, 250)}.{random.randint(0, 250)}.{random.randint(1, 250)}"
        self.port = free_port(self.host)
        self.url = f"http://{self.host}:{self.port}"
        self._log = log
        command = [
            sys.executable,
            "-m",
            "e2e.sim.engine",
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--backend",
            backend,
        ]
        self.process = starting.start([*command, *arguments], {}, log)
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_up(self) -> Engine:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            try:
                if self.http.get("/model_info").status_code in (200, 401):
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"engine did not come up:\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **more)

    def generate(self, prompt: list[int], new: int, **sampling: Any) -> dict[str, Any]:
        answer = self.post(
            "/generate",
            {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": new, **sampling}},
        )
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def checksum(self) -> str:
        answer = self.post("/weights_checker", {"action": "checksum"}).json()
        assert answer["success"]
        digest: str = answer["per_engine_checksum"]
        return digest

    def load(self) -> dict[str, int]:
        loads: list[dict[str, int]] = self.http.get("/v1/loads").json()["loads"]
        return loads[0]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"condition never held; engine says:\n{self.log()}"
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


StartEngine = Callable[..., Engine]


@contextmanager
def engine_starter(directory: Path) -> Iterator[StartEngine]:
    engines: list[Engine] = []

    def start(backend: str = "numpy", *arguments: str) -> Engine:
        engine = Engine(backend, list(arguments), directory / f"engine-{len(engines)}.log")
        engines.append(engine)
        return engine.wait_up()

    try:
        yield start
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines: ``start_engine("numpy", "--flag", ...)``; all are stopped after the test."""
    with engine_starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def _module_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_starter(tmp_path_factory.mktemp("engine")) as start:
        yield start("numpy")


@pytest.fixture
def shared_engine(_module_engine: Engine) -> Iterator[Engine]:
    """One numpy engine for all tests of a module that change no weights; it is unpaused after each."""
    yield _module_engine
    assert _module_engine.post("/continue_generation").status_code == 200
    _module_engine.post("/end_weight_update")  # refused when no session is open
