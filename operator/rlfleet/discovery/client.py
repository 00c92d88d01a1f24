"""Asks Dynamo frontends which workers they have (``GET /v1/rl/workers``).

Invariants:
- what could not be read whole, and in time, is Unknown with why; it is never an empty or a shortened list;
- one question is under way per frontend, however many ask; who asks waits a moment at most and else takes the last
  answer, without waiting where that was late. One frozen worker holds a frontend's whole answer up for seconds, and
  must not hold up a reconcile;
- an answer counts from when its question was sent, and is Unknown once it is too old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlfleet.calls import CallError, JsonClient
from rlfleet.plan.dynamo import Listing, ProtocolRefused, Unreadable, parse

log = logging.getLogger(__name__)

PATH = "/v1/rl/workers"
#: Seconds for one answer, all of it. A frontend gives a worker that is frozen five.
ANSWER_SECONDS = 12.0
#: Seconds that a caller waits for an answer which is on its way.
PATIENCE_SECONDS = 0.5
#: Seconds after which an answer says nothing any more: one that took as long as it may, and the time to the next.
STALE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is known of the workers. ``refused``: the frontend speaks a protocol that this does not know."""

    message: str
    refused: bool = False


@dataclass(slots=True)
class _Frontend:
    http: JsonClient
    asking: asyncio.Task[None] | None = None
    told: Listing | Unknown | None = None
    at: float = 0.0
    took: float = 0.0
    """Seconds of the last answer."""


class Frontends:
    """The Dynamo frontends that pools name, by base URL. Close it at the end."""

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._monotonic = monotonic
        self._answer_seconds = answer_seconds
        self._frontends: dict[str, _Frontend] = {}

    async def close(self) -> None:
        """End what is under way, close connections."""
        for url in list(self._frontends):
            await self.forget(url)

    async def forget(self, url: str) -> None:
        """End what concerns one frontend, which no pool names any more."""
        frontend = self._frontends.pop(url, None)
        if frontend is None:
            return
        if frontend.asking is not None:
            frontend.asking.cancel()
            await asyncio.gather(frontend.asking, return_exceptions=True)
        await frontend.http.close()

    async def look(self, url: str, *, patience: float = PATIENCE_SECONDS, fresh: float = 0.0) -> Listing | Unknown:
        """The workers as last told. An answer to a question sent less than ``fresh`` seconds ago is not asked anew."""
        frontend = self._frontends.get(url)
        if frontend is None:
            frontend = self._frontends[url] = _Frontend(JsonClient(url))
        now = self._monotonic()
        if frontend.told is None or now - frontend.at >= fresh:
            if frontend.asking is None or frontend.asking.done():
                frontend.asking = asyncio.create_task(self._ask(url, frontend))
            # One that was late for the last question will be for this one, too: whoever asks has waited once.
            if frontend.told is None or frontend.took <= patience:
                await asyncio.wait({frontend.asking}, timeout=patience)
        if frontend.told is None:
            return Unknown(f"{url}{PATH}: no answer yet")
        if self._monotonic() - frontend.at > STALE_SECONDS:
            # Without its age, which would be another text, and another write of a status, each time.
            return Unknown(f"{url}{PATH}: the last answer is older than {STALE_SECONDS:g} s")
        return frontend.told

    async def _ask(self, url: str, frontend: _Frontend) -> None:
        sent = self._monotonic()
        told: Listing | Unknown
        try:
            answer = await frontend.http.ask("GET", PATH, seconds=self._answer_seconds)
            told = parse(answer.status, answer.body)
        except ProtocolRefused as e:
            told = Unknown(f"{url}{PATH}: {e}", refused=True)
        except Unreadable as e:
            told = Unknown(f"{url}{PATH}: {e}")
        except CallError as e:
            told = Unknown(str(e))
        if isinstance(told, Unknown):
            log.warning("the workers of a Dynamo frontend are not known: %s", told.message)
        frontend.told, frontend.at, frontend.took = told, sent, self._monotonic() - sent
