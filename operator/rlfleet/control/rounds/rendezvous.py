"""The port on which a round's broadcast groups meet: claimed in RLPipeline.status, given to the sender, released there.

Invariants (plan.rendezvous):
- the claim is durable, and no other pipeline's was seen beside it, before the sender is asked to listen. It rides on
  the write that claims the slot and goes with the one that frees it: a round without trouble writes no more for it;
- a claim is dropped here only if the sender refused its port, or never heard of it; all else is left to
  ``plan.rendezvous.judged``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.control.rounds.pods import is_gone
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS, RLPIPELINES
from rlfleet.plan.rendezvous import Taken, Use, Wanted, Write, claims_of, doubtful, own, rows, step, taken

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.rounds.ledger import Ledger

#: Modes in which a round may need a group.
_GROUP_MODES = ("Broadcast", "Auto")
#: Claims tried before the round does without a group: more collisions in a row than chance brings about.
TRIES = 8


class Rendezvous:
    """The claim of one execution."""

    def __init__(self, ctx: Context, ledger: Ledger, sender: SenderLink, operation: str, incarnation: str) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._sender = sender
        self._operation = operation
        self._incarnation = incarnation
        #: The port that was seen to be ours alone.
        self._checked: int | None = None
        #: Ports that this execution claimed itself: nobody before us can listen on them.
        self._fresh: set[int] = set()
        #: Groups that this execution has named, by attempt: none is ever named twice.
        self.named: set[int] = set()

    async def with_slot(self) -> dict[str, Any]:
        """What the write that claims the slot carries: a claim, where this round may need one and has none."""
        mode = self._ledger.spec["transport"]["mode"]
        status = self._sender.status
        if mode not in _GROUP_MODES or status is None or status.incarnation != self._incarnation:
            return {}
        claims = claims_of(self._ledger.status)
        if own(claims, operation=self._operation, incarnation=self._incarnation) is not None:
            return {}
        next_step = step(claims, self._wanted(), await self._others())
        if not isinstance(next_step, Write):
            return {}  # a round that needs no port must not fail for it; one that does will ask again
        self._fresh.add(next_step.port)
        return {"rendezvousClaims": rows(next_step.claims)}

    async def hold(self, refused: frozenset[int] = frozenset()) -> int | None:
        """The port of this execution, durable and seen to be ours alone; None: none can be had.

        ``refused``: ports that the sender could not listen on, with a recorded end.
        """
        if self._checked is not None and self._checked not in refused:
            return self._checked
        for _ in range(TRIES):
            # Always read after our own claim was written.
            others = await self._others()
            claims = claims_of(self._ledger.status)
            next_step = step(claims, self._wanted(), others, refused=refused, fresh=frozenset(self._fresh))
            if next_step is None:
                return None
            if isinstance(next_step, Use):
                self._checked = next_step.port
                return next_step.port
            self._fresh.add(next_step.port)
            await self._ledger.write_pipeline({"rendezvousClaims": rows(next_step.claims)}, what="rendezvous port")
        return None

    def _wanted(self) -> Wanted:
        peer = self._sender.peer
        assert peer is not None
        ports = self._ledger.spec["transport"]["rendezvousPorts"]
        return Wanted(
            address=self._sender.host,
            operation=self._operation,
            incarnation=self._incarnation,
            first=int(ports["first"]),
            last=int(ports["last"]),
            begin=int(wire.operation_id(self._operation, "port", 0, "")[:6], 16),
            pod="" if self._sender.by_url else peer.name,
            pod_uid="" if self._sender.by_url else peer.pod_uid,
        )

    async def _others(self) -> Taken:
        """What all other pipelines that this operator serves claim, read live."""
        kube = self._ledger.kube
        scopes: tuple[str | None, ...] = self._ctx.settings.namespaces or (None,)
        found = await asyncio.gather(
            *(kube.list(RLPIPELINES, ns, timeout=self._ctx.settings.api_timeout) for ns in scopes)
        )
        return taken([p for listed in found for p in listed.items], but=self._ledger.uid)


async def gone_claimants(ctx: Context, ledger: Ledger, sender: SenderLink) -> frozenset[str]:
    """UIDs of sender pods with claims that are proven gone; asked only where the sender's answer releases nothing."""
    kube = ctx.kube.at(Priority.RESYNC)
    gone = set()
    host = sender.host if sender.peer is not None else ""
    for c in doubtful(claims_of(ledger.status), sender=sender.said, address=host):
        try:
            pod = await kube.get(PODS, ledger.namespace, c.pod, timeout=ctx.settings.api_timeout)
        except NotFound:
            gone.add(c.pod_uid)
            continue
        if pod["metadata"]["uid"] != c.pod_uid or is_gone(pod):
            gone.add(c.pod_uid)
    return frozenset(gone)
