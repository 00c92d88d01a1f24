"""Processes of the real Dynamo runtime for a test: one frontend, any number of workers, all on loopback addresses.

Discovery is the file backend, so there is neither etcd nor NATS. Invariant: everything that was started is ended, by
pid; nothing listens on a wildcard address.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.dynamo.install import CURRENT, UNVERSIONED, ensure

WORKER = Path(__file__).with_name("worker.py")


def environment(store: Path, host: str, *, version: str = CURRENT) -> dict[str, str]:
    """What every process of the runtime needs. ``store``: the folder that discovery is kept in."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_ENABLE_RL": "true",
        "DYN_TCP_RPC_HOST": host,
        # An address today, the name of an interface in versions before.
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo" if version == UNVERSIONED else host,
        "DYN_SYSTEM_HOST": host,
        "HF_HUB_OFFLINE": "1",
        "DYN_LOG": "warn",
    }


def get(url: str, *, timeout: float = 10.0) -> tuple[int, bytes]:
    """One GET; status and body."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def post(url: str, body: Any = None, *, timeout: float = 10.0) -> Any:
    """One POST with a JSON body; the JSON of its answer."""
    data = json.dumps({} if body is None else body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


class Runtime:
    """One frontend and its workers below ``folder``."""

    def __init__(self, folder: Path, *, version: str = CURRENT) -> None:
        self.folder = folder
        self.version = version
        self.store = folder / "discovery"
        self.store.mkdir(parents=True)
        # A loopback address that nobody else uses, so its ports are free.
        self.host = f"127.{secrets.randbelow(20) + 230}.{secrets.randbelow(254) + 1}.{secrets.randbelow(254) + 1}"
        self.rl_port = 0
        self._port = 18_000
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Base URL of the discovery listener."""
        return f"http://{self.host}:{self.rl_port}"

    def start_frontend(self) -> subprocess.Popen[bytes]:
        """A frontend with its RL listener, once that answers. A later one listens where the first one did."""
        port, self.rl_port = self.free_port(), self.rl_port or self.free_port()
        arguments = ["-m", "dynamo.frontend", "--http-host", self.host, "--http-port", str(port)]
        process = self.spawn("frontend", arguments, self.version, DYN_RL_PORT=str(self.rl_port))
        self.until(lambda: _answers(f"{self.url}/v1/rl/workers"), "the frontend to answer", process)
        return process

    def start_worker(self, port: int = 0, *, version: str = CURRENT, **env: str) -> Worker:
        """A worker on its own system port, once its routes answer. It may not be listed yet."""
        port = port or self.free_port()
        process = self.spawn(f"worker-{port}", [str(WORKER)], version, DYN_SYSTEM_PORT=str(port), **env)
        worker = Worker(process, f"http://{self.host}:{port}")
        self.until(lambda: _answers(f"{worker.url}/engine/tell_state"), "the worker to answer", process)
        return worker

    def unlist(self, instance_id: str) -> None:
        """Take a worker's registration away, as a lease does that runs out while the worker is frozen."""
        files = list(self.store.rglob(f"*{int(instance_id):x}"))
        assert files, f"no registration of {instance_id} in {self.store}"
        for file in files:
            file.unlink()

    def free_port(self) -> int:
        """A port of this runtime's own address that was not given out before. Dynamo's system port is an i16."""
        self._port += 1
        return self._port

    def spawn(self, name: str, arguments: list[str], version: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a Python program in the environment of one version."""
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, str(ensure(version)), *arguments],
                env={"PATH": os.environ["PATH"], **environment(self.store, self.host, version=version), **env},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def until(self, look: Callable[[], Any], what: str, process: subprocess.Popen[bytes] | None = None) -> Any:
        """Wait for something true; the deadline only ends a broken test."""
        deadline = time.monotonic() + 120
        while True:
            found = look()
            if found:
                return found
            assert process is None or process.poll() is None, f"{what}: it ended ({process.returncode})\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited 120 s for {what}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        """The last lines of every process."""
        texts = [f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)

    def stop(self) -> None:
        """End everything that was started."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait()


class Worker:
    """One worker process and where its system server is."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])

    def state(self) -> dict[str, Any]:
        """What its scripted engine is."""
        found: dict[str, Any] = post(f"{self.url}/engine/tell_state")
        return found

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait()


def _answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False
