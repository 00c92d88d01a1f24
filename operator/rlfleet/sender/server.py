"""The sender's HTTP server: the control protocol of ``rlfleet.api.wire``.

Invariants: authentication comes before the body is read; identity before the fence; the fence before the effect.
Every refusal is an ErrorBody. Everything here runs in one event loop of its own, so a busy training loop does not
silence the sender (as long as it lets go of the interpreter now and then).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from rlfleet import __version__
from rlfleet.api import tokens, wire
from rlfleet.devices import Devices
from rlfleet.sender import broadcast, push
from rlfleet.sender.access import Access
from rlfleet.sender.cache import Weights
from rlfleet.sender.errors import Refused
from rlfleet.sender.metrics import Metrics
from rlfleet.sender.operations import Operations, Run
from rlfleet.sender.recut import recut
from rlfleet.sender.slots import Hold, Slots
from rlfleet.serving import BODY_SECONDS, Listener, expect_continue, listen, within
from rlfleet.threads import in_daemon
from rlfleet.tls import ClientTLS, ServerTLS

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20

B = TypeVar("B", bound=wire.Fenced)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves one sender. ``identity``: (pod UID, incarnation); ``capabilities`` as reported."""

    def __init__(
        self,
        *,
        pod_uid: str,
        incarnation: str,
        access: Access,
        slots: Slots,
        metrics: Metrics,
        backends: tuple[str, ...],
        capabilities: tuple[str, ...],
        devices: Devices,
        peer_proxy: str | None = None,
        tls: ServerTLS | None = None,
        authorities: ClientTLS | None = None,
    ) -> None:
        self._pod_uid = pod_uid
        self._incarnation = incarnation
        self._access = access
        self._slots = slots
        self._metrics = metrics
        self._backends = backends
        self._capabilities = capabilities
        self._devices = devices
        self._peer_proxy = peer_proxy
        self._tls = tls
        self._authorities = authorities
        self._operations = Operations(metrics.operation_ended)
        self._order = asyncio.Lock()
        self._listener: Listener | None = None

    def application(self) -> web.Application:
        """Routes and handlers; ``serve`` runs it."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/metrics", self._get_metrics),
                web.get("/v1/status", self._get_status),
                web.get("/v1/manifest/{digest}", self._get_manifest),
                web.get("/v1/operations/{id}", self._get_operation),
                web.post("/v1/fence", self._post_fence, expect_handler=expect_continue),
                web.post("/v1/hold", self._post_hold, expect_handler=expect_continue),
                web.post("/v1/release", self._post_release, expect_handler=expect_continue),
                web.post("/v1/operations", self._post_operation, expect_handler=expect_continue),
            ]
        )
        return app

    async def serve(self, listener: socket.socket) -> None:
        """Begin to answer on a socket that listens; ``close`` ends it."""
        self._listener = await listen(self.application(), at=listener, shutdown_seconds=1.0, tls=self._tls)

    async def close(self) -> None:
        """Stop operations, answer nothing more."""
        await self._operations.close()
        if self._listener is not None:
            await self._listener.close()

    # ------------------------------------------------------------------------------------------- answers

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as e:
            refusal = e
        except web.HTTPRequestEntityTooLarge:
            refusal = Refused(wire.ErrorReason.TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            refusal = Refused(wire.ErrorReason.NOT_FOUND, "there is no such path, or not with this method")
        except web.HTTPException as e:
            refusal = Refused(wire.ErrorReason.INVALID, f"{request.method} {request.path}: {e.reason}")
        except Exception as e:
            log.exception("%s %s failed", request.method, request.path)
            refusal = Refused(wire.ErrorReason.INTERNAL, f"{type(e).__name__}: see the trainer's log")
        return web.json_response(refusal.body().wire(), status=refusal.status)

    async def _claims(self, request: web.Request) -> tokens.Claims:
        header = request.headers.get("Authorization")
        try:
            return self._access.authenticate(header)
        except Refused:
            # Keys may have come, or have been rotated, since they were asked for.
            if not header or not await in_daemon(self._refresh, "rlfleet-public-keys"):
                raise
        return self._access.authenticate(header)

    def _refresh(self) -> bool:
        try:
            return self._access.refresh()
        except Exception as e:  # noqa: BLE001 the source is the user's code; without keys the call is refused
            log.warning("public keys could not be had: %s: %s", type(e).__name__, e)
            return False

    async def _reader(self, request: web.Request) -> None:
        claims = await self._claims(request)
        if claims.scope not in (tokens.Scope.READ, tokens.Scope.CONTROL):
            raise Refused(wire.ErrorReason.FORBIDDEN, f"a token of scope {claims.scope.value} does not allow reading")

    async def _body(self, request: web.Request, model: type[B]) -> B:
        """Authenticate, read and authorize one mutating call."""
        claims = await self._claims(request)
        raw = await within(BODY_SECONDS, request.read(), lambda text: Refused(wire.ErrorReason.INVALID, text))
        try:
            body = model.model_validate_json(raw)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise Refused(wire.ErrorReason.INVALID, f"{where}: {first['msg']}") from e
        self._access.authorize(claims, body)
        return body

    def _admit(self, body: wire.Fenced) -> None:
        self._access.admit(body, idle=not self._slots.holding() and self._operations.in_flight is None)

    # -------------------------------------------------------------------------------------------- reading

    async def _livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _get_status(self, request: web.Request) -> web.Response:
        await self._reader(request)
        return web.json_response((await self._status()).wire())

    async def _get_manifest(self, request: web.Request) -> web.Response:
        await self._reader(request)
        weights = self._slots.find(request.match_info["digest"])
        if weights is None:
            raise Refused(wire.ErrorReason.NOT_FOUND, "no weights with this digest are here")
        return web.Response(text=weights.manifest.model_dump_json(by_alias=True), content_type="application/json")

    async def _get_operation(self, request: web.Request) -> web.Response:
        await self._reader(request)
        text = request.query.get("waitSeconds", "0")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise Refused(wire.ErrorReason.INVALID, f"waitSeconds: {text[:32]!r} is not a number of seconds")
        record = await self._operations.wait(request.match_info["id"], min(seconds, wire.MAX_WAIT_SECONDS))
        if record is None:
            raise Refused(wire.ErrorReason.NOT_FOUND, "there is no operation with this id")
        return web.json_response(record.wire())

    async def _status(self) -> wire.SenderStatus:
        devices = await self._devices.report()

        def make(slots: list[Weights], hold: Hold | None, waiting: bool) -> wire.SenderStatus:
            return wire.SenderStatus(
                protocol_version=wire.PROTOCOL_VERSION,
                sender_version=__version__,
                capabilities=self._capabilities,
                pod_uid=self._pod_uid,
                incarnation=self._incarnation,
                fence=self._access.held,
                cache=slots[-1].report() if slots else None,
                slots=tuple(w.report() for w in slots),
                publish_waiting=waiting,
                hold=None
                if hold is None
                else wire.SenderHold(
                    operation=hold.operation,
                    version=hold.version,
                    manifest_digest=hold.digest,
                    expires_ms=hold.expires_ms,
                ),
                in_flight=self._operations.in_flight,
                devices=devices,
            )

        return self._slots.describe(make)

    # ------------------------------------------------------------------------------------------- mutating

    async def _post_fence(self, request: web.Request) -> web.Response:
        self._admit(await self._body(request, wire.FenceRequest))
        return web.json_response((await self._status()).wire())

    async def _post_hold(self, request: web.Request) -> web.Response:
        body = await self._body(request, wire.HoldRequest)
        self._admit(body)
        self._slots.hold(body.operation, body.version, body.manifest_digest, body.deadline_seconds)
        return web.json_response((await self._status()).wire())

    async def _post_release(self, request: web.Request) -> web.Response:
        body = await self._body(request, wire.ReleaseRequest)
        self._admit(body)
        self._slots.release(body.operation)
        return web.json_response((await self._status()).wire())

    async def _post_operation(self, request: web.Request) -> web.Response:
        body = await self._body(request, wire.SenderOperationRequest)
        if body.sender_incarnation != self._incarnation:
            raise Refused(
                wire.ErrorReason.IDENTITY_MISMATCH,
                f"senderIncarnation: {body.sender_incarnation} is not this process ({self._incarnation})",
            )
        # Stopping a deposed push takes a moment, in which another order must not come in between.
        async with self._order:
            self._admit(body)
            record = self._operations.known(body)
            if record is None:
                await self._operations.make_room(body)
                record = self._start(body)
        running = record.state is wire.OperationState.RUNNING
        return web.json_response(record.wire(), status=202 if running else 200)

    def _start(self, body: wire.SenderOperationRequest) -> wire.OperationRecord:
        order = body.order
        with ExitStack() as stack:
            # From here on these bytes stay as they are, even if the hold ends while they travel.
            weights = stack.enter_context(self._slots.reading(order.manifest_digest))
            weights = recut(weights, order.bucket_bytes)
            if isinstance(order, wire.PushOrder):
                run: Run = functools.partial(
                    push.push,
                    weights,
                    order,
                    body.operation,
                    self._incarnation,
                    proxy=self._peer_proxy,
                    authorities=self._authorities,
                )
            else:
                try:
                    moving = broadcast.Broadcast(weights, order, self._backends)
                except Refused as e:
                    if e.reason is not wire.ErrorReason.TRANSPORT_FAILED:
                        raise
                    return self._operations.record_failure(body, e)
                stack.callback(moving.close)
                run = moving.run
            return self._operations.start(
                body, run, stack.pop_all().close, cancellable=isinstance(order, wire.PushOrder)
            )
