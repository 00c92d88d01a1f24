"""After the transfer: the verdict, the commit, reopening; or Holding, or an end without a commit.

Invariants (DESIGN section 5):
- the commit is one conditional write of RLPipeline.status; before it only abort, after it only forward;
- nothing opens while more than ``maxUnavailable`` members are missing, and nothing is committed while a live engine
  has not stored our fence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.healing import Healing
from rlfleet.control.rounds.results import ok, why
from rlfleet.control.rounds.silent import left_out
from rlfleet.plan.elastic import in_the_way
from rlfleet.plan.rounds import digest_rows, unavailable_limit
from rlfleet.plan.verdicts import Next, Outcome, Verdict, conclude, could_serve, reopening, still_blocked, unfenced

if TYPE_CHECKING:
    from rlfleet.control.rounds.transfer import Transfer

from rlfleet.control.rounds.ending import REOPEN_SECONDS, SHUT_SECONDS, Ending

log = logging.getLogger(__name__)


class Closing(Ending):
    """All ends of one execution."""

    def limit(self, transfer: Transfer) -> int:
        """``maxUnavailable`` of this round as a count."""
        return unavailable_limit(self.ledger.spec["sync"]["maxUnavailable"], transfer.plan.total)

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
        shut = await self._shut(verdicts)
        limit = self.ledger.spec["sync"]["maxUnavailable"]
        blocked = still_blocked(transfer.plan, self.fleet.engines.values())
        outcome = conclude(transfer.plan, verdicts, unfenced=(*still, *shut), max_unavailable=limit, blocked=blocked)
        silent = [n for n in still if self.fleet.engines[n].status is None]
        if outcome.next is Next.WAIT_FENCE and set(outcome.unfenced) == set(silent):
            # Nothing but their silence is in the way: out of the routers they count as closed, where that is safe.
            out = await left_out(self.run, silent)
            still = tuple(n for n in still if n not in out)
            outcome = conclude(
                transfer.plan, verdicts, unfenced=still, max_unavailable=limit, left_out=out, blocked=blocked
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
                    "engineDigests": digest_rows(digests, self.fleet.engines.values()),
                },
                "activeOperation": {**active, "committed": True},
            },
            what="commit",
        )

    async def commit_without_members(self, transfer: Transfer) -> None:
        """A round with nobody in it: committed at once, but only if every engine is proven asleep or gone."""
        outcome, _ = await self.look(transfer)
        live = in_the_way(self.fleet.engines.values())
        asleep = sum(not e.gone for e in self.fleet.engines.values())
        if live:
            await self.refuse(
                "Planned",
                Reason.GATES_UNREACHABLE,
                f"no engine can take part, but {len(live)} are neither Offloaded nor gone "
                f"({', '.join(live[:4])}): they may still be starting; sync again when their gates answer",
            )
            return
        await self.commit(transfer, outcome)
        await self.settle(
            "Succeeded",
            "Planned",
            Reason.NO_MEMBERS,
            f"no engine is awake ({asleep} sleep): the version is committed for those to come",
            transfer=transfer,
            committed=True,
        )

    # ------------------------------------------------------------------------------------------ reopen

    async def reopen(self, transfer: Transfer) -> None:
        """Resume the whole members, add routes where they lack, close the others; then settle."""
        started = self.ctx.clock.monotonic()
        deadline = started + REOPEN_SECONDS
        await self.fleet.read_pods()  # who is to go by now stays closed
        verdicts = transfer.verdicts()
        doors = reopening(verdicts, self.fleet.engines)
        verdicts |= dict.fromkeys(doors.dropped, Verdict.DROPPED)
        whole = doors.resume
        resume = wire.ResumeOrder(version=transfer.target.version, manifest_digest=transfer.target.manifest_digest)
        resumed, _ = await asyncio.gather(
            # Anew, not joined: a resume that a predecessor asked for may have failed.
            self.fleet.run(self.run.caller, "Resume", dict.fromkeys(whole, resume), deadline=deadline, again=True),
            self.run.phase("Committed", Reason.COMMITTED, f"{len(whole)} engines reopen", committed=True),
        )
        self.note_paused()
        bad = {n: why(r) for n, r in resumed.items() if not ok(r)}
        if len(doors.missing) > self.limit(transfer):
            # They were whole at the commit, or it would not have been made; a takeover since then lost sight of them.
            silent = Reason.GATES_UNREACHABLE, "its gate does not answer, so it was not reopened"
            bad |= {n: transfer.trouble.by_engine.get(n, silent) for n in doors.missing}
        await self.fleet.poll(whole)
        judged = await self.probe([n for n in whole if n not in bad], deadline)
        bad |= {n: (Reason.PROBE_FAILED, text) for n, text in {**judged.bad, **judged.unknown}.items()}
        for name, text in judged.bad.items():
            transfer.trouble.note(name, Reason.PROBE_FAILED, text)
            verdicts[name] = Verdict.POISONED
        closed = [
            n
            for n in whole
            # No answer now does not mean that a router lists it.
            if n not in bad
            and ((s := self.fleet.engines[n].status) is None or any(v is not True for v in s.routed.values()))
        ]
        opened, shut = await asyncio.gather(
            self.fleet.run(self.run.caller, "Open", dict.fromkeys(closed, wire.OpenOrder()), deadline=deadline),
            self.fleet.run(self.run.caller, "Close", dict.fromkeys(doors.close, wire.CloseOrder()), deadline=deadline),
        )
        bad |= {n: why(r) for n, r in opened.items() if not ok(r)}
        for name, result in shut.items():
            if not ok(result):
                log.warning("close failed", extra={"engine": name, "why": str(why(result))})
        self.run.lap("reopenMs", started)
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
