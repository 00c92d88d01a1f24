"""The serialized leg: sender -> real gate, against a raw HTTP copy that hashes too. Budget: >= 0.8 of its rate.

Ours: a Push operation of the sender to a gate process, which hashes every tensor and writes safetensors files into a
memory-backed volume. Baseline: the same bytes sent in pieces by aiohttp to a bare aiohttp server process that hashes
them and writes them to a file beside. Both are timed by the caller. Usage: serialized_leg.py [MiB] [repetitions]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

import aiohttp  # noqa: E402
import httpx  # noqa: E402
import torch  # noqa: E402
import xxhash  # noqa: E402
from aiohttp import web  # noqa: E402

from bench.machine import describe, report  # noqa: E402
from rlfleet.api import wire  # noqa: E402
from rlfleet.gate.main import READ_BUFFER  # noqa: E402
from rlfleet.sender import WeightSender  # noqa: E402
from tests.gate import kit  # noqa: E402
from tests.sender.caller import Operator  # noqa: E402

PIECE = 2**20
TENSORS = 32


def serve_copy(host: str, port: int, folder: str) -> None:
    """The baseline's server: hash and write, nothing else."""

    async def put(request: web.Request) -> web.Response:
        digest = xxhash.xxh3_128()
        with (Path(folder) / request.match_info["name"]).open("wb", buffering=0) as file:
            async for chunk in request.content.iter_any():
                digest.update(chunk)
                file.write(chunk)
        return web.Response(text=digest.hexdigest())

    app = web.Application(client_max_size=2**40)
    app.router.add_put("/{name}", put)

    async def serve() -> None:
        # The gate's own setting: with aiohttp's default of 64 KiB the copy is far slower, and no baseline.
        runner = web.AppRunner(app, access_log=None, read_bufsize=READ_BUFFER)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


async def copy(url: str, parts: list[memoryview]) -> list[str]:
    """The baseline's client; the hashes that the server computed."""
    hashes = []
    async with aiohttp.ClientSession() as session:
        for index, part in enumerate(parts):

            async def pieces(part: memoryview = part) -> AsyncIterator[memoryview]:
                for at in range(0, len(part), PIECE):
                    yield part[at : at + PIECE]

            headers = {"Content-Length": str(len(part))}
            async with session.put(f"{url}/{index}", data=pieces(), headers=headers) as answer:
                assert answer.status == 200
                hashes.append(await answer.text())
    return hashes


def main() -> None:
    """Run both, alternating."""
    if sys.argv[1:2] == ["serve"]:
        serve_copy(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torch.set_num_threads(1)
    print(describe())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        run(Path(name), mib, repetitions)


def run(folder: Path, mib: int, repetitions: int) -> None:
    """Start engine, gate, sender and the bare server, and time."""
    engine = kit.Engine(folder)
    gate = kit.Gate(folder, engine.url, engine.host, RLFLEET_STAGING_LIMIT_BYTES=str(2 * mib * 2**20))
    host = kit.address()
    argv = [sys.executable, str(Path(__file__).resolve()), "serve", host, "8080", str(folder)]
    bare = kit.Process("bare", folder, argv, {})
    sender = WeightSender(
        kit.address(), pod_uid="trainer-pod-uid", public_keys={kit.KID: kit.public(kit.KEY)}, bucket_bytes=mib * 2**18
    )
    caller = None
    try:
        sender.start()
        engine.up()
        gate.start()
        at_gate = kit.Operator(gate).ready()
        caller = Operator(sender.url, kit.KEY, sender.incarnation)
        caller.operation, caller.generation = at_gate.operation, at_gate.generation
        each = mib * 2**20 // TENSORS
        state = {f"t{i}": torch.randint(0, 256, (each,), dtype=torch.uint8) for i in range(TENSORS)}
        manifest = sender.publish(1, state)
        whole = torch.cat(list(state.values()))
        array: Any = whole.numpy()
        flat = memoryview(array)
        parts = [flat[at : at + mib * 2**18] for at in range(0, len(flat), mib * 2**18)]
        expected = [xxhash.xxh3_128_hexdigest(part) for part in parts]
        kit.until("bare server up", lambda: httpx.get(f"http://{host}:8080/").status_code == 404)
        target = wire.PushTarget(
            engine="e", url=gate.url, pod_uid=gate.pod_uid, buckets=True, token=caller.push_token(gate.pod_uid)
        )
        order = wire.PushOrder(manifest_digest=manifest.digest, targets=(target,), deadline_seconds=120)
        ours: list[float] = []
        baseline: list[float] = []
        prepare = {"transport": "Serialized", "manifestDigest": manifest.digest, "totalBytes": manifest.total_bytes}
        for attempt in range(1, repetitions + 2):
            # A gate keeps what it has of the same bytes and would only compare them: make it store them each time.
            at_gate.ok("Discard", attempt=attempt)
            at_gate.ok("Prepare", attempt=attempt, version=1, **prepare)
            assert at_gate.status()["staged"]["receivedBytes"] == 0
            started = time.perf_counter()
            record = caller.run(order, attempt)
            ours.append(time.perf_counter() - started)
            assert record.result["targets"]["e"]["ok"], record
            assert at_gate.status()["staged"]["complete"]
            for index in range(len(parts)):
                (folder / str(index)).unlink(missing_ok=True)
            started = time.perf_counter()
            hashes = asyncio.run(copy(f"http://{host}:8080", parts))
            baseline.append(time.perf_counter() - started)
            assert hashes == expected
        # The first of each warms up.
        report("serialized leg", manifest.total_bytes, ours[1:], baseline[1:], 0.8)
    finally:
        if caller is not None:
            caller.http.close()
        sender.close()
        gate.close()
        engine.close()
        bare.stop()


if __name__ == "__main__":
    main()
