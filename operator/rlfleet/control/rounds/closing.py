"""How a round ends: commit, reopen, Holding, abort by the resume rule, settle.

Invariants (DESIGN section 5):
- the commit is one conditional write of RLPipeline.status; before it only abort, after it only forward;
- resume is asked only for committed weights, and every gate checks that against its own record;
- nothing opens while more than ``maxUnavailable`` members are missing, and nothing is committed while a live engine
  has not stored our fence;
- settle writes the round first and frees the slot second: dying in between repeats the same settle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import epoch_ms, rfc3339
from rlfleet.control.peers import PeerError
from rlfleet.control.rounds.fleet import ok, why
from rlfleet.control.rounds.healing import Healing
from rlfleet.control.rounds.ledger import RoundGone
from rlfleet.control.rounds.outcome import member_results, settled
from rlfleet.kube.events import EventType
from rlfleet.plan.rounds import Engine, RoundPlan, unavailable_limit
from rlfleet.plan.verdicts import Next, Outcome, Verdict, abort, conclude, could_serve, unfenced

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.control.rounds.transfer import Transfer

log = logging.getLogger(__name__)

#: Seconds in which engines must resume and routers must list them after a commit, before the round says degraded.
REOPEN_SECONDS = 60.0
#: Seconds for an engine to pause that is found open before a commit, or to leave the routers when a round aborts.
SHUT_SECONDS = 10.0
MAX_ATTEMPTS = 20


class Closing:
    """The ends of one execution."""

    def __init__(self, run: Executor) -> None:
        self.run = run
        self.ledger = run.ledger
        self.fleet = run.fleet
        self.ctx = run.ctx

    def limit(self, transfer: Transfer) -> int:
        """``maxUnavailable`` of this round as a count."""
        total = len(transfer.plan.members) + len(transfer.plan.silent)
        return unavailable_limit(self.ledger.spec["sync"]["maxUnavailable"], total)

    # ------------------------------------------------------------------------------------------ verdict

    async def look(self, transfer: Transfer) -> tuple[Outcome, dict[str, Verdict]]:
        """Observe everybody live, fence whoever is not fenced yet, and conclude."""
        await self.fleet.read_pods()
        missing_fence = unfenced(
            self.fleet.engines.values(), pipeline=self.ledger.uid, generation=self.ledger.generation
        )
        await self.fleet.fence(self.run.caller, missing_fence)
        still = unfenced(self.fleet.engines.values(), pipeline=self.ledger.uid, generation=self.ledger.generation)
        verdicts = transfer.verdicts()
        still = (*still, *await self._shut(verdicts))
        outcome = conclude(
            transfer.plan,
            verdicts,
            unfenced=still,
            max_unavailable=self.ledger.spec["sync"]["maxUnavailable"],
        )
        return outcome, verdicts

    async def _shut(self, verdicts: dict[str, Verdict]) -> tuple[str, ...]:
        """Pause engines that could serve something else than the target; the names that are not proven paused.

        Such are engines that were silent when members were frozen, and members that an interrupted abort resumed.
        """
        serving = could_serve(self.fleet.engines, verdicts)
        if not serving:
            return ()
        deadline = self.ctx.clock.monotonic() + SHUT_SECONDS
        orders = dict.fromkeys(serving, wire.PauseOrder())
        await self.fleet.run(self.run.caller, "Pause", orders, deadline=deadline, again=True)
        await self.fleet.poll(serving)
        return tuple(n for n in serving if (s := self.fleet.engines[n].status) is None or s.engine.paused is not True)

    async def hold_or_commit(self, transfer: Transfer) -> None:
        """After the transfer: commit and reopen, abort, or hold until one of them is right."""
        outcome, verdicts = await self.look(transfer)
        if outcome.next is not Next.COMMIT:
            outcome, verdicts = await self._settle_down(transfer, outcome, verdicts)
        if outcome.next is Next.COMMIT:
            await self.commit(transfer, outcome)
            await self.reopen(transfer)
        elif outcome.next is Next.ABORT:
            late = self.ctx.clock.monotonic() >= self.run.deadline("pausedSeconds", "pausedAt")
            first = transfer.trouble.first()
            reason = Reason.PAUSED_DEADLINE if late else Reason.TRANSFER_FAILED
            if (
                not late
                and first is not None
                and first[0]
                in (
                    Reason.VERIFY_FAILED,
                    Reason.PUBLISH_FAILED,
                    Reason.OPERATOR_RESTARTED,
                )
            ):
                reason = first[0]
            detail = f"{first[0].value}: {first[1]}" if first else "no load began"
            await self.abort(transfer, "Transferring", reason, f"no engine took over the version; {detail}")
        else:
            await Healing(self).hold(transfer)

    async def _settle_down(
        self, transfer: Transfer, outcome: Outcome, verdicts: dict[str, Verdict]
    ) -> tuple[Outcome, dict[str, Verdict]]:
        """Give pods that are just dying a moment: a crashed engine's pod is reported Failed a little later.

        Lost members do not count against maxUnavailable, so this decides between committing and Holding.
        """
        deadline = min(self.ctx.clock.monotonic() + 3.0, self.run.deadline("pausedSeconds", "pausedAt"))
        while outcome.next is not Next.COMMIT and self.ctx.clock.monotonic() < deadline:
            dying = [
                name
                for name in (*outcome.missing, *outcome.unfenced)
                if (e := self.fleet.engines.get(name)) is not None
                and not e.gone
                and (e.leaving or e.status is None or e.status.engine.state is not wire.EngineState.READY)
            ]
            if not dying:
                break
            await asyncio.sleep(0.1)
            await self.fleet.read_pods()
            await self.fleet.poll(dying)
            outcome, verdicts = await self.look(transfer)
        return outcome, verdicts

    # ------------------------------------------------------------------------------------------ commit

    def _digests(self, outcome: Outcome) -> dict[str, str]:
        """The engines' own digest per layout, from the whole members' records."""
        digests: dict[str, str] = {}
        for name in outcome.whole:
            status = self.fleet.engines[name].status
            if status is not None and status.holds is not None and status.holds.engine_digest:
                digests[status.engine.layout or "unknown"] = status.holds.engine_digest
        return digests

    async def commit(self, transfer: Transfer, outcome: Outcome) -> None:
        """The commit point: ``committed`` and ``activeOperation.committed`` in one conditional write."""
        await self.ledger.read_pipeline()
        old = self.ledger.committed
        digests = self._digests(outcome)
        if old is not None and old.manifest_digest == transfer.target.manifest_digest:
            # Same bytes: layouts that have no engine in this round keep the digest they are known to reach.
            digests = {**(old.engine_digests or {}), **digests}
        active = dict(self.ledger.status.get("activeOperation") or {})
        await self.ledger.write_pipeline(
            {
                "committed": {
                    "version": transfer.target.version,
                    "manifestDigest": transfer.target.manifest_digest,
                    "senderIncarnation": transfer.target.sender_incarnation,
                    "engineDigests": [{"layout": k, "digest": v} for k, v in sorted(digests.items())],
                },
                "activeOperation": {**active, "committed": True},
            }
        )

    async def commit_without_members(self, transfer: Transfer) -> None:
        """A round with nobody in it: committed at once, but only if no live engine is there."""
        outcome, _ = await self.look(transfer)
        live = [n for n, e in self.fleet.engines.items() if not e.gone]
        if live:
            await self.refuse(
                "Planned",
                Reason.GATES_UNREACHABLE,
                f"no engine can take part, but {len(live)} are alive ({', '.join(sorted(live)[:4])}): "
                "they may still be starting; sync again when their gates answer",
            )
            return
        await self.commit(transfer, outcome)
        await self.settle(
            "Succeeded",
            "Planned",
            Reason.NO_MEMBERS,
            "no engines: the version is committed for those to come",
            transfer=transfer,
            committed=True,
        )

    # ------------------------------------------------------------------------------------------ reopen

    async def reopen(self, transfer: Transfer) -> None:
        """Resume the whole members, add routes where they lack, close the others; then settle."""
        started = self.ctx.clock.monotonic()
        deadline = started + REOPEN_SECONDS
        verdicts = transfer.verdicts()
        whole = [n for n, v in verdicts.items() if v is Verdict.WHOLE]
        resume = wire.ResumeOrder(version=transfer.target.version, manifest_digest=transfer.target.manifest_digest)
        resumed, _ = await asyncio.gather(
            # Anew, not joined: a resume that a predecessor asked for may have failed.
            self.fleet.run(self.run.caller, "Resume", dict.fromkeys(whole, resume), deadline=deadline, again=True),
            self.run.phase("Committed", Reason.COMMITTED, f"{len(whole)} engines reopen", committed=True),
        )
        self._note_paused()
        bad = {n: why(r) for n, r in resumed.items() if not ok(r)}
        await self.fleet.poll(whole)
        closed = [
            n
            for n in whole
            if n not in bad
            and (status := self.fleet.engines[n].status) is not None
            and any(v is not True for v in status.routed.values())
        ]
        others = [n for n, v in verdicts.items() if v in (Verdict.UNTOUCHED, Verdict.POISONED, Verdict.LOADED)]
        others += [n for n, e in self.fleet.engines.items() if n not in verdicts and routed(e) and not e.gone]
        opened, shut = await asyncio.gather(
            self.fleet.run(self.run.caller, "Open", dict.fromkeys(closed, wire.OpenOrder()), deadline=deadline),
            self.fleet.run(self.run.caller, "Close", dict.fromkeys(others, wire.CloseOrder()), deadline=deadline),
        )
        bad |= {n: why(r) for n, r in opened.items() if not ok(r)}
        for name, result in shut.items():
            if not ok(result):
                log.warning("close failed", extra={"engine": name, "why": str(why(result))})
        self.run._lap("reopenMs", started)
        if bad:
            await self.fleet.read_pods()
            bad = {n: w for n, w in bad.items() if n in self.fleet.engines and not self.fleet.engines[n].gone}
        if bad:
            name, (reason, message) = next(iter(sorted(bad.items())))
            await self.settle(
                "Failed",
                "Committed",
                Reason.ROUTING_DEGRADED,
                f"version {transfer.target.version} is committed, but {len(bad)} engines could not be reopened; "
                f"{name}: {reason.value}: {message}",
                transfer=transfer,
                verdicts=verdicts,
                committed=True,
            )
            return
        reason, tail = Reason.SUCCEEDED, ""
        if transfer.unconfirmed:
            reason = Reason.DELIVERED_UNCONFIRMED
            tail = f"; no other engine confirms what {', '.join(sorted(transfer.unconfirmed)[:4])} loaded"
        await self.settle(
            "Succeeded",
            "Committed",
            reason,
            f"{len(whole)} engines serve version {transfer.target.version}{tail}",
            transfer=transfer,
            verdicts=verdicts,
            committed=True,
        )

    def _note_paused(self) -> None:
        if self.run.paused_since is not None:
            self.run.timings["pausedMs"] = round((self.ctx.clock.monotonic() - self.run.paused_since) * 1000)
        elif text := self.ledger.round_status.get("pausedAt"):
            # A predecessor paused them: whole seconds are all that is known.
            self.run.timings["pausedMs"] = max(0, self.ctx.clock.wall_ms() - epoch_ms(text))

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
            self._resume(rule.resume, deadline),
            self.fleet.run(self.run.caller, "Close", dict.fromkeys(rule.close, wire.CloseOrder()), deadline=shut),
        )
        self._note_paused()
        tail = f"; {len(rule.resume)} engines resumed at the committed version, {len(rule.close)} stay closed"
        if stuck:
            tail += f"; could not resume: {', '.join(stuck[:4])}"
        await self.settle(outcome, stage, reason, message + tail, transfer=transfer, verdicts=transfer.verdicts())

    async def _resume(self, names: Iterable[str], deadline: float) -> list[str]:
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
        unrouted = [
            n
            for n, r in resumed.items()
            if ok(r)
            and (status := self.fleet.engines[n].status) is not None
            and any(v is not True for v in status.routed.values())
        ]
        opened = await self.fleet.run(
            self.run.caller, "Open", dict.fromkeys(unrouted, wire.OpenOrder()), deadline=deadline
        )
        return sorted(n for n, r in {**resumed, **opened}.items() if not ok(r))

    # ------------------------------------------------------------------------------------------ settle

    async def refuse(self, stage: str, reason: Reason, message: str, *, outcome: str = "Failed") -> None:
        """End a round before any engine was touched.

        Engines that it inherited closed (from a round that it superseded in Holding) resume if they hold what is
        committed: nobody else would open them.
        """
        closed = abort(RoundPlan((), 1), self.fleet.engines, self.ledger.committed, operation=self.run.round_uid).resume
        if closed:
            await self._resume(closed, self.ctx.clock.monotonic() + REOPEN_SECONDS)
        await self.settle(outcome, stage, reason, message)

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
        await self._release()
        self.run.timings["totalMs"] = round((self.ctx.clock.monotonic() - self.run.began) * 1000)
        status = settled(
            self.ledger.round or {},
            outcome=outcome,
            stage=stage,
            reason=reason,
            message=message,
            committed=committed,
            now_ms=self.ctx.clock.wall_ms(),
        )
        status["lease"] = self.ledger.lease()
        status["timings"] = self.run.timings
        status["attempts"] = self._attempts("Settle")
        if verdicts is not None:
            status["members"] = member_results(transfer, verdicts)
        try:
            await self.ledger.write_round(status)
        except RoundGone:
            log.warning("round vanished before it was settled", extra={"round": self.run.round_uid})
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
            },
        )
        if self.ledger.round is not None:
            kind: EventType = "Normal" if outcome == "Succeeded" else "Warning"
            self.ctx.events.record(self.ledger.round, kind, reason.value, message, action="Settle")
        self.ctx.metrics.round_finished(outcome)
        await self.free(trouble=(reason, message) if reason is Reason.ROUTING_DEGRADED else None)

    def _attempts(self, op: str) -> list[dict[str, Any]]:
        rows = list(self.ledger.round_status.get("attempts") or [])
        rows.append(
            {
                "requestId": f"{op.lower()}-{self.ledger.generation}",
                "op": op,
                "result": "Applied",
                "generation": self.ledger.generation,
                "at": rfc3339(self.ctx.clock.wall_ms()),
            }
        )
        return rows[-MAX_ATTEMPTS:]

    async def _release(self) -> None:
        if self.run.sender.peer is None:
            return
        try:
            await self.ctx.peers.release(self.run.sender.peer, self.run.caller)
        except PeerError as e:
            # The hold ends by its own deadline: a sender that is gone must not keep a round from ending.
            log.info("hold not released", extra={"round": self.run.round_uid, "why": str(e)})

    async def free(self, trouble: tuple[Reason, str] | None = None) -> None:
        """Free the slot (with the pipeline's status as it now is), then let the round object go."""
        assert self.ledger.round is not None
        assert self.run.pipeline_status is not None
        await self.fleet.read_pods()
        await self.fleet.poll()
        await self.ledger.write_pipeline(
            {
                "activeOperation": None,
                "lastRound": self.ledger.round["metadata"]["name"],
                **self.run.pipeline_status(trouble=trouble),
            }
        )
        await self.ledger.set_finalizer(False)


def routed(engine: Engine) -> bool:
    """Some router lists the engine, as far as its gate knows."""
    return engine.status is not None and any(engine.status.routed.values())
