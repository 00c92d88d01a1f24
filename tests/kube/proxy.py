"""A TCP proxy in front of the apiserver that can lose answers or go silent; TLS passes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from urllib.parse import urlsplit


class Mode(Enum):
    """What happens to bytes that come from the server."""

    PASS = "pass"
    DROP = "drop"  # swallowed: the client sees silence although the server acted
    CUT = "cut"  # the connection is closed as soon as the server answers


class Proxy:
    """Forwards connections to one address."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._scheme = parts.scheme
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.mode = Mode.PASS
        self.swallowed = asyncio.Event()

    @property
    def url(self) -> str:
        """Where to connect instead of to the target."""
        assert self._server is not None
        return f"{self._scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._stopped = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        # Connections are closed by the loop's next turns: of those aborted just now, and of those not yet begun.
        for _ in range(3):
            await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_writer: asyncio.StreamWriter | None = None
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            await asyncio.gather(self._forward(reader, up_writer), self._backward(up_reader, writer, up_writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for w in (writer, up_writer):
                if w is not None:
                    w.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _backward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            if self.mode is Mode.PASS:
                writer.write(data)
                await writer.drain()
                continue
            self.swallowed.set()
            if self.mode is Mode.CUT:
                break
        writer.transport.abort()
        up.transport.abort()


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    """A running proxy to ``target``."""
    proxy = Proxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
