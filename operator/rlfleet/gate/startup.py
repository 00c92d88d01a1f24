"""The start-up promise: a fresh engine never inherits an open address.

The engine container starts only after this promise holds (its pod's start-up probe asks for it):
- the gate is enrolled, so it knows its routers;
- its own URL is in none of them, read back from each, without a break for longer than a router's worker start-up
  timeout: a late job of an earlier owner of the address may still list it within that time;
- a fresh random incarnation is stored.

Once an incarnation is stored, the engine beside this gate lives or lived: a restarted gate keeps everything, passes at
once, and touches no entry. A router that is reached only later never had the chance to be read, so it blocks the
promise under its own name.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from rlfleet.api.wire import EnrollRequest, ErrorBody, ErrorReason
from rlfleet.calls import CallError
from rlfleet.gate.links import Routers
from rlfleet.gate.rules import quiet_enough
from rlfleet.gate.store import Store

log = logging.getLogger(__name__)

READ_BACK_SECONDS = 0.25
REMOVE_SECONDS = 3.0


class StartupPromise:
    """Runs until the promise holds. ``problem`` says why it does not hold yet; None: it holds."""

    def __init__(self, store: Store, routers: Routers, quiet_seconds: float) -> None:
        self._store = store
        self._routers = routers
        self._quiet = quiet_seconds
        self._changed = asyncio.Event()
        self.problem: ErrorBody | None = None
        if store.incarnation is None:
            self.problem = ErrorBody(reason=ErrorReason.NOT_ENROLLED, message="waits for the operator's enroll call")

    def enrolled(self) -> None:
        """An enrolment was stored: look at once."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the promise, then end."""
        while self._store.incarnation is None:
            self._changed.clear()
            enrolment = self._store.enrolment
            if enrolment is None:
                await self._changed.wait()
            elif await self._quiet_long_enough(enrolment):
                self._store.incarnation = secrets.token_hex(16)
                self.problem = None
                log.info("start-up promise holds", extra={"incarnation": self._store.incarnation})

    async def _quiet_long_enough(self, enrolment: EnrollRequest) -> bool:
        """Read routers until they have been empty of our URL long enough; False: the enrolment changed, begin anew."""
        if not self._routers.endpoints():
            return True
        since: float | None = None
        while _where(self._store.enrolment) == _where(enrolment):
            before = time.monotonic()
            trouble = await self._read_back()
            if trouble is not None:
                since, self.problem = None, trouble
            elif since is None:
                since = before
            if since is not None:
                quiet = time.monotonic() - since
                if quiet_enough(pending=True, quiet_seconds=quiet, needed_seconds=self._quiet):
                    return True
                self.problem = ErrorBody(
                    reason=ErrorReason.NOT_PROVEN,
                    message=f"own URL is in no router for {quiet:.1f} s; must stay so for {self._quiet:g} s",
                )
            await asyncio.sleep(READ_BACK_SECONDS)
        return False

    async def _read_back(self) -> ErrorBody | None:
        """Remove our URL wherever it is listed; None when every router was read and none listed it."""
        listed = False
        for router in self._routers.endpoints():
            try:
                async with self._routers.using(router) as adapter:
                    if await adapter.lists(self._routers.own_url, REMOVE_SECONDS):
                        listed = True
                        log.warning("own URL is in router %s at first start; removing it", router.name)
                        await adapter.remove(self._routers.own_url, seconds=REMOVE_SECONDS)
            except CallError as e:
                return ErrorBody(
                    reason=ErrorReason.ROUTER_UNREACHABLE,
                    message=f"router {router.name} can not be read, so it may still send requests here: {e}",
                )
        if listed:
            return ErrorBody(reason=ErrorReason.NOT_PROVEN, message="own URL was just removed from a router")
        return None


def _where(enrolment: EnrollRequest | None) -> object:
    """What the read-backs are about; an enrolment repeated under a higher generation does not begin them anew."""
    return None if enrolment is None else (enrolment.engine_url, enrolment.routers)
