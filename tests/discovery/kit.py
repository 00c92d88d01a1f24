"""A server of worker discovery whose workers the test chooses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp

from rlfleet.api.wire import GateStatus
from rlfleet.discovery.board import Board, DiscoveryError
from rlfleet.discovery.probing import ProbeError, Prober
from rlfleet.discovery.server import Denied, DiscoveryServer
from rlfleet.plan.discovery import Naming, Scope, Worker
from tests.plan.rounds_kit import DIGEST_A, gate
from tests.plan.test_discovery import worker

NAMING = Naming()


class Site:
    """A server whose workers the test chooses."""

    def __init__(self) -> None:
        self.workers: list[Worker] = [worker("e-0"), worker("e-1"), worker("f-0", "f", pipeline="q")]
        self.failure = ""
        self.hold: asyncio.Event | None = None
        self.judge: asyncio.Event | None = None
        self.scopes: list[Scope] = []
        self.results: list[str] = []
        board = Board(self._list, Prober(self._probe, NAMING, cap=8), NAMING, timeout=30)
        self.server = DiscoveryServer("127.0.0.1", 0, board=board, authorize=self._authorize, observer=self)

    async def _list(self, scope: Scope) -> Iterable[Worker]:
        self.scopes.append(scope)
        if self.hold is not None:
            await self.hold.wait()
        if self.failure:
            raise DiscoveryError(self.failure)
        return [w for w in self.workers if scope.pipeline in ("", w.pipeline)]

    async def _probe(self, w: Worker, seconds: float) -> GateStatus:
        if w.pod == "e-1":
            raise ProbeError("e-1: no answer to GET /v1/status (TimeoutError)")
        return gate(holds=(3, DIGEST_A))

    async def _authorize(self, header: str | None, scope: Scope) -> None:
        if header and self.judge is not None:
            await self.judge.wait()
        if header == "Bearer stranger":
            raise Denied(403, "not yours")
        if header == "":
            raise Denied(401, "send a token")

    def discovery_request(self, result: str, seconds: float) -> None:
        self.results.append(result)

    async def until(self, results: list[str]) -> None:
        """Wait until requests ended like this."""
        async with asyncio.timeout(120):
            while sorted(self.results) != sorted(results):
                await asyncio.sleep(0.01)

    async def get(
        self, path: str = "/v1/rl/workers", method: str = "GET", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://127.0.0.1:{self.server.port}{path}", headers=headers) as response,
        ):
            raw = await response.read()
            return response.status, json.loads(raw) if raw else None, dict(response.headers)
