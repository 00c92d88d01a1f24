"""How a round ends: abort by the resume rule, refuse, settle, free the slot.

Invariants (DESIGN section 5):
- resume is asked only for committed weights, and every gate checks that against its own record;
- settle writes the round first and frees the slot second: dying in between repeats the same settle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.v1alpha1.syncround_status import AttemptOp
from rlfleet.control.rounds.drops import remove_dropped
from rlfleet.control.rounds.finished import finished
from rlfleet.control.rounds.ledger import RoundGone
from rlfleet.control.rounds.outcome import member_results, settled
from rlfleet.control.rounds.probes import probe_generation
from rlfleet.control.rounds.refused import RefusedHold
from rlfleet.control.rounds.results import ok
from rlfleet.kube.errors import Unavailable
from rlfleet.kube.events import EventType
from rlfleet.plan.probes import ProbeVerdict
from rlfleet.plan.rounds import RoundPlan
from rlfleet.plan.verdicts import Verdict, abort

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.control.rounds.transfer import Transfer

log = logging.getLogger(__name__)

#: Seconds in which engines must resume and routers must list them, before the round says degraded.
REOPEN_SECONDS = 60.0
#: Seconds for an engine to pause that is found open before a commit, or to leave the routers when a round aborts.
SHUT_SECONDS = 10.0


class Ending:
    """The ends of one execution that commit nothing."""

    def __init__(self, run: Executor) -> None:
        self.run = run
        self.ledger = run.ledger
        self.fleet = run.fleet
        self.ctx = run.ctx

    def note_paused(self) -> None:
        """Write down how long engines were paused."""
        if self.run.paused_since is not None:
            self.run.timings["pausedMs"] = round((self.ctx.clock.monotonic() - self.run.paused_since) * 1000)
        elif text := self.ledger.round_status.get("pausedAt"):
            # A predecessor paused them: whole seconds are all that is known.
            self.run.timings["pausedMs"] = max(0, self.ctx.now_ms() - epoch_ms(text))

    # ------------------------------------------------------------------------------------------ abort

    async def abort(
        self, transfer: Transfer, stage: str, reason: Reason, message: str, *, outcome: str = "Failed"
    ) -> None:
        """The resume rule: untouched members at ``committed`` go back to serving it, all others stay closed."""
        deadline = self.ctx.clock.monotonic() + REOPEN_SECONDS
        await self.fleet.read_pods()
        await self.fleet.poll([m.engine for m in transfer.plan.members if m.engine in self.fleet.engines])
        rule = abort(transfer.plan, self.fleet.engines, self.ledger.committed, operation=self.run.round_uid)
        # Those stay paused whether or not their gates answer: a silent one must not keep the round from ending.
        shut = self.ctx.clock.monotonic() + SHUT_SECONDS
        stuck, _ = await asyncio.gather(
            self.resume(rule.resume, deadline),
            self.fleet.run(self.run.caller, "Close", dict.fromkeys(rule.close, wire.CloseOrder()), deadline=shut),
        )
        self.note_paused()
        tail = f"; {len(rule.resume)} engines resumed at the committed version, {len(rule.close)} stay closed"
        if stuck:
            tail += f"; could not resume: {', '.join(stuck[:4])}"
        await self.settle(outcome, stage, reason, message + tail, transfer=transfer, verdicts=transfer.verdicts())

    async def resume(self, names: Iterable[str], deadline: float) -> list[str]:
        """Resume engines at the committed weights and route them; the names that could not."""
        committed = self.ledger.committed
        if committed is None:
            return []
        order = wire.ResumeOrder(version=committed.version, manifest_digest=committed.manifest_digest)
        # Anew, not joined: an engine that an interrupted abort resumed may have been paused again since.
        resumed = await self.fleet.run(
            self.run.caller, "Resume", dict.fromkeys(names, order), deadline=deadline, again=True
        )
        await self.fleet.poll(list(resumed))
        judged = await self.probe([n for n, r in resumed.items() if ok(r)], deadline)
        silent = {**judged.bad, **judged.unknown}
        unrouted = [
            n
            for n, r in resumed.items()
            if ok(r)
            and n not in silent
            and (status := self.fleet.engines[n].status) is not None
            and any(v is not True for v in status.routed.values())
        ]
        opened = await self.fleet.run(
            self.run.caller, "Open", dict.fromkeys(unrouted, wire.OpenOrder()), deadline=deadline
        )
        return sorted({n for n, r in {**resumed, **opened}.items() if not ok(r)} | set(silent))

    async def probe(self, names: Iterable[str], deadline: float) -> ProbeVerdict:
        """One token of each resumed engine (``probeGeneration``); those that answer wrongly are closed."""
        if not self.ledger.spec["sync"].get("probeGeneration"):
            return ProbeVerdict({}, {})
        committed = self.ledger.committed
        known = set((committed.engine_digests or {}) if committed is not None else {})
        judged = await probe_generation(self.fleet, self.run.caller, names, proven_layouts=known, deadline=deadline)
        for name, text in {**judged.bad, **judged.unknown}.items():
            log.warning("probe failed", extra={"engine": name, "why": text})
        return judged

    # ------------------------------------------------------------------------------------------ settle

    async def refuse(
        self,
        stage: str,
        reason: Reason,
        message: str,
        *,
        outcome: str = "Failed",
        transfer: Transfer | None = None,
    ) -> None:
        """End a round before any weights moved: it touched nothing, or only paused engines (``transfer``).

        Engines that it inherited closed (from a round that it superseded in Holding) resume if they hold what is
        committed: nobody else would open them. Are there others, the round does not end but holds them.
        """
        hold = RefusedHold(self)
        uids = await hold.owned() if outcome == "Failed" else frozenset()
        if not hold.closed(uids):
            if transfer is not None:
                await self.abort(transfer, stage, reason, message, outcome=outcome)
                return
            await self.resume_committed()
            await self.settle(outcome, stage, reason, message)
            return
        await hold.begin(stage, reason, message, uids)
        await hold.hold(fresh=False)

    async def resume_committed(self) -> None:
        """Let engines serve that are closed, not ours to load, and proven at the committed version."""
        closed = abort(RoundPlan((), 1), self.fleet.engines, self.ledger.committed, operation=self.run.round_uid).resume
        if closed:
            await self.resume(closed, self.ctx.clock.monotonic() + REOPEN_SECONDS)

    async def shut(self, names: Iterable[str]) -> None:
        """Take engines out of the routers, as far as their gates answer; they stay paused in any case."""
        orders = dict.fromkeys(names, wire.CloseOrder())
        await self.fleet.run(self.run.caller, "Close", orders, deadline=self.ctx.clock.monotonic() + SHUT_SECONDS)

    async def settle(
        self,
        outcome: str,
        stage: str,
        reason: Reason,
        message: str,
        *,
        transfer: Transfer | None = None,
        verdicts: dict[str, Verdict] | None = None,
        committed: bool = False,
    ) -> None:
        """Write the end of the round, release the hold, free the slot."""
        await self.release()
        with contextlib.suppress(RoundGone, Unavailable):
            await self.ledger.read_round()  # a cancel that came late is recorded too
        self.run.timings["totalMs"] = round((self.ctx.clock.monotonic() - self.run.began) * 1000)
        status = settled(
            self.ledger.round or {},
            outcome=outcome,
            stage=stage,
            reason=reason,
            message=message,
            committed=committed,
            now_ms=self.ctx.now_ms(),
        )
        status["lease"] = self.ledger.lease()
        status["timings"] = self.run.timings
        if verdicts is not None:
            status["members"] = member_results(transfer, verdicts)
        try:
            await self.ledger.write_round(status, op=AttemptOp.SETTLE, what=outcome)
        except RoundGone:
            log.warning("round vanished before it was settled", extra={"round": self.run.round_uid})
            assert self.ledger.round is not None
            self.ledger.round["status"] = {**self.ledger.round_status, **status}
        log.log(
            logging.INFO if outcome == "Succeeded" else logging.WARNING,
            "%s: %s: %s",
            outcome,
            reason.value,
            message,
            extra={
                "round": (self.ledger.round or {}).get("metadata", {}).get("name"),
                "roundUID": self.run.round_uid,
                "pipeline": f"{self.ledger.namespace}/{self.ledger.name}",
                "generation": self.ledger.generation,
            },
        )
        if self.ledger.round is not None:
            kind: EventType = "Normal" if outcome == "Succeeded" else "Warning"
            self.ctx.events.record(self.ledger.round, kind, reason.value, message, action="Settle")
            finished(self.ctx, self.ledger.round)
        await self.free(trouble=(reason, message) if reason is Reason.ROUTING_DEGRADED else None)

    async def settled_before(self) -> None:
        """A predecessor settled the round and died before it freed the slot: say so, and free it."""
        phase = str(self.ledger.round_status["phase"])
        await self.ledger.write_round({"phase": phase}, op=AttemptOp.SETTLE, what=phase)
        assert self.ledger.round is not None
        finished(self.ctx, self.ledger.round, again=True)
        await self.free()

    async def release(self) -> None:
        """End the hold at the sender."""
        await self.run.sender.release(self.run.caller)

    async def free(self, trouble: tuple[Reason, str] | None = None) -> None:
        """Free the slot (with the pipeline's status as it now is), then let the round object go."""
        assert self.ledger.round is not None
        assert self.run.pipeline_status is not None
        await self.fleet.read_pods()
        await self.fleet.poll()
        await remove_dropped(self.run)
        status = {"activeOperation": None, **self.run.pipeline_status(trouble=trouble)}
        if self.run.kind == "Refresh":
            # A CatchUp is no news of the fleet: what the last Refresh said stands.
            status["lastRound"] = self.ledger.round["metadata"]["name"]
        await self.ledger.write_pipeline(status, what="free")
        self.ctx.metrics.round_moved(self.ledger.namespace, self.ledger.name, None)
        await self.ledger.set_finalizer(False)
