"""Our discovery client and adapter against the real Dynamo runtime: what it lists, and what its workers answer.

Discovery, request plane and system servers are Dynamo's own; the engine behind the routes is scripted (e2e/dynamo).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from e2e.dynamo.runtime import Runtime
from rlfleet.api.wire import PauseMode
from rlfleet.calls import Refused
from rlfleet.discovery.client import Frontends
from rlfleet.engine.dynamo import UNDECLARED, DynamoAdapter
from rlfleet.plan.dynamo import REQUIRED, Listing


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """A frontend of the present version, without a worker."""
    one = Runtime(tmp_path / "dynamo")
    try:
        one.start_frontend()
        yield one
    finally:
        one.stop()


@pytest.fixture
async def frontends() -> AsyncIterator[Frontends]:
    """The client as the operator has it."""
    one = Frontends(monotonic=time.monotonic)
    yield one
    await one.close()


async def listed(frontends: Frontends, runtime: Runtime, count: int, *, healthy: bool = True) -> Listing:
    """The list, once it has so many workers; a registration takes a moment."""
    deadline = time.monotonic() + 120
    while True:
        told = await frontends.look(runtime.url, patience=30)
        if (
            isinstance(told, Listing)
            and len(told.workers) == count
            and all(not w.error or not healthy for w in told.workers)
        ):
            return told
        assert time.monotonic() < deadline, f"{told}\n{runtime.logs()}"


async def test_a_worker_is_listed_driven_and_known_by_its_process(runtime: Runtime, frontends: Frontends) -> None:
    empty = await frontends.look(runtime.url, patience=30)
    assert isinstance(empty, Listing)
    assert (empty.protocol, empty.workers) == (1, ())

    worker = runtime.start_worker(RL_WORLD_SIZE="2")
    entry = (await listed(frontends, runtime, 1)).workers[0]
    assert (entry.component, entry.system_url, entry.world_size) == ("backend", worker.url, 2)
    assert entry.routes >= REQUIRED
    adapter = DynamoAdapter(worker.url)
    try:
        view = await adapter.view(5)
        assert (view.admitting, view.label, view.running, view.instance) == (True, UNDECLARED, 0, entry.instance_id)
        await adapter.facts(5)
        # A 200 is no success: the worker refuses to load unless it is paused, and to load what is not there.
        with pytest.raises(Refused, match="must be paused"):
            await adapter.load_directory(str(runtime.folder), seconds=5)
        with pytest.raises(Refused, match="not paused"):
            await adapter.flush(5)
        await adapter.pause(PauseMode.KEEP, drain_seconds=0)
        assert ((await adapter.view(5)).admitting, worker.state()["paused"]) == (False, True)
        with pytest.raises(Refused, match="no safetensors"):
            await adapter.load_directory(str(runtime.folder), seconds=5)
        assert worker.state()["loads"] == 0, "asking whether it is paused loads nothing"
        assert await adapter.write_label("7", 5) == "7"
        assert await adapter.idle(5, memory_here=True)
        await adapter.flush(5)
        await adapter.resume()
        assert ((await adapter.view(5)).admitting, worker.state()["paused"]) == (True, False)

        # Killed, it is listed for a while with an error, and then not at all; either way it is closed, not healthy.
        worker.kill()
        dead = (await listed(frontends, runtime, 1, healthy=False)).workers[0]
        assert dead.error
        assert (dead.routes, dead.system_url) == (frozenset(), None)
        assert (await adapter.view(1)).reachable is False

        # The same URL, another process: another instance, which nobody takes for the first one.
        again = runtime.start_worker(worker.port)
        view = await adapter.view(5)
        assert again.url == worker.url
        assert view.instance not in (None, entry.instance_id)
        assert (view.admitting, view.label) == (True, UNDECLARED)
        with pytest.raises(Refused, match="the weights were loaded into"):
            await adapter.write_label("7", 5)
    finally:
        await adapter.close()
