"""The list of workers, made for readers who come at the same time by one look.

Invariants:
- every reader gets what was looked at after it came: readers that come while a list is being read wait for the next
  one, all of them for the same. So one list of a scope is read at a time and one waits, however many readers there are;
- a list that could not be read is a failure, never an empty list;
- one deadline, counted from the first reader's arrival, covers the list, the wait for probes and the probes;
- a look that nobody waits for any more is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rlfleet.api.discovery import RLWorkers
from rlfleet.discovery.probing import Entry, Prober
from rlfleet.plan.discovery import Naming, Scope, Worker, failed, in_order

log = logging.getLogger(__name__)

#: Seconds between the beginnings of two looks at one scope, and so much more for each worker in it: readers in a loop
#: must keep neither the apiserver busy nor this process, which may be executing rounds. A probe costs it 0.3 ms.
PACE_SECONDS = 0.1
PACE_PER_WORKER = 0.001
#: Seconds between the beginnings of any two looks, in the order in which they came. Each is a call of the apiserver:
#: readers of many scopes must neither use up the operator's share of those nor wait longer than readers of one.
PACE_OF_ALL_SECONDS = 0.04


class DiscoveryError(Exception):
    """The list of workers could not be read, so nothing is known; the message is what readers are told."""


#: Lists the live workers of a scope. Raises DiscoveryError.
List = Callable[[Scope], Awaitable[Iterable[Worker]]]


@dataclass(slots=True)
class Answer:
    """One look, for all of its readers."""

    naming: Naming
    entries: tuple[Entry, ...] = ()
    failure: str = ""
    """Why there is no list; empty: there is one."""
    _plain: bytes = b""
    _strict: bytes = b""

    def body(self, *, is_strict: bool) -> bytes:
        """The JSON document. DiscoveryError where there is no list."""
        if self.failure:
            raise DiscoveryError(self.failure)
        if is_strict:
            self._strict = self._strict or self._joined(e.strict for e in self.entries)
            return self._strict
        self._plain = self._plain or self._joined(e.plain for e in self.entries)
        return self._plain

    def _joined(self, texts: Iterable[bytes]) -> bytes:
        """The list around texts that are made once for all: at 1,000 workers most of the work."""
        around = RLWorkers(namespace=self.naming.namespace, workers=()).json_bytes()
        return around.removesuffix(b"]}") + b",".join(texts) + b"]}"


@dataclass(slots=True, eq=False)
class _Look:
    """One look that readers share: those who came before it began."""

    deadline: float
    readers: int = 0
    task: asyncio.Task[Answer] | None = None


class Board:
    """Worker discovery of one process. ``close`` it when done."""

    def __init__(self, list_: List, prober: Prober, naming: Naming, *, timeout: float) -> None:
        self._list = list_
        self._prober = prober
        self._naming = naming
        self._timeout = timeout
        self._forming: dict[Scope, _Look] = {}
        self._reading: dict[Scope, asyncio.Event] = {}
        self._not_before: dict[Scope, float] = {}
        self._turn = asyncio.Lock()
        self._last_begun = float("-inf")
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def read(self, scope: Scope) -> Answer:
        """The workers of ``scope`` as they are now."""
        loop = asyncio.get_running_loop()
        look = self._forming.get(scope)
        if look is None:
            look = self._forming[scope] = _Look(loop.time() + self._timeout)
            look.task = loop.create_task(self._look(scope, look), name="look for workers")
            self._tasks.add(look.task)
            look.task.add_done_callback(self._tasks.discard)
        assert look.task is not None
        look.readers += 1
        try:
            return await asyncio.shield(look.task)
        finally:
            look.readers -= 1
            if not look.readers and not look.task.done():
                look.task.cancel()
                self._formed(scope, look)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prober.close()

    def _formed(self, scope: Scope, look: _Look) -> None:
        """Nobody joins it any more."""
        if self._forming.get(scope) is look:
            del self._forming[scope]

    async def _look(self, scope: Scope, look: _Look) -> Answer:
        try:
            async with asyncio.timeout_at(look.deadline):
                workers = in_order(await self._listed(scope, look), self._naming)
        except DiscoveryError as e:
            return Answer(self._naming, failure=str(e))
        except TimeoutError:
            return Answer(self._naming, failure=f"no list of workers within {self._timeout:g} s")
        except Exception:
            log.exception("the list of workers could not be made")
            return Answer(self._naming, failure="the operator failed here: see its log")
        finally:
            self._formed(scope, look)
        found = await self._prober.ask(workers, look.deadline)
        return Answer(self._naming, tuple(found.get(w.uid) or self._missing(w) for w in workers))

    async def _listed(self, scope: Scope, look: _Look) -> Iterable[Worker]:
        """Read the list when nobody else reads it; from that moment on new readers form the next look."""
        loop = asyncio.get_running_loop()
        while (reading := self._reading.get(scope)) is not None:
            await reading.wait()
        mine = self._reading[scope] = asyncio.Event()
        try:
            if (at := self._not_before.get(scope)) is not None:
                await asyncio.sleep(max(0.0, at - loop.time()))
            async with self._turn:  # first come, first served
                await asyncio.sleep(max(0.0, self._last_begun + PACE_OF_ALL_SECONDS - loop.time()))
                begun = self._last_begun = loop.time()
            self._formed(scope, look)
            found = tuple(await self._list(scope))
            self._pace(scope, begun + PACE_SECONDS + PACE_PER_WORKER * len(found))
            return found
        finally:
            del self._reading[scope]
            mine.set()

    def _pace(self, scope: Scope, at: float) -> None:
        """The next look at this scope begins then. Times that have passed are forgotten."""
        now = asyncio.get_running_loop().time()
        self._not_before = {s: t for s, t in self._not_before.items() if t > now}
        self._not_before[scope] = at

    def _missing(self, worker: Worker) -> Entry:
        why = f"worker discovery timed out after {self._timeout:g}s"
        return Entry(failed(worker, why, self._naming))
