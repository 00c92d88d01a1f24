"""One CatchUp from claim to settle: named engines are brought to what is committed already (DESIGN section 5).

Invariants:
- it commits nothing, and touches only those of its ``engines`` that still need it; everybody else is only fenced;
- an attempt is counted, durably, before the first call that touches its engine;
- each engine is resumed when it is proven, by the resume rule; one that is not stays closed, and is not waited for;
- until weights move it makes room for a Refresh that can run, and for a trainer that waits to publish.

Death between any two lines: the next claim passes the barrier and enters where ``plan.catchup.enter_catch_up`` says.
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
from rlfleet.control.rounds.barrier import pass_barrier
from rlfleet.control.rounds.counting import count_attempts, counts_of, note_reasons
from rlfleet.control.rounds.ending import REOPEN_SECONDS, SHUT_SECONDS, Ending
from rlfleet.control.rounds.executor import PROOF_SECONDS, Executor
from rlfleet.control.rounds.fleet import ok, why
from rlfleet.control.rounds.ledger import API_SECONDS, committed_of, is_terminal, ref_of
from rlfleet.control.rounds.transfer import Target, Transfer, member_rows, plan_of
from rlfleet.kube.resources import ENGINEPOOLS, SYNCROUNDS
from rlfleet.plan.allowance import spent
from rlfleet.plan.catchup import (
    Transporting,
    absorbed_by,
    choose_members,
    enter_catch_up,
    left_closed,
    needs,
    outdated,
)
from rlfleet.plan.rounds import TERMINAL, Committed, Member, held, layout_of
from rlfleet.plan.topology import train_devices
from rlfleet.plan.triage import triage
from rlfleet.plan.verdicts import Entry, Verdict

log = logging.getLogger(__name__)

#: Seconds between two looks for what a CatchUp makes room for.
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a CatchUp ends before weights move."""

    outcome: str
    reason: Reason
    message: str


def transporting(spec: dict[str, Any]) -> Transporting:
    """What an RLPipeline's spec says of transport and proof."""
    return Transporting(
        mode=spec["transport"]["mode"],
        backend=spec["transport"]["backend"],
        train=train_devices((spec.get("trainer") or {}).get("gpus")),
        verify=spec["sync"]["verify"],
    )


class CatchUp(Executor):
    """Executes one CatchUp under one claim."""

    async def execute(self, extra: dict[str, Any]) -> None:
        """Claim and carry the round to its end."""
        active = self.ledger.status.get("activeOperation") or {}
        self.takeover = active.get("uid") == self.round_uid
        await self.claim(extra)
        ending = Ending(self)
        if self.ledger.round_status.get("phase") in TERMINAL:
            # Settled by a predecessor that died before it freed the slot: the identical replay is a success.
            await ending.settled_before()
            return
        await pass_barrier(self, takeover=self.takeover)
        plan = plan_of(self.ledger.round_status)
        phase = str(self.ledger.round_status.get("phase") or "")
        if enter_catch_up(phase, planned=plan is not None) is Entry.JUDGE:
            assert plan is not None
            transfer = self.transfer(plan, self.target_from_status())
            await self._finish(transfer, ending, plan.members, load=False)
            return
        planned = await self._plan(ending)
        if planned is None:
            return
        members = await self._ready(planned, ending)
        if members is None:
            return
        await self.phase("Transferring", Reason.TRANSFERRING, f"{len(members)} engines load")
        await self._finish(planned, ending, members, load=True)

    # ------------------------------------------------------------------------------------------ before weights move

    async def _plan(self, ending: Ending) -> Transfer | None:
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
            return None
        transfer = await self._freeze(ending, committed, slot)
        if transfer is not None:
            self.lap("planMs", started)
            await self._say_planned(transfer)
        return transfer

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
            how=transporting(self.ledger.spec),
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
        target = Target(
            operation=self.round_uid,
            version=committed.version,
            manifest_digest=committed.manifest_digest,
            total_bytes=slot.total_bytes,
            sender_incarnation=self.sender.status.incarnation,
        )
        return self.transfer(plan, target)

    async def _say_planned(self, transfer: Transfer) -> None:
        plan = transfer.plan
        serialized, broadcast = plan.of(wire.Transport.SERIALIZED), plan.of(wire.Transport.BROADCAST)
        await self.phase(
            "Planned",
            Reason.PLANNED,
            f"{len(serialized)} serialized, {len(broadcast)} broadcast",
            startedAt=self.ledger.round_status.get("startedAt") or rfc3339(self.ctx.now_ms()),
            manifestDigest=transfer.target.manifest_digest,
            bytes=transfer.target.total_bytes,
            plan={
                "worldSize": plan.world_size if broadcast else 0,
                "serialized": len(serialized),
                "broadcast": len(broadcast),
                "members": member_rows(plan),
            },
        )

    async def _ready(self, transfer: Transfer, ending: Ending) -> list[Member] | None:
        """Staging, then Quiescing: the members that can load; None: the round has ended."""
        started = self.ctx.clock.monotonic()
        members = list(transfer.plan.members)
        await self.phase(
            "Staging",
            Reason.STAGING,
            f"{transfer.target.total_bytes} bytes to {len(members)} gates",
            stagingAt=self.ledger.round_status.get("stagingAt") or rfc3339(self.ctx.now_ms()),
        )
        stop = await self._unless_stopped(
            transfer.stage(members, deadline=self.deadline("stagingSeconds", "stagingAt"), again=self.takeover)
        )
        self.lap("stageMs", started)
        staged = [m for m in members if transfer.staged(m)]
        if stop is None and not staged:
            reason, message = transfer.trouble.first() or (Reason.STAGING_FAILED, "no gate received its bytes")
            stop = Stop("Failed", Reason.STAGING_FAILED, f"no gate received the weights; {reason.value}: {message}")
        if stop is not None:
            await ending.settle(stop.outcome, "Staging", stop.reason, stop.message)
            return None
        if not transfer.plan.of(wire.Transport.BROADCAST):
            # All bytes are at the gates: a trainer need not wait for the loads to publish what comes next.
            await ending.release()
        counted = await count_attempts(self.ledger, self.fleet, staged, transfer.target.version, self.round_uid)
        return await self._quiesce_members([m for m in staged if m.engine in counted], transfer, ending)

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
        order = dict.fromkeys((m.engine for m in members), wire.PauseOrder())

        async def pause() -> None:
            # Anew after a takeover: what the predecessor's pause proved may not hold any more.
            results = await self.fleet.run(
                self.caller, "Pause", order, deadline=self.load_deadline(), again=self.takeover
            )
            transfer.trouble.note_results(results)
            paused.update(name for name, result in results.items() if ok(result))

        paused: set[str] = set()
        stop = await self._unless_stopped(pause())
        self.lap("quiesceMs", started)
        ready = [m for m in members if m.engine in paused]
        if stop is None and not ready:
            reason, message = transfer.trouble.first() or (Reason.QUIESCE_FAILED, "no engine could be paused")
            stop = Stop("Failed", Reason.QUIESCE_FAILED, f"no engine could be paused; {reason.value}: {message}")
        if stop is None:
            return ready
        if stop.outcome == "Failed":
            await self._close({m.engine for m in members})
            await self._note(transfer, {m.engine for m in members}, stop.reason)
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
        await self.ledger.read_round()
        assert self.ledger.round is not None
        me = ref_of(self.ledger.round)
        if me.cancel or me.deleting:
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

    # ------------------------------------------------------------------------------------------ weights move

    async def _finish(self, transfer: Transfer, ending: Ending, members: Iterable[Member], *, load: bool) -> None:
        """Load, prove and open each engine by itself where that is possible, then settle.

        ``load`` False: a predecessor died in Transferring, so what its loads left is judged and nothing is loaded.
        """
        started = self.ctx.clock.monotonic()
        if not load:
            transfer.trouble.note("", Reason.OPERATOR_RESTARTED, "an operator died while weights moved")
        groups = self._groups(list(members))
        stuck: dict[str, tuple[Reason, str]] = {}
        results = await asyncio.gather(
            *(self._bring(group, transfer, ending, load=load, stuck=stuck) for group in groups), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self.lap("transferMs", started)
        await self.fleet.read_pods()
        await self.fleet.poll([m.engine for m in transfer.plan.members if m.engine in self.fleet.engines])
        verdicts = transfer.verdicts()
        behind = left_closed(verdicts, stuck)
        await self._close({n for n in behind if verdicts[n] is not Verdict.WHOLE})
        ending.note_paused()
        if not behind:
            opened = sum(v is Verdict.WHOLE for v in verdicts.values())
            await ending.settle(
                "Succeeded",
                "Transferring",
                Reason.SUCCEEDED,
                f"{opened} engines caught up with version {transfer.target.version}" + self._tail(transfer),
                transfer=transfer,
                verdicts=verdicts,
            )
            return
        reason, message = self._worst(transfer, behind, stuck)
        await self._note(transfer, behind, reason)
        await ending.settle(
            "Failed",
            "Transferring",
            reason,
            f"{len(behind)} of {len(verdicts)} engines stay closed; {message}",
            transfer=transfer,
            verdicts=verdicts,
        )

    def _groups(self, members: list[Member]) -> list[list[Member]]:
        """Who must be proven together: ranks of one broadcast, and engines of a layout without a committed digest."""
        committed = self.ledger.committed
        known = (committed.engine_digests or {}) if committed is not None else {}
        alone = self.ledger.spec["sync"]["verify"] == "Off"
        single: list[list[Member]] = []
        together: list[Member] = []
        for m in members:
            engine = self.fleet.engines.get(m.engine)
            if engine is None:
                continue
            if m.transport is wire.Transport.SERIALIZED and (alone or layout_of(engine) in known):
                single.append([m])
            else:
                together.append(m)
        return [*single, together] if together else single

    async def _bring(
        self,
        group: list[Member],
        transfer: Transfer,
        ending: Ending,
        *,
        load: bool,
        stuck: dict[str, tuple[Reason, str]],
    ) -> None:
        """Load, verify, publish, open one group."""
        names = [m.engine for m in group]
        if load:
            await transfer.load(group, deadline=self.load_deadline())
        # The weights are in: without the time to prove it the load was for nothing.
        deadline = max(self.deadline("pausedSeconds", "pausedAt"), self.ctx.clock.monotonic() + PROOF_SECONDS)
        await self.fleet.poll(names)
        judged = transfer.verdicts()
        loaded = [m for m in group if judged[m.engine] is Verdict.LOADED]
        if loaded:
            agreement = await transfer.verify(
                loaded,
                committed=self.ledger.committed,
                how=self.ledger.spec["sync"]["verify"],
                deadline=deadline,
                known={},
                again=not load,
            )
            await transfer.publish(agreement, deadline=deadline, again=not load)
            await self.fleet.poll(names)
        judged = transfer.verdicts()
        whole = [n for n in names if judged[n] is Verdict.WHOLE]
        if not whole:
            return
        await self._learn(whole)
        for name in await ending.resume(whole, self.ctx.clock.monotonic() + REOPEN_SECONDS):
            stuck[name] = (Reason.ROUTING_DEGRADED, "it holds the committed version and could not be reopened")

    async def _learn(self, whole: list[str]) -> None:
        """A layout without a committed engine digest gets the one that these engines proved."""
        committed = self.ledger.committed
        assert committed is not None
        known = dict(committed.engine_digests or {})
        found = {}
        for name in whole:
            status = self.fleet.engines[name].status
            if status is not None and status.holds is not None and status.holds.engine_digest:
                found[layout_of(self.fleet.engines[name])] = status.holds.engine_digest
        if found.keys() <= known.keys():
            return
        digests = {**found, **known}
        raw = dict(self.ledger.status["committed"])
        raw["engineDigests"] = [{"layout": k, "digest": v} for k, v in sorted(digests.items())]
        await self.ledger.write_pipeline({"committed": raw}, what="engine digests")

    # ------------------------------------------------------------------------------------------ the end

    async def _close(self, names: set[str]) -> None:
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

    async def _note(self, transfer: Transfer, names: Iterable[str], otherwise: Reason) -> None:
        known = transfer.trouble.by_engine
        reasons = {n: known[n][0] if n in known else otherwise for n in names}
        await note_reasons(self.ledger, self.fleet, reasons, self.round_uid)

    @staticmethod
    def _worst(transfer: Transfer, behind: Iterable[str], stuck: dict[str, tuple[Reason, str]]) -> tuple[Reason, str]:
        known = {**stuck, **transfer.trouble.by_engine}
        for name in sorted(behind):
            if name in known:
                reason, message = known[name]
                return reason, f"{name}: {message}"
        first = transfer.trouble.by_engine.get("")
        name = min(behind)
        if first is not None:
            return first[0], f"{name}: {first[1]}"
        return Reason.TRANSFER_FAILED, f"{name}: nothing proves that it holds the weights"

    @staticmethod
    def _tail(transfer: Transfer) -> str:
        if not transfer.unconfirmed:
            return ""
        return f"; no other engine confirms what {', '.join(sorted(transfer.unconfirmed)[:4])} loaded"
