"""HTTP side of the reference engine: routes, keys, error bodies and scripted faults.

Invariants: control calls run to their end even when the caller has gone (a client's timeout frees nothing); a
generate call ends with its caller. User and admin keys are refused on each other's paths.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from . import bodies
from .admission import Admission
from .bodies import BodyError
from .faults import Fault, Faults, parse
from .labels import Labels, Refused
from .updates import Updates

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")
B = TypeVar("B")

#: Paths that take the admin key when there is one.
CONTROL = frozenset(
    {
        "/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update",
        "/update_weights_from_distributed", "/update_weights_from_disk", "/update_weight_version",
        "/get_weights_by_name", "/weights_checker", "/pause_generation", "/continue_generation", "/abort_request",
        "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    }
)  # fmt: skip
_OPEN = ("/health", "/ready", "/metrics")
_DISCARD = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
#: What ``lie`` answers: a success of every form that the control calls have.
_LIE = {"success": True, "message": "Success.", "status": "ok", "num_paused_requests": 0}


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> web.Response:
    """The engine's error object."""
    return web.json_response({"object": "error", "message": message, "type": kind, "code": status}, status=status)


class Server:
    """Routes of one engine. ``metrics``: whether /metrics exists. ``close_port`` stops listening (a fault)."""

    def __init__(
        self,
        admission: Admission,
        updates: Updates,
        labels: Labels,
        faults: Faults,
        *,
        api_key: str | None,
        admin_key: str | None,
        metrics: bool,
        health_generates: bool,
        close_port: Callable[[], None] = lambda: None,
    ) -> None:
        self._admission = admission
        self._updates = updates
        self._labels = labels
        self._faults = faults
        self._api_key = api_key
        self._admin_key = admin_key
        self._metrics_enabled = metrics
        self._health_generates = health_generates
        self._close_port = close_port
        self._core_is_dead = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def app(self) -> web.Application:
        """The application; serve it with ``handler_cancellation`` on."""
        app = web.Application(client_max_size=64 << 20, middlewares=[self._authenticate, self._misbehave, self._refuse])
        get, post, both = ("GET",), ("POST",), ("GET", "POST")
        routes: list[tuple[tuple[str, ...], str, Handler]] = [
            (post, "/generate", self._generate),
            (get, "/health", self._health),
            (get, "/health_generate", self._health_generate),
            (get, "/ready", self._ready),
            (get, "/metrics", self._metrics),
            (get, "/model_info", self._model_info),
            (get, "/get_model_info", self._model_info),
            (get, "/server_info", self._server_info),
            (get, "/get_server_info", self._server_info),
            (get, "/v1/loads", self._loads),
            (get, "/v1/models", self._models),
            (post, "/init_weights_update_group", self._result(bodies.InitGroup, self._updates.init_group)),
            (post, "/destroy_weights_update_group", self._result(bodies.DestroyGroup, self._updates.destroy_group)),
            (post, "/begin_weight_update", self._result(bodies.BeginUpdate, lambda _: self._updates.begin_update())),
            (post, "/end_weight_update", self._result(bodies.EndUpdate, lambda _: self._updates.end_update())),
            (
                post,
                "/update_weights_from_distributed",
                self._result(bodies.FromDistributed, self._updates.from_distributed),
            ),
            (post, "/update_weights_from_disk", self._result(bodies.FromDisk, self._updates.from_disk)),
            (post, "/update_weight_version", self._result(bodies.WeightVersion, self._updates.set_version)),
            (both, "/weights_checker", self._result(bodies.CheckWeights, self._updates.check_weights)),
            (both, "/get_weights_by_name", self._weights_by_name),
            (post, "/pause_generation", self._pause),
            (post, "/continue_generation", self._continue),
            (post, "/abort_request", self._abort),
            (both, "/flush_cache", self._flush),
            (both, "/release_memory_occupation", self._release),
            (both, "/resume_memory_occupation", self._resume),
            (both, "/_sim/faults", self._set_faults),
            (get, "/_sim/tensor", self._tensor),
        ]
        for methods, path, handler in routes:
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    # ---- middlewares --------------------------------------------------------------------------------------------

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = self._admin_key or self._api_key if request.path in CONTROL else self._api_key
        if wanted is not None and not request.path.startswith((*_OPEN, "/_sim/")):
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
            self._updates.halve_next_load()
            response = await handler(request)
            return response if fault.action == "subset" else error(_DISCARD)
        if fault is not None and fault.action in ("keep", "late"):
            memory = self._admission.memory
            memory.keep_next, memory.late_seconds = (
                fault.action == "keep",
                fault.seconds if fault.action == "late" else None,
            )
            return await handler(request)
        broken = await _strike(fault)
        if broken is not None:
            return broken
        response = await handler(request)
        return await _strike(self._faults.strike(request.path, "after")) or response

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (BodyError, Refused) as problem:
            return error(str(problem))
        except (TypeError, ValueError) as problem:
            return error(f"{type(problem).__name__}: {problem}")

    # ---- helpers ------------------------------------------------------------------------------------------------

    async def _body(self, request: web.Request, kind: type[B]) -> B:
        raw = await request.read()
        if not raw:
            raise BodyError("1 validation error: body: Field required")
        try:
            return bodies.parse(kind, json.loads(raw))
        except ValueError as problem:
            raise BodyError(f"1 validation error: body: JSON decode error: {problem}") from problem

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _result(self, kind: type[B], call: Callable[[B], Coroutine[Any, Any, dict[str, Any]]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            answer = await self._to_the_end(call(await self._body(request, kind)))
            return web.json_response(answer, status=200 if answer["success"] else 400)

        return handle

    # ---- handlers -----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        return web.json_response(await self._admission.generate(await self._body(request, bodies.Generate)))

    async def _health(self, request: web.Request) -> web.Response:
        return await self._health_generate(request) if self._health_generates else web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if await self._admission.health() else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._admission.ready() else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._labels.model_info())

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(await self._admission.server_info())

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response(self._admission.loads())

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._labels.served_model_name, "object": "model", "owned_by": "sglang"}
        return web.json_response({"object": "list", "data": [card]})

    async def _weights_by_name(self, request: web.Request) -> web.Response:
        return web.json_response(await self._updates.weights_by_name(await self._body(request, bodies.WeightsByName)))

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._body(request, bodies.Pause)
        if body.mode not in ("abort", "retract", "in_place"):
            raise BodyError("1 validation error: body.mode: Input should be 'abort', 'retract' or 'in_place'")
        await self._to_the_end(self._admission.pause(body.mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._body(request, bodies.Continue)
        await self._to_the_end(self._admission.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        await self._to_the_end(self._admission.abort(await self._body(request, bodies.Abort)))
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        timeout = float(request.query.get("timeout", "0"))
        if await self._to_the_end(self._admission.flush(timeout)):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _release(self, request: web.Request) -> web.Response:
        await self._to_the_end(self._admission.release_memory((await self._body(request, bodies.MemoryTags)).tags))
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        await self._to_the_end(self._admission.resume_memory((await self._body(request, bodies.MemoryTags)).tags))
        return web.json_response(None)

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self._metrics_enabled:
            return web.Response(status=404, text="Not Found")
        scheduler, totals = self._admission.scheduler, self._admission.scheduler.counters
        samples = {
            "sglang:num_running_reqs": len(scheduler.running),
            "sglang:num_queue_reqs": len(scheduler.waiting),
            "sglang:num_paused_reqs": len(scheduler.waiting) if scheduler.paused else 0,
            "sglang:num_aborted_requests_total": totals.aborted,
            "sglang:num_retracted_reqs": totals.retracted,
            "sglang:generation_tokens_total": totals.generated_tokens,
            "sglang:num_requests_total": totals.finished,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in samples.items()))

    async def _tensor(self, request: web.Request) -> web.Response:
        """A parameter of ``--extra-tensors`` as the bytes that the engine keeps."""
        kept = await self._updates.extra_tensor(request.query.get("name", ""))
        return error("no such tensor", 404, "NotFound") if kept is None else web.Response(body=kept)

    async def _set_faults(self, request: web.Request) -> web.Response:
        # Only for the machine itself: on a pod network nobody else may make an engine misbehave.
        if not ipaddress.ip_address(request.remote or "0.0.0.0").is_loopback:
            return error("faults can be set from the loopback interface only", 403, "Forbidden")
        if request.method == "POST":
            self._faults.replace(parse(await request.json()))
        rules = self._faults.rules()
        return web.json_response(
            {path: asdict(rule) | {"struck": self._faults.struck(path)} for path, rule in rules.items()}
        )


async def _strike(fault: Fault | None) -> web.Response | None:
    if fault is None:
        return None
    if fault.action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "hang":
        await asyncio.Event().wait()
    if fault.action == "delay":
        await asyncio.sleep(fault.seconds)
        return None
    if fault.action == "lie":
        return web.json_response(_LIE)
    if fault.action == "http400":
        return error("Bad Request (scripted)")
    return error("Internal Server Error (scripted)", 500, "InternalServerError")
