"""One claim under which engines are put to sleep, woken, or shut: kinds Offload, Wake and Quarantine of
``activeOperation``.

Invariants (DESIGN sections 5 and 7):
- every order rests on what gates answered under our own generation, and a Refresh that could run goes first until the
  first call that can not be taken back: aborting requests, or taking memory;
- an engine releases memory only after it has left the routers (read back), has no request left, and is paused;
- what is asleep or awake afterwards is read from the gates, never from an answer; an engine that did not get there
  stays closed, is named with why, and is tried again. Where a wake has no good end the slot is freed under a higher
  fence than that of the wake, so that the memory gate knows who may still obey it;
- nothing of the work is recorded but the claim: whoever takes it over applies the resume rule to all engines (engines
  that are to sleep are not resumed by it) and frees the slot, and the next look begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import OperationKind
from rlfleet.control.peers import Caller
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.outcome import StatusOf
from rlfleet.control.rounds.results import Ended, ok, why
from rlfleet.control.slot import take_slot
from rlfleet.plan.asleep import is_offloaded, is_touched
from rlfleet.plan.drops import is_closed
from rlfleet.plan.elastic import busy, ceiling, lies_on, plan_elastic
from rlfleet.plan.quarantine import plan_quarantine

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Preempted = Callable[[], Awaitable[str | None]]
Problem = tuple[Reason, str]

#: Seconds for requests to end once they are aborted; who still has some then is named.
IDLE_SECONDS = 30.0
#: Seconds between two looks at engines that have requests left.
LOOK_SECONDS = 0.3
#: Seconds for memory to be given back, and to be seen so: a gate looks at its devices for as long as they are too full.
RELEASE_SECONDS = 20.0
#: Seconds for engines to leave their routers.
CLOSE_SECONDS = 15.0


class ElasticWork:
    """Moves engines of one pipeline between asleep and awake, in one reconcile."""

    def __init__(self, ctx: Context, ledger: Ledger, status: StatusOf, fleet: Fleet, *, cache_ready: bool) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._status = status
        self._fleet = fleet
        self._cache_ready = cache_ready
        self._problems: dict[str, Problem] = {}
        self._caller: Caller | None = None
        self._deadline = 0.0
        self._failed = Reason.OFFLOAD_FAILED

    async def sleep(self, names: Iterable[str], *, working: Problem, preempted: Preempted) -> None:
        """Close, empty, pause and release these engines."""
        names = await self._claim(OperationKind.OFFLOAD, names, working)
        names = await self._shut(names)
        await self._drain(names, preempted)
        waits = await preempted()
        if waits is None:
            names = await self._empty(names)
            # In no other mode: after an Abort a Retract would tell counts of before it as requests that wait.
            asleep = wire.PauseOrder(mode=wire.PauseMode.ABORT, budget_seconds=self._left())
            names = await self._pause(names, "Pause", asleep)
            await self._release(names)
        await self._free(OperationKind.OFFLOAD, waits)

    async def wake(self, names: Iterable[str], *, working: Problem, preempted: Preempted) -> None:
        """Have these engines take back what they released. They stay closed until a CatchUp has proven them."""
        names = await self._claim(OperationKind.WAKE, names, working)
        waits = await preempted()
        if waits is None:
            order = wire.WakeOrder(budget_seconds=self._left())
            results = await self._order("Wake", names, order)
            await self._fleet.poll(names)
            for name in names:
                engine = self._fleet.engines.get(name)
                if engine is None or engine.gone:
                    continue
                # No answer is no evidence: it is looked at again.
                if engine.status is None or is_touched(engine.status) or not ok(results.get(name)):
                    self._note(name, Reason.WAKE_FAILED, "Wake", results.get(name))
                else:
                    self._ctx.elastic.done(engine.pod_uid)
            if not all(ok(results.get(n)) for n in names):
                # What is still on its way must find a higher generation: it would wake an engine behind the back of a
                # trainer that is granted its device next.
                await self._ledger.still_ours()
                await self._claim(OperationKind.WAKE, (), working)
        await self._free(OperationKind.WAKE, waits)

    async def shut(self, names: Iterable[str], *, working: Problem, preempted: Preempted) -> None:
        """Close, empty and pause these engines, which a person keeps out of service."""
        self._failed = Reason.QUARANTINE_FAILED
        names = await self._claim(OperationKind.QUARANTINE, names, working)
        names = await self._shut(names)
        await self._drain(names, preempted)
        waits = await preempted()
        if waits is None:
            names = await self._empty(names)
            names = await self._pause(names, "Pause", wire.PauseOrder(budget_seconds=self._left()))
            await self._fleet.poll(names)
            for name in names:
                engine = self._fleet.engines.get(name)
                if engine is not None and not is_closed(engine):
                    self._note(name, self._failed, "Pause", None)
                elif engine is not None:
                    self._ctx.elastic.done(engine.pod_uid)
        await self._free(OperationKind.QUARANTINE, waits)

    # ------------------------------------------------------------------------------------------ inside

    def _left(self) -> float:
        return max(1.0, self._deadline - self._ctx.clock.monotonic())

    def _budget(self) -> float:
        """Loop time until which this may last: no longer than a round keeps engines from serving, and the draining."""
        sync = self._ledger.spec["sync"]
        seconds = float(sync["deadlines"]["pausedSeconds"]) + float(sync["drainSeconds"])
        return self._ctx.clock.monotonic() + seconds

    async def _claim(self, kind: OperationKind, names: Iterable[str], working: Problem) -> tuple[str, ...]:
        """Take the slot; those of the engines that still are to be moved, as their gates answer under our fence."""
        wanted = set(names)
        operation = {"kind": kind.value, "name": kind.value.lower(), "uid": str(uuid.uuid4()), "committed": False}
        self._caller = await take_slot(
            self._ledger,
            self._fleet,
            operation,
            deadline=self._budget,
            extra=self._status(trouble=None, working=working),
        )
        self._deadline = self._budget()
        engines = list(self._fleet.engines.values())
        if kind is OperationKind.QUARANTINE:
            return tuple(n for n in plan_quarantine(engines, pipeline=self._ledger.uid) if n in wanted)
        now = plan_elastic(engines, pipeline=self._ledger.uid, cache_ready=self._cache_ready)
        moved = now.shrink if kind is OperationKind.OFFLOAD else now.wake
        return tuple(n for n in moved if n in wanted)

    async def _order(self, step: str, names: Iterable[str], order: Any) -> dict[str, Ended]:
        orders = order if isinstance(order, Mapping) else dict.fromkeys(names, order)
        if not orders:
            return {}
        assert self._caller is not None
        return await self._fleet.run(self._caller, step, orders, deadline=self._deadline, again=True)

    def _note(self, name: str, reason: Reason, step: str, result: Ended | None) -> None:
        code, message = why(result) if not ok(result) else (Reason.DEADLINE_EXCEEDED, "its gate does not confirm it")
        self._problems[name] = reason, f"{step}: {code.value}: {message}"[:500]

    async def _shut(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Out of every router, read back: from then on no new request comes."""
        results = await self._order("Close", names, wire.CloseOrder(deadline_seconds=CLOSE_SECONDS))
        for name in names:
            if not ok(results.get(name)):
                self._note(name, self._failed, "Close", results.get(name))
        return tuple(n for n in names if n not in self._problems)

    async def _drain(self, names: tuple[str, ...], preempted: Preempted) -> None:
        """Give requests ``drainSeconds`` to end by themselves; a trainer that demands the device does not wait."""
        until = self._ctx.clock.monotonic() + float(self._ledger.spec["sync"]["drainSeconds"])
        waiting = [n for n in names if not lies_on(self._fleet.engines[n], self._fleet.held)]
        while waiting and self._ctx.clock.monotonic() < until:
            await self._fleet.poll(waiting)
            waiting = [n for n in waiting if busy(self._fleet.engines[n])]
            if waiting and await preempted() is not None:
                return
            if waiting:
                await asyncio.sleep(LOOK_SECONDS)

    async def _empty(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Abort what is left, then see nothing run or wait. Under one operation id an abort happens once."""
        await self._fleet.poll(names)
        running = [n for n in names if busy(self._fleet.engines[n]) is not False]
        order = wire.PauseOrder(mode=wire.PauseMode.ABORT, budget_seconds=min(IDLE_SECONDS, self._left()))
        results = await self._order("Abort", running, order)
        until = min(self._ctx.clock.monotonic() + IDLE_SECONDS, self._deadline)
        left = list(running)
        while left:
            await self._fleet.poll(left)
            left = [n for n in left if (e := self._fleet.engines.get(n)) is not None and busy(e) is not False]
            if not left or self._ctx.clock.monotonic() >= until:
                break
            await asyncio.sleep(LOOK_SECONDS)
        for name in left:
            status = self._fleet.engines[name].status
            if status is None or not busy(self._fleet.engines[name]):
                self._note(name, self._failed, "Abort", results.get(name))
                continue
            requests = f"{status.engine.running} running, {status.engine.waiting} waiting"
            self._problems[name] = Reason.ENGINES_BUSY, f"requests did not end in {IDLE_SECONDS:g} s: {requests}"
        return tuple(n for n in names if n not in self._problems)

    async def _pause(self, names: tuple[str, ...], step: str, order: wire.PauseOrder) -> tuple[str, ...]:
        """Idle does not mean that no kernel is in flight: the pause does."""
        results = await self._order(step, names, order)
        for name in names:
            if not ok(results.get(name)):
                self._note(name, self._failed, step, results.get(name))
        return tuple(n for n in names if n not in self._problems)

    async def _release(self, names: tuple[str, ...]) -> None:
        orders = {}
        for name in names:
            pool = self._fleet.pools.get(self._fleet.engines[name].pool)
            limit = ceiling(pool).residual_bytes if pool is not None else None
            orders[name] = wire.ReleaseOrder(residual_bytes=limit, budget_seconds=min(RELEASE_SECONDS, self._left()))
        results = await self._order("Release", names, orders)
        await self._fleet.poll(names)
        for name in names:
            engine = self._fleet.engines.get(name)
            if engine is None or engine.gone:
                continue
            if is_offloaded(engine.status):
                self._ctx.elastic.done(engine.pod_uid)
            else:
                self._note(name, Reason.OFFLOAD_FAILED, "Release", results.get(name))

    async def _free(self, kind: OperationKind, waits: str | None) -> None:
        """Say what became of it and give the slot up."""
        now = self._ctx.clock.monotonic()
        for name, problem in self._problems.items():
            engine = self._fleet.engines.get(name)
            if engine is not None:
                self._ctx.elastic.failed(self._ledger.uid, engine.pod_uid, problem, now)
        where = f"{self._ledger.namespace}/{self._ledger.name}"
        if waits is not None:
            log.info("%s gives way", kind.value, extra={"pipeline": where, "round": waits})
        elif self._problems:
            log.warning("%s: not all", kind.value, extra={"pipeline": where, "problems": str(self._problems)[:2000]})
        await self._fleet.read_pods()
        await self._fleet.poll()
        self._status.bind(self._fleet)
        trouble = trouble_of(self._problems)
        if trouble is not None:
            self._ctx.events.record(self._ledger.pipeline, "Warning", trouble[0].value, trouble[1], action=kind.value)
        await self._ledger.write_pipeline({"activeOperation": None, **self._status(trouble=trouble)})


def trouble_of(problems: Mapping[str, Problem]) -> Problem | None:
    """What Degraded says of engines that would not sleep, wake or close; None: there are none."""
    if not problems:
        return None
    name, (reason, message) = min(problems.items())
    more = f" ({len(problems)} engines)" if len(problems) > 1 else ""
    return reason, f"{name}{more}: {message}"
