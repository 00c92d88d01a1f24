"""One sync round from claim to settle: the phase table of DESIGN section 5, row by row.

Invariants:
- each durable phase is written before its first side effect;
- every wait has a deadline that is counted from a time in the round's status, so a restart never refills it;
- nothing is resumed in a ``finally``: whatever interrupts us leaves the engines as they are, and the next claim
  (ours or a successor's) raises the fence, asks everybody, and decides from what they answer.

Death between any two lines here is the same as death anywhere: ``execute`` of the next claim begins with the barrier
and enters where ``plan.verdicts.enter`` says.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from rlfleet import logkeys
from rlfleet.api import wire
from rlfleet.api.condition_list import set_condition
from rlfleet.api.conditions import ConditionStatus, Reason, RoundCondition
from rlfleet.api.timestamps import epoch_ms, rfc3339
from rlfleet.control.peers import Caller
from rlfleet.control.rounds.barrier import take_over_round
from rlfleet.control.rounds.closing import Closing
from rlfleet.control.rounds.drops import drop_unwanted
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.outcome import StatusOf, with_late_cancel
from rlfleet.control.rounds.plan_record import plan_of
from rlfleet.control.rounds.preparing import plan_members, stage_bytes
from rlfleet.control.rounds.refused import RefusedHold
from rlfleet.control.rounds.rendezvous import Rendezvous
from rlfleet.control.rounds.results import Ended, ok, why
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.control.rounds.target import Target
from rlfleet.control.rounds.transfer import Transfer
from rlfleet.plan.checkpoint import checkpoint_path
from rlfleet.plan.deletion import is_deleting
from rlfleet.plan.quiesce import drain_allowance, leaves_routers, wanted_mode
from rlfleet.plan.rounds import TERMINAL, Member, RoundPlan
from rlfleet.plan.verdicts import Entry, Verdict, enter

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)

#: Seconds for engines that drain or abort to leave their routers.
CLOSE_SECONDS = 10.0
#: Share of pausedSeconds that is left for verification and publication, and the least seconds for them.
PROOF_SHARE = 0.1
PROOF_SECONDS = 10.0


class Executor:
    """Executes one round under one claim. Make a new one per claim."""

    def __init__(self, ctx: Context, ledger: Ledger, sender: SenderLink) -> None:
        assert ledger.round is not None
        self.ctx = ctx
        self.ledger = ledger
        self.sender = sender
        self.fleet = Fleet.of(ctx, ledger)
        self.timings: dict[str, int] = dict(ledger.round_status.get("timings") or {})
        self.began = ctx.clock.monotonic()
        self.paused_since: float | None = None
        self.takeover = False
        self._ends: dict[tuple[str, str], float] = {}
        #: Makes the pipeline's status from the fleet as observed; set by the pipeline's reconcile.
        self.pipeline_status: StatusOf | None = None
        incarnation = str(self.round_spec.get("senderIncarnation") or "")
        self.rendezvous = Rendezvous(ctx, ledger, sender, self.round_uid, incarnation)

    # ------------------------------------------------------------------------------------------ facts

    @property
    def round_uid(self) -> str:
        """UID of the SyncRound: the operation that the fence names."""
        assert self.ledger.round is not None
        return str(self.ledger.round["metadata"]["uid"])

    @property
    def round_spec(self) -> dict[str, Any]:
        """Spec of the SyncRound."""
        assert self.ledger.round is not None
        return dict(self.ledger.round["spec"])

    @property
    def kind(self) -> str:
        """Refresh or CatchUp."""
        return str(self.round_spec.get("kind") or "Refresh")

    @property
    def caller(self) -> Caller:
        """The fence that every call carries."""
        return Caller(self.ledger.uid, self.round_uid, self.ledger.generation)

    def deadline(self, key: str, since: str) -> float:
        """Loop time at which the budget ``spec.sync.deadlines.<key>`` counted from status.<since> is spent.

        Asked again it only ever comes nearer: neither a changed spec nor a clock that is set back refills a budget.
        """
        budget = int(self.ledger.spec["sync"]["deadlines"][key])
        if key == "pausedSeconds":
            budget += drain_allowance(self.ledger.spec["sync"])
        text = self.ledger.round_status.get(since)
        spent = max(0.0, (self.ctx.now_ms() - epoch_ms(text)) / 1000) if text else 0.0
        end = self.ctx.clock.monotonic() + budget - spent
        if text:
            end = self._ends[key, text] = min(end, self._ends.get((key, text), end))
        return end

    def lap(self, name: str, since: float) -> float:
        """Add the time since ``since`` (loop seconds) to a timing and the trace; now, as the start of the next one."""
        now = self.ctx.clock.monotonic()
        self.timings[name] = self.timings.get(name, 0) + max(0, round((now - since) * 1000))
        assert self.ledger.round is not None
        self.ctx.traces.part(self.ledger.round, name.removesuffix("Ms"), now - since, self.ctx.now_ms())
        return now

    async def phase(self, phase: str, reason: Reason, message: str, **extra: Any) -> None:
        """Write a durable phase before its first side effect, with lease, condition and timings so far."""
        now = rfc3339(self.ctx.now_ms())
        assert self.ledger.round is not None
        conditions = set_condition(
            self.ledger.round_status.get("conditions") or [],
            RoundCondition.PROGRESSING,
            ConditionStatus.TRUE,
            reason,
            message,
            int(self.ledger.round["metadata"].get("generation") or 0),
            now,
        )
        conditions = with_late_cancel(conditions, self.ledger.round, now)
        await self.ledger.write_round(
            {
                "observedGeneration": self.ledger.round["metadata"].get("generation", 0),
                "phase": phase,
                "lease": self.ledger.lease(),
                "conditions": conditions,
                "timings": self.timings,
                **extra,
            },
            what=phase if phase != self.ledger.round_status.get("phase") else "",
        )
        log.info(
            "%s: %s",
            phase,
            message,
            extra={
                "round": self.ledger.round["metadata"]["name"],
                "roundUID": self.round_uid,
                "pipeline": f"{self.ledger.namespace}/{self.ledger.name}",
                "generation": self.ledger.generation,
            },
        )

    async def cancelled(self) -> bool:
        """The end of this round was asked for: spec.cancel, or it or its pipeline is being deleted. Read live."""
        await self.ledger.read_round()
        await self.ledger.still_ours()
        assert self.ledger.round is not None
        asked = bool(self.round_spec.get("cancel"))
        return asked or is_deleting(self.ledger.round) or is_deleting(self.ledger.pipeline)

    # ------------------------------------------------------------------------------------------ claim, barrier

    async def claim(self, extra: dict[str, Any]) -> None:
        """Finalizer, then the claim (fence and activeOperation in one conditional write)."""
        await self.ledger.set_finalizer(True)
        active = self.ledger.status.get("activeOperation") or {}
        again = active.get("uid") == self.round_uid
        assert self.ledger.round is not None
        await self.ledger.claim(
            {
                "kind": self.kind,
                "name": self.ledger.round["metadata"]["name"],
                "uid": self.round_uid,
                "committed": bool(active.get("committed")) if again else False,
            },
            extra={**extra, **await self.rendezvous.with_slot()},
        )
        logkeys.add(generation=self.ledger.generation)
        if self.takeover:
            self.ctx.metrics.round_taken_over(self.kind)

    # ------------------------------------------------------------------------------------------ the round

    async def execute(self, extra: dict[str, Any]) -> None:
        """Claim and carry the round to its end (or to Holding's, however long that takes)."""
        active = self.ledger.status.get("activeOperation") or {}
        self.takeover = active.get("uid") == self.round_uid or bool(self.ledger.round_status.get("lease"))
        await self.claim(extra)
        closing = Closing(self)
        if self.ledger.round_status.get("phase") in TERMINAL:
            # Settled by a predecessor that died before it freed the slot: the identical replay is a success.
            await closing.settled_before()
            return
        await take_over_round(self, takeover=self.takeover)
        plan = plan_of(self.ledger.round_status)
        committed = bool((self.ledger.status.get("activeOperation") or {}).get("committed"))
        entry = enter(
            str(self.ledger.round_status.get("phase") or ""),
            committed=committed,
            planned=plan is not None,
            refused=plan is None and bool(self.ledger.round_status.get("refused")),
        )
        if entry is Entry.REFUSED:
            if not await RefusedHold(closing).hold(fresh=True):
                return
            entry = Entry.PLAN
        if entry is Entry.PLAN:
            if self.takeover and await self.cancelled():
                await closing.refuse(
                    "Planned", Reason.CANCELLED, "cancelled before engines were touched", outcome="Cancelled"
                )
                return
            transfer = await plan_members(self, closing)
            if transfer is None:
                return
            if not await stage_bytes(self, transfer, closing):
                return
            entry = Entry.QUIESCE
        else:
            assert plan is not None
            transfer = self.transfer(plan, self.target_from_status())
        if entry is Entry.QUIESCE:
            if not await self._quiesce(transfer, closing):
                return
            await self._load(transfer, closing)
        elif entry is Entry.JUDGE:
            transfer.trouble.note("", Reason.OPERATOR_RESTARTED, "an operator died while weights moved")
            await self.finish_loads(
                transfer,
                deadline=self.deadline("pausedSeconds", "pausedAt"),
                known=transfer.known_digests(),
                started=self.ctx.clock.monotonic(),
                again=True,  # the predecessor's verification may have failed, or asked for something else
            )
            await closing.hold_or_commit(transfer)
        else:
            await closing.reopen(transfer)

    def target(self, slot: wire.SenderCache) -> Target:
        """What this round brings: the weights in one slot of the sender."""
        assert self.sender.status is not None
        return self._target(slot.version, slot.manifest_digest, slot.total_bytes, self.sender.status.incarnation)

    def target_from_status(self) -> Target:
        """What a predecessor planned to bring."""
        status, spec = self.ledger.round_status, self.round_spec
        incarnation = str(spec.get("senderIncarnation") or "")
        return self._target(
            int(spec["version"]), str(status["manifestDigest"]), int(status.get("bytes") or 1), incarnation
        )

    def _target(self, version: int, digest: str, total_bytes: int, incarnation: str) -> Target:
        return Target(
            operation=self.round_uid,
            version=version,
            manifest_digest=digest,
            total_bytes=total_bytes,
            sender_incarnation=incarnation,
            path=checkpoint_path(self.ledger.spec, version),
        )

    def transfer(self, plan: RoundPlan, target: Target) -> Transfer:
        """The movement of these weights under our claim."""
        spec = self.ledger.spec
        return Transfer(
            fleet=self.fleet,
            sender=self.sender,
            caller=self.caller,
            plan=plan,
            target=target,
            backend=str(spec["transport"]["backend"]),
            rendezvous=self.rendezvous,
            paused_seconds=float(spec["sync"]["deadlines"]["pausedSeconds"]),
        )

    async def _quiesce(self, transfer: Transfer, closing: Closing) -> bool:
        """Quiescing: every member paused and verified; one that can not be paused aborts the round."""
        started = self.ctx.clock.monotonic()
        await self.phase(
            "Quiescing",
            Reason.QUIESCING,
            f"pausing {len(transfer.plan.members)} engines",
            pausedAt=self.ledger.round_status.get("pausedAt") or rfc3339(self.ctx.now_ms()),
        )
        self.paused_since = self.ctx.clock.monotonic()
        sync = self.ledger.spec["sync"]
        mode = wanted_mode(sync)
        deadline = self.deadline("pausedSeconds", "pausedAt")
        # Who is to go by now is dropped: it is closed while the others load.
        await self.fleet.read_pods()
        members = [m.engine for m in transfer.plan.members if self._takes_part(m)]
        results: dict[str, Ended] = {}
        if leaves_routers(mode):
            # Requests must not wait in front of an engine that drains or aborts: it leaves the routers first, and one
            # that a router may still list is not quiesced.
            shut = dict.fromkeys(members, wire.CloseOrder(deadline_seconds=CLOSE_SECONDS))
            closed = await self.fleet.run(self.caller, "Close", shut, deadline=deadline, again=True)
            results = {n: r for n, r in closed.items() if not ok(r)}
        left = max(self.load_deadline() - self.ctx.clock.monotonic(), 1.0)
        order = wire.PauseOrder(mode=mode, drain_seconds=float(sync["drainSeconds"]), budget_seconds=left)
        pausing = [n for n in members if n not in results]
        # Always proven anew: before a takeover, or before a status was lost, an abort may have resumed engines.
        results |= await self.fleet.run(
            self.caller, "Pause", dict.fromkeys(pausing, order), deadline=deadline, again=True
        )
        transfer.trouble.note_results(results)
        self.lap("quiesceMs", started)
        failed = [n for n in members if not ok(results[n])]
        if failed:
            await self.fleet.read_pods()
            failed = [n for n in failed if n in self.fleet.engines and not self.fleet.engines[n].gone]
        if failed:
            late = self.ctx.clock.monotonic() >= deadline
            reason, message = why(results[failed[0]])
            await closing.refuse(
                "Quiescing",
                Reason.PAUSED_DEADLINE if late else Reason.QUIESCE_FAILED,
                f"{len(failed)} engines could not be paused; {failed[0]}: {reason.value}: {message}",
                transfer=transfer,
            )
            return False
        if self.ctx.clock.monotonic() >= self.load_deadline():
            late_message = "no time is left in pausedSeconds to load and prove"
            await closing.refuse("Quiescing", Reason.PAUSED_DEADLINE, late_message, transfer=transfer)
            return False
        if await self.cancelled():
            await closing.abort(
                transfer, "Quiescing", Reason.CANCELLED, "cancelled before weights moved", outcome="Cancelled"
            )
            return False
        return True

    def _takes_part(self, m: Member) -> bool:
        e = self.fleet.engines.get(m.engine)
        return e is not None and e.pod_uid == m.pod_uid and not (e.unwanted or e.resting or e.shut)

    def load_deadline(self) -> float:
        """Loop time at which waiting for loads ends: it leaves time to prove those that have ended."""
        budget = int(self.ledger.spec["sync"]["deadlines"]["pausedSeconds"])
        return self.deadline("pausedSeconds", "pausedAt") - PROOF_SHARE * budget

    async def _load(self, transfer: Transfer, closing: Closing) -> None:
        """Transferring, verify, publish; then the verdict."""
        started = self.ctx.clock.monotonic()
        await self.phase("Transferring", Reason.TRANSFERRING, f"{len(transfer.plan.members)} engines load")
        deadline = self.deadline("pausedSeconds", "pausedAt")
        members = [m for m in transfer.plan.members if transfer.staged(m) and self._takes_part(m)]
        await asyncio.gather(transfer.load(members, deadline=self.load_deadline()), drop_unwanted(self))
        started = self.lap("transferMs", started)
        await self.finish_loads(transfer, deadline=deadline, known={}, started=started)
        await closing.hold_or_commit(transfer)

    async def finish_loads(
        self, transfer: Transfer, *, deadline: float, known: dict[str, str], started: float, again: bool = False
    ) -> None:
        """Verify and publish on every member whose load has ended well. ``known``: digests agreed on, per layout."""
        # The weights are in: without the time to prove it one hanging load would cost all engines.
        deadline = max(deadline, self.ctx.clock.monotonic() + PROOF_SECONDS)
        # Engines are paused: nobody waits here for gates that were silent before; the look before a commit asks them.
        await self.fleet.poll(self.fleet.heard())
        judged = transfer.verdicts()
        loaded = [m for m in transfer.plan.members if judged[m.engine] is Verdict.LOADED]
        if not loaded:
            return
        agreement = await transfer.verify(
            loaded,
            committed=self.ledger.committed,
            how=self.ledger.spec["sync"]["verify"],
            deadline=deadline,
            known=known,
            again=again,
        )
        started = self.lap("verifyMs", started)
        await transfer.publish(agreement, deadline=deadline, again=again)
        self.lap("publishMs", started)
        await self.fleet.poll(self.fleet.heard())
