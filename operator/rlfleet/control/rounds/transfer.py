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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlfleet.api import wire
from rlfleet.api.budgets import Split, order_times
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller, PeerError, Refused
from rlfleet.control.rounds.fleet import Ended, Fleet, SenderLink, ok, why
from rlfleet.plan.rounds import Committed, Member, RoundPlan
from rlfleet.plan.verdicts import Agreement, Evidence, Verdict, agree, verdict

#: How often bytes are pushed anew to gates that did not get all of them, while stagingSeconds last.
PUSH_TRIES = 5


@dataclass(frozen=True, slots=True)
class Target:
    """What this round brings to the engines."""

    operation: str
    version: int
    manifest_digest: str
    total_bytes: int
    sender_incarnation: str


@dataclass(slots=True)
class Trouble:
    """Why members are not whole: engine -> (reason, message); the first trouble of an engine stays."""

    by_engine: dict[str, tuple[Reason, str]] = field(default_factory=dict)

    def note(self, engine: str, reason: Reason, message: str) -> None:
        """Remember what went wrong with an engine."""
        self.by_engine.setdefault(engine, (reason, message))

    def note_results(self, results: Mapping[str, Ended]) -> None:
        """Remember every result that is not a recorded success."""
        for engine, result in results.items():
            if not ok(result):
                self.note(engine, *why(result))

    def first(self) -> tuple[Reason, str] | None:
        """One of them, for a summary, with the engine named."""
        for engine in sorted(self.by_engine):
            reason, message = self.by_engine[engine]
            return reason, f"{engine}: {message}"
        return None


@dataclass(slots=True)
class Transfer:
    """One round's movement of weights; ``deadline`` values are loop seconds."""

    fleet: Fleet
    sender: SenderLink
    caller: Caller
    plan: RoundPlan
    target: Target
    backend: str
    ports: tuple[int, int]
    paused_seconds: float
    trouble: Trouble = field(default_factory=Trouble)
    #: Members whose load no other engine's checksum confirmed.
    unconfirmed: set[str] = field(default_factory=set)

    # -------------------------------------------------------------------------------------------- staging

    async def stage(self, members: Iterable[Member], *, deadline: float, again: bool = False) -> set[str]:
        """Bring manifest (and for serialized members the bytes) to the gates; the names that did not get them.

        The gates' own report is the evidence, not the sender's answer.
        """
        members = list(members)
        prepare = {
            m.engine: wire.PrepareOrder(
                transport=m.transport,
                version=self.target.version,
                manifest_digest=self.target.manifest_digest,
                total_bytes=self.target.total_bytes,
                sender_incarnation=self.target.sender_incarnation or None,
            )
            for m in members
        }
        results = await self.fleet.run(self.caller, "Prepare", prepare, deadline=deadline, again=again)
        self.trouble.note_results(results)
        ready = [m for m in members if ok(results.get(m.engine))]
        await self._push(ready, deadline=deadline)
        missing = {m.engine for m in members if not self.staged(m)}
        for name in missing:
            self.trouble.note(name, Reason.STAGING_FAILED, "its gate did not receive all bytes")
        return missing

    async def _push(self, members: list[Member], *, deadline: float) -> None:
        """Have the sender push to the gates that still lack bytes, a few times while the deadline allows."""
        for attempt in range(1, PUSH_TRIES + 1):
            lacking = [m for m in members if not self.staged(m)]
            left = deadline - self.fleet.ctx.clock.monotonic()
            if not lacking or left <= 0 or self.sender.peer is None:
                return
            order = wire.PushOrder(
                manifest_digest=self.target.manifest_digest,
                targets=tuple(self._push_target(m, int(left) + 60) for m in lacking),
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

    def _push_target(self, m: Member, ttl: int) -> wire.PushTarget:
        peer = self.fleet.peers[m.engine]
        return wire.PushTarget(
            engine=m.engine,
            url=peer.url,
            pod_uid=peer.pod_uid,
            buckets=m.transport is wire.Transport.SERIALIZED,
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
        return report.complete if m.transport is wire.Transport.SERIALIZED else report.manifest_received

    # -------------------------------------------------------------------------------------------- loading

    async def load(self, members: Iterable[Member], *, deadline: float, again: bool = False) -> None:
        """Load on all given members at once: serialized ones from their memory, broadcast ones with the sender."""
        members = list(members)
        serialized = [m for m in members if m.transport is wire.Transport.SERIALIZED]
        broadcast = [m for m in members if m.transport is wire.Transport.BROADCAST]
        await asyncio.gather(
            self._load_serialized(serialized, deadline=deadline, again=again),
            self._load_broadcast(broadcast, deadline=deadline, again=again),
        )
        if any(reason is Reason.RENDEZVOUS_TIMEOUT for reason, _ in self.trouble.by_engine.values()):
            await self.fleet.poll([m.engine for m in broadcast])
            await self.await_unwedged()

    def _load_order(
        self, m: Member, group: wire.BroadcastGroup | None, rank: int | None, deadline: float
    ) -> wire.LoadOrder:
        return wire.LoadOrder(
            transport=m.transport,
            version=self.target.version,
            manifest_digest=self.target.manifest_digest,
            group=group,
            rank_offset=rank,
            **order_times(self.paused_seconds, deadline - self.fleet.ctx.clock.monotonic()),
        )

    async def _load_serialized(self, members: list[Member], *, deadline: float, again: bool) -> None:
        orders = {m.engine: self._load_order(m, None, None, deadline) for m in members}
        self.trouble.note_results(await self.fleet.run(self.caller, "Load", orders, deadline=deadline, again=again))

    async def _load_broadcast(self, members: list[Member], *, deadline: float, again: bool) -> None:
        if not members:
            return
        if self.sender.peer is None:
            for m in members:
                self.trouble.note(m.engine, Reason.SENDER_ABSENT, "the sender is gone, nobody broadcasts")
            return
        ranks: dict[str, int] = {}
        offset = 1
        for m in members:
            ranks[m.engine] = offset
            offset += m.world_size
        attempt = max(self.fleet.attempts(m.engine, self.caller, "Load") for m in members) + (1 if again else 0)
        attempt = min(max(1, attempt), 9)
        first, last = self.ports
        width = last - first + 1
        # Where in the range to begin differs per round, so that a port in TIME_WAIT is not asked for twice.
        begin = int(wire.operation_id(self.target.operation, "port", attempt, "")[:6], 16)
        for shift in range(min(width, 8)):
            group = wire.BroadcastGroup(
                master_address=self.sender.host,
                master_port=first + (begin + shift) % width,
                group_name=f"rlfleet-{self.target.operation[:8]}-{attempt}-{shift}",
                world_size=offset,
                backend="nccl" if self.backend == "nccl" else "gloo",
            )
            send = asyncio.ensure_future(self._send(group, attempt * 100 + shift, deadline))
            try:
                if await self._port_taken(send):
                    continue
                orders = {m.engine: self._load_order(m, group, ranks[m.engine], deadline) for m in members}
                results = await self.fleet.run(self.caller, "Load", orders, deadline=deadline, again=again)
                self.trouble.note_results(results)
                sent = await send
            finally:
                send.cancel()
            if not ok(sent):
                reason, message = why(sent)
                for m in members:
                    self.trouble.note(m.engine, reason, f"sender: {message}")
            return
        for m in members:
            self.trouble.note(m.engine, Reason.PORTS_EXHAUSTED, f"no free port in {first}-{last} at the sender")

    async def await_unwedged(self) -> None:
        """Give engines whose group never formed the share of a teardown to come out of it, as they do when the
        sender's side has gone: they are untouched then, and need not be replaced."""
        clock = self.fleet.ctx.clock
        deadline = clock.monotonic() + Split.of(self.paused_seconds).teardown
        names = [m.engine for m in self.plan.members]
        while wedged := [
            n
            for n in names
            if (e := self.fleet.engines.get(n)) is not None and e.status is not None and e.status.wedged
        ]:
            if clock.monotonic() >= deadline:
                return
            await asyncio.sleep(0.2)
            await self.fleet.poll(wedged)

    async def _send(self, group: wire.BroadcastGroup, attempt: int, deadline: float) -> Ended:
        order = wire.BroadcastOrder(
            manifest_digest=self.target.manifest_digest,
            group=group,
            **order_times(self.paused_seconds, deadline - self.fleet.ctx.clock.monotonic()),
        )
        return await self.sender.run(
            self.caller,
            "Broadcast",
            attempt,
            order,
            incarnation=self.target.sender_incarnation,
            deadline=deadline,
        )

    @staticmethod
    async def _port_taken(send: asyncio.Future[Ended]) -> bool:
        """The sender could not listen: it says so before any engine is asked to join, so another port is safe."""
        done, _ = await asyncio.wait({send}, timeout=0.05)
        if not done:
            return False
        result = send.result()
        if isinstance(result, Refused) or ok(result):
            return False
        reason, message = why(result)
        return reason is Reason.TRANSPORT_FAILED and "address already in use" in message.lower()

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
        """Every member's verdict from what was last observed."""
        return {
            m.engine: verdict(
                m,
                self.fleet.engines.get(m.engine),
                operation=self.target.operation,
                version=self.target.version,
                manifest_digest=self.target.manifest_digest,
            )
            for m in self.plan.members
        }


def member_rows(plan: RoundPlan) -> list[dict[str, Any]]:
    """``status.plan.members``: compact, written once when the round is planned."""
    rows = []
    for m in plan.members:
        row: dict[str, Any] = {
            "engine": m.engine,
            "podUID": m.pod_uid,
            "incarnation": m.incarnation,
            "transport": m.transport.value,
            "worldSize": m.world_size,
        }
        if m.rank_offset is not None:
            row["rankOffset"] = m.rank_offset
        if m.reason:
            row["reason"] = m.reason
        rows.append(row)
    return rows


def plan_of(status: Mapping[str, Any]) -> RoundPlan | None:
    """The plan that a round's status holds; None when it was never planned."""
    raw = status.get("plan")
    if not raw:
        return None
    members = tuple(
        Member(
            engine=str(r["engine"]),
            pod_uid=str(r["podUID"]),
            incarnation=str(r["incarnation"]),
            transport=wire.Transport(r["transport"]),
            world_size=int(r.get("worldSize") or 1),
            rank_offset=r.get("rankOffset"),
            reason=str(r.get("reason") or ""),
        )
        for r in raw.get("members") or []
    )
    return RoundPlan(members, int(raw.get("worldSize") or 1), tuple(raw.get("silent") or ()))
