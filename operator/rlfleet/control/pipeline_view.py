"""The status of one RLPipeline as it should be, from what was observed last.

Invariant: a view decides nothing and orders nobody; it is written only when it says something new.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.repair.rules import RuleName, Rules
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.rendezvous import gone_claimants
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.plan.blocks import block_rows, moves
from rlfleet.plan.demand import Grant, grants_of
from rlfleet.plan.identity import unrecorded
from rlfleet.plan.pipeline import FleetFacts, conditions, count
from rlfleet.plan.rendezvous import Claim, claims_of, judged, leak_message, rows
from rlfleet.plan.rounds import Committed
from rlfleet.plan.template import gpus_per_engine
from rlfleet.plan.topology_valid import topology_valid
from rlfleet.plan.validate import Violation, violations

if TYPE_CHECKING:
    from rlfleet.control.context import Context

Obj = dict[str, Any]


class PipelineView:
    """The pipeline's status as it should be, from the engines and the sender as last observed."""

    def __init__(self, ctx: Context, ledger: Ledger, sender: SenderLink, expected: int, rules: Rules) -> None:
        self.ctx = ctx
        self.ledger = ledger
        self.sender = sender
        self.expected = expected
        self.rules = rules
        self.memory = ctx.repairs.of(ledger.namespace, ledger.name, ledger.uid)
        self.fleet = Fleet.of(ctx, ledger)
        #: What a person should see whatever a round that ends has to say; None: nothing.
        self.trouble: tuple[Reason, str] | None = None
        #: Engines that repair did not help; None: there are none.
        self.unrepaired: tuple[Reason, str] | None = None
        #: UIDs of sender pods with port claims that are proven gone.
        self.gone_claimants: frozenset[str] = frozenset()
        #: Engines that would not sleep or wake; None: there are none.
        self.unmoved: tuple[Reason, str] | None = None
        #: What became of the trainer's demands, once they are decided anew; None: as recorded.
        self.grants: tuple[Grant, ...] | None = None
        #: Progress of the rollouts; as recorded until the trainer's report is read.
        self.progress: Obj | None = ledger.status.get("progress")
        #: Why closed engines wait for a Refresh; empty: they do not.
        self.awaiting = ""
        #: ResourceClaims of train blocks whose names somebody else has.
        self.taken: tuple[Violation, ...] = ()
        self._own = self.fleet

    def bind(self, fleet: Fleet) -> PipelineView:
        """Look at the fleet that an executor observes."""
        self.fleet = fleet
        return self

    async def observe(self, seconds: float | None = None) -> None:
        """Read pods and gates; ``seconds``: how long each gate may take to answer (None: as long as any call)."""
        await self.fleet.read_pods()
        await self.fleet.poll(seconds=seconds)
        if seconds is None:
            self.memory.observed(self.fleet.engines.values(), self.ctx.clock.monotonic())

    async def judge_claims(self) -> None:
        """Look for the pods of senders that left port claims behind, and count what has leaked."""
        self.gone_claimants = await gone_claimants(self.ctx, self.ledger, self.sender)
        leaked = sum(c.leaked for c in claims_of(self.ledger.status))
        self.ctx.metrics.claims_leaked(self.ledger.namespace, self.ledger.name, leaked)

    def _claims(self) -> tuple[Claim, ...]:
        """Port claims that stay once no round owns the pipeline."""
        host = self.sender.host if self.sender.peer is not None else ""
        return judged(claims_of(self.ledger.status), sender=self.sender.said, address=host, gone=self.gone_claimants)

    def facts(self, committed: Committed | None) -> FleetFacts:
        """Engines counted; those that pools still owe count as missing, those that are to sleep do not."""
        engines = list(self.fleet.engines.values())
        found = count(self.memory.believed(engines) if self.fleet is self._own else engines, committed)
        lost = unrecorded(self.fleet.engines.values(), pipeline=self.ledger.uid) if committed is None else ()
        return replace(found, total=found.total + self.fleet.owed, unrecorded=lost)

    def sender_status(self) -> Obj:
        """``sender`` and ``cacheReady`` as observed; absent ones are deleted."""
        s = self.sender.status
        peer = self.sender.peer
        sender = {"podUID": s.pod_uid, "incarnation": s.incarnation, "url": peer.url} if s and peer else None
        cache = {"version": s.cache.version, "manifestDigest": s.cache.manifest_digest} if s and s.cache else None
        keys = [{"kid": k, "key": v} for k, v in sorted(self.ctx.keys.public_text().items())]
        return {
            "sender": sender,
            "cacheReady": cache,
            "publicKeys": keys,
            "observedGeneration": self.ledger.pipeline["metadata"].get("generation", 0),
        }

    def _blocks(self) -> list[Obj]:
        status = self.ledger.status
        old = status.get("blocks") or []
        rows = block_rows(self.ledger.pipeline, self.sender.allocations, old, str(status.get("lastRound") or ""))
        if RuleName.TRAIN_BLOCKS in self.rules.failed or self.rules.again:
            # A removed block is remembered until its claim is surely deleted: without a row nobody looks for claims.
            rows += [dict(r) for r in old if all(r["name"] != row["name"] for row in rows)]
        known = {r["name"]: r.get("movedFrom") for r in old}
        if moved := moves(r for r in rows if r.get("movedFrom") != known.get(r["name"])):
            self.ctx.events.record(self.ledger.pipeline, "Warning", Reason.BLOCK_MOVED.value, moved, action="Plan")
        return rows

    def _grants(self) -> tuple[Grant, ...]:
        """A round that holds engines records demands itself, so what is recorded is read as late as possible."""
        return grants_of(self.ledger.status) if self.grants is None else self.grants

    def _topology(self, blocks: list[Obj]) -> tuple[bool | None, Reason, str]:
        transport = self.ledger.spec["transport"]
        return topology_valid(
            self.fleet.engines.values(),
            self.sender.train,
            mode=transport["mode"],
            assert_mixed=bool(transport.get("assertMixed")),
            broken=(*self.taken, *violations(self.ledger.pipeline, self.fleet.pools.values())),
            sizes={name: gpus_per_engine(pool) for name, pool in self.fleet.pools.items()},
            moved=moves(blocks),
        )

    def __call__(self, *, trouble: tuple[Reason, str] | None, working: tuple[Reason, str] | None = None) -> Obj:
        """The status fields that this view owns."""
        committed = self.ledger.committed
        facts = self.facts(committed)
        blocks = self._blocks()
        claims = self._claims()
        leak = (Reason.PORT_CLAIM_LEAKED, leak_message(claims)) if claims else None
        return {
            **self.sender_status(),
            "rendezvousClaims": rows(claims),
            "engines": facts.counts,
            "grants": [g.row() for g in self._grants()] or None,
            "blocks": blocks or None,
            "progress": self.progress,
            "conditions": conditions(
                self.ledger.status.get("conditions") or [],
                facts=facts,
                committed=committed,
                sender=self.sender.status,
                sender_problem=self.sender.problem,
                working=working,
                trouble=self.rules.trouble or trouble or self.trouble or leak,
                awaiting=self.awaiting,
                topology=self._topology(blocks),
                generation=int(self.ledger.pipeline["metadata"].get("generation") or 0),
                now=rfc3339(self.ctx.now_ms()),
            ),
        }

    async def write_if_changed(
        self, working: tuple[Reason, str] | None, *, trouble: tuple[Reason, str] | None = None
    ) -> None:
        """Write status when it says something new. Nothing is claimed here, so the fence stays as it is."""
        wanted = self(trouble=trouble, working=working)
        have = self.ledger.status
        if all(have.get(k) == v for k, v in wanted.items()):
            return
        self.ledger.generation = int(have.get("fence") or 0)
        await self.ledger.write_pipeline(wanted)
