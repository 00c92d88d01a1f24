"""A proxy between one operator and the apiserver that strikes at the n-th write of a round.

It counts writes to RLPipelines and SyncRounds (the durable record of rounds; what pools, events and health write is
passed on uncounted) and does one scripted thing to one of them: the operator dies before or after it, it is refused,
or it is carried out and its answer lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from rlfleet.client import credentials

_START_SECONDS = 30.0
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_COUNTED = ("/rlpipelines/", "/syncrounds/")


class Fault(StrEnum):
    """What happens to the write."""

    KILL_BEFORE = "kill-before"  # the operator dies, and the write never reaches the apiserver
    KILL_AFTER = "kill-after"  # the write is carried out, and the operator dies before it learns of it
    CONFLICT = "409"
    ERROR = "500"  # refused without effect, but the client can not know that
    BUSY = "503"
    DROP = "drop"  # carried out, and the connection breaks instead of an answer


class FaultProxy:
    """Forwards to the apiserver of ``kubeconfig`` with its credentials; ``self.kubeconfig`` leads here.

    ``kill``: called from the proxy's thread to end the operator at once; it must not return before it is dead.
    """

    def __init__(self, kubeconfig: Path, folder: Path, kill: Callable[[], None]) -> None:
        self._access = credentials.find(kubeconfig)
        self._kill = kill
        self.kubeconfig = folder / "fault-proxy.kubeconfig"
        self.fired = threading.Event()
        self.writes: list[str] = []
        self._fault: Fault | None = None
        self._at = 0
        self._every = False
        self._refuse_all = False
        self._seen = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    # ------------------------------------------------------------------------------------------ scripting

    def watch(self) -> None:
        """Count from zero, without a fault."""
        self._fault, self._at, self._every, self._seen, self.writes = None, 0, False, 0, []
        self.fired.clear()

    def arm(self, fault: Fault, at: int) -> None:
        """Strike once, at the ``at``-th write from now (1: the next)."""
        self.watch()
        self._at, self._fault = at, fault

    def arm_every_other(self, fault: Fault) -> None:
        """Strike at the first, third, fifth ... write from now: every write is struck once and then repeated."""
        self.watch()
        self._every, self._fault = True, fault

    def outage(self, down: bool) -> None:
        """While ``down`` every call is answered 503."""
        self._refuse_all = down

    def _due(self) -> Fault | None:
        if self._fault is None:
            return None
        if self._every:
            return self._fault if self._seen % 2 == 1 else None
        return self._fault if self._seen == self._at else None

    # ------------------------------------------------------------------------------------------ serving

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(_START_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._write_kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    def _write_kubeconfig(self, server: str) -> None:
        named = {"name": "proxy"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [named | {"cluster": {"server": server}}],
            "users": [named | {"user": {}}],
            "contexts": [named | {"context": {"cluster": "proxy", "user": "proxy"}}],
            "current-context": "proxy",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._refuse_all:
            return self._refusal(503, "ServiceUnavailable")
        if request.method not in _WRITES or not any(kind in request.path for kind in _COUNTED):
            return await self._forward(request)
        self._seen += 1
        self.writes.append(f"{request.method} {request.path.rsplit('/', 3)[-3:]} {(await request.read())[:400]!r}")
        fault = self._due()
        if fault is None:
            return await self._forward(request)
        if fault is Fault.KILL_BEFORE:
            self._kill()
            return self._cut(request)
        if fault in (Fault.KILL_AFTER, Fault.DROP):
            status = await self._carry_out(request)
            assert status < 300, f"the write to be lost was refused: {status}"
            if fault is Fault.KILL_AFTER:
                self._kill()
            return self._cut(request)
        self.fired.set()
        return self._refusal(int(fault.value), "Conflict" if fault is Fault.CONFLICT else "InternalError")

    def _cut(self, request: web.Request) -> web.Response:
        self.fired.set()
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    @staticmethod
    def _refusal(code: int, reason: str) -> web.Response:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        return web.json_response(body | {"message": f"scripted {code}"}, status=code)

    def _call(self, request: web.Request, data: bytes) -> aiohttp.client._RequestContextManager:
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept")}
        if (authorization := self._access.authorization()) is not None:
            headers["Authorization"] = authorization
        return self._session.request(
            request.method,
            self._access.server + request.path_qs,
            data=data or None,  # an empty body would be sent with a content type
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _carry_out(self, request: web.Request) -> int:
        async with self._call(request, await request.read()) as answer:
            await answer.read()
            return answer.status

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        async with self._call(request, await request.read()) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "date", "retry-after")}
            response = web.StreamResponse(status=answer.status, headers=kept)
            try:
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except (ConnectionError, aiohttp.ClientError):
                return response  # the operator is gone, or ended its watch
            return response
