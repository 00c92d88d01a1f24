"""The gate's HTTP surface (docs/reference/gate.md).

Invariants:
- the token is verified before a body is read, and everything is verified before anything is stored;
- every answer outside 2xx is a wire.ErrorBody;
- bodies are bounded before they are parsed, and parsed strictly;
- a client that disconnects ends nothing but its own call.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rlfleet.api.manifest import Manifest
from rlfleet.api.tokens import Claims, Scope
from rlfleet.api.wire import (
    MAX_WAIT_SECONDS,
    SENDER_HEADER,
    EnrollRequest,
    ErrorBody,
    ErrorReason,
    FenceRequest,
    OperationRequest,
)
from rlfleet.gate.app import Gate
from rlfleet.gate.errors import GateError
from rlfleet.gate.receive import receive_bucket
from rlfleet.gate.staging import Staging
from rlfleet.serving import BODY_SECONDS, expect_continue, within

log = logging.getLogger(__name__)

#: Largest control body; an enrolment with 16 routers and 8 keys needs about 16 KiB.
MAX_BODY_BYTES = 256 * 2**10
#: Largest manifest; 200,000 tensors with names of 200 characters.
MAX_MANIFEST_BYTES = 96 * 2**20

#: Seconds for a manifest to arrive: it may be large and come from another zone.
MANIFEST_SECONDS = 120.0

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HTTP_REASONS = {404: ErrorReason.NOT_FOUND, 413: ErrorReason.TOO_LARGE}


class GateServer:
    """Routes and handlers around one Gate."""

    def __init__(self, gate: Gate, on_fatal: Callable[[BaseException], None]) -> None:
        self._gate = gate
        self._on_fatal = on_fatal

    def application(self) -> web.Application:
        """The aiohttp application; the caller runs it."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        router = app.router
        router.add_get("/livez", self.livez)
        router.add_get("/startupz", self.startupz)
        router.add_get("/readyz", self.readyz)
        router.add_get("/enginez", self.enginez)
        router.add_get("/metrics", self.metrics)
        router.add_get("/v1/status", self.status)
        router.add_post("/v1/enroll", self.enroll, expect_handler=expect_continue)
        router.add_post("/v1/fence", self.fence, expect_handler=expect_continue)
        router.add_post("/v1/operations", self.start_operation, expect_handler=expect_continue)
        router.add_get("/v1/operations/{id}", self.read_operation)
        router.add_put("/v1/staging/{operation}/manifest", self.put_manifest, expect_handler=self._expect_push)
        router.add_put("/v1/staging/{operation}/buckets/{index}", self.put_bucket, expect_handler=self._expect_push)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except GateError as e:
            self._gate.ctx.metrics.refusals.labels(e.reason.value).inc()
            return _error(e.status, e.body())
        except web.HTTPException as e:
            reason = _HTTP_REASONS.get(e.status, ErrorReason.INVALID)
            return _error(
                e.status, ErrorBody(reason=reason, message=f"{request.method} {request.path}: {e.reason}"[:500])
            )
        except sqlite3.Error as e:
            # Not on disk means not done, and a gate without its disk can not refuse stale owners any more.
            self._on_fatal(e)
            return _error(500, ErrorBody(reason=ErrorReason.INTERNAL, message="the gate's state can not be written"))
        except ConnectionError:
            raise
        except Exception as e:  # a defect of ours must not look like a refusal
            log.exception("request failed in an unforeseen way", extra={"path": request.path})
            return _error(500, ErrorBody(reason=ErrorReason.INTERNAL, message=f"{type(e).__name__} in the gate"))

    # ------------------------------------------------------------------------------------------ probes

    async def livez(self, _: web.Request) -> web.Response:
        """The process answers."""
        return web.json_response({"live": True})

    async def startupz(self, _: web.Request) -> web.Response:
        """The start-up promise holds; only then may the engine container start."""
        problem = self._gate.startup.problem
        if problem is not None:
            return _error(503, problem)
        return web.json_response({"incarnation": self._gate.store.incarnation})

    async def readyz(self, _: web.Request) -> web.Response:
        """The engine process is up with a model; a paused engine is still ready, else every round would shake pods."""
        if self._gate.store.incarnation is None:
            return _error(
                503, ErrorBody(reason=ErrorReason.NOT_ENROLLED, message="the start-up promise does not hold yet")
            )
        view = await self._gate.observe_engine()
        if view.model is None:
            return _error(
                503, ErrorBody(reason=ErrorReason.ENGINE_UNREACHABLE, message="the engine does not answer yet")
            )
        fresh = self._gate.store.holds is None and self._gate.store.latest_load() is None
        if self._gate.config.ready_when_proven and fresh:
            # Later the pod's condition decides, which the operator keeps: a load must not shake the pod either.
            return _error(503, ErrorBody(reason=ErrorReason.NOT_PROVEN, message="the engine has base weights only"))
        return web.json_response({"ready": True})

    async def enginez(self, _: web.Request) -> web.Response:
        """Liveness of the engine's container: its loop answers, unless an operation of ours may keep it busy."""
        if await self._gate.engine_hangs():
            message = "the engine's loop does not answer, and no operation keeps it busy"
            return _error(503, ErrorBody(reason=ErrorReason.ENGINE_UNREACHABLE, message=message))
        return web.json_response({"answers": True})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._gate.ctx.metrics.render(), content_type="text/plain", charset="utf-8")

    # ------------------------------------------------------------------------------------------ control

    async def status(self, request: web.Request) -> web.Response:
        """GET /v1/status."""
        self._claims(request, Scope.READ, Scope.CONTROL)
        return _report(await self._gate.status())

    async def enroll(self, request: web.Request) -> web.Response:
        """POST /v1/enroll."""
        claims = self._claims(request, Scope.CONTROL)
        body = await self._body(request, EnrollRequest)
        await self._gate.admission.enroll(claims, body)
        self._gate.startup.enrolled()
        return _report(await self._gate.status())

    async def fence(self, request: web.Request) -> web.Response:
        """POST /v1/fence."""
        claims = self._claims(request, Scope.CONTROL)
        body = await self._body(request, FenceRequest)
        self._gate.admission.match(claims, body)
        return _report(await self._gate.fence(body))

    async def start_operation(self, request: web.Request) -> web.Response:
        """POST /v1/operations: 202 when started now, 200 when known."""
        claims = self._claims(request, Scope.CONTROL)
        body = await self._body(request, OperationRequest)
        self._gate.admission.match(claims, body)
        self._gate.admission.identify(body)
        await self._gate.admission.admit(body)
        # Shielded: a caller that hangs up between the fence and the log must not leave half a start.
        record, started = await asyncio.shield(asyncio.ensure_future(self._gate.operations.start(body)))
        return _report(record, status=202 if started else 200)

    async def read_operation(self, request: web.Request) -> web.Response:
        """GET /v1/operations/{id}?waitSeconds=n."""
        self._claims(request, Scope.READ, Scope.CONTROL)
        text = request.query.get("waitSeconds", "0")
        try:
            wait = float(text)
        except ValueError:
            raise GateError(ErrorReason.INVALID, f"waitSeconds={text[:32]!r} is not a number of seconds") from None
        if not 0 <= wait <= MAX_WAIT_SECONDS:
            raise GateError(ErrorReason.INVALID, f"waitSeconds must be between 0 and {MAX_WAIT_SECONDS}")
        return _report(await self._gate.operations.find(request.match_info["id"], wait))

    # ------------------------------------------------------------------------------------------ staging

    def _staging(self, request: web.Request) -> Staging:
        """The staging that this push is for; every check that does not need the body."""
        claims = self._claims(request, Scope.PUSH)
        operation = request.match_info["operation"]
        staging = self._gate.ctx.area.staging
        feeds = staging.generation if staging is not None and staging.stream is not None else None
        self._gate.admission.admit_push(claims, operation, feeds=feeds)
        if staging is None or staging.operation != operation:
            raise GateError(ErrorReason.NOT_STAGED, "nothing is expected for this operation; Prepare comes first")
        pusher = request.headers.get(SENDER_HEADER)
        if staging.sender is not None and pusher != staging.sender:
            raise GateError(
                ErrorReason.IDENTITY_MISMATCH,
                f"bytes are expected of sender {staging.sender}, this push is of {str(pusher)[:64]}",
            )
        return staging

    async def _expect_push(self, request: web.Request) -> web.StreamResponse | None:
        """Expect: 100-continue: refuse before the body travels."""
        try:
            self._staging(request)
        except GateError as e:
            self._gate.ctx.metrics.refusals.labels(e.reason.value).inc()
            return _error(e.status, e.body())
        return await expect_continue(request)

    async def put_manifest(self, request: web.Request) -> web.Response:
        """PUT /v1/staging/{operation}/manifest."""
        staging = self._staging(request)
        raw = await _read(request, MAX_MANIFEST_BYTES, MANIFEST_SECONDS)
        manifest = await asyncio.to_thread(_parse, Manifest, raw)  # seconds for a large one
        if self._staging(request) is not staging:
            raise GateError(ErrorReason.NOT_STAGED, "the round was prepared anew meanwhile")
        self._gate.ctx.area.accept_manifest(staging, manifest)
        return _report(staging.report())

    async def put_bucket(self, request: web.Request) -> web.Response:
        """PUT /v1/staging/{operation}/buckets/{index}."""
        staging = self._staging(request)
        text = request.match_info["index"]
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise GateError(ErrorReason.INVALID, f"bucket {text[:32]!r} is not an index")
        before = staging.received_bytes
        await receive_bucket(self._gate.ctx.area, staging, int(text), request)
        metrics = self._gate.ctx.metrics
        passed = sum(t.nbytes for t in staging.buckets[int(text)]) if staging.is_streamed else 0
        metrics.received_bytes.inc(passed or max(0, staging.received_bytes - before))
        metrics.staged_bytes.set(staging.received_bytes)
        return _report(staging.report())

    # ------------------------------------------------------------------------------------------ helpers

    def _claims(self, request: web.Request, *scopes: Scope) -> Claims:
        return self._gate.admission.authenticate(request.headers.get("Authorization"), *scopes)

    async def _body(self, request: web.Request, model: type[M]) -> M:
        return _parse(model, await _read(request, MAX_BODY_BYTES, BODY_SECONDS))


async def _read(request: web.Request, limit: int, seconds: float) -> bytes:
    """The whole body, at most ``limit`` bytes, within ``seconds``."""
    return await within(seconds, _whole(request, limit), lambda text: GateError(ErrorReason.INVALID, text))


async def _whole(request: web.Request, limit: int) -> bytes:
    if request.content_length is not None and request.content_length > limit:
        raise GateError(ErrorReason.TOO_LARGE, f"the body has {request.content_length} bytes, {limit} are allowed")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > limit:
            raise GateError(ErrorReason.TOO_LARGE, f"the body is longer than the allowed {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(model: type[M], raw: bytes) -> M:
    try:
        return model.model_validate_json(raw)
    except ValidationError as e:
        lines = [
            f"{'.'.join(str(part) for part in error['loc']) or 'body'}: {error['msg']}"
            for error in e.errors(include_url=False, include_input=False, include_context=False)[:5]
        ]
        raise GateError(ErrorReason.INVALID, f"not a {model.__name__}: " + "; ".join(lines)[:1500]) from None


def _report(report: BaseModel, status: int = 200) -> web.Response:
    body = report.model_dump_json(by_alias=True, exclude_none=True)
    return web.Response(text=body, status=status, content_type="application/json")


def _error(status: int, body: ErrorBody) -> web.Response:
    return web.Response(
        text=body.model_dump_json(by_alias=True, exclude_none=True), status=status, content_type="application/json"
    )
