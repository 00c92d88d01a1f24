"""SGLang's face of the reference engine: its routes, keys and error bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from . import bodies
from .admission import Admission
from .bodies import BodyError
from .faults import Faults
from .front import Front, Handler, Route
from .labels import Labels, Refused
from .updates import Updates

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
_KINDS = {400: "BadRequestError", 403: "Forbidden", 404: "NotFound", 500: "InternalServerError"}


class Server(Front):
    """Routes of one engine. ``metrics``: whether /metrics exists."""

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
        super().__init__(admission, updates, faults, api_key=api_key, admin_key=admin_key, close_port=close_port)
        self._updates = updates
        self._labels = labels
        self._metrics_enabled = metrics
        self._health_generates = health_generates

    def routes(self) -> list[Route]:
        """SGLang's paths."""
        get, post, both = ("GET",), ("POST",), ("GET", "POST")
        return [
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
        ]

    def wanted_key(self, path: str) -> str | None:
        """Control paths take the admin key where there is one, all others the user key."""
        if path.startswith(_OPEN):
            return None
        return self._admin_key or self._api_key if path in CONTROL else self._api_key

    def error(self, message: str, status: int = 400) -> web.Response:
        """The engine's error object."""
        body = {"object": "error", "message": message, "type": _KINDS[status], "code": status}
        return web.json_response(body, status=status)

    def refusal(self, problem: Exception) -> web.Response | None:
        """Whatever is wrong with a call is a 400."""
        if isinstance(problem, BodyError | Refused):
            return self.error(str(problem))
        return (
            self.error(f"{type(problem).__name__}: {problem}") if isinstance(problem, TypeError | ValueError) else None
        )

    # ---- helpers ------------------------------------------------------------------------------------------------

    async def _body(self, request: web.Request, kind: type[B]) -> B:
        raw = await request.read()
        if not raw:
            raise BodyError("1 validation error: body: Field required")
        try:
            return bodies.parse(kind, json.loads(raw))
        except ValueError as problem:
            raise BodyError(f"1 validation error: body: JSON decode error: {problem}") from problem

    def _result(self, kind: type[B], call: Callable[[B], Coroutine[Any, Any, dict[str, Any]]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            answer = await self.to_the_end(call(await self._body(request, kind)))
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
        await self.to_the_end(self._admission.pause(body.mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._body(request, bodies.Continue)
        await self.to_the_end(self._admission.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        await self.to_the_end(self._admission.abort(await self._body(request, bodies.Abort)))
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        timeout = float(request.query.get("timeout", "0"))
        if await self.to_the_end(self._admission.flush(timeout)):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _release(self, request: web.Request) -> web.Response:
        await self.to_the_end(self._admission.release_memory((await self._body(request, bodies.MemoryTags)).tags))
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        await self.to_the_end(self._admission.resume_memory((await self._body(request, bodies.MemoryTags)).tags))
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
