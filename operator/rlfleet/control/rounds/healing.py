"""Holding: a round that has whole members but misses too many keeps what it owns closed and heals the rest.

Invariants (DESIGN section 5, Holding):
- nothing opens here; every turn observes anew, and plan.holding.turn says what follows;
- healing uses only what is proven to be possible: bytes that are still staged, bytes that the sender still holds, or a
  new group of the missing; tries are counted by the gates' logs, so a restart of the operator refills none;
- status is written when it says something new, not once per turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.demand import hear_demands
from rlfleet.control.rounds.exits import look_for_exits
from rlfleet.control.rounds.ledger import API_SECONDS
from rlfleet.kube.errors import ApiError, Conflict, NotFound
from rlfleet.kube.resources import PODS
from rlfleet.plan.holding import Move, Turn, may_replace_pod, on_failure_of, overdue, planned_pods, turn
from rlfleet.plan.rounds import Member, RoundRef, held
from rlfleet.plan.verdicts import Next, Outcome, Verdict

if TYPE_CHECKING:
    from rlfleet.control.rounds.closing import Closing
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.control.rounds.transfer import Transfer

log = logging.getLogger(__name__)

#: Stagings and loads tried per member in one round, the first ones included.
LOAD_TRIES = 3
#: Seconds between two looks at the world.
TURN_SECONDS = 1.0


class Healing:
    """Carries a round through Holding."""

    def __init__(self, closing: Closing) -> None:
        self.closing = closing
        self.run = closing.run
        self.ledger = closing.ledger
        self.fleet = closing.fleet
        self.ctx = closing.ctx
        self.in_the_way = InTheWay(closing.run)

    async def hold(self, transfer: Transfer) -> None:
        """Stay until an exit applies, then take it."""
        said, asked = "", False
        while True:
            # A deposed operator observes the same fleet as its successor: it must stop before it acts on it.
            await self.ledger.still_ours()
            await hear_demands(self.run)
            outcome, verdicts = await self.closing.look(transfer)
            lacking = {*outcome.missing, *outcome.unfenced, *outcome.blocked}
            self.in_the_way.see(lacking)
            if outcome.next in (Next.HOLD, Next.WAIT_FENCE) and (message := self._message(outcome)) != said:
                waits = outcome.next is Next.WAIT_FENCE
                await self.run.phase("Holding", Reason.NOT_ALL_FENCED if waits else Reason.HOLDING, message)
                said, asked = message, False
            wishes, newer = await look_for_exits(self.run, self.closing)
            asks = str(self.ledger.spec["sync"]["onFailure"])
            on_failure, why = on_failure_of(lacking, self.fleet.engines, asked=asks)
            move = turn(
                Turn(
                    outcome.next,
                    wishes,
                    can_heal=self._can_heal(transfer, verdicts),
                    spent=self._spent(outcome),
                    on_failure=on_failure,
                )
            )
            if await self._leave(move, transfer, outcome, newer):
                return
            if move is Move.HEAL:
                await self._heal(transfer, verdicts)
            elif move is Move.REPLACE:
                await self.in_the_way.replace(planned_pods(transfer.plan, self.fleet.engines.values()))
            elif move is Move.ASK and not asked:
                spent = "pausedSeconds are" if self._late() else f"{LOAD_TRIES} tries for each of them are"
                note = f"{spent} spent and {why}: delete the named pods, or cancel the round"
                await self.run.phase("Holding", Reason.HOLDING_NEEDS_ACTION, f"{said}; {note}")
                asked = True
            await asyncio.sleep(TURN_SECONDS)

    @staticmethod
    def _message(outcome: Outcome) -> str:
        if outcome.next is Next.WAIT_FENCE:
            names = ", ".join(outcome.unfenced[:4])
            return f"not committed: {names} have not stored this generation, or are not proven closed"
        blocked = outcome.blocked
        out = f", {len(blocked)} could not take part ({', '.join(blocked[:4])})" if blocked else ""
        return (
            f"{len(outcome.whole)} engines are whole, {len(outcome.missing)} are missing "
            f"({', '.join(outcome.missing[:4])}){out}, {outcome.limit} may be"
        )

    async def _leave(self, move: Move, transfer: Transfer, outcome: Outcome, newer: RoundRef | None) -> bool:
        """Take an exit, if the move is one."""
        aborts = {
            Move.ABORT: (Reason.TRANSFER_FAILED, "no engine holds the version any more", "Failed"),
            Move.GONE: (Reason.ROUND_GONE, "the round's object vanished", "Failed"),
            Move.CANCEL: (Reason.CANCELLED, "cancelled while holding", "Cancelled"),
            Move.SENDER_GONE: (
                Reason.SENDER_INCARNATION_GONE,
                f"{len(outcome.missing)} engines are missing and the sender is gone: nothing can heal them",
                "Failed",
            ),
        }
        if move is Move.COMMIT:
            await self.closing.commit(transfer, outcome)
            await self.closing.reopen(transfer)
        elif move in aborts:
            reason, message, end = aborts[move]
            await self.closing.abort(transfer, "Holding", reason, message, outcome=end)
        elif move is Move.SUPERSEDE and newer is not None:
            # The newer round takes over every engine as it is: closed ones stay closed until it has updated them.
            await self.closing.settle(
                "Superseded",
                "Holding",
                Reason.SUPERSEDED,
                f"superseded by {newer.name} (version {newer.version}), which inherits the closed engines",
                transfer=transfer,
                verdicts=transfer.verdicts(),
            )
        else:
            return False
        return True

    # ------------------------------------------------------------------------------------------ what is possible

    def _late(self) -> bool:
        return self.ctx.clock.monotonic() >= self.run.deadline("pausedSeconds", "pausedAt")

    def _spent(self, outcome: Outcome) -> bool:
        """No more time, or no more tries for anybody that is missing. A silent gate's tries are unknown."""
        if self._late():
            return True
        return bool(outcome.missing) and outcome.next is Next.HOLD and all(map(self._used_up, outcome.missing))

    def _used_up(self, name: str) -> bool:
        engine = self.fleet.engines.get(name)
        if engine is None or engine.status is None or engine.status.in_flight:
            return False
        return self._tries(name, "Pause" if engine.status.uncertain else "Load") >= LOAD_TRIES

    def _tries(self, name: str, step: str) -> int:
        return self.fleet.attempts(name, self.run.caller, step)

    def _can_heal(self, transfer: Transfer, verdicts: dict[str, Verdict]) -> bool:
        return any(v is Verdict.LOADED for v in verdicts.values()) or any(
            m.engine in self._uncertain(transfer)
            or self._can_stage(transfer, m, verdicts[m.engine])
            or self._can_load(transfer, m, verdicts[m.engine])
            for m in transfer.plan.members
        )

    def _sender_holds(self, transfer: Transfer) -> bool:
        sender, target = self.run.sender.status, transfer.target
        return (
            sender is not None
            and sender.incarnation == target.sender_incarnation
            and held(sender, target.version, target.manifest_digest) is not None
        )

    def _idle(self, m: Member, v: Verdict) -> bool:
        """It is there, closed, and waits for nothing: something may be tried on it."""
        if v not in (Verdict.UNTOUCHED, Verdict.POISONED):
            return False
        status = self.fleet.engines[m.engine].status
        if status is None or status.in_flight or status.uncertain or status.engine.state is not wire.EngineState.READY:
            return False
        return status.engine.paused is True

    def _can_stage(self, transfer: Transfer, m: Member, v: Verdict) -> bool:
        if transfer.staged(m) or not self._idle(m, v) or not self._sender_holds(transfer):
            return False
        return self._tries(m.engine, "Prepare") < LOAD_TRIES

    def _can_load(self, transfer: Transfer, m: Member, v: Verdict) -> bool:
        if not transfer.staged(m) or not self._idle(m, v):
            return False
        if transfer.plan.needs_sender(m) and not self._sender_holds(transfer):
            return False
        return self._tries(m.engine, "Load") < LOAD_TRIES

    def _uncertain(self, transfer: Transfer) -> list[str]:
        return [
            m.engine
            for m in transfer.plan.members
            if (e := self.fleet.engines.get(m.engine)) is not None
            and e.status is not None
            and e.status.uncertain
            and not e.status.in_flight
            and self._tries(m.engine, "Pause") < LOAD_TRIES
        ]

    # ------------------------------------------------------------------------------------------ healing

    async def _heal(self, transfer: Transfer, verdicts: dict[str, Verdict]) -> None:
        """Stage and load again where that can work, then verify and publish."""
        deadline = self.run.deadline("pausedSeconds", "pausedAt")
        await self._clear_uncertain(transfer, deadline)
        members = transfer.plan.members
        lacking = [m for m in members if self._can_stage(transfer, m, verdicts[m.engine])]
        if lacking:
            await transfer.stage(lacking, deadline=deadline, again=True)
            await self.fleet.poll([m.engine for m in lacking])
        again = [m for m in members if self._can_load(transfer, m, verdicts[m.engine])]
        started = self.ctx.clock.monotonic()
        if again and started < deadline:
            await transfer.load(again, deadline=deadline, again=True)
        known = transfer.known_digests()
        if again or any(v is Verdict.LOADED for v in verdicts.values()):
            await self.run.finish_loads(transfer, deadline=deadline, known=known, started=started, again=True)

    async def _clear_uncertain(self, transfer: Transfer, deadline: float) -> None:
        """An operation without a recorded end blocks its gate until a new, verified pause proves the engine idle."""
        names = self._uncertain(transfer)
        if names:
            orders = dict.fromkeys(names, wire.PauseOrder())
            await self.fleet.run(self.run.caller, "Pause", orders, deadline=deadline, again=True)
            await self.fleet.poll(names)


class InTheWay:
    """Engines that keep a round in Holding, and for how long. A successor measures anew, so it waits no shorter."""

    def __init__(self, run: Executor) -> None:
        self._run = run
        self._since: dict[str, float] = {}

    def see(self, names: Iterable[str]) -> None:
        """These are in the way now, and no others."""
        now, engines = self._run.ctx.clock.monotonic(), self._run.fleet.engines
        uids = {engines[n].pod_uid for n in names if n in engines}
        self._since = {uid: self._since.get(uid, now) for uid in uids}

    async def replace(self, planned: Collection[str]) -> None:
        """Delete pods that have not healed (owned ones, by UID); their pool makes new ones."""
        run = self._run
        late = overdue(self._since, planned=planned, now=run.ctx.clock.monotonic())
        for name, engine in sorted(run.fleet.engines.items()):
            if engine.pod_uid not in late or not may_replace_pod(engine):
                continue
            try:
                await run.ledger.kube.delete(PODS, run.ledger.namespace, name, uid=engine.pod_uid, timeout=API_SECONDS)
            except (NotFound, Conflict):
                continue  # it is gone or another pod already: the next look tells
            except ApiError as e:
                log.warning("pod not replaced", extra={"pod": name, "why": str(e)})
