"""What sglang-router, smg and vllm-router have in common: a list of workers by URL, kept by a program.

Facts that hold for all three (seen on the real ones):
- ``GET /workers`` answers ``{"workers": [{"url", "is_healthy", ...}]}``; URLs are compared as strings, so that
  ``http://a:1`` and ``http://a:1/`` are two workers;
- ``is_healthy`` is the verdict of the router's health checks only. An open circuit breaker is told nowhere but among
  the metrics, on another port: ``..._cb_state{worker="<url>"}`` is 0 closed, 1 open, 2 half open. Where an EnginePool
  names that port, it is read, at most once in ``BREAKER_SECONDS``: the page grows with the router's workers.

- ``--api-key`` of sglang-router and smg demands ``Authorization: Bearer <key>`` on all but health paths (401);
  ``--control-plane-api-keys`` on the list of workers only, and one without the role admin gets 403. vllm-router demands
  none: its ``--api-key`` is for its engines. Metrics are open at all of them.

Invariant: metrics that can not be read say nothing of an entry; only the list decides whether an engine is listed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

from rlfleet.calls import Answer, CallError, JsonClient, NoAnswer, Refused, explain
from rlfleet.router.adapter import Entry, Key, no_key, normal

QUICK = 3.0
POLL_SECONDS = 0.05
BREAKER_SECONDS = 5.0
_OPEN = re.compile(r'^\w+_cb_state\{worker="([^"]+)"[^}]*\}\s+1(?:\.0*)?\s*$', re.MULTILINE)

_KEY_MISSING = (
    "the router demands a key and was shown none: name the Secret that holds it in spec.routers[].adminKeySecretRef of "
    "the EnginePool, see that it has that key, and replace pods that are older than that field"
)
_KEY_REFUSED = (
    "the router does not take the key in the Secret of spec.routers[].adminKeySecretRef: it must be the one of the "
    "router's --api-key, or one of --control-plane-api-keys with the role admin"
)

log = logging.getLogger(__name__)


class WorkerList:
    """One router with a list of workers, reached at ``url``. ``metrics``: base URL of its metrics, if it is known.

    ``key``: what is shown with each call of its API; vllm-router, which demands none, is shown none.
    """

    type = ""

    def __init__(self, url: str, metrics: str | None = None, key: Key = no_key) -> None:
        self._http = JsonClient(url)
        self._key = key
        self._metrics = JsonClient(metrics) if metrics else None
        self._open: frozenset[str] = frozenset()
        self._asked = float("-inf")

    async def close(self) -> None:
        """Close connections; touches nothing at the router."""
        await self._http.close()
        if self._metrics is not None:
            await self._metrics.close()

    async def lists(self, url: str, seconds: float) -> bool:
        """Whether any spelling of ``url`` is in the router's list."""
        return bool(await self._mine(url, seconds))

    async def look(self, url: str, seconds: float) -> Entry:
        """Whether it is listed, and whether the router says that it sends no requests there."""
        mine = await self._mine(url, seconds)
        if not mine:
            return Entry(listed=False)
        if not any(w.get("is_healthy") for w in mine):
            return Entry(listed=True, shunned=f"its health check says {mine[0].get('status') or 'unhealthy'}")
        own = normal(url)
        if any(_is(broken, own) for broken in await self._broken(seconds)):
            return Entry(listed=True, shunned="its circuit breaker is open")
        return Entry(listed=True)

    async def _mine(self, url: str, seconds: float) -> list[dict[str, Any]]:
        """Entries for any spelling of ``url``."""
        answer = await self._call("GET", "/workers", seconds=seconds)
        workers = answer.body.get("workers") if isinstance(answer.body, dict) else None
        if not isinstance(workers, list):
            raise Refused("GET /workers", answer.status, "the answer holds no list of workers: is this the router?")
        own = normal(url)
        return [w for w in workers if isinstance(w, dict) and isinstance(w.get("url"), str) and _is(w["url"], own)]

    async def _ask(self, method: str, path: str, *, seconds: float, body: Any = None) -> Answer:
        """One call of the router's API, whatever its answer but one about the key (Refused, with the remedy)."""
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        answer = await self._http.ask(method, path, seconds=seconds, body=body, headers=headers)
        if answer.status in (401, 403):
            raise Refused(f"{method} {path}", answer.status, _KEY_REFUSED if key else _KEY_MISSING)
        return answer

    async def _call(self, method: str, path: str, *, seconds: float, body: Any = None) -> Answer:
        """As ``_ask``; any status outside 2xx raises Refused with the router's own words."""
        answer = await self._ask(method, path, seconds=seconds, body=body)
        if not 200 <= answer.status < 300:
            raise Refused(f"{method} {path}", answer.status, explain(answer))
        return answer

    async def _broken(self, seconds: float) -> frozenset[str]:
        """URLs of workers whose circuit breaker is open, as the router writes them, as last read."""
        now = time.monotonic()
        if self._metrics is not None and now >= self._asked + BREAKER_SECONDS:
            self._asked = now
            try:
                answer = await self._metrics.call("GET", "/metrics", seconds=seconds)
                self._open = frozenset(_OPEN.findall(answer.text))
            except CallError as e:
                log.debug("circuit breakers of router %s are not known: %s", self._http.base_url, e)
                self._open = frozenset()
        return self._open

    async def remove(self, url: str, *, seconds: float) -> None:
        """Delete every worker with this URL and read the list back."""
        deadline = time.monotonic() + seconds
        while True:
            mine = await self._mine(url, QUICK)
            if not mine:
                return
            for worker in mine:
                await self._delete(worker)
            if time.monotonic() > deadline:
                raise NoAnswer(f"{self._http.base_url}: {url} is still listed {seconds:g} s after its removal")
            await asyncio.sleep(POLL_SECONDS)

    async def _delete(self, worker: dict[str, Any]) -> None:
        """Ask for the removal of one entry; one that is gone meanwhile is no failure."""
        raise NotImplementedError


def _is(text: str, own: str) -> bool:
    """``text`` is a spelling of ``own`` (a normal form). What somebody else has listed may be no URL at all."""
    try:
        return normal(text) == own
    except ValueError:
        return False
