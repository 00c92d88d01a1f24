"""The engines that the contract is tested against: the reference engine in either face, and the real ones.

Invariant: all of them begin with the same weights (seed ``DISK``) of the same model under the same keys, so what one
answers can be held against what the other does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from e2e.engines.environments import installed
from e2e.engines.fixtures import DISK
from e2e.engines.serving import PATIENCE, PORT, process
from e2e.engines.tiny import MODEL
from rlfleet.engine import Checksum, EngineAdapter, make_adapter
from rlfleet_vllm.__main__ import install
from tests.gate.kit import ROOT, address

REFERENCE, REAL = "reference", "real"
USER_KEY, ADMIN_KEY = "user-key", "admin-key"
#: Seconds for a start; a real engine on two busy cores takes most of it.
START_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """A finished request."""

    tokens: list[int]
    reason: str


class Subject(ABC):
    """One running engine."""

    where: str
    #: Tokens of a request that is to be met while it runs.
    long: int

    def __init__(self, kind: str, folder: Path, models: Path) -> None:
        self.kind = kind
        self.models = models
        self.host = address()
        self.url = f"http://{self.host}:{PORT}"
        self._log = (folder / "engine.log").open("wb")
        self._folder = folder
        self._starts = 0
        #: What its parameters hash to with the weights that cases begin with, once that is known.
        self.begins_with: Checksum | None = None
        self._popen = self._again()

    def _again(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        (self._folder / str(self._starts)).mkdir()
        return self._start()

    @property
    def scratch(self) -> Path:
        """A folder that is new with every start."""
        return self._folder / str(self._starts)

    def restart(self) -> None:
        """It ended by itself, or is to end now: start it again."""
        self._end()
        self._popen = self._again()
        self.up()

    @abstractmethod
    def _start(self) -> subprocess.Popen[bytes]: ...

    def _run(self, argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        # A session of its own: a real engine is several processes, which all end with it.
        return subprocess.Popen(
            argv, cwd=ROOT, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def up(self) -> Subject:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._popen.poll() is None, self.tail()
            try:
                if httpx.get(f"{self.url}/v1/models", headers=self._headers(), timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not up within {START_SECONDS:g} s: {self.tail()}")

    def close(self) -> None:
        """End all of its processes."""
        self._end()
        self._log.close()

    def _end(self) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(timeout=20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.wait()

    def tail(self) -> str:
        """The end of its log."""
        return (self._folder / "engine.log").read_text(errors="replace")[-4000:]

    def adapter(self, *, api_key: str | None = USER_KEY, admin_key: str | None = ADMIN_KEY) -> EngineAdapter:
        """A new adapter for it."""
        return make_adapter(self.kind, self.url, api_key=api_key, admin_key=admin_key)

    @staticmethod
    def _headers() -> dict[str, str]:
        return {"Authorization": f"Bearer {USER_KEY}"}

    async def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        """One greedy request, as a user sends it."""
        async with httpx.AsyncClient(base_url=self.url, headers=self._headers(), timeout=120) as http:
            if self.kind == "VLLM":
                body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
                answer = await http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
                assert answer.status_code == 200, answer.text
                choice = answer.json()["choices"][0]
                return Answer([int(t) for t in choice["token_ids"] or []], str(choice["finish_reason"]))
            how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            answer = await http.post("/generate", json={"input_ids": list(prompt), "sampling_params": how})
            assert answer.status_code == 200, answer.text
            told = answer.json()
            return Answer([int(t) for t in told["output_ids"]], str(told["meta_info"]["finish_reason"]["type"]))


class Reference(Subject):
    """The reference engine."""

    where = REFERENCE
    long = 250

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [
            sys.executable, "-m", "e2e.sim.engine", "--api", self.kind.lower(),
            "--host", self.host, "--port", str(PORT),
            "--model", MODEL, "--seed", str(DISK), "--step-ms", "3", "--max-running-requests", "8",
            "--enable-memory-saver",
        ]  # fmt: skip
        argv += ["--api-key", USER_KEY, "--admin-api-key", ADMIN_KEY]
        return self._run(argv, {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}"})


class Real(Subject):
    """A real engine, from ``make engines``."""

    where = REAL
    long = 1000

    def _start(self) -> subprocess.Popen[bytes]:
        assert installed(self.kind) is not None
        extra = {
            "SGLang": ("--api-key", USER_KEY, "--admin-api-key", ADMIN_KEY),
            "VLLM": (
                *("--api-key", USER_KEY, "--middleware", "rlfleet_vllm.ControlKey"),
                *("--weight-transfer-config", '{"backend":"rlfleet"}'),
            ),
        }[self.kind]
        env = {}
        if self.kind == "VLLM":
            install(self.scratch / "plugin")
            env = {
                "PYTHONPATH": os.pathsep.join([str(self.scratch / "plugin"), str(PATIENCE)]),
                "RLFLEET_ENGINE_ADMIN_KEY": ADMIN_KEY,
            }
        argv, told = process(self.kind, self.models / str(DISK), self.host, PORT, self.scratch)
        kept = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
        return self._run([*argv, *extra], kept | told | env)
