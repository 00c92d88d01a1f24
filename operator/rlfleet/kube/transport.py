"""One connection pool to the apiserver: credentials, rate limit, deadlines, and what an answer means as a typed error.

Invariants:
- a request is sent once. The only exception is an answer 401, which says that nothing was processed: then the
  credentials are read again and it is sent a second time;
- with a guard, a write is sent only by a leader with validity left (NotLeader otherwise).
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Protocol

import aiohttp

from .config import Credentials, CredentialSource
from .errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    TooManyRequests,
    Unavailable,
    Unknown,
)
from .guard import Guard
from .limiter import Priority, RateLimiter
from .resources import Resource
from .server_time import ServerTime

Obj = dict[str, Any]

JSON = "application/json"
CONNECT_SECONDS = 5.0
#: Most connections to the apiserver, watches among them.
MAX_CONNECTIONS = 64


class ApiObserver(Protocol):
    """Told of every finished call, for metrics. ``code`` is the HTTP status, 0 where no answer came."""

    def api_call(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One call ended."""


class Transport:
    """Connections, credentials and limit that all views of one client share."""

    def __init__(
        self,
        source: CredentialSource,
        limiter: RateLimiter,
        observer: ApiObserver | None,
        user_agent: str,
        guard: Guard | None = None,
    ) -> None:
        self._source = source
        self._guard = guard
        self._limiter = limiter
        self._observer = observer
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._credentials: Credentials | None = None
        self._refresh = asyncio.Lock()
        self.time = ServerTime()

    def guarded(self, guard: Guard) -> Transport:
        """The same connections and limit, under another guard. Not to be closed: whoever opened the first one does."""
        other = copy.copy(self)
        other._guard = guard
        return other

    async def open(self) -> None:
        """Read the credentials and make the pool."""
        if self._session is None:
            self._credentials = await self._source()
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ttl_dns_cache=60)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            if self._session.connector is not None:
                # Without a closing handshake: nobody waits for it, and a loop that ends before it leaks the socket.
                await self._session.connector.close(abort_ssl=True)
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def request(
        self,
        verb: str,
        method: str,
        res: Resource,
        path: str,
        *,
        params: Mapping[str, str],
        priority: Priority,
        limits: aiohttp.ClientTimeout,
        call: str,
        body: bytes | None = None,
        content_type: str = JSON,
        write: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request with an answer below 300; everything else is raised as a typed error."""
        waiting = time.monotonic()
        try:
            async with asyncio.timeout(limits.total):
                await self._limiter.acquire(priority)
        except TimeoutError as e:
            raise Unavailable("own rate limit: no turn within the deadline", call=call) from e
        if limits.total is not None:
            left = max(0.001, limits.total - (time.monotonic() - waiting))
            limits = aiohttp.ClientTimeout(total=left, sock_connect=limits.sock_connect)
        # Asked here, not before: the wait for a turn may have outlasted a term.
        with self._guard.mutation() if write and self._guard is not None else nullcontext():
            started = time.monotonic()
            code = 0
            try:
                once = partial(self._once, method, path, params, body, content_type, limits, call, write)
                async with await self._send(once, write) as response:
                    code = response.status
                    if code >= 300:
                        raise await _error(response, call, write)
                    yield response
            finally:
                if self._observer is not None:
                    self._observer.api_call(verb, res.plural, code, time.monotonic() - started)

    async def _send(self, once: Callable[[], Awaitable[aiohttp.ClientResponse]], write: bool) -> aiohttp.ClientResponse:
        used = self._credentials
        response = await once()
        if response.status != 401:
            return response
        # A rotated token: the call was refused before anything happened, so it may be sent once more.
        response.release()
        async with self._refresh:
            if self._credentials is used:
                self._credentials = await self._source()
        if write and self._guard is not None:
            self._guard.token()  # an exec plugin may take long
        return await once()

    async def _once(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: bytes | None,
        content_type: str,
        limits: aiohttp.ClientTimeout,
        call: str,
        write: bool,
    ) -> aiohttp.ClientResponse:
        if self._session is None or self._credentials is None:
            raise RuntimeError("KubeClient is not open")
        credentials = self._credentials
        headers = {"Accept": JSON, "User-Agent": self._user_agent}
        if body is not None:
            headers["Content-Type"] = content_type
        if credentials.authorization:
            headers["Authorization"] = credentials.authorization
        try:
            response = await self._session.request(
                method,
                credentials.server + path,
                params=params,
                data=body,
                headers=headers,
                timeout=limits,
                ssl=credentials.tls if credentials.tls is not None else True,
                server_hostname=credentials.tls_server_name,
                proxy=credentials.proxy,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            raise Unavailable(f"no connection: {e!r}", call=call) from e
        except (aiohttp.ClientError, TimeoutError) as e:
            raise (Unknown if write else Unavailable)(f"no answer: {e!r}", call=call) from e
        date = response.headers.get("Date")
        if date:
            try:
                self.time.note(int(parsedate_to_datetime(date).timestamp() * 1000), time.monotonic())
            except ValueError:
                pass  # a proxy's odd header is no reason to fail the call; the last good one stands
        return response


async def _error(response: aiohttp.ClientResponse, call: str, write: bool) -> ApiError:
    try:
        text = await response.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as e:
        text = f"(body unreadable: {e!r})"
    try:
        body = json.loads(text)
    except ValueError:
        body = {"message": text[:500]}
    if not isinstance(body, dict):
        body = {"message": text[:500]}
    try:
        retry_after = float(response.headers.get("Retry-After", "1"))
    except ValueError:
        retry_after = 1.0
    return typed_error(response.status, body, call, write=write, retry_after=retry_after)


def typed_error(status: int, body: Obj, call: str, *, write: bool, retry_after: float) -> ApiError:
    """The error that an HTTP status and a Status object mean."""
    reason = str(body.get("reason") or "")
    message = f"{status} {reason}: {body.get('message') or ''}".strip()
    kwargs: dict[str, Any] = {"status": status, "reason": reason, "call": call, "body": body}
    if status == 429:
        return TooManyRequests(message, retry_after=max(0.1, min(retry_after, 60.0)), **kwargs)
    if status == 409:
        return (AlreadyExists if reason == "AlreadyExists" else Conflict)(message, **kwargs)
    if status in (500, 502, 504) and write:
        return Unknown(message, **kwargs)  # the store may have taken it before the server gave up
    known: dict[int, type[ApiError]] = {
        400: Invalid,
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        410: Gone,
        422: Invalid,
    }
    return known.get(status, Unavailable if status >= 500 else ApiError)(message, **kwargs)
