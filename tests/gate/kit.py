"""Real processes for the gate's tests: a reference engine, a gate, a router, and an operator's side of the protocol."""

from __future__ import annotations

import base64
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import xxhash
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from e2e.sim.model import MODELS, initial_state
from rlfleet.api import tokens
from rlfleet.api.manifest import Manifest, TensorEntry, manifest_digest
from rlfleet.api.tokens import Scope
from rlfleet.api.wire import operation_id
from tests import starting

ROOT = Path(__file__).resolve().parents[2]
KEY = Ed25519PrivateKey.generate()
OTHER_KEY = Ed25519PrivateKey.generate()
KID = "k1"
SECONDS = 120.0


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def address() -> str:
    """A loopback address of its own, so that ports can be the same everywhere."""
    return f"127.{random.randint(64, 250)}.{random.randint(0, 250)}.{random.randint(1, 250)}"


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def until(what: str, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Poll until ``condition`` returns something true; connection errors count as not yet."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = condition()
            if last:
                return last
        except httpx.TransportError as e:
            last = e
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds:g} s (last: {last!r})")


class Process:
    """One child process with its output in a file."""

    def __init__(self, name: str, directory: Path, argv: list[str], env: dict[str, str]) -> None:
        self.log = directory / f"{name}.log"
        self.popen = starting.start(argv, env, self.log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait(timeout=SECONDS)

    def alive(self) -> None:
        if self.popen.poll() is not None:
            raise AssertionError(f"exited with {self.popen.returncode}:\n{self.log.read_text()[-4000:]}")


class Engine:
    """The reference engine with the numpy backend."""

    def __init__(self, directory: Path, *arguments: str, backend: str = "numpy", **env: str) -> None:
        self.host = address()
        self.url = f"http://{self.host}:30000"
        argv = [sys.executable, "-m", "e2e.sim.engine", "--host", self.host, "--port", "30000", "--backend", backend]
        self._start = partial(Process, "engine", directory, [*argv, *arguments], env)
        self.process = self._start()
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    def up(self) -> Engine:
        def ready() -> bool:
            self.process.alive()
            return self.http.get("/model_info").status_code == 200

        until("engine up", ready)
        return self

    def restart(self) -> None:
        """Another process at the same address, as where its container restarts in place."""
        self.kill()
        self.start()

    def kill(self) -> None:
        self.process.stop(signal.SIGKILL)

    def start(self) -> None:
        self.process = self._start()
        self.up()

    def reset(self) -> None:
        """Undo what an earlier test did to admission, label and faults."""
        self.faults()
        self.http.post("/continue_generation", json={}).raise_for_status()
        body = {"new_version": "default", "abort_all_requests": False}
        self.http.post("/update_weight_version", json=body).raise_for_status()

        def ready() -> bool:
            return self.ready() == 200 or (self.http.get("/health").status_code == 200 and self.ready() == 200)

        until("engine ready", ready)

    def faults(self, **rules: dict[str, Any]) -> None:
        self.http.post("/_sim/faults", json=rules).raise_for_status()

    def struck(self, path: str) -> int:
        """How many calls the fault of ``path`` has hit."""
        return int(self.http.get("/_sim/faults").json()[path]["struck"])

    def label(self) -> str:
        return str(self.http.get("/model_info").json()["weight_version"])

    def ready(self) -> int:
        return self.http.get("/ready").status_code

    def checksum(self) -> str:
        return str(self.http.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"])

    def close(self) -> None:
        self.http.close()
        self.process.stop(signal.SIGKILL)


#: How each router program is started, by the type that an EnginePool calls it.
ROUTERS = {
    "SGLangRouter": (sys.executable, "-m", "sglang_router.launch_router"),
    "SMG": (sys.executable, "-m", "smg", "launch"),
    "VLLMRouter": (sys.executable, "-m", "vllm_router.launch_router"),
}


class Router:
    """A real router; ``arguments`` win over ours."""

    def __init__(self, directory: Path, kind: str = "SGLangRouter", *arguments: str) -> None:
        self.kind = kind
        self.host = address()
        self.port = free_port(self.host)
        self.metrics_port = free_port(self.host)
        self.url = f"http://{self.host}:{self.port}"
        self.metrics = f"http://{self.host}:{self.metrics_port}"
        self._directory = directory
        self._arguments = arguments
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)
        self.process: Process | None = None

    def start(self) -> Router:
        argv = [*ROUTERS[self.kind], "--host", self.host, "--port", str(self.port)]
        argv += ["--policy", "round_robin", "--prometheus-host", self.host, "--prometheus-port", str(self.metrics_port)]
        # An engine that does not answer at first is asked again within the start-up timeout, which is short.
        argv += ["--worker-startup-timeout-secs", "5", "--worker-startup-check-interval", "1"]
        if self.kind != "VLLMRouter" and "--health-check-interval-secs" not in self._arguments:
            argv += ["--disable-health-check"]
        self.process = Process(f"router-{self.kind}", self._directory, [*argv, *self._arguments], {})
        until("router up", lambda: self.http.get("/liveness").status_code == 200)
        return self

    def urls(self) -> list[str]:
        return [str(w["url"]) for w in self.http.get("/workers").json()["workers"]]

    def add(self, url: str) -> None:
        self.http.post("/workers", json={"url": url}).raise_for_status()

    def close(self) -> None:
        self.http.close()
        if self.process is not None:
            self.process.stop(signal.SIGKILL)


@dataclass
class Weights:
    """One policy in buckets, as a sender would cut it."""

    manifest: Manifest
    buckets: list[bytes]

    @classmethod
    def of(cls, seed: int, *, tensors_per_bucket: int = 5, rename: Callable[[str], str] = lambda name: name) -> Weights:
        """The reference model's weights for a seed."""
        state = {rename(name): array for name, array in initial_state(MODELS["tiny"], seed).items()}
        entries: list[TensorEntry] = []
        buckets: list[bytes] = []
        items = list(state.items())
        for index, group in enumerate(_batches(items, tensors_per_bucket)):
            data = b""
            for name, array in group:
                raw = array.tobytes()
                entries.append(
                    TensorEntry(
                        name=name,
                        dtype="float32",
                        shape=array.shape,
                        hash=xxhash.xxh3_128(raw).hexdigest(),
                        bucket=index,
                        offset=len(data),
                    )
                )
                data += raw
            buckets.append(data)
        digest = manifest_digest("xxh3-128", entries)
        manifest = Manifest(tensors=tuple(entries), bucket_bytes=tuple(map(len, buckets)), digest=digest)
        return cls(manifest, buckets)

    @classmethod
    def random(cls, size: int) -> Weights:
        """One tensor of ``size`` bytes in one bucket."""
        data = random.randbytes(size)
        entry = TensorEntry(
            name="t", dtype="uint8", shape=(size,), hash=xxhash.xxh3_128(data).hexdigest(), bucket=0, offset=0
        )
        digest = manifest_digest("xxh3-128", [entry])
        return cls(Manifest(tensors=(entry,), bucket_bytes=(size,), digest=digest), [data])

    def without_last_bucket(self) -> Weights:
        """A policy that lacks some parameters of the model, whole and signed as such."""
        last = len(self.buckets) - 1
        entries = [t for t in self.manifest.tensors if t.bucket != last]
        digest = manifest_digest("xxh3-128", entries)
        buckets = self.buckets[:last]
        return Weights(Manifest(tensors=tuple(entries), bucket_bytes=tuple(map(len, buckets)), digest=digest), buckets)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def total(self) -> int:
        return self.manifest.total_bytes


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Gate:
    """The gate's process, and the calls that an operator and a sender make to it."""

    def __init__(self, directory: Path, engine_url: str, host: str, **env: str) -> None:
        self.host = host
        self.engine_url = engine_url
        self.url = f"http://{host}:9440"
        self.pod_uid = f"pod-{random.randrange(16**8):08x}"
        self.directory = directory
        self.state = directory / "state"
        self.staging = directory / "staging"
        self.env = {
            "RLFLEET_POD_UID": self.pod_uid,
            "RLFLEET_POD_NAME": "pool-0-abcde",
            "RLFLEET_POD_NAMESPACE": "default",
            "RLFLEET_POD_IP": host,
            "RLFLEET_NODE_NAME": "node-1",
            "RLFLEET_STATE_DIR": str(self.state),
            "RLFLEET_STAGING_DIR": str(self.staging),
            "RLFLEET_ENGINE_TYPE": "SGLang",
            "RLFLEET_ENGINE_URL": engine_url,
            "RLFLEET_STAGING_LIMIT_BYTES": str(64 * 2**20),
            "RLFLEET_MEMORY_LIMIT_BYTES": "0",
            "RLFLEET_PUBLIC_KEYS": json.dumps({KID: public(KEY)}),
            "RLFLEET_ROUTER_QUIET_SECONDS": "0.5",
            **env,
        }
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)
        self.process: Process | None = None

    # ------------------------------------------------------------------------------------------ process

    def start(self) -> Gate:
        self.process = Process("gate", self.directory, [sys.executable, "-m", "rlfleet.gate"], self.env)

        def up() -> bool:
            assert self.process is not None
            self.process.alive()
            return self.http.get("/livez").status_code == 200

        until("gate up", up)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.stop(signal.SIGKILL)

    def stop(self) -> int:
        assert self.process is not None
        return self.process.stop(signal.SIGTERM)

    def close(self) -> None:
        self.http.close()
        if self.process is not None:
            self.process.stop(signal.SIGKILL)

    def startupz(self) -> httpx.Response:
        return self.http.get("/startupz")


@dataclass
class Operator:
    """Speaks for one pipeline under one operation and generation."""

    gate: Gate
    pipeline: str = "pipeline-uid"
    operation: str = "round-1"
    generation: int = 1000
    key: Ed25519PrivateKey = field(default_factory=lambda: KEY)
    kid: str = KID

    def token(self, scope: Scope = Scope.CONTROL, **changes: Any) -> str:
        claims: dict[str, Any] = {
            "audience": [self.gate.pod_uid],
            "scope": scope,
            "pipeline": self.pipeline,
            "operation": self.operation,
            "generation": self.generation,
            "issued_at": int(time.time()),
        }
        claims.update(changes)
        return tokens.sign(self.key, self.kid, **claims)

    def headers(self, scope: Scope = Scope.CONTROL, **changes: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token(scope, **changes)}"}

    def status(self) -> dict[str, Any]:
        answer = self.gate.http.get("/v1/status", headers=self.headers(Scope.READ))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def enroll(self, routers: list[dict[str, Any]] | None = None, **changes: Any) -> httpx.Response:
        body = {
            "pipeline": self.pipeline,
            "generation": self.generation,
            "podUid": self.gate.pod_uid,
            "pool": "pool",
            "engine": "pool-0",
            "engineUrl": self.gate.engine_url,
            "routers": routers or [],
        } | changes
        return self.gate.http.post("/v1/enroll", json=body, headers=self.headers(operation=""))

    def ready(self, routers: list[dict[str, Any]] | None = None) -> Operator:
        """Enroll and wait until the start-up promise holds, the engine is known, and the gate has closed it."""
        assert self.enroll(routers).status_code == 200
        until("start-up promise", lambda: self.gate.startupz().status_code == 200)

        def closed() -> bool:
            status = self.status()
            return bool(status["capabilities"]) and status["engine"].get("paused") is True

        until("engine known and closed", closed)
        return self

    def fence(self) -> httpx.Response:
        body = {"pipeline": self.pipeline, "operation": self.operation, "generation": self.generation}
        return self.gate.http.post("/v1/fence", json=body, headers=self.headers())

    def body(self, kind: str, *, attempt: int = 1, incarnation: str | None = None, **order: Any) -> dict[str, Any]:
        incarnation = incarnation or self.status().get("incarnation", "none")
        return {
            "pipeline": self.pipeline,
            "operation": self.operation,
            "generation": self.generation,
            "podUid": self.gate.pod_uid,
            "incarnation": incarnation,
            "id": operation_id(self.operation, kind, attempt, incarnation),
            "attempt": attempt,
            "order": {"kind": kind, **order},
        }

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return self.gate.http.post("/v1/operations", json=body, headers=self.headers())

    def start(self, kind: str, **order: Any) -> httpx.Response:
        return self.post(self.body(kind, **order))

    def wait(self, op_id: str, seconds: float | None = None) -> dict[str, Any]:
        """The record of an operation after ``seconds``, or when it has ended; None: when it has ended."""
        deadline = time.monotonic() + SECONDS
        url = f"/v1/operations/{op_id}?waitSeconds={30 if seconds is None else seconds}"
        while True:
            answer = self.gate.http.get(url, headers=self.headers(Scope.READ))
            assert answer.status_code == 200, answer.text
            body: dict[str, Any] = answer.json()
            if seconds is not None or body["state"] != "Running" or time.monotonic() > deadline:
                return body

    def run(self, kind: str, **order: Any) -> dict[str, Any]:
        """Start an operation and wait for its end, whatever that is."""
        answer = self.start(kind, **order)
        assert answer.status_code in (200, 202), f"{kind}: {answer.text}"
        return self.wait(answer.json()["id"])

    def ok(self, kind: str, **order: Any) -> dict[str, Any]:
        record = self.run(kind, **order)
        assert record["state"] == "Succeeded", record
        return record

    def refused(self, kind: str, **order: Any) -> str:
        answer = self.start(kind, **order)
        assert answer.status_code >= 400, answer.text
        return str(answer.json()["reason"])

    # ------------------------------------------------------------------------------------------ weights

    def push(self, path: str, content: Any, **changes: Any) -> httpx.Response:
        headers = self.headers(Scope.PUSH, **changes)
        return self.gate.http.put(f"/v1/staging/{self.operation}/{path}", content=content, headers=headers)

    def prepare(self, weights: Weights, version: int, transport: str = "Serialized", **more: Any) -> dict[str, Any]:
        return self.ok(
            "Prepare",
            transport=transport,
            version=version,
            manifestDigest=weights.digest,
            totalBytes=weights.total,
            **more,
        )

    def push_manifest(self, weights: Weights) -> httpx.Response:
        return self.push("manifest", weights.manifest.model_dump_json(by_alias=True))

    def push_all(self, weights: Weights) -> None:
        assert self.push_manifest(weights).status_code == 200
        for index, data in enumerate(weights.buckets):
            answer = self.push(f"buckets/{index}", data)
            assert answer.status_code == 200, answer.text

    def load_order(self, weights: Weights, version: int) -> dict[str, Any]:
        return {"transport": "Serialized", "version": version, "manifestDigest": weights.digest}

    def names(self, weights: Weights, version: int) -> dict[str, Any]:
        return {"version": version, "manifestDigest": weights.digest}

    def deliver(self, weights: Weights, version: int, **more: Any) -> dict[str, Any]:
        """Prepare, push, pause, load, verify, publish; leaves the engine paused. Returns the publish record."""
        self.prepare(weights, version, **more)
        self.push_all(weights)
        self.ok("Pause", **more)
        self.ok("Load", **self.load_order(weights, version), **more)
        self.ok("Verify", **self.names(weights, version), **more)
        return self.ok("Publish", **self.names(weights, version), **more)

    def serve(self, weights: Weights, version: int) -> None:
        """Deliver and resume: the engine serves this version."""
        self.deliver(weights, version)
        self.ok("Resume", **self.names(weights, version))

    def next(self, operation: str = "round-2") -> Operator:
        """The same pipeline under a newer operation and generation."""
        return Operator(self.gate, self.pipeline, operation, self.generation + 1)


def router_entry(router: Router, *, name: str = "main", gone: bool = False) -> dict[str, Any]:
    return {"name": name, "type": "SGLangRouter", "url": router.url, "gone": gone}
