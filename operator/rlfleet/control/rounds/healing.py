"""Holding: a round that has whole members but misses too many keeps what it owns closed and heals the rest.

Invariants (DESIGN section 5, Holding):
- nothing opens here; every turn observes anew and concludes anew;
- healing uses only what is proven to be possible: bytes that are still staged, or a new group of the missing;
- there is always an exit: healed enough, superseded, cancelled, no member whole, or pods replaced when pausedSeconds
  are spent (owned pods, ``onFailure: Replace``); with ``Hold`` a condition asks for a person.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.ledger import API_SECONDS, RoundGone, committed_of, is_terminal, ref_of
from rlfleet.kube.errors import ApiError, Conflict, NotFound
from rlfleet.kube.resources import PODS, SYNCROUNDS
from rlfleet.plan.rounds import Member
from rlfleet.plan.triage import newer_than, triage
from rlfleet.plan.verdicts import Next, Outcome, Verdict

if TYPE_CHECKING:
    from rlfleet.control.rounds.closing import Closing
    from rlfleet.control.rounds.transfer import Transfer

log = logging.getLogger(__name__)

#: Loads tried per member in one round, the first one included.
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

    async def hold(self, transfer: Transfer) -> None:
        """Stay until an exit applies, then take it."""
        said, asked = "", False
        while True:
            # A deposed operator observes the same fleet as its successor: it must stop before it acts on it.
            await self.ledger.still_ours()
            outcome, verdicts = await self.closing.look(transfer)
            if outcome.next is Next.COMMIT:
                await self.closing.commit(transfer, outcome)
                await self.closing.reopen(transfer)
                return
            if outcome.next is Next.ABORT:
                await self.closing.abort(
                    transfer, "Holding", Reason.TRANSFER_FAILED, "no engine holds the version any more"
                )
                return
            message = self._message(outcome)
            if message != said:
                waits = outcome.next is Next.WAIT_FENCE
                await self.run.phase("Holding", Reason.NOT_ALL_FENCED if waits else Reason.HOLDING, message)
                said, asked = message, False
            if await self._leave(transfer):
                return
            late = self.ctx.clock.monotonic() >= self.run.deadline("pausedSeconds", "pausedAt")
            if not late:
                await self._heal(transfer, verdicts)
            elif self.ledger.spec["sync"]["onFailure"] == "Replace":
                await self._replace(outcome)
            elif not asked:
                note = "pausedSeconds are spent and onFailure is Hold: delete the named pods, or cancel the round"
                await self.run.phase("Holding", Reason.HOLDING_NEEDS_ACTION, f"{message}; {note}")
                asked = True
            await asyncio.sleep(TURN_SECONDS)

    @staticmethod
    def _message(outcome: Outcome) -> str:
        if outcome.next is Next.WAIT_FENCE:
            names = ", ".join(outcome.unfenced[:4])
            return f"not committed: {names} have not stored this generation, or are not proven closed"
        return (
            f"{len(outcome.whole)} engines are whole, {len(outcome.missing)} are missing "
            f"({', '.join(outcome.missing[:4])}), {outcome.limit} may be"
        )

    async def _leave(self, transfer: Transfer) -> bool:
        """Exits that somebody asked for: cancel, deletion, a newer round."""
        try:
            await self.ledger.read_round()
        except RoundGone:
            await self.closing.abort(transfer, "Holding", Reason.ROUND_GONE, "the round's object vanished")
            return True
        assert self.ledger.round is not None
        me = ref_of(self.ledger.round)
        if me.cancel or me.deleting:
            await self.closing.abort(
                transfer, "Holding", Reason.CANCELLED, "cancelled while holding", outcome="Cancelled"
            )
            return True
        listed = await self.ledger.kube.list(SYNCROUNDS, self.ledger.namespace, timeout=API_SECONDS)
        others = [
            ref_of(r)
            for r in listed.items
            if r["spec"]["pipeline"] == self.ledger.name and not is_terminal(r) and r["metadata"]["uid"] != me.uid
        ]
        others = [r for r in others if newer_than(r, me)]
        if not others:
            return False
        await self.run.sender.ask()
        newer = triage(
            others,
            committed=committed_of(self.ledger.pipeline),
            sender=self.run.sender.status,
            sender_problem=None,
            now_ms=self.ctx.now_ms(),
            pending_ms=int(self.ledger.spec["sync"]["deadlines"]["pendingSeconds"]) * 1000,
            joinable=1,
            expected=1,  # this round's own engines are there for it
        ).run
        if newer is None:
            if self.run.sender.status is not None and self.run.sender.status.publish_waiting:
                # A trainer waits for our hold before it can publish what the newer round asks for.
                await self.closing.release()
            return False
        # The newer round takes over every engine as it is: closed ones stay closed until it has updated them.
        await self.closing.settle(
            "Superseded",
            "Holding",
            Reason.SUPERSEDED,
            f"superseded by {newer.name} (version {newer.version}), which inherits the closed engines",
            transfer=transfer,
            verdicts=transfer.verdicts(),
        )
        return True

    async def _heal(self, transfer: Transfer, verdicts: dict[str, Verdict]) -> None:
        """Load again where that can work, then verify and publish."""
        deadline = self.run.deadline("pausedSeconds", "pausedAt")
        await self._clear_uncertain(transfer, deadline)
        again = [m for m in transfer.plan.members if self._can_load(transfer, m, verdicts[m.engine])]
        started = self.ctx.clock.monotonic()
        if again:
            await transfer.load(again, deadline=deadline, again=True)
        known = transfer.known_digests()
        if again or any(v is Verdict.LOADED for v in verdicts.values()):
            await self.run.finish_loads(transfer, deadline=deadline, known=known, started=started, again=True)

    async def _clear_uncertain(self, transfer: Transfer, deadline: float) -> None:
        """An operation without a recorded end blocks its gate until a new, verified pause proves the engine idle."""
        order = wire.PauseOrder()
        names = [
            m.engine
            for m in transfer.plan.members
            if (e := self.fleet.engines.get(m.engine)) is not None
            and e.status is not None
            and e.status.uncertain
            and not e.status.in_flight
            and self.fleet.attempts(m.engine, self.run.caller, "Pause") < LOAD_TRIES
        ]
        if names:
            await self.fleet.run(self.run.caller, "Pause", dict.fromkeys(names, order), deadline=deadline, again=True)
            await self.fleet.poll(names)

    def _can_load(self, transfer: Transfer, m: Member, v: Verdict) -> bool:
        if v not in (Verdict.UNTOUCHED, Verdict.POISONED) or not transfer.staged(m):
            return False
        status = self.fleet.engines[m.engine].status
        if status is None or status.in_flight or status.uncertain or status.engine.state is not wire.EngineState.READY:
            return False
        if status.engine.paused is not True:
            return False
        return self.fleet.attempts(m.engine, self.run.caller, "Load") < LOAD_TRIES

    async def _replace(self, outcome: Outcome) -> None:
        """pausedSeconds are spent: replace what does not heal (owned pods, by UID); the pool makes new ones."""
        for name in {*outcome.missing, *outcome.unfenced}:
            engine = self.fleet.engines.get(name)
            if engine is None or engine.gone or engine.leaving or not engine.owned:
                continue
            try:
                await self.ledger.kube.delete(
                    PODS, self.ledger.namespace, name, uid=engine.pod_uid, timeout=API_SECONDS
                )
            except (NotFound, Conflict):
                continue  # it is gone or another pod already: the next look tells
            except ApiError as e:
                log.warning("pod not replaced", extra={"pod": name, "why": str(e)})
