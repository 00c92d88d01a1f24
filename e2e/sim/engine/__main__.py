"""``python -m e2e.sim.engine``: start one reference engine.

Invariant: the port opens only when the weights are loaded, and nothing listens but ``--host``:``--port``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import sys
import zlib
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Middleware

from e2e.sim.device.ledger import Account, DeviceOutOfMemory, visible
from e2e.sim.model import MODELS, ModelConfig, fused_shapes, initial_state, load_config
from e2e.sim.model_numpy import NumpyModel, cache_shape

from .admission import Admission
from .faults import Faults
from .front import Front
from .groups_api import Groups
from .labels import Labels
from .memory import CACHE, GRAPHS, WEIGHTS, DeviceMemory, padded
from .middleware import named
from .scheduler import Model, Scheduler
from .server import Server
from .updates import Updates
from .vllm_server import VLLMServer
from .vllm_weights import LayerwiseLoads
from .vllm_workers import Workers
from .weights import WeightStore

log = logging.getLogger("e2e.sim.engine")
#: What the real engines call the process that holds device memory.
_PROCESS = {"sglang": "sglang::scheduler", "vllm": "VLLM::EngineCore"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.sim.engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api", choices=("sglang", "vllm"), default="sglang", help="whose HTTP surface it answers")
    parser.add_argument(
        "--no-plugin", action="store_true", help="vllm only: started without rlfleet's weight transfer plug-in"
    )
    parser.add_argument("--middleware", help="vllm only: an ASGI middleware package.Class in front of every path")
    parser.add_argument("--model", default="tiny", help=f"checkpoint directory, or one of {', '.join(MODELS)}")
    parser.add_argument("--served-model-name", help="default: what --model says")
    parser.add_argument("--backend", choices=("torch", "numpy"), default="torch", help="numpy: no broadcast groups")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of sampling")
    parser.add_argument("--api-key", help="key for user paths")
    parser.add_argument("--admin-api-key", help="key for control paths")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="least duration of a decode step, as a larger model has"
    )
    parser.add_argument("--health-timeout", type=float, default=20.0, help="seconds until /health answers 503")
    parser.add_argument("--no-health-generation", action="store_true", help="/health is a plain 200")
    parser.add_argument("--group-timeout", type=float, default=1800.0, help="seconds of rendezvous and collectives")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument(
        "--empty-checksums", action="store_true", help="parameters hash as empty input, as packed ones do on CPUs"
    )
    parser.add_argument(
        "--extra-tensors", type=Path, help="JSON {name: [dtype, shape]} of parameters that are kept as they come"
    )
    parser.add_argument(
        "--enable-memory-saver",
        action="store_true",
        help="device memory is really given back (vllm: --enable-sleep-mode)",
    )
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.1, help="part of its simulated device that the engine takes"
    )
    parser.add_argument("--fault-file", type=Path, help="JSON of scripted faults, read again at every call")
    return parser.parse_args()


def _worth_logging(record: logging.LogRecord) -> bool:
    """False for what is not HTTP at all: routers probe every new worker for gRPC, and are answered 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


def _fatal(message: str) -> None:
    """The real engine's scheduler takes the whole server down with it."""
    sys.stderr.write(f"{message}\nthe engine exits\n")
    sys.stderr.flush()
    os._exit(1)


def _model(model: str) -> tuple[ModelConfig, Path | None]:
    directory = Path(model)
    if directory.is_dir():
        return load_config(directory), directory
    if model not in MODELS:
        raise SystemExit(f"--model {model}: neither a directory nor one of {', '.join(MODELS)}")
    return MODELS[model], None


def _allocate(arguments: argparse.Namespace, config: ModelConfig) -> DeviceMemory:
    """All memory of this engine, on its devices where it has some; one that has no room does not start."""
    weights = sum(padded(4 * math.prod(shape)) for shape in fused_shapes(config).values())
    cache = 2 * padded(4 * math.prod(cache_shape(config, arguments.max_running_requests)))
    try:
        return DeviceMemory(
            Account(visible(os.environ), f"{_PROCESS[arguments.api]} {arguments.served_model_name or arguments.model}"),
            {WEIGHTS: weights, CACHE: cache},
            fraction=arguments.mem_fraction_static,
            saver=arguments.enable_memory_saver,
            fatal=_fatal,
        )
    except DeviceOutOfMemory as error:
        raise SystemExit(f"torch.OutOfMemoryError: {error}") from error


async def _serve(arguments: argparse.Namespace) -> None:
    config, directory = _model(arguments.model)
    path = "" if directory is None else str(directory.resolve())
    memory = _allocate(arguments, config)
    state = initial_state(config, arguments.seed) if directory is None else {}
    described = {} if arguments.extra_tensors is None else json.loads(arguments.extra_tensors.read_text())
    extra = {name: (dtype, tuple(shape)) for name, (dtype, shape) in described.items()}
    weights = WeightStore(config, state, extra, new=partial(memory.new, WEIGHTS))
    if directory is not None:
        weights.load_directory(directory)
    weights.packed = arguments.empty_checksums
    slots = arguments.max_running_requests
    groups: Groups | None = None
    model: Model
    if arguments.backend == "torch":
        from e2e.sim.model_torch import TorchModel

        from .groups import BroadcastGroups

        groups = BroadcastGroups(arguments.host, arguments.group_timeout)
        model = TorchModel(config, weights.parameters, slots, partial(memory.new, CACHE))
    else:
        model = NumpyModel(config, weights.parameters, slots, partial(memory.new, CACHE))
    loads = LayerwiseLoads(weights, fatal=_fatal)

    def touch() -> None:
        memory.touch(WEIGHTS, CACHE, GRAPHS)
        loads.touch()

    scheduler = Scheduler(
        weights,
        model,
        slots=slots,
        # Engines of one pool share --seed; their samples must still differ.
        seed=arguments.seed ^ zlib.crc32(f"{arguments.host}:{arguments.port}".encode()),
        step_seconds=arguments.step_ms / 1000,
        touch=touch,
        fatal=_fatal,
    )
    labels = Labels(path, arguments.served_model_name or arguments.model)
    admission = Admission(
        scheduler, config, labels, memory=memory, health_seconds=arguments.health_timeout, fatal=_fatal
    )
    sites: list[web.TCPSite] = []

    def close_port() -> None:
        for site in sites:
            stopping = asyncio.ensure_future(site.stop())
            stopping.add_done_callback(lambda task: task.result())

    front: Front
    outer: list[Middleware] = []
    faults = Faults(arguments.fault_file)
    if arguments.api == "vllm":
        front = vllm = VLLMServer(
            admission,
            Workers(admission, weights, loads, groups),
            labels,
            faults,
            api_key=arguments.api_key,
            admin_key=arguments.admin_api_key,
            plugin=not arguments.no_plugin,
            close_port=close_port,
        )
        outer = [named(arguments.middleware, vllm.config())] if arguments.middleware else []
    else:
        front = Server(
            admission,
            Updates(admission, weights, labels, groups),
            labels,
            faults,
            api_key=arguments.api_key,
            admin_key=arguments.admin_api_key,
            metrics=arguments.enable_metrics,
            health_generates=not arguments.no_health_generation,
            close_port=close_port,
        )
    scheduler.start()
    runner = web.AppRunner(
        front.app(*outer), access_log=None, handler_cancellation=True, shutdown_timeout=1, keepalive_timeout=3600
    )
    await runner.setup()
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    sites.append(web.TCPSite(runner, arguments.host, arguments.port))
    await sites[0].start()
    log.info("serving %s (%s) on http://%s:%d", arguments.model, arguments.backend, arguments.host, arguments.port)
    await stop.wait()
    await runner.cleanup()
    if not scheduler.stop(timeout=1):
        # Stuck in a collective: nothing but the end of the process frees it.
        log.warning("the scheduler is stuck in a call; exiting anyway")
        os._exit(0)


def main() -> None:
    """Parse arguments and serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.server").addFilter(_worth_logging)
    sys.setswitchinterval(0.001)  # the event loop must not wait long behind decode steps
    asyncio.run(_serve(_arguments()))


if __name__ == "__main__":
    main()
