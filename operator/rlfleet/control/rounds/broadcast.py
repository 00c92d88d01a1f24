"""Loading by broadcast: the sender opens a group as rank 0, and engines join it.

Invariant: the sender listens before any engine is asked to join, so a port that is taken costs nobody anything; an
engine that joined a group that never formed is wedged until it proves that it has come out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlfleet.api import wire
from rlfleet.api.budgets import Split, order_times
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller, PeerError
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.rendezvous import Rendezvous
from rlfleet.control.rounds.results import Ended, is_older, ok, why
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.control.rounds.target import Target, Trouble, load_order
from rlfleet.plan.rounds import Member

#: Groups that one execution may name: a few per port that turns out to be in use.
MAX_GROUPS = 32


@dataclass(slots=True)
class Broadcast:
    """The broadcast part of one round's movement; ``deadline`` values are loop seconds."""

    fleet: Fleet
    sender: SenderLink
    caller: Caller
    target: Target
    trouble: Trouble
    backend: str
    rendezvous: Rendezvous
    paused_seconds: float
    bucket_bytes: int | None = None
    """Largest bucket, as in the manifest that the gates have; None: as published."""

    async def load(self, members: list[Member], *, deadline: float, again: bool) -> None:
        """Have these members join one group with the sender and load; where it never formed, see them out again."""
        await self._join(members, deadline=deadline, again=again)
        names = [m.engine for m in members]
        known = (self.trouble.by_engine.get(n) for n in names)
        if any(k is not None and k[0] is Reason.RENDEZVOUS_TIMEOUT for k in known):
            await self.fleet.poll(names)
            await self._await_unwedged(names)

    async def _join(self, members: list[Member], *, deadline: float, again: bool) -> None:
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
        refused: frozenset[int] = frozenset()
        for number in self._numbers(attempt):
            port = await self.rendezvous.hold(refused)
            if port is None:
                break
            group = wire.BroadcastGroup(
                master_address=self.sender.host,
                master_port=port,
                group_name=f"rlfleet-{self.target.operation[:8]}-{number}",
                world_size=offset,
                backend="nccl" if self.backend == "nccl" else "gloo",
            )
            listening = asyncio.Event()
            send = asyncio.ensure_future(self._send(group, number, deadline, listening))
            try:
                if not await self._listens(send, listening):
                    if is_older(send.result(), self.caller.generation):
                        continue  # a predecessor's, which ended: that group is never used again
                    if not self._port_in_use(send.result()):
                        self._note_sender(members, send.result())
                        return
                    refused |= {port}
                    continue
                # All are asked to join at once and nobody is waited for: the group forms when everybody is there.
                orders = {m.engine: self._order(m, group, ranks[m.engine], deadline) for m in members}
                results = await self.fleet.run(self.caller, "Load", orders, deadline=deadline, again=again)
                self.trouble.note_results(results)
                self._note_sender(members, await send)
            finally:
                send.cancel()
            return
        self.note_no_port(m.engine for m in members)

    def _numbers(self, attempt: int) -> Iterator[int]:
        """Names of groups for one attempt at these loads; each names one group, whatever became of it."""
        for number in range(attempt * 100, attempt * 100 + 100):
            if number not in self.rendezvous.named and len(self.rendezvous.named) < MAX_GROUPS:
                self.rendezvous.named.add(number)
                yield number

    async def without_port(self, members: Sequence[Member]) -> set[str]:
        """Members of a broadcast for which no port can be claimed: known before anybody is paused."""
        group = {m.engine for m in members if m.transport is wire.Transport.BROADCAST}
        if not group or self.sender.peer is None or await self.rendezvous.hold() is not None:
            return set()
        self.note_no_port(group)
        return group

    def note_no_port(self, engines: Iterable[str]) -> None:
        """Say of these engines that the sender has no port for their group."""
        message = (
            f"no port of spec.transport.rendezvousPorts is free at {self.sender.host}: all are claimed "
            "(status.rendezvousClaims) or in use; widen the range"
        )
        for name in engines:
            self.trouble.note(name, Reason.PORTS_EXHAUSTED, message)

    def _note_sender(self, members: list[Member], sent: Ended) -> None:
        if not ok(sent):
            reason, message = why(sent)
            for m in members:
                self.trouble.note(m.engine, reason, f"sender: {message}")

    async def _await_unwedged(self, names: Sequence[str]) -> None:
        """Give engines whose group never formed the share of a teardown to come out of it, as they do when the
        sender's side has gone: they are untouched then, and need not be replaced."""
        clock = self.fleet.ctx.clock
        deadline = clock.monotonic() + Split.of(self.paused_seconds).teardown
        while wedged := [
            n
            for n in names
            if (e := self.fleet.engines.get(n)) is not None and e.status is not None and e.status.wedged
        ]:
            if clock.monotonic() >= deadline:
                return
            await asyncio.sleep(0.2)
            await self.fleet.poll(wedged)

    def _order(self, m: Member, group: wire.BroadcastGroup, rank: int, deadline: float) -> wire.LoadOrder:
        left = deadline - self.fleet.ctx.clock.monotonic()
        return load_order(self.target, m, paused_seconds=self.paused_seconds, left=left, group=group, rank=rank)

    async def _send(self, group: wire.BroadcastGroup, attempt: int, deadline: float, listening: asyncio.Event) -> Ended:
        order = wire.BroadcastOrder(
            manifest_digest=self.target.manifest_digest,
            group=group,
            bucket_bytes=self.bucket_bytes,
            **order_times(self.paused_seconds, deadline - self.fleet.ctx.clock.monotonic()),
        )
        return await self.sender.run(
            self.caller,
            "Broadcast",
            attempt,
            order,
            incarnation=self.target.sender_incarnation,
            deadline=deadline,
            begun=listening,
        )

    @staticmethod
    async def _listens(send: asyncio.Future[Ended], listening: asyncio.Event) -> bool:
        """Wait until the sender says that it listens. Nobody joins a group of which that is not known: an engine would
        hang in it, or meet whoever else has the port."""
        send.add_done_callback(lambda _: listening.set())
        await listening.wait()
        return not send.done()

    @staticmethod
    def _port_in_use(sent: Ended) -> bool:
        """The sender could not listen, and says so with a recorded end: another port is safe."""
        if isinstance(sent, PeerError) or ok(sent):
            return False
        reason, message = why(sent)
        return reason is Reason.TRANSPORT_FAILED and "address already in use" in message.lower()
