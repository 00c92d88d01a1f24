"""How worker discovery carries load: 1,000 workers, 100 readers at a time, without and with slow and dead workers.

Every part is a process of its own on loopback: the world (1,000 gates that answer a status, each at an address of its
own, and an apiserver that lists their pods and pools), the operator's worker discovery as it is (real probes, signed
tokens, real server), the readers, and as the baseline a bare aiohttp server with a static body of the same size. Gates
verify no token: that cost is on 1,000 machines, not on the operator's. Usage: discovery.py [seconds per measurement]
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

import aiohttp  # noqa: E402
import psutil  # noqa: E402
from aiohttp import web  # noqa: E402

from bench.machine import describe  # noqa: E402
from rlfleet.api import labels  # noqa: E402
from rlfleet.api.wire import EngineReport, EngineState, GateStatus, Held, HoldsRecord  # noqa: E402

WORKERS = 1000
POOLS = 10
READERS = 100
SLOW, SLOW_SECONDS = 10, 2.0
FROZEN = 10
DEAD = 20
GATE_PORT = 9440
Obj = dict[str, Any]


def address(number: int) -> str:
    """Where gate ``number`` listens."""
    return f"127.9.{number // 250}.{number % 250 + 1}"


# ------------------------------------------------------------------------------------------------ the world


def pool(number: int) -> Obj:
    """An EnginePool."""
    template = {"spec": {"containers": [{"name": "engine", "image": "e"}]}}
    return {
        "metadata": {"name": f"pool-{number}", "namespace": "bench", "uid": f"pool-uid-{number}"},
        "spec": {
            "pipeline": "p", "replicas": WORKERS // POOLS, "engine": {"type": "SGLang", "port": 30000},
            "gate": {"port": GATE_PORT}, "source": {"template": template},
        },
    }  # fmt: skip


def pod(number: int, *, trouble: bool) -> Obj:
    """The pod of engine ``number``; of a dead one nobody listens at its address."""
    of = number % POOLS
    owner = {"apiVersion": labels.API_VERSION, "kind": "EnginePool", "name": f"pool-{of}", "uid": f"pool-uid-{of}"}
    dead = trouble and SLOW + FROZEN <= number < SLOW + FROZEN + DEAD
    return {
        "metadata": {
            "name": f"engine-{number}", "namespace": "bench", "uid": f"uid-{number}", "resourceVersion": "5",
            "labels": {labels.POOL: f"pool-{of}", labels.PIPELINE: "p", labels.ENGINE_INDEX: str(number // POOLS)},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"initContainers": [{"name": "gate", "ports": [{"containerPort": GATE_PORT}]}], "containers": []},
        "status": {"phase": "Running", "podIP": "127.9.9.9" if dead else address(number)},
    }  # fmt: skip


def status(number: int) -> bytes:
    """What a gate says."""
    said = GateStatus(
        protocol_version=1, gate_version="0.1.0", capabilities=("Broadcast", "Checksum", "Serialized"),
        pod_uid=f"uid-{number}", incarnation="i" * 32, enrolled=True, enrolment="e" * 64, pipeline="p",
        pool=f"pool-{number % POOLS}", engine_name=f"engine-{number}",
        fence=Held(pipeline="p", operation="o" * 36, generation=1_780_000_000_000),
        engine=EngineReport(
            state=EngineState.READY, type="SGLang", version="0.5.9", paused=False, weight_label="12", world_size=8,
            layout="l" * 64, running=3, waiting=0, model="Qwen/Qwen3-0.6B",
        ),
        holds=HoldsRecord(version=12, manifest_digest="sha256:" + "a" * 64, engine_digest="b" * 64),
        routed={"router": True},
    )  # fmt: skip
    return said.model_dump_json(by_alias=True, exclude_none=True).encode()


async def world(trouble: bool) -> None:
    """Serve gates and apiserver until the end of input."""

    async def gate(request: web.Request) -> web.Response:
        number = request.app["number"]
        if trouble and number < SLOW:
            await asyncio.sleep(SLOW_SECONDS)
        elif trouble and number < SLOW + FROZEN:
            await asyncio.sleep(3600)
        return web.Response(body=request.app["body"], content_type="application/json")

    async def api(request: web.Request) -> web.StreamResponse:
        what = request.path.rsplit("/", 1)[-1]
        if "watch" in request.query:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(3600)
        if what == "rlfleet-signing-key":
            seed = base64.b64encode(b"s" * 32).decode()
            return web.json_response({"metadata": {"name": what}, "data": {"ed25519.seed": seed}})
        items = [pod(n, trouble=trouble) for n in range(WORKERS)] if what == "pods" else map(pool, range(POOLS))
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": list(items)})

    runners = []
    for number in range(WORKERS):
        app = web.Application()
        app["number"], app["body"] = number, status(number)
        app.router.add_get("/v1/status", gate)
        runners.append(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], address(number), GATE_PORT).start()
    app = web.Application()
    app.router.add_get("/{path:.*}", api)
    runners.append(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
    await runners[-1].setup()
    await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
    await until_told(runners[-1].addresses[0][1])


# ------------------------------------------------------------------------------------------------ the two servers


async def ours(apiserver: int, folder: str) -> None:
    """Worker discovery as the operator has it."""
    from rlfleet.app.discovery import Discovery
    from rlfleet.app.metrics import OperatorMetrics
    from rlfleet.app.settings import Settings
    from rlfleet.kube.client import KubeClient
    from rlfleet.kube.config import Credentials
    from rlfleet.kube.limiter import RateLimiter
    from rlfleet.kube.reflector import Reflector
    from rlfleet.kube.resources import PODS

    async def source() -> Credentials:
        return Credentials(f"http://127.0.0.1:{apiserver}")

    settings = Settings(discovery=True, discovery_port=0, kubeconfig=folder)
    async with KubeClient(source, limiter=RateLimiter(settings.api_qps, settings.api_burst)) as kube:
        view = Reflector(kube, PODS, index_labels=(labels.POOL, labels.PIPELINE))
        task = asyncio.create_task(view.run())
        await view.wait_synced()
        served = Discovery(settings, kube, view, authorities=None, observer=OperatorMetrics())
        await served.start()
        await until_told(served.port)
        await served.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def static(size: int) -> None:
    """A bare server with a body of this size."""
    body = b"x" * size

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/rl/workers", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await until_told(runner.addresses[0][1])


async def until_told(port: int) -> None:
    """Say the port, and go on until the input ends."""
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


# ------------------------------------------------------------------------------------------------ the readers


async def readers(port: int, seconds: float) -> None:
    """So many readers in a loop, each with a connection of its own; prints what they saw."""
    url = f"http://127.0.0.1:{port}/v1/rl/workers"
    taken: list[float] = []
    sizes: set[int] = set()
    bad: list[int] = []
    loop = asyncio.get_running_loop()

    async def one(session: aiohttp.ClientSession, until: float) -> None:
        while (started := loop.time()) < until:
            async with session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    bad.append(response.status)
            taken.append(loop.time() - started)
            sizes.add(len(body))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await one(session, loop.time() + 0.001)  # connections to gates are made
        taken.clear()
        began = loop.time()
        await asyncio.gather(*(one(session, began + seconds) for _ in range(READERS)))
        lasted = loop.time() - began
    print(json.dumps({"taken": taken, "seconds": lasted, "size": max(sizes), "bad": bad}), flush=True)


class Part:
    """One process of the benchmark, from its first line of output on."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def measure(part: Part, seconds: float) -> Obj:
    """What the readers saw, and the most memory that the server took meanwhile."""
    command = [sys.executable, __file__, "readers", str(part.port), str(seconds)]
    process = psutil.Process(part.process.pid)
    before = peak = process.memory_info().rss
    cpu = sum(process.cpu_times()[:2])
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(command, stdout=output)
        while running.poll() is None:
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.05)
        output.seek(0)
        found: Obj = json.load(output)
    used = sum(process.cpu_times()[:2]) - cpu
    return found | {"before": before, "peak": peak, "cpu": used / found["seconds"]}


def line(what: str, found: Obj) -> float:
    """Print one measurement; requests per second."""
    taken = sorted(found["taken"])
    rate = len(taken) / found["seconds"]
    p50, p99 = statistics.median(taken), taken[min(len(taken) - 1, int(len(taken) * 0.99))]
    print(
        f"  {what:28} {rate:8.1f} requests/s  p50 {p50:6.3f} s  p99 {p99:6.3f} s  {len(taken):6} answers of "
        f"{found['size'] / 1024:.0f} KiB  RSS {found['before'] / 2**20:.0f} -> {found['peak'] / 2**20:.0f} MiB  "
        f"CPU {found['cpu']:.2f}" + (f"  NOT 200: {sorted(set(found['bad']))}" if found["bad"] else ""),
        flush=True,
    )
    return rate


def main() -> None:
    """Measure without and with trouble, each beside the baseline."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    print(describe())
    print(f"{WORKERS} workers, {READERS} readers in a loop, {seconds:g} s each")
    with tempfile.TemporaryDirectory() as folder:
        for trouble in (False, True):
            print(
                f"{SLOW} slow ({SLOW_SECONDS:g} s), {FROZEN} frozen, {DEAD} dead" if trouble else "all workers are well"
            )
            about = Part("world", int(trouble))
            server = Part("ours", about.port, folder)
            found = measure(server, seconds)
            bare = Part("static", found["size"])
            other = measure(bare, seconds)
            for part in (server, about, bare):
                part.close()
            rate, most = line("worker discovery", found), line("bare server, static body", other)
            print(f"  ratio of rates {rate / most:.3f}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["world", text]:
            asyncio.run(world(text == "1"))
        case ["ours", port, where]:
            asyncio.run(ours(int(port), where))
        case ["static", size]:
            asyncio.run(static(int(size)))
        case ["readers", port, text]:
            asyncio.run(readers(int(port), float(text)))
        case _:
            main()
