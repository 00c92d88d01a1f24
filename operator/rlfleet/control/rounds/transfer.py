"""Moving the weights of one round: staging, loading (serialized and broadcast), verification, publication.

Invariants:
- staging touches no engine: its failure leaves everything as it was;
- a load's start is durable at the gate before its engine is touched, so "no load begun" can be proven later;
- verification compares before anything is published; a member that fails any step stays closed and is judged by
  evidence, not by the error that we happened to see.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller, PeerError, Refused
from rlfleet.control.rounds.broadcast import Broadcast
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.rendezvous import Rendezvous
from rlfleet.control.rounds.results import Ended, is_older, ok, why
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.control.rounds.target import Target, Trouble, load_order, prepare_order
from rlfleet.plan.rounds import Committed, Member, RoundPlan
from rlfleet.plan.transport import MIB
from rlfleet.plan.verdicts import Agreement, Evidence, Verdict, agree, verdict

#: How often bytes are pushed anew to gates that did not get all of them, while stagingSeconds last.
PUSH_TRIES = 5


@dataclass(slots=True)
class Transfer:
    """One round's movement of weights; ``deadline`` values are loop seconds."""

    fleet: Fleet
    sender: SenderLink
    caller: Caller
    plan: RoundPlan
    target: Target
    backend: str
    rendezvous: Rendezvous
    paused_seconds: float
    trouble: Trouble = field(default_factory=Trouble)
    #: Streams that were ordered of the sender, by attempt.
    streamed: set[int] = field(default_factory=set)
    #: Members whose load no other engine's checksum confirmed.
    unconfirmed: set[str] = field(default_factory=set)

    # -------------------------------------------------------------------------------------------- staging

    def what_is_staged(self, members: Sequence[Member]) -> str:
        """What staging does, for people."""
        if self.target.path is not None:
            return f"{len(members)} gates read and hash {self.target.path}"
        return f"{self.staged_bytes(members)} bytes to {len(members)} gates"

    async def stage(self, members: Iterable[Member], *, deadline: float, again: bool = False) -> set[str]:
        """Bring manifest (and for serialized members the bytes) to the gates; the names that did not get them.

        The gates' own report is the evidence, not the sender's answer.
        """
        members = list(members)
        missing = await self._group().without_port(members)
        members = [m for m in members if m.engine not in missing]
        left = deadline - self.fleet.ctx.clock.monotonic()
        prepare = {
            m.engine: prepare_order(
                self.target,
                m,
                self.fleet.engines.get(m.engine),
                left=left,
                staging=self.plan.staging if self.plan.streams(m) else wire.StagingMode.FULL,
            )
            for m in members
        }
        results = await self.fleet.run(self.caller, "Prepare", prepare, deadline=deadline, again=again)
        self.trouble.note_results(results)
        ready = [m for m in members if ok(results.get(m.engine))]
        await self._push([m for m in ready if m.transport is not wire.Transport.CHECKPOINT], deadline=deadline)
        if read := [m.engine for m in members if m.transport is wire.Transport.CHECKPOINT]:
            await self.fleet.poll(read)
        unstaged = {m.engine for m in members if not self.staged(m)}
        for name in unstaged:
            self.trouble.note(name, Reason.STAGING_FAILED, "its gate did not receive all bytes")
        return missing | unstaged

    async def _push(self, members: list[Member], *, deadline: float) -> None:
        """Have the sender push to the gates that still lack bytes, a few times while the deadline allows."""
        for attempt in range(1, PUSH_TRIES + 1):
            lacking = [m for m in members if not self.staged(m)]
            left = deadline - self.fleet.ctx.clock.monotonic()
            if not lacking or left <= 0 or self.sender.peer is None:
                return
            order = wire.PushOrder(
                manifest_digest=self.target.manifest_digest,
                targets=tuple(self._push_target(m, int(left) + 60, self._fills(m)) for m in lacking),
                bucket_bytes=self._bucket_bytes,
                deadline_seconds=left,
            )
            pushed = await self.sender.run(
                self.caller, "Push", attempt, order, incarnation=self.target.sender_incarnation, deadline=deadline
            )
            await self.fleet.poll([m.engine for m in members])
            if isinstance(pushed, Refused) and pushed.body.reason is wire.ErrorReason.OPERATION_CONFLICT:
                continue  # an operator before us used this attempt for its own push: take the next
            self._note_push(pushed)
            if isinstance(pushed, PeerError):
                return

    @property
    def _bucket_bytes(self) -> int | None:
        return self.plan.bucket_mib * MIB or None

    def _fills(self, m: Member) -> bool:
        """All bytes of the member are staged in its gate's memory; of others the manifest alone."""
        return not self.plan.needs_sender(m)

    def staged_bytes(self, members: Iterable[Member]) -> int:
        """Bytes that each gate takes before engines are paused, where it stages any."""
        return self.target.total_bytes if any(map(self._fills, members)) else 0

    def _push_target(self, m: Member, ttl: int, buckets: bool) -> wire.PushTarget:
        peer = self.fleet.peers[m.engine]
        return wire.PushTarget(
            engine=m.engine,
            url=peer.url,
            pod_uid=peer.pod_uid,
            buckets=buckets,
            server_name=peer.server_name or None,
            token=self.fleet.ctx.peers.push_token(peer, self.caller, ttl),
        )

    def _note_push(self, pushed: Ended) -> None:
        if not ok(pushed):
            reason, message = why(pushed)
            for m in self.plan.members:
                if not self.staged(m):
                    self.trouble.note(m.engine, reason, f"sender: {message}")
            return
        assert isinstance(pushed, wire.OperationRecord)
        for engine, entry in (pushed.result.get("targets") or {}).items():
            if not entry.get("ok"):
                self.trouble.note(str(engine), Reason.STAGING_FAILED, str(entry.get("error") or "push failed"))

    def staged(self, m: Member) -> bool:
        """The member's gate says that it has what it needs of this round."""
        engine = self.fleet.engines.get(m.engine)
        report = engine.status.staged if engine is not None and engine.status is not None else None
        if report is None or report.operation != self.target.operation:
            return False
        if report.manifest_digest != self.target.manifest_digest:
            return False
        streamed = report.staging is wire.StagingMode.BUCKET
        if self.plan.streams(m) is not streamed:
            return False
        return report.complete if self._fills(m) else report.manifest_received

    # -------------------------------------------------------------------------------------------- loading

    async def load(self, members: Iterable[Member], *, deadline: float, again: bool = False) -> None:
        """Load on all given members at once: from their gates' memory, or with the sender, which does one thing at a
        time: it streams first, and broadcasts then."""
        members = list(members)
        await asyncio.gather(
            self._load_staged([m for m in members if self._fills(m)], deadline=deadline, again=again),
            self._load_with_sender([m for m in members if self.plan.needs_sender(m)], deadline=deadline, again=again),
        )

    async def _load_with_sender(self, members: list[Member], *, deadline: float, again: bool) -> None:
        streamed = [m for m in members if self.plan.streams(m)]
        await self._load_streamed(streamed, deadline=deadline, again=again)
        await self._load_broadcast([m for m in members if m not in streamed], deadline=deadline, again=again)

    async def _load_streamed(self, members: list[Member], *, deadline: float, again: bool) -> None:
        """Have engines load bucket by bucket while the sender pushes: a gate that asks for none, and a push that comes
        to no load, end by themselves, so neither side waits for the other to begin."""
        left = deadline - self.fleet.ctx.clock.monotonic()
        if not members or left <= 0:
            return
        if self.sender.peer is None:
            for m in members:
                self.trouble.note(m.engine, Reason.SENDER_ABSENT, "the sender is gone, nobody pushes buckets")
            return
        attempt = max(self.fleet.attempts(m.engine, self.caller, "Load") for m in members) + (1 if again else 0)
        orders = {m.engine: load_order(self.target, m, paused_seconds=self.paused_seconds, left=left) for m in members}
        push = wire.PushOrder(
            manifest_digest=self.target.manifest_digest,
            targets=tuple(self._push_target(m, int(left) + 60, True) for m in members),
            deadline_seconds=left,
            bucket_bytes=self._bucket_bytes,
            stall_seconds=left,
        )
        results, pushed = await asyncio.gather(
            self.fleet.run(self.caller, "Load", orders, deadline=deadline, again=again),
            self._stream(push, min(max(1, attempt), 9), deadline),
        )
        self._note_stream(members, results, pushed)

    async def _stream(self, push: wire.PushOrder, attempt: int, deadline: float) -> Ended:
        """Push under an id that has no end yet: loads that never began do not count as attempts at the gates."""
        pushed: Ended | None = None
        for number in range(attempt * 100, attempt * 100 + 100):
            if number in self.streamed:
                continue
            self.streamed.add(number)
            pushed = await self.sender.run(
                self.caller, "Stream", number, push, incarnation=self.target.sender_incarnation, deadline=deadline
            )
            if not is_older(pushed, self.caller.generation):
                break
        assert pushed is not None
        return pushed

    def _note_stream(self, members: list[Member], results: Mapping[str, Ended], pushed: Ended) -> None:
        failed = {m.engine for m in members if not ok(results.get(m.engine))}
        if not ok(pushed):
            reason, message = why(pushed)
            for name in failed:
                self.trouble.note(name, reason, f"sender: {message}")
        self.trouble.note_results(results)

    async def _load_staged(self, members: list[Member], *, deadline: float, again: bool) -> None:
        left = deadline - self.fleet.ctx.clock.monotonic()
        orders = {m.engine: load_order(self.target, m, paused_seconds=self.paused_seconds, left=left) for m in members}
        self.trouble.note_results(await self.fleet.run(self.caller, "Load", orders, deadline=deadline, again=again))

    async def _load_broadcast(self, members: list[Member], *, deadline: float, again: bool) -> None:
        if not members:
            return
        await self._group().load(members, deadline=deadline, again=again)

    def _group(self) -> Broadcast:
        return Broadcast(
            fleet=self.fleet,
            sender=self.sender,
            caller=self.caller,
            target=self.target,
            trouble=self.trouble,
            backend=self.backend,
            rendezvous=self.rendezvous,
            paused_seconds=self.paused_seconds,
            bucket_bytes=self._bucket_bytes,
        )

    # ------------------------------------------------------------------------------------- verify, publish

    async def verify(
        self,
        members: Iterable[Member],
        *,
        committed: Committed | None,
        how: str,
        deadline: float,
        known: Mapping[str, str],
        again: bool = False,
    ) -> Agreement:
        """Verify on the given members and compare. ``known``: digests per layout that this round agreed on already."""
        members = list(members)
        same = committed is not None and committed.manifest_digest == self.target.manifest_digest
        orders: dict[str, wire.VerifyOrder] = {}
        for m in members:
            layout = self._layout(m.engine)
            expected = known.get(layout)
            if expected is None and same and committed is not None and how != "Off":
                expected = (committed.engine_digests or {}).get(layout)
            orders[m.engine] = wire.VerifyOrder(
                version=self.target.version,
                manifest_digest=self.target.manifest_digest,
                expected_engine_digest=expected,
            )
        results = await self.fleet.run(self.caller, "Verify", orders, deadline=deadline, again=again)
        self.trouble.note_results(results)
        evidence = []
        for m in members:
            record = results.get(m.engine)
            if ok(record):
                assert isinstance(record, wire.OperationRecord)
                evidence.append(
                    Evidence(
                        engine=m.engine,
                        layout=self._layout(m.engine),
                        digest=record.result.get("engineDigest") if record.result.get("meaningful", True) else None,
                        changed=record.result.get("changed"),
                    )
                )
        judged = self.verdicts()
        # After a takeover others may never have been asked to load; in the first pass all have been.
        waiting = [m for m in self.plan.members if again and judged[m.engine] is Verdict.UNTOUCHED and self.staged(m)]
        untouched = Counter(self._layout(m.engine) for m in waiting)
        agreement = agree(
            evidence,
            committed=committed,
            manifest_digest=self.target.manifest_digest,
            verify=how,
            agreed_on=known,
            others=untouched,
        )
        for engine, message in agreement.rejected.items():
            self.trouble.note(engine, Reason.VERIFY_FAILED, message)
        self.unconfirmed |= set(agreement.unconfirmed)
        return agreement

    def _layout(self, engine: str) -> str:
        status = self.fleet.engines[engine].status
        return (status.engine.layout or "unknown") if status is not None else "unknown"

    async def publish(self, agreement: Agreement, *, deadline: float, again: bool = False) -> None:
        """Write the version label on every member that agreed; the gate reads it back and records the proof."""
        orders = {
            name: wire.PublishOrder(
                version=self.target.version,
                manifest_digest=self.target.manifest_digest,
                engine_digest=agreement.digests.get(self._layout(name)),
            )
            for name in agreement.agreed
        }
        results = await self.fleet.run(self.caller, "Publish", orders, deadline=deadline, again=again)
        self.trouble.note_results(results)

    # -------------------------------------------------------------------------------------------- judging

    def known_digests(self) -> dict[str, str]:
        """The engines' own digest per layout that whole members are proven to have."""
        known: dict[str, str] = {}
        for name, v in self.verdicts().items():
            status = self.fleet.engines[name].status if name in self.fleet.engines else None
            if v is Verdict.WHOLE and status is not None and status.holds is not None and status.holds.engine_digest:
                known[status.engine.layout or "unknown"] = status.holds.engine_digest
        return known

    def verdicts(self) -> dict[str, Verdict]:
        """Every member's verdict from what was last observed.

        A pod that was evicted, preempted or deleted was dropped, not lost, also when it is gone by now.
        """
        found = {
            m.engine: verdict(
                m,
                self.fleet.engines.get(m.engine),
                operation=self.target.operation,
                version=self.target.version,
                manifest_digest=self.target.manifest_digest,
            )
            for m in self.plan.members
        }
        gone = [m for m in self.plan.members if found[m.engine] is Verdict.LOST]
        return found | {m.engine: Verdict.DROPPED for m in gone if self.fleet.departure(m.pod_uid) is not None}
