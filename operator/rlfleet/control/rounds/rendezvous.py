"""The port on which a round's broadcast groups meet: claimed in RLPipeline.status, given to the sender, released there.

Invariants (plan.rendezvous):
- the claim is durable, and no other pipeline's was seen beside it, before the sender is asked to listen. It rides on
  the write that claims the slot and goes with the one that frees it: a round without trouble writes no more for it;
- a claim is dropped here only if the sender refused its port, or never heard of it; all else is left to
  ``plan.rendezvous.judged``.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.control.rounds.pods import is_gone
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS, RLPIPELINES
from rlfleet.plan.rendezvous import Claim, Taken, claims_of, doubtful, own, pick, rows, taken

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
        port = self._pick(claims, await self._others(), frozenset())
        if port is None:
            return {}  # a round that needs none must not fail for it; one that does will ask again
        self._fresh.add(port)
        return {"rendezvousClaims": rows([*claims, self._claim(port)])}

    async def hold(self, refused: frozenset[int] = frozenset()) -> int | None:
        """The port of this execution, durable and seen to be ours alone; None: none can be had.

        ``refused``: ports that the sender could not listen on, with a recorded end.
        """
        for _ in range(TRIES):
            claims = claims_of(self._ledger.status)
            mine = own(claims, operation=self._operation, incarnation=self._incarnation)
            if mine is not None and mine.port not in refused and mine.port == self._checked:
                return mine.port
            others = await self._others()
            if mine is not None and mine.port not in refused and mine.where not in others:
                self._checked = mine.port
                return mine.port
            kept = [c for c in claims if c is not mine]
            if mine is not None and mine.port not in refused and mine.port not in self._fresh:
                # A predecessor may have had the sender listen on it.
                kept.append(replace(mine, leaked=True))
            port = self._pick(tuple(kept), others, refused)
            if port is None:
                return None
            self._fresh.add(port)
            await self._ledger.write_pipeline(
                {"rendezvousClaims": rows([*kept, self._claim(port)])}, what="rendezvous port"
            )
        return None

    def _claim(self, port: int) -> Claim:
        peer = self._sender.peer
        assert peer is not None
        in_cluster = not self._sender.by_url
        return Claim(
            address=self._sender.host,
            port=port,
            operation=self._operation,
            incarnation=self._incarnation,
            pod=peer.name if in_cluster else "",
            pod_uid=peer.pod_uid if in_cluster else "",
        )

    def _pick(self, claims: tuple[Claim, ...], others: Taken, refused: frozenset[int]) -> int | None:
        ports = self._ledger.spec["transport"]["rendezvousPorts"]
        return pick(
            int(ports["first"]),
            int(ports["last"]),
            address=self._sender.host,
            begin=int(wire.operation_id(self._operation, "port", 0, "")[:6], 16),
            others=others,
            mine=claims,
            refused=refused,
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
