"""Holding of a round that was refused before its transfer, but inherited closed engines (decision 0018).

It superseded a round that held engines at a version that was never committed. Ending it as Failed would leave them
closed with nobody to own them, so it waits in Holding: engines at what is committed serve, the others stay closed until
the round can start over, a newer one takes them, or one of the other exits of plan.holding.refused_turn applies.

Invariant: which engines were inherited, and why the round was refused, is durable before anything else is done.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.demand import hear_demands
from rlfleet.control.rounds.exits import look_for_exits
from rlfleet.control.rounds.healing import TURN_SECONDS, InTheWay
from rlfleet.control.rounds.ledger import API_SECONDS
from rlfleet.control.rounds.preparing import frozen
from rlfleet.kube.errors import NotFound
from rlfleet.kube.resources import SYNCROUNDS
from rlfleet.plan.holding import Move, RefusedTurn, inherited, left_closed, on_failure_of, refused_turn
from rlfleet.plan.rounds import RoundPlan, RoundRef, held
from rlfleet.plan.verdicts import abort, unfenced

if TYPE_CHECKING:
    from rlfleet.control.rounds.ending import Ending

#: Seconds before a refused round starts over: what refused it is hardly over at once.
START_OVER_SECONDS = 2.0


class RefusedHold:
    """Carries a refused round through Holding."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.run = ending.run
        self.ledger = ending.ledger
        self.fleet = ending.fleet
        self.ctx = ending.ctx

    async def owned(self) -> frozenset[str]:
        """UIDs of the pods that this round inherited: from what it recorded, or from the round that it superseded."""
        refused = self.ledger.round_status.get("refused")
        if refused:
            return frozenset(refused.get("podUIDs") or [])
        last = self.ledger.status.get("lastRound")
        if not last:
            return frozenset()
        try:
            ended = await self.ledger.kube.get(SYNCROUNDS, self.ledger.namespace, str(last), timeout=API_SECONDS)
        except NotFound:
            return frozenset()
        return left_closed(ended)

    def closed(self, uids: frozenset[str]) -> tuple[str, ...]:
        """Those of them that nobody would own if this round ended now."""
        return inherited(self.fleet.engines.values(), uids, self.ledger.committed)

    async def begin(self, stage: str, reason: Reason, message: str, uids: frozenset[str]) -> None:
        """Write down that the round is refused and holds what it inherited."""
        before = self.ledger.round_status.get("refused") or {}
        refused = {
            "stage": stage,
            "reason": reason.value,
            "message": message[:1024],
            "podUIDs": sorted(uids),
            "startOvers": int(before.get("startOvers") or 0),
        }
        await self.run.phase(
            "Holding",
            Reason.HOLDING,
            self._message(reason, message, self.closed(uids)),
            refused=refused,
            # Nothing of this round is planned any more: a successor must not take a stale plan for a frozen one.
            plan=None,
            pausedAt=self.ledger.round_status.get("pausedAt") or rfc3339(self.ctx.now_ms()),
        )

    @staticmethod
    def _message(reason: Reason, message: str, closed: tuple[str, ...]) -> str:
        names = ", ".join(closed[:4])
        return f"refused ({reason.value}: {message}), but {len(closed)} inherited engines are closed ({names})"

    async def hold(self, *, fresh: bool) -> bool:
        """Stay until an exit applies and take it; True: what refused the round is over, start over at Planned.

        ``fresh``: this claim has not written Holding itself, so the phase may go back under it. Otherwise the claim is
        left for the next reconcile, which claims anew.
        """
        refused = dict(self.ledger.round_status["refused"])
        uids = frozenset(refused.get("podUIDs") or [])
        began = self.ctx.clock.monotonic()
        asked, in_the_way = False, InTheWay(self.run)
        while True:
            await self.ledger.still_ours()
            await self._observe()
            await hear_demands(self.run)
            closed = self.closed(uids)
            in_the_way.see(closed)
            wishes, newer = await look_for_exits(self.run, self.ending)
            rested = fresh or self.ctx.clock.monotonic() >= began + START_OVER_SECONDS
            asks = str(self.ledger.spec["sync"]["onFailure"])
            on_failure, why = on_failure_of(closed, self.fleet.engines, asked=asks)
            move = refused_turn(
                RefusedTurn(
                    closed=len(closed),
                    wishes=wishes,
                    can_start=rested and self._can_start(),
                    start_overs=int(refused.get("startOvers") or 0),
                    spent=self.ctx.clock.monotonic() >= self.run.deadline("pausedSeconds", "pausedAt"),
                    on_failure=on_failure,
                )
            )
            if move is Move.START_OVER:
                if not fresh:
                    return False
                refused["startOvers"] = int(refused.get("startOvers") or 0) + 1
                await self.run.phase(
                    "Pending", Reason.PLANNED, "starting over: what refused the round is over", refused=refused
                )
                return True
            if await self._leave(move, refused, newer):
                return False
            if move is Move.REPLACE:
                await in_the_way.replace(uids)
            elif move is Move.ASK and not asked:
                note = f"pausedSeconds are spent and {why}: delete these pods, or cancel the round"
                said = self._message(Reason.parse(refused["reason"]), str(refused["message"]), closed)
                await self.run.phase("Holding", Reason.HOLDING_NEEDS_ACTION, f"{said}; {note}")
                asked, fresh = True, False
            await asyncio.sleep(TURN_SECONDS)

    async def _observe(self) -> None:
        """Read everybody, fence who is not fenced, and let serve what is proven at the committed version."""
        await self.fleet.read_pods()
        await self.fleet.poll()
        missing = unfenced(self.fleet.engines.values(), pipeline=self.ledger.uid, generation=self.ledger.generation)
        await self.fleet.fence(self.run.caller, missing)
        await self.ending.resume_committed()

    def _can_start(self) -> bool:
        sender = self.run.sender.status
        spec = self.run.round_spec
        slot = held(sender, int(spec["version"]), spec.get("manifestDigest")) if sender is not None else None
        if slot is None or self.ctx.clock.monotonic() >= self.run.deadline("stagingSeconds", "stagingAt"):
            return False
        plan = frozen(self.run, slot)
        return isinstance(plan, RoundPlan) and bool(plan.members)

    async def _leave(self, move: Move, refused: dict[str, Any], newer: RoundRef | None) -> bool:
        stage, why, said = str(refused["stage"]), Reason.parse(refused["reason"]), str(refused["message"])
        ends = {
            Move.ABORT: ("Failed", stage, why, f"{said}; no inherited engine is closed any more"),
            Move.GONE: ("Failed", stage, Reason.ROUND_GONE, "the round's object vanished"),
            Move.CANCEL: ("Cancelled", "Holding", Reason.CANCELLED, f"cancelled while holding; refused before: {said}"),
            Move.SENDER_GONE: (
                "Failed",
                "Holding",
                Reason.SENDER_INCARNATION_GONE,
                f"the sender is gone, so nothing can heal the inherited engines; refused before: {said}",
            ),
        }
        if move is Move.SUPERSEDE and newer is not None:
            message = f"superseded by {newer.name} (version {newer.version}), which inherits the closed engines"
            await self.ending.settle("Superseded", "Holding", Reason.SUPERSEDED, message)
        elif move in ends:
            outcome, stage, why, said = ends[move]
            await self._shut()
            await self.ending.settle(outcome, stage, why, said)
        else:
            return False
        return True

    async def _shut(self) -> None:
        """The resume rule: what is not at ``committed`` leaves the routers for good."""
        rule = abort(RoundPlan((), 1), self.fleet.engines, self.ledger.committed, operation=self.run.round_uid)
        closed = [n for n in self.closed(await self.owned()) if n not in rule.resume]
        await self.ending.shut(closed)
