"""Serves worker discovery: GET /v1/rl/workers, and the same below a path that says whose workers.

Invariants:
- read-only, and nothing is told before ``authorize`` allowed it;
- a list that could not be made is HTTP 500, so "nothing is known" never looks like "there is nobody";
- readers are bounded, and so is the time in which they must take their answer; whoever hangs up is asked for no longer;
- only who may read takes a reader's place. Who is being judged has places of its own, which are free again as soon as
  the apiserver has answered, so callers without rights can not shut readers out by waiting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from rlfleet.api.discovery import DiscoveryProblem
from rlfleet.discovery.board import Board, DiscoveryError
from rlfleet.plan.discovery import Scope
from rlfleet.serving import Listener, listen

log = logging.getLogger(__name__)

#: The path of Dynamo's clients; what stands before it is part of the base URL that they are given.
PATH: Final = "/v1/rl/workers"
#: Readers at a time; more are told to come back.
MAX_READERS = 256
#: Callers at a time of whom it is not known yet whether they may read.
MAX_JUDGED = 256
#: Seconds for that judgement.
JUDGE_SECONDS = 10.0
#: Seconds in which a reader must take its answer.
WRITE_SECONDS = 30.0
#: Seconds for open calls when the server stops: clients of a list come again.
STOP_SECONDS = 0.2
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Denied(Exception):
    """This reader is not answered. ``status``: 401, 403, 404 or 502."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Busy(Exception):
    """There is no place for this caller now."""


#: Whether whoever sent this Authorization header may read this scope. Raises Denied.
Authorize = Callable[[str | None, Scope], Awaitable[None]]


class RequestObserver(Protocol):
    """Told of every request, for metrics."""

    def discovery_request(self, result: str, seconds: float) -> None:
        """A request was answered: Ok, Failed, Denied, Busy or Gone (the reader hung up, or took too long)."""


class DiscoveryServer:
    """Serves on ``host``:``port`` from ``start()`` to ``stop()``, in the running loop."""

    def __init__(
        self, host: str, port: int, *, board: Board, authorize: Authorize, observer: RequestObserver | None = None
    ) -> None:
        self._at = (host, port)
        self._board = board
        self._authorize = authorize
        self._observer = observer
        self._readers = 0
        self._judged = 0
        self._listener: Listener | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._listener is not None
        return self._listener.port

    async def start(self) -> None:
        """Start serving; OSError where the address is in use."""
        self._listener = await listen(self.application(), shutdown_seconds=STOP_SECONDS, at=self._at, cancel=True)

    def application(self) -> web.Application:
        """The aiohttp application; the caller runs it."""
        app = web.Application(middlewares=[self._guarded], client_max_size=1024)
        for before in ("", "/strict"):
            for scope in ("", "/namespaces/{namespace}", "/namespaces/{namespace}/pipelines/{pipeline}"):
                app.router.add_get(before + scope + PATH, self._workers)
        return app

    async def stop(self) -> None:
        """Stop serving, and end what is under way."""
        if self._listener is not None:
            await self._listener.close()
        await self._board.close()

    async def _workers(self, request: web.Request) -> web.StreamResponse:
        scope = Scope(_name(request, "namespace"), _name(request, "pipeline"))
        await self._judge(request.headers.get("Authorization"), scope)
        if self._readers >= MAX_READERS:
            raise _Busy(f"{MAX_READERS} readers wait for an answer already; come back")
        self._readers += 1
        try:
            return await self._answer(request, scope)
        finally:
            self._readers -= 1

    async def _judge(self, header: str | None, scope: Scope) -> None:
        """Whether this caller may read. Raises Denied or _Busy."""
        if self._judged >= MAX_JUDGED:
            raise _Busy(f"{MAX_JUDGED} callers wait to be known already; come back")
        self._judged += 1
        try:
            async with asyncio.timeout(JUDGE_SECONDS):
                await self._authorize(header, scope)
        except TimeoutError:
            raise Denied(502, f"whether you may read is not known within {JUDGE_SECONDS:g} s; come back") from None
        finally:
            self._judged -= 1

    async def _answer(self, request: web.Request, scope: Scope) -> web.StreamResponse:
        answer = await self._board.read(scope)
        body = answer.body(is_strict=request.path.startswith("/strict/"))
        response = web.StreamResponse(headers=_HEADERS)
        response.content_type = "application/json"
        response.content_length = len(body)
        async with asyncio.timeout(WRITE_SECONDS):
            await response.prepare(request)
            if request.method != "HEAD":
                await response.write(body)
            await response.write_eof()
        return response

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started, result = time.monotonic(), "Failed"
        try:
            response = await handler(request)
            result = "Ok"
            return response
        except _Busy as e:
            result = "Busy"
            return _error(503, "busy", str(e), {"Retry-After": "1"})
        except Denied as e:
            result = "Denied"
            more = {"WWW-Authenticate": "Bearer"} if e.status == 401 else {}
            return _error(e.status, "denied", str(e), more)
        except web.HTTPException as e:
            result = "Denied"
            return _error(e.status, "not_served", f"{request.method} {request.path}: {e.reason}"[:500])
        except DiscoveryError as e:
            result = "Failed"
            log.warning("worker discovery failed: %s", e)
            return _error(500, "discovery_failed", str(e))
        except (asyncio.CancelledError, ConnectionError):
            result = "Gone"
            raise
        except TimeoutError:
            result = "Gone"
            # A part of the answer may be out: only the end of the connection says that the rest does not come.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader did not take its answer in time") from None
        finally:
            self._count(result, time.monotonic() - started)

    def _count(self, result: str, seconds: float) -> None:
        if self._observer is not None:
            self._observer.discovery_request(result, seconds)


def _name(request: web.Request, field: str) -> str:
    text = request.match_info.get(field)
    if text is None:
        return ""
    if not _NAME.fullmatch(text):
        raise Denied(404, f"{field} is no name of a Kubernetes object")
    return text


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    text = DiscoveryProblem(error=code, message=message).json_bytes()
    return web.Response(body=text, status=status, headers=_HEADERS | (headers or {}), content_type="application/json")
