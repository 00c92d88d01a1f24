"""A proxy before the real apiserver that loses answers, refuses watches, and is down for a while."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from rlfleet.client import credentials

_START_SECONDS = 30.0


class Proxy:
    """Forwards to the apiserver of ``kubeconfig``.

    ``lose_creates``: how many creates are carried out and then get no answer; ``busy``: how many calls are answered
    503 and not carried out; ``no_watch``: watches are forbidden; ``cut_watches``: watches end without an event.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._access = credentials.find(kubeconfig)
        self.kubeconfig = folder / "proxy.kubeconfig"
        self.lose_creates = 0
        self.busy = 0
        self.no_watch = False
        self.cut_watches = False
        self.calls: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

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
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._access.tls or True)) as self._session:
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._write(f"http://127.0.0.1:{runner.addresses[0][1]}")
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    def _write(self, server: str) -> None:
        named = {"name": "proxy"}
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [named | {"cluster": {"server": server}}],
                    "users": [named | {"user": {}}],
                    "contexts": [named | {"context": {"cluster": "proxy", "user": "proxy"}}],
                    "current-context": "proxy",
                }
            )
        )

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        watch = "watch" in request.query
        self.calls.append("WATCH" if watch else request.method)
        if self.busy > 0:
            self.busy -= 1
            return web.json_response({"message": "etcd leader changed"}, status=503)
        if watch and self.no_watch:
            return web.json_response({"message": "watch is forbidden", "reason": "Forbidden"}, status=403)
        if watch and self.cut_watches:
            return web.Response()
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept")}
        if (authorization := self._access.authorization()) is not None:
            headers["Authorization"] = authorization
        async with self._session.request(
            request.method, self._access.server + request.path_qs, data=await request.read(), headers=headers
        ) as answer:
            if request.method == "POST" and self.lose_creates > 0:
                assert answer.status == 201, await answer.text()
                self.lose_creates -= 1
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response
