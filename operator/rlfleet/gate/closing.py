"""What a gate does without being told: it closes a fresh engine, and sees when a wedged one has healed.

Invariant (DESIGN section 5, Closed): an engine whose weights nothing proves is paused by its gate, without being told:
base weights are no policy, and a pool without a router has no other door to keep shut. Only a resume, which the gate's
own record must allow, opens it. The same holds for an engine whose label took its proof away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlfleet.calls import CallError
from rlfleet.gate.errors import GateError
from rlfleet.gate.links import EngineLink
from rlfleet.gate.operations import Operations
from rlfleet.gate.store import Store

log = logging.getLogger(__name__)

#: Seconds between looks while the engine is still starting, and while it is closed or proven.
START_SECONDS = 0.2
LOOK_SECONDS = 2.0
#: Seconds between two tries to prove that a wedged engine crosses its loop again.
WEDGED_SECONDS = 1.0


class UnprovenCloser:
    """Keeps an unproven engine closed for as long as the gate lives."""

    def __init__(self, store: Store, engine: EngineLink, operations: Operations) -> None:
        self._store = store
        self._engine = engine
        self._operations = operations

    async def run(self) -> None:
        """Look again and again; an engine that does not answer yet is looked at sooner."""
        while True:
            settled = self._store.holds is not None
            if not settled and self._store.incarnation is not None:
                try:
                    _, report = await self._engine.observe(busy=self._operations.in_flight is not None)
                    settled = report.model is not None and await self._operations.close_unproven()
                except (CallError, GateError) as e:
                    log.warning("the engine could not be closed yet: %s", e)
            await asyncio.sleep(LOOK_SECONDS if settled else START_SECONDS)


class ProcessWatch:
    """Looks whether another process stands there than before, without being asked: a new one serves unproven weights.

    Both forget what the record says of a process that is not there any more: ``at_listener`` asks the kernel who
    listens, ``look`` observes an engine that itself tells one process from the next.
    """

    def __init__(self, store: Store, at_listener: Callable[[], bool], look: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._at_listener = at_listener
        self._look = look

    async def run(self) -> None:
        """Look again and again; the engine is asked once it has said who it is."""
        while True:
            self._at_listener()
            if self._store.engine_instance is not None:
                await self._look()
            await asyncio.sleep(LOOK_SECONDS)


class WedgeWatch:
    """Settles what a rendezvous that timed out left behind, when the engine heals by itself (the late trainer came)."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def run(self) -> None:
        """Look again and again; asks the engine nothing while nothing is wedged."""
        while True:
            if self._operations.wedged:
                await self._operations.heal_wedged()
            await asyncio.sleep(WEDGED_SECONDS)
