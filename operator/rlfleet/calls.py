"""JSON over HTTP to one engine or router: an explicit deadline on every call, bounded answers, three kinds of failure.

Invariants:
- a definite "no", "never sent" and "no answer" are different exceptions. Code that catches one does not handle another
  by accident: after no answer the order may have been carried out, or may be carried out later;
- no call is repeated here. Whether a call may be asked again is the adapter's knowledge, never the client's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp


class CallError(Exception):
    """Base of all failed calls; the message is safe to show (no secrets, bounded length)."""


class Refused(CallError):
    """The peer answered and said no: what was asked is not in progress any more."""

    def __init__(self, what: str, status: int, detail: str) -> None:
        super().__init__(f"{what}: HTTP {status}: {detail}" if detail else f"{what}: HTTP {status}")
        self.status = status
        self.detail = detail


class NotSent(CallError):
    """No connection could be made, so the peer never saw the call."""


class NoAnswer(CallError):
    """The call was sent and no whole answer came back in time: its effect is unknown."""


#: Longest answer that is read; an engine's resolved arguments are some 20 KiB.
MAX_ANSWER_BYTES = 16 * 2**20
#: Seconds to make a connection. Peers are in the same pod or cluster; a longer wait only hides that one is gone.
CONNECT_SECONDS = 2.0
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its status, and its body as JSON (None when the body is not JSON) and as text."""

    status: int
    body: Any
    text: str


class JsonClient:
    """A client for one base URL. Close it when done.

    ``keep_alive`` False: a new connection per call. For servers that close a connection without saying so: the next
    order would meet it closed, and whether it arrived could not be told.
    """

    def __init__(self, base_url: str, *, keep_alive: bool = True) -> None:
        self.base_url = base_url.rstrip("/")
        self._keep_alive = keep_alive
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No cookies, no proxies from the environment: peers are pod addresses.
            self._session = aiohttp.ClientSession(
                connector=(
                    aiohttp.TCPConnector(limit=32, keepalive_timeout=10)
                    if self._keep_alive
                    else aiohttp.TCPConnector(limit=32, force_close=True)
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(
        self, method: str, path: str, *, seconds: float, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Make one call and return its answer whatever the status; raise NotSent or NoAnswer."""
        what = f"{method} {self.base_url}{path}"
        try:
            async with self._client().request(
                method,
                self.base_url + path,
                json=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds, connect=min(seconds, CONNECT_SECONDS)),
                allow_redirects=False,
            ) as response:
                raw = await _read(response)
                return Answer(response.status, _json(raw), raw.decode("utf-8", "replace"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            raise NotSent(f"{what}: no connection ({type(e).__name__})") from e
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise NoAnswer(f"{what}: no answer within {seconds:g} s ({type(e).__name__})") from e

    async def call(
        self, method: str, path: str, *, seconds: float, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """As ``ask``, but any status outside 2xx raises Refused with the peer's own words."""
        answer = await self.ask(method, path, seconds=seconds, body=body, headers=headers)
        if not 200 <= answer.status < 300:
            raise Refused(f"{method} {path}", answer.status, explain(answer))
        return answer


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"answer longer than {MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def explain(answer: Answer) -> str:
    """The peer's own words about an answer, cut to what fits in a message."""
    if isinstance(answer.body, dict):
        for key in ("message", "error", "detail"):
            value = answer.body.get(key)
            if isinstance(value, dict):
                value = value.get("message")  # OpenAI's form, which vLLM answers
            if isinstance(value, str) and value:
                return value[:_SHOWN]
    return answer.text.strip()[:_SHOWN]
