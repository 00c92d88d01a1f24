"""One CatchUp from claim to settle: named engines are brought to what is committed already (DESIGN section 5).

Invariants:
- it commits nothing;
- each engine is resumed when it is proven, by the resume rule; one that is not stays closed, and is not waited for;
- members that can be proven by themselves do not wait for each other.

Death between any two lines: the next claim passes the barrier and enters where ``plan.catchup.enter_catch_up`` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.barrier import take_over_round
from rlfleet.control.rounds.catchup_ready import CatchUpReady
from rlfleet.control.rounds.ending import REOPEN_SECONDS, Ending
from rlfleet.control.rounds.executor import PROOF_SECONDS
from rlfleet.control.rounds.plan_record import plan_of
from rlfleet.control.rounds.probes import probe_generation
from rlfleet.control.rounds.results import ok, why
from rlfleet.control.rounds.transfer import Transfer
from rlfleet.plan.catchup import enter_catch_up, left_closed
from rlfleet.plan.rounds import TERMINAL, Member, RoundPlan, digest_rows, layout_of
from rlfleet.plan.verdicts import Entry, Verdict


class CatchUp(CatchUpReady):
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
        await take_over_round(self, takeover=self.takeover)
        plan = plan_of(self.ledger.round_status)
        phase = str(self.ledger.round_status.get("phase") or "")
        if enter_catch_up(phase, planned=plan is not None) is Entry.JUDGE:
            assert plan is not None
            transfer = self.transfer(plan, self.target_from_status())
            await self._finish(transfer, ending, plan.members, load=False)
            return
        planned = await self.plan(ending)
        if planned is None:
            return
        members = await self.ready(planned, ending)
        if members is None:
            return
        await self.phase("Transferring", Reason.TRANSFERRING, f"{len(members)} engines load")
        await self._finish(planned, ending, members, load=True)

    # ------------------------------------------------------------------------------------------ weights move

    async def _finish(self, transfer: Transfer, ending: Ending, members: Iterable[Member], *, load: bool) -> None:
        """Load, prove and open each engine by itself where that is possible, then settle.

        ``load`` False: a predecessor died in Transferring, so what its loads left is judged and nothing is loaded.
        """
        started = self.ctx.clock.monotonic()
        if not load:
            transfer.trouble.note("", Reason.OPERATOR_RESTARTED, "an operator died while weights moved")
        groups = self._groups(list(members), transfer.plan)
        stuck: dict[str, tuple[Reason, str]] = {}
        results = await asyncio.gather(
            *(self._bring(group, transfer, load=load, stuck=stuck) for group in groups), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self.lap("transferMs", started)
        await self.fleet.read_pods()
        await self.fleet.poll([m.engine for m in transfer.plan.members if m.engine in self.fleet.engines])
        verdicts = transfer.verdicts()
        behind = left_closed(verdicts, stuck)
        await self.close({n for n in behind if verdicts[n] is not Verdict.WHOLE})
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
        await self.note(transfer, behind, reason)
        await ending.settle(
            "Failed",
            "Transferring",
            reason,
            f"{len(behind)} of {len(verdicts)} engines stay closed; {message}",
            transfer=transfer,
            verdicts=verdicts,
        )

    def _groups(self, members: list[Member], plan: RoundPlan) -> list[list[Member]]:
        """Who is loaded and proven together: whom the sender serves at once (ranks of one broadcast, gates of one
        stream), and engines of a layout without a committed digest."""
        committed = self.ledger.committed
        known = (committed.engine_digests or {}) if committed is not None else {}
        alone = self.ledger.spec["sync"]["verify"] == "Off"
        single: list[list[Member]] = []
        together: list[Member] = []
        for m in members:
            engine = self.fleet.engines.get(m.engine)
            if engine is None:
                continue
            if not plan.needs_sender(m) and (alone or layout_of(engine) in known):
                single.append([m])
            else:
                together.append(m)
        return [*single, together] if together else single

    async def _bring(
        self,
        group: list[Member],
        transfer: Transfer,
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
                # What a predecessor has published is agreed on already.
                known={} if load else transfer.known_digests(),
                again=not load,
            )
            await transfer.publish(agreement, deadline=deadline, again=not load)
            await self.fleet.poll(names)
        judged = transfer.verdicts()
        whole = [n for n in names if judged[n] is Verdict.WHOLE]
        if not whole:
            return
        await self._learn(whole)
        stuck |= await self._open(whole, transfer)

    async def _open(self, whole: list[str], transfer: Transfer) -> dict[str, tuple[Reason, str]]:
        """Resume, probe where that is wanted, route; those that are proven and did not open, with why."""
        committed = self.ledger.committed
        assert committed is not None
        deadline = self.ctx.clock.monotonic() + REOPEN_SECONDS
        order = wire.ResumeOrder(version=committed.version, manifest_digest=committed.manifest_digest)
        # Anew, not joined: a resume that a predecessor asked for may have failed.
        resumed = await self.fleet.run(
            self.caller, "Resume", dict.fromkeys(whole, order), deadline=deadline, again=True
        )
        stuck = {n: why(r) for n, r in resumed.items() if not ok(r)}
        left = [n for n in whole if n not in stuck]
        if self.ledger.spec["sync"].get("probeGeneration"):
            known = set(committed.engine_digests or {})
            judged = await probe_generation(self.fleet, self.caller, left, proven_layouts=known, deadline=deadline)
            for name, text in judged.bad.items():
                transfer.trouble.note(name, Reason.PROBE_FAILED, text)
            stuck |= {n: (Reason.PROBE_FAILED, text) for n, text in {**judged.bad, **judged.unknown}.items()}
            left = [n for n in left if n not in stuck]
        await self.fleet.poll(left)
        unrouted = [
            n
            for n in left
            if (status := self.fleet.engines[n].status) is not None
            and any(v is not True for v in status.routed.values())
        ]
        opened = await self.fleet.run(self.caller, "Open", dict.fromkeys(unrouted, wire.OpenOrder()), deadline=deadline)
        return stuck | {n: why(r) for n, r in opened.items() if not ok(r)}

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
        raw["engineDigests"] = digest_rows(digests, self.fleet.engines.values())
        await self.ledger.write_pipeline({"committed": raw}, what="engine digests")

    # ------------------------------------------------------------------------------------------ the end

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
