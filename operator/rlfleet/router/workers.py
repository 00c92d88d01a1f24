"""What sglang-router, smg and vllm-router have in common: a list of workers by URL, kept by a program.

Facts that hold for all three (seen on the real ones):
- ``GET /workers`` answers ``{"workers": [{"url", "is_healthy", ...}]}``; URLs are compared as strings, so that
  ``http://a:1`` and ``http://a:1/`` are two workers;
- ``is_healthy`` is the verdict of the router's health checks only. An open circuit breaker is told nowhere but among
  the metrics, on another port: ``..._cb_state{worker="<url>"}`` is 0 closed, 1 open, 2 half open. Where an EnginePool
  names that port, it is read, at most once in ``BREAKER_SECONDS``: the page grows with the router's workers.

Invariant: metrics that can not be read say nothing of an entry; only the list decides whether an engine is listed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

from rlfleet.calls import CallError, JsonClient, NoAnswer, Refused
from rlfleet.router.adapter import Entry, normal

QUICK = 3.0
POLL_SECONDS = 0.05
BREAKER_SECONDS = 5.0
_OPEN = re.compile(r'^\w+_cb_state\{worker="([^"]+)"[^}]*\}\s+1(?:\.0*)?\s*$', re.MULTILINE)

log = logging.getLogger(__name__)


class WorkerList:
    """One router with a list of workers, reached at ``url``. ``metrics``: base URL of its metrics, if it is known."""

    type = ""

    def __init__(self, url: str, metrics: str | None = None) -> None:
        self._http = JsonClient(url)
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
        answer = await self._http.call("GET", "/workers", seconds=seconds)
        workers = answer.body.get("workers") if isinstance(answer.body, dict) else None
        if not isinstance(workers, list):
            raise Refused("GET /workers", answer.status, "the answer holds no list of workers: is this the router?")
        own = normal(url)
        return [w for w in workers if isinstance(w, dict) and isinstance(w.get("url"), str) and _is(w["url"], own)]

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
