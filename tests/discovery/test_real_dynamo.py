"""Our discovery client and adapter against the real Dynamo runtime: what it lists, and what its workers answer.

Discovery, request plane and system servers are Dynamo's own; the engine behind the routes is scripted (e2e/dynamo).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from e2e.dynamo.fixtures import installed
from e2e.dynamo.install import CURRENT, UNVERSIONED
from e2e.dynamo.runtime import Runtime
from rlfleet.api.wire import PauseMode
from rlfleet.calls import Refused
from rlfleet.discovery.client import Frontends, Unknown
from rlfleet.engine.dynamo import UNDECLARED, DynamoAdapter
from rlfleet.plan.dynamo import REQUIRED, Candidate, Listing, Standing, join


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """A frontend of the present version, without a worker."""
    installed()
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
    """The list, once it has so many workers, all of them healthy unless that does not matter."""
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
        await asyncio.sleep(0.05)


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
        view = await adapter.view(30)
        assert (view.admitting, view.label, view.running, view.instance) == (True, UNDECLARED, 0, entry.instance_id)
        await adapter.facts(30)
        # A 200 is no success: the worker refuses to load unless it is paused, and to load what is not there.
        with pytest.raises(Refused, match="must be paused"):
            await adapter.load_directory(str(runtime.folder), seconds=30)
        with pytest.raises(Refused, match="not paused"):
            await adapter.flush(30)
        await adapter.pause(PauseMode.KEEP, drain_seconds=0)
        assert ((await adapter.view(30)).admitting, worker.state()["paused"]) == (False, True)
        assert worker.state()["flushes"] == 1, "what was computed with the old weights is dropped by the pause itself"
        with pytest.raises(Refused, match="no safetensors"):
            await adapter.load_directory(str(runtime.folder), seconds=30)
        assert worker.state()["loads"] == 0, "asking whether it is paused loads nothing"
        assert await adapter.write_label("7", 30) == "7"
        assert await adapter.idle(30, memory_here=True)
        await adapter.flush(30)
        await adapter.resume()
        assert ((await adapter.view(30)).admitting, worker.state()["paused"]) == (True, False)

        # Killed, it is listed for a while with an error, and then not at all; either way it is closed, not healthy.
        worker.kill()
        dead = (await listed(frontends, runtime, 1, healthy=False)).workers[0]
        assert dead.error
        assert (dead.routes, dead.system_url) == (frozenset(), None)
        assert (await adapter.view(1)).reachable is False

        # The same URL, another process: another instance, which nobody takes for the first one.
        again = runtime.start_worker(worker.port)
        view = await adapter.view(30)
        assert again.url == worker.url
        assert view.instance not in (None, entry.instance_id)
        assert (view.admitting, view.label) == (True, UNDECLARED)
        with pytest.raises(Refused, match="the weights were loaded into"):
            await adapter.write_label("7", 30)
    finally:
        await adapter.close()


async def test_a_frozen_worker_is_closed_and_holds_nobody_up(runtime: Runtime, frontends: Frontends) -> None:
    """The frontend gives it five seconds; whoever asks meanwhile has the answer before, and our deadline ends it."""
    frozen, well = runtime.start_worker(), runtime.start_worker()
    ids = {w.system_url: w.instance_id for w in (await listed(frontends, runtime, 2)).workers}
    frozen.process.send_signal(signal.SIGSTOP)
    hasty = Frontends(monotonic=time.monotonic, answer_seconds=2)
    try:
        told = await hasty.look(runtime.url, patience=30)
        assert isinstance(told, Unknown), "half an answer is none"
        assert "no answer within 2 s" in told.message
    finally:
        await hasty.close()
    before = await frontends.look(runtime.url, patience=0.01)
    assert isinstance(before, Listing)
    assert len(before.workers) == 2, "the answer from before, until there is a newer one"
    while True:
        told = await frontends.look(runtime.url, patience=60)
        assert isinstance(told, Listing), told
        mine = [w for w in told.workers if w.instance_id == ids[frozen.url]]
        others = [w for w in told.workers if w.instance_id == ids[well.url]]
        if [w.error for w in others] == [""] and all(w.error for w in mine):
            break  # closed or gone, and it spoils no other


async def test_a_worker_that_is_not_listed_runs_on(runtime: Runtime, frontends: Frontends) -> None:
    """A zombie: its registration is gone (a lease that ran out while it was frozen), its process is not."""
    worker = runtime.start_worker()
    entry = (await listed(frontends, runtime, 1)).workers[0]
    runtime.unlist(entry.instance_id)
    told = await listed(frontends, runtime, 0)
    adapter = DynamoAdapter(worker.url)
    try:
        view = await adapter.view(30)
        assert (view.reachable, view.admitting, view.instance) == (True, True, entry.instance_id)
        verdict = join(told, [Candidate("u", "pod", runtime.host, view.instance)], port=worker.port)["u"]
        assert (verdict.standing, verdict.joined) == (Standing.UNLISTED, False)
        await adapter.pause(PauseMode.ABORT, drain_seconds=0)
        assert worker.state()["paused"], "what is not listed can be closed all the same"
    finally:
        await adapter.close()


async def test_frontend_and_worker_from_before_there_were_versions(tmp_path: Path, frontends: Frontends) -> None:
    """Dynamo 1.3.1 tells no protocol version; fleets of both are real."""
    installed(CURRENT, UNVERSIONED)
    runtime = Runtime(tmp_path / "old", version=UNVERSIONED)
    try:
        runtime.start_frontend()
        workers = {w.url: w for w in (runtime.start_worker(version=UNVERSIONED), runtime.start_worker())}
        told = await listed(frontends, runtime, 2)
        assert told.protocol is None
        for entry in told.workers:
            assert entry.system_url in workers
            adapter = DynamoAdapter(entry.system_url)
            try:
                await adapter.facts(30)
                assert (await adapter.view(30)).instance == entry.instance_id
                await adapter.pause(PauseMode.KEEP, drain_seconds=0)
                assert await adapter.write_label("3", 30) == "3"
                await adapter.resume()
            finally:
                await adapter.close()
            pod = Candidate("u", "p", runtime.host, entry.instance_id)
            assert join(told, [pod], port=workers[entry.system_url].port)["u"].joined
    finally:
        runtime.stop()


async def test_no_frontend_is_unknown_and_not_empty(runtime: Runtime, frontends: Frontends) -> None:
    assert isinstance(await frontends.look(runtime.url, patience=30), Listing)
    runtime.processes[0].kill()
    runtime.processes[0].wait()
    told = await frontends.look(runtime.url, patience=30)
    assert isinstance(told, Unknown)
    assert not told.refused
