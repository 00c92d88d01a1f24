"""A Dynamo worker whose registration, system server and request plane are the real runtime's, and whose engine is not.

Runs in an environment of e2e.dynamo.install, so it imports nothing of this repository. Its RL routes answer as those of
Dynamo 1.6's vLLM worker do: always 200 with a ``status`` inside, one lock around whatever changes the engine, weights
only while paused, "paused" in process memory. The "engine" reads the safetensors files that it is told to load and
keeps a hash of their data, which ``tell_state`` tells.

Environment: RL_ROUTES (a comma-separated list; only these are registered), RL_WORLD_SIZE (1; 0: not told), RL_ENDPOINT
(``dynamo.backend.rl``), RL_FAULTS (a file of JSON: route -> what its answer becomes, ``null``: it raises; read at each
call, so that a test can change it).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dynamo.common.rl import RLRouteRegistry, register_rl_routes  # type: ignore[import-not-found]
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

Body = dict[str, Any]
Route = Callable[[Body], Awaitable[Body]]


class Engine:
    """The scripted engine behind the routes."""

    def __init__(self) -> None:
        self.paused = False
        self.version: str | None = None
        self.weights = "base"
        self.loads = 0
        self.flushes = 0
        self.mode = ""
        self.lock = asyncio.Lock()

    async def liveness_probe(self, _: Body) -> Body:
        return {"status": "ok", "alive": True}

    async def pause_generation(self, body: Body) -> Body:
        mode, clear = body.get("mode", "keep"), bool(body.get("clear_cache", False))
        if mode not in ("keep", "wait", "abort"):
            return _error(f"Invalid mode '{mode}'; expected keep|wait|abort")
        async with self.lock:
            self.paused, self.mode = True, mode
            self.flushes += clear
        return {"status": "ok", "message": "Engine paused", "mode": mode, "clear_cache": clear}

    async def resume_generation(self, _: Body) -> Body:
        async with self.lock:
            self.paused = False
        return {"status": "ok", "message": "Engine resumed"}

    async def flush_cache(self, _: Body) -> Body:
        async with self.lock:
            self.flushes += 1
        return {"status": "ok", "message": "Cache flushed"}

    async def update_weights_from_disk(self, body: Body) -> Body:
        async with self.lock:
            if not self.paused:
                return _error("Worker must be paused via pause_generation() before updating weights.")
            path = body.get("model_path")
            if not path:
                return _error("Missing 'model_path' in body")
            try:
                self.weights = _hash(Path(path))
            except OSError as e:
                return _error(str(e))
            self.loads += 1
            self.flushes += 1
            if "weight_version" in body:
                self.version = body["weight_version"]
        return {"status": "ok", "version": self.version, "version_declared": "weight_version" in body}

    async def update_weights_from_tensor(self, _: Body) -> Body:
        return _error("update_weights_from_tensor is not implemented")

    async def get_weight_version(self, _: Body) -> Body:
        return {"status": "ok", "version": self.version, "version_declared": self.version is not None}

    async def set_weight_version(self, body: Body) -> Body:
        if "weight_version" not in body:
            return _error("Missing 'weight_version' in body")
        self.version = body["weight_version"]
        return {"status": "ok", "version": self.version}

    async def tell_state(self, _: Body) -> Body:
        return {
            "status": "ok",
            "pid": os.getpid(),
            "paused": self.paused,
            "version": self.version,
            "weights": self.weights,
            "loads": self.loads,
            "flushes": self.flushes,
            "mode": self.mode,
        }


def _error(message: str) -> Body:
    return {"status": "error", "message": message}


def _hash(folder: Path) -> str:
    """A hash of the data of all safetensors files in ``folder``, without their headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    digest = hashlib.sha256()
    for file in files:
        raw = file.read_bytes()
        digest.update(raw[8 + int.from_bytes(raw[:8], "little") :])
    return digest.hexdigest()


def _faults() -> Body:
    """What RL_FAULTS says now."""
    file = os.environ.get("RL_FAULTS")
    return dict(json.loads(Path(file).read_text())) if file and Path(file).exists() else {}


def _faulty(name: str, route: Route) -> Route:
    """The route, unless RL_FAULTS says otherwise."""

    async def call(body: Body) -> Body:
        found = _faults()
        if name not in found:
            return await route(body)
        if found[name] is None:
            raise RuntimeError(f"{name} raises, as its test wants it")
        return dict(found[name])

    return call


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(0))
    engine = Engine()
    names = [n for n in vars(Engine) if not n.startswith("_") and n != "tell_state"]
    asked = [n.strip() for n in os.environ.get("RL_ROUTES", "").split(",") if n.strip()]
    routes = {n: _faulty(n, getattr(engine, n)) for n in asked or names}
    world = int(os.environ.get("RL_WORLD_SIZE", "1"))
    try:
        registry = RLRouteRegistry(runtime, **({"world_size": world} if world else {}))
    except TypeError:  # versions before 1.6 have no world_size
        registry = RLRouteRegistry(runtime)
    register_rl_routes(runtime, registry, routes, enable_dispatch=True)
    runtime.register_engine_route("tell_state", engine.tell_state)
    print("registered", flush=True)
    await runtime.endpoint(os.environ.get("RL_ENDPOINT", "dynamo.backend.rl")).serve_endpoint(registry.dispatch_stream)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
