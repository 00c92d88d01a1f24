"""Probes and metrics of the operator, served from a thread of their own.

Invariant: /healthz judges the main loop from outside it: a loop that is blocked cannot claim to be well, and a probe
does not need the loop to be answered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST


class LoopStamp:
    """When the main loop last moved. ``run()`` in that loop, ``age()`` from any thread."""

    def __init__(self, interval: float = 0.5) -> None:
        self._interval = interval
        self._at = time.monotonic()

    async def run(self) -> None:
        """Stamp until cancelled."""
        while True:
            self._at = time.monotonic()
            await asyncio.sleep(self._interval)

    def age(self) -> float:
        """Seconds since the last stamp."""
        return time.monotonic() - self._at


class HealthServer:
    """Serves /healthz, /readyz and /metrics on ``host``:``port`` until ``stop()``."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        stamp: LoopStamp,
        stall_seconds: float,
        not_ready: Callable[[], str],
        metrics: Callable[[], bytes],
    ) -> None:
        self._host = host
        self._port = port
        self._stamp = stamp
        self._stall = stall_seconds
        self._not_ready = not_ready
        self._metrics = metrics
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="health", daemon=True)
        self.port = 0

    def start(self) -> None:
        """Start serving; raises what went wrong (address in use)."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop serving and wait for the thread."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=5)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as e:
            self._error = e
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._get_metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self.port = runner.addresses[0][1]
            self._started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        age = self._stamp.age()
        if age > self._stall:
            return web.Response(status=503, text=f"main loop did not move for {age:.1f} s\n")
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = self._not_ready()
        return web.Response(status=503, text=f"{missing}\n") if missing else web.Response(text="ok\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})
