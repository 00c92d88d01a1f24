"""A CatchUp until weights move: members, bytes, pauses, and what makes it stop before that (DESIGN section 5).

Invariants:
- only those of its ``engines`` are touched that still need it; everybody else is only fenced;
- an attempt is counted, durably, before the first call that touches its engine;
- it makes room for a Refresh that can run, and for a trainer that waits to publish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.peers import PeerError
from rlfleet.control.rounds.counting import count_attempts, counts_of, note_reasons
from rlfleet.control.rounds.ending import SHUT_SECONDS, Ending
from rlfleet.control.rounds.executor import Executor
from rlfleet.control.rounds.ledger import API_SECONDS
from rlfleet.control.rounds.objects import committed_of, is_terminal, ref_of
from rlfleet.control.rounds.plan_record import plan_row, summary
from rlfleet.control.rounds.preparing import cut_of
from rlfleet.control.rounds.results import ok, why
from rlfleet.control.rounds.transfer import Transfer
from rlfleet.kube.resources import ENGINEPOOLS, SYNCROUNDS
from rlfleet.plan.allowance import spent
from rlfleet.plan.catchup import (
    Transporting,
    absorbed_by,
    choose_members,
    needs,
    outdated,
)
from rlfleet.plan.checkpoint import is_shelf, mode_of, path_template
from rlfleet.plan.rounds import Committed, Member, held
from rlfleet.plan.topology import Identity
from rlfleet.plan.triage import triage

log = logging.getLogger(__name__)

#: Seconds between two looks for what a CatchUp makes room for.
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a CatchUp ends before weights move."""

    outcome: str
    reason: Reason
    message: str


def transporting(spec: dict[str, Any], train: Identity, slot: wire.SenderCache | None) -> Transporting:
    """What an RLPipeline's spec says of transport and proof, and where its trainer runs.

    ``slot``: the weights at the sender; None: it does not hold them.
    """
    return Transporting(
        mode=mode_of(spec),
        backend=spec["transport"]["backend"],
        train=train.devices,
        verify=spec["sync"]["verify"],
        disputes=(train.conflict,) if train.conflict else (),
        cut=cut_of(spec, slot),
        path_template=path_template(spec),
    )


class CatchUpReady(Executor):
    """The part of a CatchUp that ends before any weight moves."""

    async def plan(self, ending: Ending) -> Transfer | None:
        """Planned: hold at the sender, members frozen; nothing is touched when a refusal applies."""
        started = self.ctx.clock.monotonic()
        assert self.ledger.round is not None
        stop = await self._stop()
        committed = self.ledger.committed
        if stop is None:
            end = outdated(ref_of(self.ledger.round), committed)
            stop = Stop(end.outcome, end.reason, end.message) if end is not None else None
        if stop is not None:
            await ending.settle(stop.outcome, "Planned", stop.reason, stop.message)
            return None
        assert committed is not None
        slot = await self._taken_hold(ending, committed)
        transfer = await self._freeze(ending, committed, slot) if slot is not None else None
        if transfer is not None:
            self.lap("planMs", started)
            await self._say_planned(transfer)
        return transfer

    async def _taken_hold(self, ending: Ending, committed: Committed) -> wire.SenderCache | None:
        """The committed bytes, held at the sender for the round's time; None: the round has ended."""
        if is_shelf(self.sender.status):
            assert self.sender.status is not None
            return held(self.sender.status, committed.version, committed.manifest_digest)
        if self.sender.peer is None or self.sender.status is None:
            reason, message = self.sender.problem or (Reason.SENDER_UNREACHABLE, "the sender does not answer")
            await ending.settle("Failed", "Planned", reason, message)
            return None
        deadlines = self.ledger.spec["sync"]["deadlines"]
        try:
            self.sender.status = await self.ctx.peers.hold(
                self.sender.peer,
                self.caller,
                version=committed.version,
                digest=committed.manifest_digest,
                deadline_seconds=sum(int(deadlines[k]) for k in ("stagingSeconds", "pausedSeconds")) + 60,
            )
        except PeerError as e:
            await ending.settle("Failed", "Planned", *why(e))
            return None
        slot = held(self.sender.status, committed.version, committed.manifest_digest)
        if slot is None:
            await ending.settle(
                "Failed", "Planned", Reason.VERSION_NOT_HELD, "the sender took no hold on the committed version"
            )
        return slot

    async def _freeze(self, ending: Ending, committed: Committed, slot: wire.SenderCache) -> Transfer | None:
        """The members: those of ``engines`` that still need it, have attempts left, and can take part."""
        named = set(self.round_spec.get("engines") or ())
        pools = await self.ledger.kube.list(ENGINEPOOLS, self.ledger.namespace, timeout=API_SECONDS)
        counts = counts_of(pools.items)
        want = [e for e in self.fleet.engines.values() if e.name in named and needs(e, committed, self.ledger.uid)]
        left = [e for e in want if not spent(counts, e)]
        if want and not left:
            await ending.settle(
                "Failed",
                "Planned",
                Reason.CATCH_UP_EXHAUSTED,
                f"{', '.join(sorted(e.name for e in want)[:4])}: no catch-up attempt is left; delete these pods, "
                "or sync: the next Refresh takes them along",
            )
            return None
        assert self.sender.status is not None
        plan, refused = choose_members(
            left,
            committed=committed,
            how=transporting(self.ledger.spec, self.sender.train, slot),
            sender=self.sender.status,
            total_bytes=slot.total_bytes,
        )
        if not plan.members and refused:
            name, refusal = next(iter(sorted(refused.items())))
            await ending.settle("Failed", "Planned", refusal.reason, f"{name}: {refusal.message}")
            return None
        if not plan.members:
            await ending.settle(
                "Succeeded", "Planned", Reason.ALREADY_COMMITTED, "none of these engines needs to catch up any more"
            )
            return None
        return self.transfer(plan, self.target(slot))

    async def _say_planned(self, transfer: Transfer) -> None:
        plan = transfer.plan
        await self.phase(
            "Planned",
            Reason.PLANNED,
            summary(plan),
            startedAt=self.ledger.round_status.get("startedAt") or rfc3339(self.ctx.now_ms()),
            manifestDigest=transfer.target.manifest_digest,
            bytes=transfer.target.total_bytes or None,
            plan=plan_row(plan),
        )

    async def ready(self, transfer: Transfer, ending: Ending) -> list[Member] | None:
        """Staging, then Quiescing: the members that can load; None: the round has ended."""
        started = self.ctx.clock.monotonic()
        members = list(transfer.plan.members)
        await self.phase(
            "Staging",
            Reason.STAGING,
            transfer.what_is_staged(members),
            stagingAt=self.ledger.round_status.get("stagingAt") or rfc3339(self.ctx.now_ms()),
        )
        stop = await self._unless_stopped(self._stage(members, transfer))
        self.lap("stageMs", started)
        staged = [m for m in members if transfer.staged(m)]
        if stop is None and not staged:
            reason, message = transfer.trouble.first() or (Reason.STAGING_FAILED, "no gate received its bytes")
            stop = Stop("Failed", Reason.STAGING_FAILED, f"no gate received the weights; {reason.value}: {message}")
            await self.note(transfer, {m.engine for m in members}, reason)
        if stop is not None:
            await ending.settle(stop.outcome, "Staging", stop.reason, stop.message)
            return None
        if not any(transfer.plan.needs_sender(m) for m in members):
            # All bytes are at the gates: a trainer need not wait for the loads to publish what comes next.
            await ending.release()
        counted = await count_attempts(self.ledger, self.fleet, staged, transfer.target.version, self.round_uid)
        return await self._quiesce_members([m for m in staged if m.engine in counted], transfer, ending)

    async def _stage(self, members: list[Member], transfer: Transfer) -> None:
        """Bytes to the gates. A gate that does not know how its last order ended takes none before a verified pause."""
        deadline = self.deadline("stagingSeconds", "stagingAt")
        uncertain = [m for m in members if self._uncertain(m)]
        if uncertain:
            version = transfer.target.version
            counted = await count_attempts(self.ledger, self.fleet, uncertain, version, self.round_uid)
            asked = [m for m in uncertain if m.engine in counted]
            seconds = float(self.ledger.spec["sync"]["deadlines"]["pausedSeconds"])
            until = min(deadline, self.ctx.clock.monotonic() + seconds)
            await self._pause(asked, transfer, until, set())
            await self.fleet.poll([m.engine for m in asked])
        certain = [m for m in members if not self._uncertain(m)]
        await transfer.stage(certain, deadline=deadline, again=self.takeover)

    def _uncertain(self, m: Member) -> bool:
        engine = self.fleet.engines.get(m.engine)
        return engine is not None and engine.status is not None and engine.status.uncertain

    async def _pause(self, members: list[Member], transfer: Transfer, deadline: float, paused: set[str]) -> None:
        """Pause, verified; adds to ``paused`` whoever is."""
        left = max(deadline - self.ctx.clock.monotonic(), 1.0)
        order = dict.fromkeys((m.engine for m in members), wire.PauseOrder(budget_seconds=left))
        # Anew after a takeover: what the predecessor's pause proved may not hold any more.
        results = await self.fleet.run(self.caller, "Pause", order, deadline=deadline, again=self.takeover)
        transfer.trouble.note_results(results)
        paused.update(name for name, result in results.items() if ok(result))

    async def _quiesce_members(self, members: list[Member], transfer: Transfer, ending: Ending) -> list[Member] | None:
        """Pause, verified. Most are paused by their own gates; one that can not be paused is left out."""
        started = self.ctx.clock.monotonic()
        await self.phase(
            "Quiescing",
            Reason.QUIESCING,
            f"pausing {len(members)} engines",
            pausedAt=self.ledger.round_status.get("pausedAt") or rfc3339(self.ctx.now_ms()),
        )
        self.paused_since = self.ctx.clock.monotonic()
        paused: set[str] = set()
        stop = await self._unless_stopped(self._pause(members, transfer, self.load_deadline(), paused))
        self.lap("quiesceMs", started)
        ready = [m for m in members if m.engine in paused]
        if stop is None and not ready:
            reason, message = transfer.trouble.first() or (Reason.QUIESCE_FAILED, "no engine could be paused")
            stop = Stop("Failed", Reason.QUIESCE_FAILED, f"no engine could be paused; {reason.value}: {message}")
        if stop is None:
            return ready
        if stop.outcome == "Failed":
            await self.close({m.engine for m in members})
            await self.note(transfer, {m.engine for m in members}, stop.reason)
        await ending.settle(stop.outcome, "Quiescing", stop.reason, stop.message)
        return None

    # ------------------------------------------------------------------------------------------ making room

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> Stop | None:
        """Run ``work`` to its end, or until there is a reason to stop; what runs at gates then ends by itself."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
                stop = await self._stop()
                if stop is not None:
                    return stop
                if done:
                    task.result()
                    return None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _stop(self) -> Stop | None:
        """Cancelled, or somebody is waiting whom a CatchUp must not be in the way of."""
        if await self.cancelled():
            return Stop("Cancelled", Reason.CANCELLED, "cancelled before weights moved")
        # Looked for anew, not only asked: a trainer that was replaced has another pod.
        await self.sender.find(self.ledger.spec)
        if self.sender.status is not None and self.sender.status.publish_waiting:
            return Stop("Superseded", Reason.SUPERSEDED, "the trainer waits to publish a newer version")
        listed = await self.ledger.kube.list(SYNCROUNDS, self.ledger.namespace, timeout=API_SECONDS)
        pending = [
            ref
            for r in listed.items
            if r["spec"]["pipeline"] == self.ledger.name and not is_terminal(r) and (ref := ref_of(r)).kind == "Refresh"
        ]
        if not pending:
            return None
        newer = triage(
            pending,
            committed=committed_of(self.ledger.pipeline),
            sender=self.sender.status,
            sender_problem=self.sender.problem,
            now_ms=self.ctx.now_ms(),
            pending_ms=int(self.ledger.spec["sync"]["deadlines"]["pendingSeconds"]) * 1000,
            joinable=1,
            expected=1,  # this round's own engines are there for it
        ).run
        return None if newer is None else Stop("Superseded", Reason.SUPERSEDED, absorbed_by(newer))

    # ------------------------------------------------------------------------------------------ left behind

    async def close(self, names: set[str]) -> None:
        """Take engines that did not get there out of the routers, where one may list them."""
        orders = {}
        for name in names:
            engine = self.fleet.engines.get(name)
            if engine is None or engine.gone:
                continue
            if engine.status is None or any(v is not False for v in engine.status.routed.values()):
                orders[name] = wire.CloseOrder()
        shut = self.ctx.clock.monotonic() + SHUT_SECONDS
        for name, result in (await self.fleet.run(self.caller, "Close", orders, deadline=shut, again=True)).items():
            if not ok(result):
                log.warning("close failed", extra={"engine": name, "why": str(why(result))})

    async def note(self, transfer: Transfer, names: Iterable[str], otherwise: Reason) -> None:
        known = transfer.trouble.by_engine
        reasons = {n: known[n][0] if n in known else otherwise for n in names}
        await note_reasons(self.ledger, self.fleet, reasons, self.round_uid)
