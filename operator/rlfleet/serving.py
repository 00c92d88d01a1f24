"""How gates and senders listen: time limits that a client cannot stretch, and the protocol's own errors everywhere.

Invariants:
- a connection that does not complete the head of its first request in time is closed, and so is one that stays idle
  between requests; neither costs more than its socket;
- what is no HTTP at all, or fails before it reaches a handler, is answered with a wire.ErrorBody like everything else;
- stopping ends all connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from rlfleet.api.wire import ErrorBody, ErrorReason
from rlfleet.tls import ServerTLS

#: Seconds from the connection to the end of the first request's head.
HEAD_SECONDS = 5.0
#: Seconds that a connection may be idle between two requests; the operator keeps its own for 15.
IDLE_SECONDS = 60.0
#: Seconds for the body of a control call to arrive.
BODY_SECONDS = 10.0
#: Seconds in which the rest of a refused body is read away, so that the refusal is not lost with the connection.
LINGER_SECONDS = 5.0

_quiet = logging.getLogger(f"{__name__}.aiohttp")
_quiet.setLevel(logging.CRITICAL)  # what clients send is no error of ours, and must not fill our log


def error_response(status: int, reason: ErrorReason, message: str) -> web.Response:
    """A refusal in the protocol's form."""
    body = ErrorBody(reason=reason, message=message[:2000])
    return web.Response(
        status=status, text=body.model_dump_json(by_alias=True, exclude_none=True), content_type="application/json"
    )


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """The one expectation that HTTP has; any other is refused before the handler runs."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(417, ErrorReason.INVALID, "Expect: only 100-continue is known")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None


class _Connection(RequestHandler):
    """One connection. aiohttp limits idle time between requests, but not the time to the first request."""

    __slots__ = ("_head_seconds", "_head_timer")

    def __init__(self, server: web.Server, head_seconds: float, idle_seconds: float, buffer: int) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=idle_seconds,
            lingering_time=LINGER_SECONDS,
            logger=_quiet,
            access_log=None,  # type: ignore[arg-type]
            read_bufsize=buffer,
        )
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the first request its time."""
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(self._head_seconds, self._late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is timed any more."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        if not self._request_count:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What failed before or outside of a handler; the connection ends with it."""
        reason = ErrorReason.INVALID if status < 500 else ErrorReason.INTERNAL
        text = message or (type(exc).__name__ if exc is not None else "the request can not be served")
        text = text.split("\n", 1)[0]
        response = error_response(status, reason, f"not an HTTP request that is understood: {text}")
        response.force_close()
        return response


class Listener:
    """A listening application; ``close`` ends it."""

    def __init__(self, runner: web.AppRunner, server: asyncio.Server) -> None:
        self._runner = runner
        self._server = server

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no new connection, let open calls end for a moment, close all connections."""
        self._server.close()
        await self._runner.cleanup()


async def listen(
    app: web.Application,
    *,
    shutdown_seconds: float,
    at: tuple[str, int] | socket.socket,
    head_seconds: float = HEAD_SECONDS,
    idle_seconds: float = IDLE_SECONDS,
    read_buffer: int = 2**16,
    tls: ServerTLS | None = None,
    cancel: bool = False,
) -> Listener:
    """Serve ``app`` at an address and port, or on a socket that listens already; with ``tls`` over nothing else.

    ``cancel``: a client that hangs up ends its handler, too. For handlers that only read.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_seconds, handler_cancellation=cancel)
    await runner.setup()
    server = runner.server
    assert server is not None

    def connection() -> _Connection:
        return _Connection(server, head_seconds, idle_seconds, read_buffer)

    loop = asyncio.get_running_loop()
    secure: dict[str, Any] = {"ssl": tls.context(), "ssl_handshake_timeout": head_seconds} if tls is not None else {}
    try:
        if isinstance(at, tuple):
            tcp = await loop.create_server(connection, *at, backlog=128, **secure)
        else:
            tcp = await loop.create_server(connection, sock=at, **secure)
    except OSError:
        await runner.cleanup()
        raise
    return Listener(runner, tcp)


async def within(seconds: float, reading: Awaitable[bytes], refuse: Callable[[str], Exception]) -> bytes:
    """A body that must arrive in time; ``refuse`` makes the error to raise."""
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise refuse(f"the body did not arrive within {seconds:g} s") from None
