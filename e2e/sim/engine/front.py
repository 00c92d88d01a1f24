"""What both faces of the reference engine share: keys, scripted faults, and calls that outlive their callers.

Invariants: control calls run to their end even when the caller has gone (a client's timeout frees nothing); a
generate call ends with its caller. User and admin keys are refused on each other's paths.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from .admission import Admission
from .faults import Fault, Faults, parse

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = tuple[Sequence[str], str, Handler]
T = TypeVar("T")

#: What ``lie`` answers: a success of every form that the control calls of either face have.
_LIE = {"success": True, "message": "Success.", "status": "ok", "num_paused_requests": 0, "results": [None]}


class Loads(Protocol):
    """What the faults need of a face's loads."""

    def halve_next_load(self) -> None:
        """The next load takes only half of its tensors, and nobody is told."""

    async def extra_tensor(self, name: str) -> bytes | None:
        """The bytes of a parameter that the model does not compute with; None when there is none of that name."""


class Front(ABC):
    """One engine's HTTP server. ``close_port`` stops listening (a fault)."""

    def __init__(
        self,
        admission: Admission,
        loads: Loads,
        faults: Faults,
        *,
        api_key: str | None,
        admin_key: str | None,
        close_port: Callable[[], None] = lambda: None,
    ) -> None:
        self._admission = admission
        self._target = loads
        self._faults = faults
        self._api_key = api_key
        self._admin_key = admin_key
        self._close_port = close_port
        self._core_is_dead = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def app(self, *outer: Middleware) -> web.Application:
        """The application, behind middlewares ``outer``; serve it with ``handler_cancellation`` on."""
        inner = [self._authenticate, self._misbehave, self._refuse]
        app = web.Application(client_max_size=64 << 20, middlewares=[*outer, *inner])
        own: list[Route] = [
            (("GET", "POST"), "/_sim/faults", self._set_faults),
            (("GET",), "/_sim/tensor", self._tensor),
        ]
        for methods, path, handler in [*self.routes(), *own]:
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    # ---- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def routes(self) -> list[Route]:
        """Methods, path and handler of all that this face answers."""

    @abstractmethod
    def wanted_key(self, path: str) -> str | None:
        """The key that a path takes; None: it is open."""

    @abstractmethod
    def error(self, message: str, status: int) -> web.Response:
        """The face's error object."""

    @abstractmethod
    def refusal(self, problem: Exception) -> web.Response | None:
        """The answer to what a handler raised; None: a defect of ours."""

    #: What an engine says after a load that it broke off.
    discard = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
    #: Status of that answer.
    discard_status = 400

    # ---- middlewares ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = None if request.path.startswith("/_sim/") else self.wanted_key(request.path)
        if wanted is not None:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {wanted}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @web.middleware
    async def _misbehave(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/_sim/"):
            return await handler(request)
        if self._core_is_dead:
            await asyncio.Event().wait()
        fault = self._faults.strike(request.path, "before")
        if fault is not None and fault.action == "zombie":
            self._core_is_dead = True
            self._close_port()
            await asyncio.Event().wait()
        if fault is not None and fault.action in ("subset", "partial"):
            self._target.halve_next_load()
            response = await handler(request)
            return response if fault.action == "subset" else self.error(self.discard, self.discard_status)
        if fault is not None and fault.action in ("keep", "late"):
            memory = self._admission.memory
            memory.keep_next, memory.late_seconds = (
                fault.action == "keep",
                fault.seconds if fault.action == "late" else None,
            )
            return await handler(request)
        broken = await self._strike(fault)
        if broken is not None:
            return broken
        response = await handler(request)
        return await self._strike(self._faults.strike(request.path, "after")) or response

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as problem:
            answer = self.refusal(problem)
            if answer is None:
                raise
            return answer

    async def _strike(self, fault: Fault | None) -> web.Response | None:
        if fault is None:
            return None
        if fault.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "hang":
            await asyncio.Event().wait()
        if fault.action == "delay":
            await asyncio.sleep(fault.seconds)
            return None
        if fault.action == "hold":
            await self._faults.until_replaced()
            return None
        if fault.action == "lie":
            return web.json_response(_LIE)
        if fault.action == "http400":
            return self.error("Bad Request (scripted)", 400)
        return self.error("Internal Server Error (scripted)", 500)

    # ---- helpers --------------------------------------------------------------------------------------------------

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, which goes on when the caller does not wait any more."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _tensor(self, request: web.Request) -> web.Response:
        """A parameter of ``--extra-tensors`` as the bytes that the engine keeps."""
        kept = await self._target.extra_tensor(request.query.get("name", ""))
        return self.error("no such tensor", 404) if kept is None else web.Response(body=kept)

    async def _set_faults(self, request: web.Request) -> web.Response:
        # Only for the machine itself: on a pod network nobody else may make an engine misbehave.
        if not ipaddress.ip_address(request.remote or "0.0.0.0").is_loopback:
            return self.error("faults can be set from the loopback interface only", 403)
        if request.method == "POST":
            self._faults.replace(parse(await request.json()))
        rules = self._faults.rules()
        return web.json_response(
            {path: asdict(rule) | {"struck": self._faults.struck(path)} for path, rule in rules.items()}
        )
