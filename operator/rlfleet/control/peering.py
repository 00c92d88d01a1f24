"""One call to a gate or sender: its token, its deadline, and three kinds of answer. Many calls at once.

Invariant: an answer is a report, a refusal (the server says no, with a reason), or silence. Silence is not "no": the
order may have been carried out, so callers ask again by operation id instead of assuming either way. What changes a
gate or sender is sent only by a leader (kube.guard); reading is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import aiohttp
from pydantic import ValidationError

from rlfleet import tls
from rlfleet.api import wire
from rlfleet.api.tokens import Scope
from rlfleet.kube.guard import Guard

T = TypeVar("T")
K = TypeVar("K")
Status = TypeVar("Status", wire.GateStatus, wire.SenderStatus)

#: Seconds for a call that only reads or records; an engine operation is polled, never awaited in one call.
CALL_SECONDS = 5.0
#: Gates asked at once; more only queue in the same process.
FANOUT = 64
MAX_REPORT_BYTES = 8 * 2**20


class Signer(Protocol):
    """Makes bearer tokens (control.keys.SigningKey)."""

    def sign(
        self,
        *,
        audience: Iterable[str],
        scope: Scope,
        pipeline: str,
        operation: str,
        generation: int,
        ttl_seconds: int = ...,
    ) -> str:
        """A signed token; see api.tokens.sign."""


class PeerObserver(Protocol):
    """Told of every finished call, for metrics."""

    def peer_call(self, peer: str, result: str, seconds: float | None) -> None:
        """A call to a ``gate`` or ``sender`` ended: Ok, NoAnswer, or the reason of its refusal.

        ``seconds``: how long an answer took; None where there was none, or the call waits for an operation's end.
        """


class Signers(Protocol):
    """The operator's keys (control.keys.SigningKeys)."""

    @property
    def order(self) -> tuple[Signer, Signer | None]:
        """The key to sign with, and the one to try where that is not known; None outside of a rotation."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a gate or sender listens, and the pod UID it must be (the token's audience).

    ``server_name``: the name that its certificate must carry, with an https URL; empty: the URL's own host.
    """

    name: str
    pod_uid: str
    url: str
    server_name: str = ""
    kind: Literal["gate", "sender"] = "gate"


class Fence(TypedDict):
    """The fence as fields of a request."""

    pipeline: str
    operation: str
    generation: int


@dataclass(frozen=True, slots=True)
class Caller:
    """In whose name a call is made: the fence."""

    pipeline: str
    operation: str
    generation: int

    def fence(self) -> Fence:
        """The fields of a request that name it."""
        return {"pipeline": self.pipeline, "operation": self.operation, "generation": self.generation}


class PeerError(Exception):
    """Base of what can go wrong in a call."""


class Refused(PeerError):
    """The server answered no."""

    def __init__(self, peer: Peer, status: int, body: wire.ErrorBody) -> None:
        super().__init__(f"{peer.name}: {body.reason.value}: {body.message}")
        self.peer = peer
        self.status = status
        self.body = body


class Silent(PeerError):
    """No answer that can be believed: no connection, a time-out, or a body that is not the protocol's."""

    def __init__(self, peer: Peer, what: str) -> None:
        super().__init__(f"{peer.name}: {what}")
        self.peer = peer
        self.what = what


class PeerCalls:
    """What calls to gates and to senders share: one HTTP session, keys, and how an answer is read. Close it when done.

    ``authorities``: whom https peers must be certified by; None: those of the system.
    ``proxy``: URL of an HTTP forward proxy that every call goes through, for an operator outside of the pod network.
    A proxy's own error is no word of a peer: it is taken as silence.
    """

    def __init__(
        self,
        signers: Signers,
        guard: Guard,
        *,
        proxy: str | None = None,
        authorities: tls.ClientTLS | None = None,
        observer: PeerObserver | None = None,
    ) -> None:
        self._signers = signers
        self._authorities = authorities
        #: The key that is tried first, and pod UIDs of listeners that did not know it, but the other one.
        self._first: Signer | None = None
        self._others: set[str] = set()
        self._guard = guard
        self._proxy = proxy
        self._observer = observer
        self._session: aiohttp.ClientSession | None = None

    def client(self) -> aiohttp.ClientSession:
        """The session of all calls, made when it is needed first."""
        if self._session is None:
            # No cookie jar, no proxies from the environment: peers are pod addresses, and a cluster's proxy for the
            # outside world is not the way to them.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=8, keepalive_timeout=15),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _signer(self, peer: Peer) -> Signer:
        first, second = self._signers.order
        if first is not self._first:
            self._first = first
            self._others.clear()
        return second if second is not None and peer.pod_uid in self._others else first

    def push_token(self, gate: Peer, caller: Caller, ttl_seconds: int) -> str:
        """A token with which the sender may push this round's bytes to this gate, and nothing else."""
        return self._signer(gate).sign(
            audience=[gate.pod_uid],
            scope=Scope.PUSH,
            **caller.fence(),
            ttl_seconds=ttl_seconds,
        )

    async def call(
        self,
        peer: Peer,
        method: str,
        path: str,
        *,
        scope: Scope,
        caller: Caller,
        body: wire.Request | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Any:
        """One call; NotLeader (nothing sent) for one that is not a read when we do not lead."""
        started, waits, result = time.monotonic(), "?waitSeconds=" in path, ""
        try:
            with contextlib.nullcontext() if scope is Scope.READ else self._guard.mutation("peer"):
                raw = await self._signed(peer, method, path, scope=scope, caller=caller, body=body, seconds=seconds)
            result = "Ok"
            return raw
        except Refused as e:
            result = e.body.reason.value
            raise
        except Silent:
            result = "NoAnswer"
            raise
        finally:
            if self._observer is not None and result:
                answered = result != "NoAnswer" and not waits
                self._observer.peer_call(peer.kind, result, time.monotonic() - started if answered else None)

    async def _signed(
        self,
        peer: Peer,
        method: str,
        path: str,
        *,
        scope: Scope,
        caller: Caller,
        body: wire.Request | None,
        seconds: float,
    ) -> Any:
        """Send it with a token of the key that the peer is thought to know, and once more with the other one."""

        async def send(signer: Signer) -> Any:
            token = signer.sign(audience=[peer.pod_uid], scope=scope, **caller.fence())
            return await self._send(peer, method, path, token=token, body=body, seconds=seconds)

        tried = self._signer(peer)
        try:
            return await send(tried)
        except Refused as e:
            first, second = self._signers.order
            if e.body.reason is not wire.ErrorReason.UNAUTHENTICATED or second is None:
                raise
        # Nothing was stored: a token is verified before anything else. Perhaps the other key is the known one: other
        # than the one tried here, for calls to one peer run side by side.
        if tried is second:
            self._others.discard(peer.pod_uid)
            return await send(first)
        self._others.add(peer.pod_uid)
        return await send(second)

    async def _send(
        self, peer: Peer, method: str, path: str, *, token: str, body: wire.Request | None, seconds: float
    ) -> Any:
        try:
            async with self.client().request(
                method,
                peer.url.rstrip("/") + path,
                json=body.wire() if body is not None else None,
                headers={"Authorization": f"Bearer {token}"},
                **self.transport(peer, seconds),
            ) as response:
                raw = await response.content.read(MAX_REPORT_BYTES)
                if response.status >= 300:
                    raise self._refusal(peer, response.status, raw)
                return raw
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise Silent(peer, f"no answer to {method} {path} ({tls.why(e) or type(e).__name__})") from e

    def transport(self, peer: Peer, seconds: float) -> dict[str, Any]:
        """How a request reaches a peer: deadline, proxy and TLS, as keywords of the session."""
        return {
            "timeout": aiohttp.ClientTimeout(total=seconds, connect=min(seconds, 2.0)),
            "allow_redirects": False,
            "proxy": self._proxy,
            "ssl": self._authorities.context() if self._authorities is not None else True,
            "server_hostname": peer.server_name or None,
        }

    @staticmethod
    def _refusal(peer: Peer, status: int, raw: bytes) -> PeerError:
        try:
            return Refused(peer, status, wire.ErrorBody.model_validate_json(raw))
        except ValidationError:
            # Something else answers at this address (a proxy, another program): that is no word of our peer.
            return Silent(peer, f"HTTP {status} without an error of the protocol")

    @staticmethod
    def parse(peer: Peer, model: type[T], raw: bytes) -> T:
        """The body of an answer. Silent: it is not one of the protocol's."""
        try:
            return model.model_validate_json(raw)  # type: ignore[attr-defined,no-any-return]
        except ValidationError as e:
            raise Silent(peer, f"an answer that is not a {model.__name__} ({e.error_count()} errors)") from e

    def status(self, peer: Peer, model: type[Status], raw: bytes) -> Status:
        """The status that a peer answered. Silent: it is that of another pod, which has the address now."""
        status = self.parse(peer, model, raw)
        if status.pod_uid != peer.pod_uid:
            raise Silent(peer, f"the {peer.kind} at {peer.url} belongs to pod {status.pod_uid}, not {peer.pod_uid}")
        return status

    async def operation(self, peer: Peer, caller: Caller, op_id: str, *, wait: float) -> wire.OperationRecord:
        """The record of an operation; the server holds the call for up to ``wait`` seconds while it runs."""
        wait = max(0.0, min(wait, wire.MAX_WAIT_SECONDS))
        raw = await self.call(
            peer,
            "GET",
            f"/v1/operations/{op_id}?waitSeconds={wait:.3f}",
            scope=Scope.READ,
            caller=caller,
            seconds=wait + CALL_SECONDS,
        )
        return self.parse(peer, wire.OperationRecord, raw)


async def fan_out(
    targets: Iterable[K], call: Callable[[K], Awaitable[T]], *, limit: int = FANOUT
) -> dict[K, T | PeerError]:
    """Run one call per target, at most ``limit`` at a time; a PeerError becomes that target's result.

    Anything else ends all of them before it is raised: no call goes on for a caller that has given up.
    """
    gate = asyncio.Semaphore(limit)

    async def one(target: K) -> tuple[K, T | PeerError]:
        async with gate:
            try:
                return target, await call(target)
            except PeerError as e:
                return target, e

    tasks = [asyncio.ensure_future(one(t)) for t in targets]
    try:
        return dict(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
