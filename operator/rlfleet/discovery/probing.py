"""Asks workers how they are, for any number of readers at once.

Invariants:
- no more than ``cap`` workers are asked at the same time, whoever wants to know;
- what a reader is told of a worker was asked after it came: it joins a probe that has not begun. So a worker has one
  probe under way and one that waits at most, however many readers there are. Only that a worker did not answer may have
  been asked before: it promises nothing, and waiting for the same silence again would double every reader's time;
- a reader's deadline covers the wait for its turn and the probe; a worker that has not answered by then is missing;
- workers that did not answer the last time get half of the turns at most, also while nobody else wants one: whoever
  comes next would wait for them. So they hold up each other only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from rlfleet.api.discovery import RLWorker
from rlfleet.api.wire import GateStatus
from rlfleet.plan.discovery import Naming, Worker, described, failed

log = logging.getLogger(__name__)

#: Seconds for one probe, whatever a reader's deadline leaves: a status takes milliseconds, and a frozen worker holds a
#: turn for as long.
PROBE_SECONDS = 5.0
#: Workers that are remembered as not having answered; of more the oldest are forgotten.
MAX_SUSPECTS = 4096


class ProbeError(Exception):
    """The worker did not answer, or refused; the message is what readers are told."""


#: Asks a worker, within so many seconds. Raises ProbeError.
Probe = Callable[[Worker, float], Awaitable[GateStatus]]


class ProbeObserver(Protocol):
    """Told of what came of probes, for metrics."""

    def probed(self, result: str) -> None:
        """A probe ended: Ok, or Error."""


class Entry:
    """One worker as found; its texts are made once, for all readers."""

    __slots__ = ("_plain", "_strict", "worker")

    def __init__(self, worker: RLWorker) -> None:
        self.worker = worker
        self._plain: bytes | None = None
        self._strict: bytes | None = None

    @property
    def plain(self) -> bytes:
        """JSON with our own member."""
        if self._plain is None:
            self._plain = self.worker.json_bytes()
        return self._plain

    @property
    def strict(self) -> bytes:
        """JSON without it."""
        if self._strict is None:
            self._strict = self.worker.json_bytes(leaving_out={"rlfleet"})
        return self._strict


class Collector:
    """What one reader, or several that came together, want to know: entries by pod UID."""

    def __init__(self, deadline: float) -> None:
        #: In the loop's time.
        self.deadline = deadline
        self.found: dict[str, Entry] = {}
        self._wanted: dict[str, _Flight] = {}
        self._complete = asyncio.Event()

    async def wait(self) -> None:
        """Until every worker was found, or the deadline; whoever is missing then is asked for no longer."""
        if self._wanted:
            try:
                async with asyncio.timeout_at(self.deadline):
                    await self._complete.wait()
            except TimeoutError:
                pass  # entries that are missing say it
            finally:
                self.leave()

    def leave(self) -> None:
        """Want nothing any more."""
        for flight in self._wanted.values():
            flight.waiters.discard(self)
        self._wanted.clear()

    def want(self, flight: _Flight) -> None:
        """Have this flight's entry, too."""
        self._wanted[flight.worker.uid] = flight
        flight.waiters.add(self)

    def put(self, uid: str, entry: Entry) -> None:
        """The worker's entry is there."""
        if (flight := self._wanted.pop(uid, None)) is not None:
            flight.waiters.discard(self)
            self.found[uid] = entry
            if not self._wanted:
                self._complete.set()


class _Flight:
    """One probe, waiting or under way, who wants its result, and who wants it if it is an error."""

    __slots__ = ("late", "waiters", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.waiters: set[Collector] = set()
        self.late: set[Collector] = set()


class Prober:
    """All probes of one process. ``close`` it when done."""

    def __init__(self, probe: Probe, naming: Naming, *, cap: int, observer: ProbeObserver | None = None) -> None:
        self._probe = probe
        self._naming = naming
        self._cap = cap
        self._observer = observer
        self._next: dict[str, _Flight] = {}
        self._running: dict[str, _Flight] = {}
        self._good: deque[_Flight] = deque()
        self._bad: deque[_Flight] = deque()
        self._suspects: OrderedDict[str, None] = OrderedDict()
        self._suspects_running = 0
        self._good_had_the_last = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, workers: Iterable[Worker], deadline: float) -> dict[str, Entry]:
        """What each of them says, by UID; those that said nothing until ``deadline`` (loop time) are missing."""
        collector = Collector(deadline)
        for worker in workers:
            flight = self._next.get(worker.uid)
            if flight is None:
                flight = self._next[worker.uid] = _Flight(worker)
                if worker.uid not in self._running:
                    self._enqueue(flight)
            if (running := self._running.get(worker.uid)) is not None:
                running.late.add(collector)
            collector.want(flight)
        self._pump()
        await collector.wait()
        return collector.found

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, flight: _Flight) -> None:
        (self._bad if flight.worker.uid in self._suspects else self._good).append(flight)

    def _pump(self) -> None:
        """Give every free turn to somebody."""
        while len(self._running) < self._cap and (flight := self._pick()) is not None:
            uid = flight.worker.uid
            del self._next[uid]
            if not flight.waiters:
                continue  # nobody wants to know any more
            self._running[uid] = flight
            loop = asyncio.get_running_loop()
            seconds = min(PROBE_SECONDS, max(c.deadline for c in flight.waiters) - loop.time())
            suspect = uid in self._suspects
            self._suspects_running += suspect
            task = loop.create_task(self._fly(flight, seconds, suspect=suspect), name="probe")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pick(self) -> _Flight | None:
        may_bad = bool(self._bad) and self._suspects_running < max(1, self._cap // 2)
        if may_bad and (not self._good or self._good_had_the_last):
            self._good_had_the_last = False
            return self._bad.popleft()
        if not self._good:
            return None
        self._good_had_the_last = True
        return self._good.popleft()

    async def _fly(self, flight: _Flight, seconds: float, *, suspect: bool) -> None:
        worker = flight.worker
        try:
            entry = await self._entry(worker, seconds)
        finally:
            self._suspects_running -= suspect
            del self._running[worker.uid]
        told = flight.waiters | (flight.late if entry.worker.error is not None else set())
        for collector in told:
            collector.put(worker.uid, entry)
        if (following := self._next.get(worker.uid)) is not None:
            self._enqueue(following)
        self._pump()

    async def _entry(self, worker: Worker, seconds: float) -> Entry:
        try:
            async with asyncio.timeout(seconds):
                status = await self._probe(worker, seconds)
            entry = Entry(described(worker, status, self._naming))
        except ProbeError as e:
            entry = Entry(failed(worker, str(e), self._naming))
        except TimeoutError:
            entry = Entry(failed(worker, f"no answer within {max(0.0, seconds):.1f} s", self._naming))
        except Exception:
            log.exception("a worker could not be asked", extra={"pod": f"{worker.namespace}/{worker.pod}"})
            entry = Entry(failed(worker, "the operator could not ask this worker: see its log", self._naming))
        self._note(worker.uid, entry.worker.error is not None)
        return entry

    def _note(self, uid: str, is_error: bool) -> None:
        if self._observer is not None:
            self._observer.probed("Error" if is_error else "Ok")
        self._suspects.pop(uid, None)
        if is_error:
            self._suspects[uid] = None
            while len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
