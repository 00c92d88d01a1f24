"""Repairing engines under the slot: resume, route or close them by the resume rule; and taking over such work.

Invariants (DESIGN section 5, One owner, One resume rule):
- nothing is claimed while nothing is wrong, and a Refresh that could run goes first;
- every order rests on what gates answered under our own generation;
- work outside rounds has no record of its own: whoever takes it over (or a round whose object is gone) looks at all
  live engines, applies the resume rule and frees the slot, so it may end anywhere.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import OperationKind
from rlfleet.control.peers import Caller
from rlfleet.control.repair.memory import RepairMemory
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.outcome import StatusOf
from rlfleet.control.rounds.results import ok, why
from rlfleet.control.slot import paused_budget, take_slot
from rlfleet.plan.identity import poisoned_gates
from rlfleet.plan.repair import Act, Need, needs

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.rounds.sender_link import SenderLink

log = logging.getLogger(__name__)
Obj = dict[str, Any]

#: Kinds whose work is a SyncRound; all others are work outside rounds.
ROUND_KINDS = frozenset({OperationKind.REFRESH.value, OperationKind.CATCH_UP.value})
_DONE = {Act.RESUME: "resumed", Act.OPEN: "routed", Act.CLOSE: "closed", Act.SETTLE: "settled"}


class EngineRepair:
    """Repairs the engines of one pipeline in one reconcile."""

    def __init__(self, ctx: Context, ledger: Ledger, status: StatusOf, fleet: Fleet) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._status = status
        self._fleet = fleet
        self._problems: dict[str, str] = {}

    def needs(self) -> tuple[Need, ...]:
        """What the engines need, as last observed."""
        deaf = poisoned_gates(self._fleet.engines.values(), now_ms=self._ctx.now_ms())
        engines = [e for e in self._fleet.engines.values() if e.name not in deaf]
        return needs(engines, self._ledger.committed, pipeline=self._ledger.uid)

    async def repair(
        self, due: tuple[Need, ...], memory: RepairMemory, *, preempted: Callable[[], Awaitable[str | None]]
    ) -> None:
        """Claim the slot and see to these engines. ``preempted``: the name of a Refresh that could run now."""
        what = summary(due)
        operation = {"kind": OperationKind.REPAIR.value, "name": "repair", "uid": str(uuid.uuid4()), "committed": False}
        working = (Reason.REPAIRING, what)
        caller = await take_slot(
            self._ledger,
            self._fleet,
            operation,
            deadline=self._deadline,
            extra=self._status(trouble=trouble_of(memory.problems(due)), working=working),
        )
        waits = await preempted()
        if waits is not None:
            log.info("repair gives way", extra={"pipeline": self._name, "round": waits})
            await self._free(trouble=None)
            return
        keys = {(n.pod_uid, n.incarnation) for n in due}
        await self._apply(caller, lambda n: (n.pod_uid, n.incarnation) in keys)
        memory.repaired(due, self._problems, self._ctx.clock.monotonic())
        self._report(due, what)
        # What did not help stays said until it does: a condition that comes and goes would be two writes each time.
        await self._free(trouble=trouble_of(self._problems))

    async def take_over(self, sender: SenderLink) -> None:
        """Finish work of somebody else that no round object stands for: the resume rule for all live engines.

        A round that vanished (or whose status did) may have left a hold at its sender: it ends with the round.
        """
        active = self._ledger.status["activeOperation"]
        of_round = active.get("kind") in ROUND_KINDS
        kind = OperationKind.REPAIR.value if of_round else active["kind"]
        operation = {**{k: active[k] for k in ("name", "uid")}, "committed": bool(active.get("committed"))}
        caller = await take_slot(self._ledger, self._fleet, {"kind": kind, **operation}, deadline=self._deadline)
        await self._apply(caller, lambda _: True)
        await sender.release(caller)
        trouble = None
        if of_round:
            message = f"round {active['name']} vanished while it was claimed; its engines were settled"
            trouble = (Reason.ROUND_GONE, message)
        log.warning(
            "took over work without a round object",
            extra={"pipeline": self._name, "kind": active.get("kind"), "operation": active["name"]},
        )
        await self._free(trouble=trouble)

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _name(self) -> str:
        return f"{self._ledger.namespace}/{self._ledger.name}"

    def _deadline(self) -> float:
        return paused_budget(self._ctx, self._ledger)

    async def _apply(self, caller: Caller, ours: Callable[[Need], bool]) -> None:
        """Settle, close, resume, route: each step on what the one before it left."""
        deadline = self._deadline()

        def due(act: Act) -> list[str]:
            return [n.engine for n in self.needs() if n.act is act and ours(n)]

        async def order(step: str, names: Iterable[str], what: Any) -> None:
            names = list(names)
            if not names:
                return
            orders = dict.fromkeys(names, what)
            results = await self._fleet.run(caller, step, orders, deadline=deadline, again=True)
            for name, result in results.items():
                if ok(result):
                    self._problems.pop(name, None)
                else:
                    reason, message = why(result)
                    self._problems[name] = f"{step}: {reason.value}: {message}"
            await self._fleet.poll(names)

        uncertain = due(Act.SETTLE)
        await order("Pause", uncertain, wire.PauseOrder())
        # What a pause does not settle is an addition to a router, or a removal: reading it back settles that.
        await order("Close", [n for n in uncertain if n in due(Act.SETTLE)], wire.CloseOrder())
        # Engines that go and whose pods stay end what they run; nobody would resume a request that is only held.
        going = [n for n in due(Act.CLOSE) if self._fleet.engines[n].unwanted]
        await order("Close", going, wire.CloseOrder())
        drain = float(self._ledger.spec["sync"]["drainSeconds"])
        await order("Pause", going, wire.PauseOrder(mode=wire.PauseMode.WAIT, drain_seconds=drain))
        wrong = due(Act.CLOSE)
        await order("Pause", [n for n in wrong if self._paused(n) is not True], wire.PauseOrder())
        await order("Close", wrong, wire.CloseOrder())
        committed = self._ledger.committed
        if committed is not None:
            resume = wire.ResumeOrder(version=committed.version, manifest_digest=committed.manifest_digest)
            await order("Resume", due(Act.RESUME), resume)
        await order("Open", due(Act.OPEN), wire.OpenOrder())
        left = {n.engine: n for n in self.needs() if ours(n)}
        self._problems = {n: self._problems.get(n, f"still needs {need.act.value}") for n, need in left.items()}

    def _paused(self, name: str) -> bool | None:
        status = self._fleet.engines[name].status
        return status.engine.paused if status is not None else None

    def _report(self, due: Iterable[Need], what: str) -> None:
        log.warning("repaired", extra={"pipeline": self._name, "what": what, "problems": dict(self._problems)})
        events, pipeline = self._ctx.events, self._ledger.pipeline
        done = [n for n in due if n.engine not in self._problems]
        if done:
            events.record(pipeline, "Normal", Reason.REPAIRED.value, summary(done, done=True), action="Repair")
        trouble = trouble_of(self._problems)
        if trouble is not None:
            events.record(pipeline, "Warning", trouble[0].value, trouble[1], action="Repair")

    async def _free(self, *, trouble: tuple[Reason, str] | None) -> None:
        await self._fleet.read_pods()
        await self._fleet.poll()
        self._status.bind(self._fleet)
        await self._ledger.write_pipeline({"activeOperation": None, **self._status(trouble=trouble)})


def trouble_of(problems: Mapping[str, str]) -> tuple[Reason, str] | None:
    """What Degraded says of engines that repair did not help; None: there are none."""
    if not problems:
        return None
    name, problem = min(problems.items())
    return Reason.REPAIR_FAILED, f"{len(problems)} engines could not be repaired; {name}: {problem}"


def summary(found: Iterable[Need], *, done: bool = False) -> str:
    """``2 Resume (a, b), 1 Close (c)``, or with ``done`` ``2 resumed ...``."""
    by_act: dict[Act, list[str]] = {}
    for need in found:
        by_act.setdefault(need.act, []).append(need.engine)
    parts = []
    for act, names in by_act.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        parts.append(f"{len(names)} {_DONE[act] if done else act.value} ({', '.join(names[:4])}{more})")
    return ", ".join(parts)
