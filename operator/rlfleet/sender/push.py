"""Pushing manifest and buckets to gates, in parallel, out of the one copy that the sender keeps.

Invariants: a gate that refuses, dies or freezes costs only itself; every byte goes out in small pieces of the buckets
themselves, so memory does not grow with the number of gates; nothing is reported as delivered that the gate did not
acknowledge.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from rlfleet.api import wire
from rlfleet.sender.cache import Weights
from rlfleet.tls import ClientTLS, why

#: Bytes handed to a socket at a time. Handing over a whole bucket at once is several times slower.
PIECE_BYTES = 2**20
CONNECT_SECONDS = 5.0
_ERROR_BYTES = 64 * 1024


class _Failed(Exception):
    """This gate did not get its bytes; the message says why."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How one gate is reached."""

    headers: dict[str, str]
    stall_seconds: float
    proxy: str | None
    server_name: str | None
    tls: ssl.SSLContext | bool


@dataclass(slots=True)
class _Outcome:
    ok: bool = False
    bytes: int = 0
    error: str | None = None

    def report(self) -> dict[str, object]:
        return {"ok": self.ok, "bytes": self.bytes, "error": self.error}


async def push(
    weights: Weights,
    order: wire.PushOrder,
    operation: str,
    incarnation: str,
    *,
    proxy: str | None = None,
    authorities: ClientTLS | None = None,
) -> dict[str, object]:
    """Carry out a PushOrder for the operation (its UID); the result is PushOrder's. Ends by its deadline.

    ``incarnation``: of this sender process, which gates compare with the one that they expect.
    ``proxy``: URL of an HTTP forward proxy on the way to the gates. ``authorities``: whom gates that serve TLS must be
    certified by; without any, nothing is pushed to such a gate.
    """
    manifest = weights.manifest.model_dump_json(by_alias=True).encode()
    outcomes = {target.engine: _Outcome() for target in order.targets}
    # One connection per gate and no pool limits: a slow gate must not stand in the way of another.
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0)
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
    ) as session:

        def base(target: wire.PushTarget) -> str:
            return f"{target.url.rstrip('/')}/v1/staging/{operation}"

        def headers(target: wire.PushTarget) -> dict[str, str]:
            return {"Authorization": f"Bearer {target.token}", wire.SENDER_HEADER: incarnation}

        async def one(target: wire.PushTarget) -> None:
            outcome = outcomes[target.engine]
            if target.server_name is not None and authorities is None:
                outcome.error = "this gate wants TLS and this sender has no ca.crt: set tls_dir (RLFLEET_TLS_DIR)"
                return
            way = _Way(
                headers(target),
                order.stall_seconds,
                proxy,
                target.server_name,
                authorities.context() if authorities is not None else True,
            )
            try:
                async with asyncio.timeout(order.deadline_seconds):
                    await _to_gate(session, weights, manifest, target, base(target), outcome, way)
                outcome.ok = True
            except TimeoutError:
                outcome.error = f"not done within {order.deadline_seconds:g} s (DeadlineExceeded)"
            except _Failed as e:
                outcome.error = str(e)[:512]

        await asyncio.gather(*(one(t) for t in order.targets))
    return {
        "targets": {engine: outcome.report() for engine, outcome in outcomes.items()},
        "bytes": sum(outcome.bytes for outcome in outcomes.values()),
    }


async def _to_gate(
    session: aiohttp.ClientSession,
    weights: Weights,
    manifest: bytes,
    target: wire.PushTarget,
    base: str,
    outcome: _Outcome,
    way: _Way,
) -> None:
    await _put(session, f"{base}/manifest", memoryview(manifest), "application/json", way)
    if not target.buckets:
        return
    for index in range(len(weights.buckets)):
        view = weights.view(index)
        await _put(session, f"{base}/buckets/{index}", view, "application/octet-stream", way)
        outcome.bytes += len(view)


async def _put(session: aiohttp.ClientSession, url: str, body: memoryview, content_type: str, way: _Way) -> None:
    stall_seconds = way.stall_seconds
    what = url.rsplit("/v1/staging/", 1)[1].partition("/")[2]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(stall_seconds) as stall:

            async def pieces() -> AsyncIterator[memoryview]:
                for at in range(0, len(body), PIECE_BYTES):
                    stall.reschedule(loop.time() + stall_seconds)
                    yield body[at : at + PIECE_BYTES]
                stall.reschedule(loop.time() + stall_seconds)

            async with session.put(
                url,
                data=pieces(),
                headers={**way.headers, "Content-Length": str(len(body)), "Content-Type": content_type},
                # The gate can refuse before the bytes travel, and its refusal is not lost in a broken connection.
                expect100=True,
                allow_redirects=False,
                proxy=way.proxy,
                ssl=way.tls,
                server_hostname=way.server_name,
            ) as response:
                raw = await response.content.read(_ERROR_BYTES)
                if response.status != 200:
                    raise _Failed(f"{what}: {_refusal(response.status, raw)}")
    except TimeoutError:
        if not stall.expired():
            raise
        raise _Failed(f"{what}: no progress for {stall_seconds:g} s, given up") from None
    except (aiohttp.ClientError, OSError) as e:
        raise _Failed(f"{what}: connection failed ({why(e) or f'{type(e).__name__}: {e}'})") from e


def _refusal(status: int, raw: bytes) -> str:
    try:
        error = wire.ErrorBody.model_validate_json(raw)
    except ValidationError:
        return f"HTTP {status} without an error of the protocol"
    return f"{error.reason.value}: {error.message}"
