"""Our own client of Dynamo reads our list as it reads Dynamo's, and both lists have one form."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from e2e.dynamo.fixtures import installed
from e2e.dynamo.runtime import Runtime
from rlfleet.api.discovery import RLWorkers
from rlfleet.discovery.client import Frontends, Unknown
from rlfleet.plan.discovery import instance_id
from rlfleet.plan.dynamo import Listing
from tests.discovery.kit import Site


@pytest.fixture
async def frontends() -> AsyncIterator[Frontends]:
    one = Frontends()
    yield one
    await one.close()


@pytest.mark.parametrize("before", ["", "/strict", "/namespaces/team", "/strict/namespaces/team/pipelines/p"])
async def test_our_client_of_dynamo_reads_our_list_unchanged(site: Site, frontends: Frontends, before: str) -> None:
    told = await frontends.look(f"http://127.0.0.1:{site.server.port}{before}", patience=60)
    assert isinstance(told, Listing), told
    assert (told.protocol, told.namespace) == (1, "dynamo")
    found = {w.instance_id: w for w in told.workers}
    well = found[str(instance_id("uid-e-0"))]  # as text, for half of all are above what an int64 holds
    assert (well.component, well.endpoint, well.system_url) == ("e", "rl", "http://e-0:9440")
    assert (well.world_size, well.error, well.routes) == (1, "", frozenset())
    ill = found[str(instance_id("uid-e-1"))]
    assert "TimeoutError" in ill.error
    assert ill.system_url is None


async def test_a_failure_is_unknown_to_it_and_never_empty(site: Site, frontends: Frontends) -> None:
    site.failure = "the apiserver is away"
    told = await frontends.look(f"http://127.0.0.1:{site.server.port}", patience=60)
    assert isinstance(told, Unknown)
    assert "HTTP 500: the apiserver is away" in told.message


async def test_the_real_frontends_list_has_our_form(tmp_path: Path, site: Site) -> None:
    """What Dynamo itself lists is read by the model that we write with, which refuses members that it does not know."""
    installed()
    runtime = Runtime(tmp_path / "dynamo")
    try:
        runtime.start_frontend()
        runtime.start_worker(RL_WORLD_SIZE="2")
        deadline = time.monotonic() + 120
        while (
            not (workers := (theirs := await asyncio.to_thread(_list, runtime.url))["workers"]) or "error" in workers[0]
        ):
            assert time.monotonic() < deadline, f"{theirs}\n{runtime.logs()}"
            await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(runtime.stop)
    RLWorkers.model_validate(theirs)
    _, ours, _ = await site.get("/strict/v1/rl/workers")
    assert ours.keys() == theirs.keys()
    (one,) = workers
    for mine in (w for w in ours["workers"] if "error" not in w):
        # A model is registered beside the engine, and the scripted one has none.
        assert mine.keys() - {"model"} == one.keys() - {"model"}
        assert {k: type(v) for k, v in mine.items() if k in one} == {k: type(v) for k, v in one.items() if k in mine}


def _list(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/v1/rl/workers", timeout=60) as answer:
        return json.load(answer)
