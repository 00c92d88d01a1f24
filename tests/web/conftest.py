"""The web server in front of recorded objects, and a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlfleet.control.explaining import Wanted
from rlfleet.kube.config import Credentials
from rlfleet.web.server import Standby, WebServer
from rlfleet.web.shared import Shared
from tests.cli.fleets import recorded
from tests.plan.rounds_kit import cache, engine, gate, ref, sender
from tests.plan.test_explain import ask
from tests.web.apiserver import Apiserver
from tests.web.browser import Browser

TWO = ref("me", 2, uid="dry-run")
HOLDS = sender(cache(2))


@pytest.fixture
async def apiserver() -> AsyncIterator[Apiserver]:
    """Answers with the failed fleet, unless the test exchanges it."""
    one = Apiserver(recorded("failed"))
    await one.server.start_server()
    yield one
    await one.server.close()


@asynccontextmanager
async def serving(apiserver: Apiserver, looks: Shared | None = None) -> AsyncIterator[WebServer]:
    """The web server of a leader that knows two engines of version 2; of other versions it is a standby."""

    async def where() -> Credentials:
        return Credentials(str(apiserver.server.make_url("")).rstrip("/"))

    async def report(namespace: str, name: str, wanted: Wanted | None) -> dict[str, Any]:
        if wanted is None or wanted.version != 2:
            raise Standby("this replica is a standby")
        said = ask(engine("a", gate()), engine("b", gate(), quarantined=True), wanted=TWO, holds=HOLDS)
        return {"observed": {}, "explanation": said}

    server = WebServer("127.0.0.1", 0, where=where, report=report, looks=looks)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def page(apiserver: Apiserver) -> AsyncIterator[WebServer]:
    """A web server."""
    async with serving(apiserver) as server:
        yield server


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    """A browser with an empty page."""
    async with Browser(tmp_path / "profile") as one:
        yield one
