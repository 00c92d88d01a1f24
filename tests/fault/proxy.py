"""A proxy between one client and the apiserver, gates and senders, that counts calls and does scripted things to them.

Two listeners, because the two ways differ: the apiserver's (``kubeconfig`` leads there) adds the client's credentials
to every call; the other one (``peer_url``) is a plain HTTP forward proxy for RLFLEET_PEER_PROXY. Each client has a
proxy of its own; proxies of one stand share a journal.

Invariant: what is forwarded is forwarded whole and answered unchanged unless a rule says otherwise; events of a watch
are never reordered, and none is left out without the stream being ended, as the real apiserver promises.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from rlfleet.client import credentials
from tests.fault.calls import Call, Journal
from tests.fault.rules import CARRIED_OUT, Fault, Rule, Watching, at, nothing
from tests.fault.stale import Snapshot

__all__ = ["RETRY_AFTER_SECONDS", "Fault", "FaultProxy", "Rule", "Watching", "at", "nothing", "of_record"]

RETRY_AFTER_SECONDS = 1
_START_SECONDS = 120.0
#: Transports close in the turns of the loop after they were told to.
_CLOSE_SECONDS = 0.1
#: A call that hangs at its server is given up then; its client has given up long before.
_PEER_SECONDS = 60.0
_PARSED_BYTES = 256 * 2**10
#: Writes to these are what ``arm`` counts: the durable record of rounds.
_RECORD = ("/rlpipelines/", "/syncrounds/")


#: About one connection, not about the message; and what this client asks for itself.
_HOP_BY_HOP = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_REASONS = {
    403: "Forbidden",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class FaultProxy:
    """Forwards to the apiserver of ``kubeconfig`` with its credentials; ``self.kubeconfig`` leads here.

    ``kill`` and ``freeze`` are called from the proxy's thread to end or stop the client at once; ``kill`` must not
    return before it is dead. After ``freeze`` the call goes on once ``thaw`` was called.
    """

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        kill: Callable[[], None] = nothing,
        *,
        freeze: Callable[[], None] = nothing,
        journal: Journal | None = None,
        name: str = "operator",
    ) -> None:
        self._access = credentials.find(kubeconfig)
        self._kill = kill
        self._freeze = freeze
        self.name = name
        self.journal = journal if journal is not None else Journal()
        self.kubeconfig = folder / f"fault-proxy-{name}.kubeconfig"
        self.peer_url = ""
        self.fired = threading.Event()
        self.struck: list[Call] = []
        self.rules: list[Rule] = []
        self.watching: dict[str, Watching] = {}
        #: Watches by kind that the apiserver itself ended because their version was too old.
        self.expired: Counter[str] = Counter()
        self._deaf: dict[str, float] = {}
        self._old: dict[str, Snapshot] = {}
        self._thawed = threading.Event()
        self._outage = False
        self._streams: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    # ------------------------------------------------------------------------------------------ scripting

    def watch(self) -> None:
        """Count from zero, without a fault."""
        self.rules, self.struck = [], []
        self.journal.reset()
        self.fired.clear()

    def strike(self, rule: Rule) -> Rule:
        """Add a rule; ``fired`` is set when any has struck."""
        self.fired.clear()
        self.rules = [*self.rules, rule]
        return rule

    def arm(self, fault: Fault, at: int) -> None:
        """Strike once, at the ``at``-th write of the record of rounds from now (1: the next)."""
        self.watch()
        self.strike(Rule(of_record, fault, skip=at - 1))

    def outage(self, down: bool) -> None:
        """While ``down`` every call to the apiserver is answered 503."""
        self._outage = down

    def thaw(self) -> None:
        """The client runs again: calls that froze it go on."""
        self._thawed.set()

    def set_watching(self, mode: Watching, *plurals: str) -> None:
        """Change what happens to watch streams of these kinds."""
        self.watching = {**self.watching, **dict.fromkeys(plurals, mode)}

    def deafen(self, *plurals: str) -> None:
        """Streams of these kinds that are open now never say anything again, and never end; new ones work."""
        self._deaf |= dict.fromkeys(plurals, time.monotonic())

    def go_back(self, *snapshots: Snapshot) -> None:
        """Answer reads of these kinds, and watches of them too, as an apiserver would that has fallen behind: what
        happened after the snapshot is not told. Without one: nobody is behind any more."""
        self.watching = {k: m for k, m in self.watching.items() if k not in self._old}
        self._old = {s.plural: s for s in snapshots}
        self.watching |= dict.fromkeys(self._old, Watching.HOLD)

    @property
    def writes(self) -> list[str]:
        """Writes to the record of rounds since ``watch``."""
        return [f"{c.label} {json.dumps(c.body)[:400]}" for c in list(self.journal.calls) if of_record(c)]

    # ------------------------------------------------------------------------------------------ serving

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(_START_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._thawed.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session,
            # A connection per call: one that is kept would outlive the gate at its other end.
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as self._peers,
        ):
            runners = []
            for handler in (self._api, self._peer):
                app = web.Application(client_max_size=1024 * 2**20)
                app.router.add_route("*", "/{path:.*}", handler)
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                runners.append(runner)
            api, peer = (runner.addresses[0][1] for runner in runners)
            self._write_kubeconfig(f"http://127.0.0.1:{api}")
            self.peer_url = f"http://127.0.0.1:{peer}"
            self._started.set()
            await self._stop.wait()
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            for runner in runners:
                await runner.cleanup()
        await asyncio.sleep(_CLOSE_SECONDS)

    def _write_kubeconfig(self, server: str) -> None:
        named = {"name": "proxy"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [named | {"cluster": {"server": server}}],
            "users": [named | {"user": {}}],
            "contexts": [named | {"context": {"cluster": "proxy", "user": "proxy"}}],
            "current-context": "proxy",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _api(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = self.journal.begin_api(self.name, request.method, request.path, request.query, _json(raw))
        if self._outage:
            call.fault = "outage"
            self.journal.end(call)
            return self._refusal(call, 503)
        if request.query.get("watch") in ("true", "1"):
            return await self._stream(request, call)
        if call.read and (old := self._old.get(call.plural)) is not None:
            call.fault = "stale"
            call.status, body = old.answer(request.path, request.query)
            self.journal.end(call)
            return web.json_response(body, status=call.status)
        return await self._answer(request, call, raw)

    async def _peer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = self.journal.begin_peer(self.name, request.method, str(request.url), _json(raw))
        return await self._answer(request, call, raw)

    async def _answer(self, request: web.Request, call: Call, raw: bytes) -> web.StreamResponse:
        rule = next((r for r in self.rules if r.strikes(call)), None)
        try:
            return (
                await self._forward(request, call, raw) if rule is None else await self._fail(request, call, raw, rule)
            )
        except (aiohttp.ClientError, OSError, TimeoutError):
            return self._cut(request)  # the server is not there, or does not answer
        finally:
            self.journal.end(call)

    async def _fail(self, request: web.Request, call: Call, raw: bytes, rule: Rule) -> web.StreamResponse:
        fault = rule.fault
        call.fault = fault.value
        self.struck = [*self.struck, call]
        try:
            if fault is Fault.DELAY:
                await asyncio.sleep(rule.seconds)
                return await self._forward(request, call, raw)
            if fault is Fault.FREEZE_BEFORE:
                await self._frozen()
                return await self._forward(request, call, raw)
            if fault is Fault.KILL_BEFORE:
                await asyncio.to_thread(self._kill)
                return self._cut(request)
            if fault is Fault.RESET:
                return self._cut(request)
            if fault not in CARRIED_OUT:
                return self._refusal(call, int(fault.value))
            status, headers, body = await self._carry_out(request, call, raw)
            if fault is Fault.KILL_AFTER:
                await asyncio.to_thread(self._kill)
            if fault is Fault.FREEZE_AFTER:
                await self._frozen()
                return web.Response(status=status, headers=headers, body=body)
            if fault is Fault.TIMEOUT:
                return self._refusal(call, 504)
            if fault is Fault.TRUNCATE:
                response = web.StreamResponse(status=status, headers=headers | {"Content-Length": str(len(body))})
                await response.prepare(request)
                await response.write(body[: len(body) // 2])
            return self._cut(request)
        finally:
            self.fired.set()

    async def _frozen(self) -> None:
        self._thawed.clear()
        await asyncio.to_thread(self._freeze)
        self.fired.set()
        await asyncio.to_thread(self._thawed.wait)

    @staticmethod
    def _cut(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    @staticmethod
    def _refusal(call: Call, code: int) -> web.Response:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if code == 429 else {}
        if call.lane == "peer":
            body: Any = {"reason": "Busy", "message": f"scripted {code}"} if code == 409 else f"scripted {code}"
            return web.json_response(body, status=code, headers=headers)
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        status |= {"reason": _REASONS.get(code, "InternalError"), "message": f"scripted {code}"}
        return web.json_response(status, status=code, headers=headers)

    def _call(self, request: web.Request, data: bytes, lane: str) -> aiohttp.client._RequestContextManager:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        if lane == "peer":
            timeout = aiohttp.ClientTimeout(total=_PEER_SECONDS, connect=2)
            body = io.BytesIO(data) if data else None  # a large one as bytes earns a warning
            return self._peers.request(
                request.method, request.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
        if (authorization := self._access.authorization()) is not None:
            headers["Authorization"] = authorization  # a client of this kubeconfig has none of its own
        return self._session.request(
            request.method,
            self._access.server + request.path_qs,
            data=data or None,  # an empty body would be sent with a content type
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _carry_out(self, request: web.Request, call: Call, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        async with self._call(request, raw, call.lane) as answer:
            body = await answer.read()
            call.status = answer.status
            if call.lane == "peer" or not call.read:
                call.answer = _json(body)
            return answer.status, _kept(answer), body

    async def _forward(self, request: web.Request, call: Call, raw: bytes) -> web.StreamResponse:
        status, headers, body = await self._carry_out(request, call, raw)
        return web.Response(status=status, headers=headers, body=body)

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        """One watch, line by line."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            if self.watching.get(call.plural) is Watching.FORBID:
                return self._refusal(call, 403)
            async with self._call(request, b"", "api") as answer:
                call.status = answer.status
                self.expired[call.plural] += answer.status == 410
                if answer.status != 200:
                    return web.Response(status=answer.status, headers=_kept(answer), body=await answer.read())
                response = web.StreamResponse(headers=_kept(answer))
                await response.prepare(request)
                await self._lines(request, call, answer, response)
        except (ConnectionError, aiohttp.ClientError):
            pass  # the client is gone, or the server is
        finally:
            self._streams.discard(task)
            self.journal.end(call)
        return response

    async def _lines(
        self, request: web.Request, call: Call, answer: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        pending = b""
        chunk: asyncio.Task[bytes] | None = None
        try:
            while request.transport is not None and not request.transport.is_closing():
                mode = self.watching.get(call.plural, Watching.PASS)
                if mode is Watching.CLOSE:
                    return
                if mode is Watching.GONE:
                    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410}
                    status |= {"reason": "Expired", "message": "too old resource version"}
                    await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                    return
                if call.began < self._deaf.get(call.plural, 0.0):
                    pending = b""
                elif mode is not Watching.HOLD and b"\n" in pending:
                    whole, _, pending = pending.rpartition(b"\n")
                    await response.write(whole + b"\n")
                if chunk is None:
                    chunk = asyncio.ensure_future(answer.content.readany())
                # A short wait, so that a changed mode and a dead client are noticed on a quiet stream.
                await asyncio.wait({chunk}, timeout=0.1)
                if chunk.done():
                    data = chunk.result()
                    chunk = None
                    if not data:
                        break
                    pending += data
                    self.expired[call.plural] += b'"code":410' in data
            if self.watching.get(call.plural, Watching.PASS) is Watching.PASS and pending:
                await response.write(pending)
        finally:
            if chunk is not None:
                chunk.cancel()
                with suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
                    await chunk


def of_record(call: Call) -> bool:
    """A write to an RLPipeline or SyncRound."""
    return call.lane == "api" and not call.read and any(kind in call.path for kind in _RECORD)


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}


def _json(raw: bytes) -> Any:
    if not raw or len(raw) > _PARSED_BYTES:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return None
