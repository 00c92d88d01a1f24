"""The durable record of a pipeline's rounds, and every write to it.

Invariants (DESIGN section 5):
- one claim = one conditional write of RLPipeline.status that raises ``fence`` and sets ``activeOperation``;
- every later write of ours to the pipeline is made only while ``fence`` is still the value that we claimed; a higher
  one means that another operator took over, and we stop (FenceLost);
- ``committed`` moves in one conditional write, together with ``activeOperation.committed``;
- a write whose answer was lost is read back, never assumed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from rlfleet.api import labels
from rlfleet.api.timestamps import rfc3339
from rlfleet.api.v1alpha1.syncround_status import AttemptOp
from rlfleet.control.rounds.objects import committed_of, record_of, slot_of
from rlfleet.control.rounds.refusals import record_refusal
from rlfleet.kube.errors import Conflict, NotFound, Unavailable, Unknown
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import RLPIPELINES, SYNCROUNDS
from rlfleet.plan.attempts import (
    Applied,
    Duplicate,
    Presented,
    Rejected,
    RoundRecord,
    append,
    decide,
    request_id,
    row,
)
from rlfleet.plan.claims import claim_landed, is_deposed, next_fence
from rlfleet.plan.rounds import Committed

if TYPE_CHECKING:
    from rlfleet.control.context import Context

Obj = dict[str, Any]

#: Seconds for one call to the apiserver.
API_SECONDS = 10.0
#: Re-reads after conflicts or lost answers before the reconcile is given up (and tried again by the queue).
WRITE_TRIES = 6


class FenceLost(Exception):
    """Another operator raised the fence of this pipeline: whatever we were doing is no longer ours to do."""


class RoundGone(Exception):
    """The SyncRound that we execute was deleted by force (its finalizer removed) or replaced by another UID."""


class RoundStatusLost(Exception):
    """The round's status was wiped or set back while we execute it: what we wrote into it is not there any more."""


class Ledger:
    """RLPipeline and SyncRound of one execution, as last read, with the fenced writes."""

    def __init__(self, ctx: Context, pipeline: Obj, *, holder: str) -> None:
        self.ctx = ctx
        self.kube = ctx.kube.at(Priority.ROUND, field_manager=labels.ROUND_MANAGER)
        self._pipeline = pipeline
        self.round: Obj | None = None
        self.holder = holder
        self.generation = 0
        #: Tries that are applied and ride on the next write of the round.
        self._unsaid: list[Obj] = []

    # ------------------------------------------------------------------------------------------ facts

    @property
    def pipeline(self) -> Obj:
        """The pipeline as last read or written; the gauges show it."""
        return self._pipeline

    @pipeline.setter
    def pipeline(self, live: Obj) -> None:
        self._pipeline = live
        self.ctx.metrics.pipeline(self.namespace, self.name, live)

    @property
    def namespace(self) -> str:
        """Namespace of the pipeline."""
        return str(self.pipeline["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return str(self.pipeline["metadata"]["name"])

    @property
    def uid(self) -> str:
        """UID of the pipeline."""
        return str(self.pipeline["metadata"]["uid"])

    @property
    def spec(self) -> Obj:
        """Spec of the pipeline (defaults are in it: the schema sets them)."""
        return dict(self.pipeline["spec"])

    @property
    def status(self) -> Obj:
        """Status of the pipeline as last read or written."""
        return dict(self.pipeline.get("status") or {})

    @property
    def committed(self) -> Committed | None:
        """The committed weights as last read or written."""
        return committed_of(self.pipeline)

    @property
    def round_status(self) -> Obj:
        """Status of the round as last read or written."""
        return dict((self.round or {}).get("status") or {})

    # ------------------------------------------------------------------------------------------ pipeline

    async def claim(self, operation: Obj, *, above: int = 0, extra: Obj | None = None) -> None:
        """Raise the fence and set ``activeOperation`` in one conditional write.

        ``above``: the highest generation that any gate or sender showed. A conflict is re-read: if somebody else's
        operation appeared, the caller must decide anew (Conflict is raised); our own lost answer counts as success.
        """
        held = self._fence()
        fence = next_fence(held, above, self.ctx.kube.last_date_ms)
        active = {**operation, "generation": fence, "holder": self.holder}
        before = self.status.get("activeOperation") or {}
        again = before.get("uid") == active["uid"] or bool(self.round_status.get("lease"))
        asked = self._presented(AttemptOp.HANDOFF if again else AttemptOp.CLAIM, "slot", generation=fence)
        try:
            await self._hold_pipeline()
            self.pipeline = await self.kube.patch_status(
                RLPIPELINES,
                self.namespace,
                self.name,
                resource_version=self.pipeline["metadata"]["resourceVersion"],
                status={**(extra or {}), "fence": fence, "activeOperation": active},
                timeout=API_SECONDS,
            )
        except (Unknown, Unavailable):
            live = await self.kube.get(RLPIPELINES, self.namespace, self.name, timeout=API_SECONDS)
            if not claim_landed((live.get("status") or {}).get("activeOperation"), active):
                raise
            self.pipeline = live
        except Conflict:
            await self._claim_lost(asked)
            raise
        self.ctx.gates.claimed(self.uid, before=held, now=fence)
        self.generation = fence
        self.ctx.raised.add(self.uid)
        self._unsaid = [row(asked, Applied(), rfc3339(self.ctx.now_ms()))]

    async def _hold_pipeline(self) -> None:
        """Our finalizer on the pipeline, before the first claim: from then on gates know it and may open engines."""
        meta = self.pipeline["metadata"]
        finalizers = list(meta.get("finalizers") or [])
        if labels.PIPELINE_FINALIZER in finalizers or "deletionTimestamp" in meta:
            return
        self.pipeline = await self.kube.patch_metadata(
            RLPIPELINES,
            self.namespace,
            self.name,
            resource_version=meta["resourceVersion"],
            finalizers=[*finalizers, labels.PIPELINE_FINALIZER],
            timeout=API_SECONDS,
        )

    async def _claim_lost(self, asked: Presented) -> None:
        """Somebody wrote the pipeline first: a claim of theirs refuses ours, anything else only makes us look again."""
        await self.read_pipeline()
        decision = decide(self._slot(), asked)
        if isinstance(decision, Rejected):
            await self._refused(asked, decision, f"{self.name} is claimed under {self.status.get('fence')}")

    async def write_pipeline(self, status: Obj, *, what: str = "status") -> None:
        """Write pipeline status while the fence is still ours; FenceLost otherwise. ``what``: names it in refusals."""
        for attempt in range(WRITE_TRIES):
            await self._stop_if_deposed(what)
            try:
                self.pipeline = await self.kube.patch_status(
                    RLPIPELINES,
                    self.namespace,
                    self.name,
                    resource_version=self.pipeline["metadata"]["resourceVersion"],
                    status=status,
                    timeout=API_SECONDS,
                )
                return
            except (Conflict, Unknown, Unavailable):
                if attempt == WRITE_TRIES - 1:
                    raise
                # The same status written twice is the same status, so re-reading and writing again is safe as
                # long as the fence is still ours.
                await asyncio.sleep(0.05 * 2**attempt)
                await self.read_pipeline()

    async def still_ours(self) -> None:
        """Read the pipeline live; FenceLost if somebody claimed it after us."""
        await self.read_pipeline()
        await self._stop_if_deposed("look")

    def _fence(self) -> int:
        return int(self.status.get("fence") or 0)

    async def _stop_if_deposed(self, what: str) -> None:
        if not is_deposed(self._fence(), self.generation):
            return
        why = f"{self.namespace}/{self.name}: fence is {self._fence()}, ours was {self.generation}"
        asked = self._presented(AttemptOp.ADVANCE, what)
        decision = decide(self._slot(), asked)
        if isinstance(decision, Rejected):
            await self._refused(asked, decision, why)
        raise FenceLost(why)

    async def read_pipeline(self) -> None:
        """Read the pipeline live; another UID under the name is another pipeline."""
        try:
            live = await self.kube.get(RLPIPELINES, self.namespace, self.name, timeout=API_SECONDS)
        except NotFound as e:
            raise FenceLost(f"{self.namespace}/{self.name} is gone") from e
        if live["metadata"]["uid"] != self.uid:
            raise FenceLost(f"{self.namespace}/{self.name} was deleted and created anew")
        self.pipeline = live

    # ------------------------------------------------------------------------------------------ round

    async def read_round(self) -> None:
        """Read the round live."""
        assert self.round is not None
        meta = self.round["metadata"]
        try:
            live = await self.kube.get(SYNCROUNDS, self.namespace, meta["name"], timeout=API_SECONDS)
        except NotFound as e:
            raise RoundGone(meta["name"]) from e
        if live["metadata"]["uid"] != meta["uid"]:
            raise RoundGone(meta["name"])
        mine = self._leased() == self.generation
        self.round = live
        if mine and self.generation and self._leased() < self.generation:
            # Plan and deadlines went with it: the next look takes the round over with what the gates say.
            raise RoundStatusLost(f"{meta['name']}: its status no longer has our lease {self.generation}")

    async def write_round(self, status: Obj, *, op: AttemptOp = AttemptOp.ADVANCE, what: str = "") -> None:
        """Write round status under its resourceVersion, if plan.attempts.decide lets us; FenceLost otherwise.

        ``what`` names the try (a phase, an outcome) and has it recorded; without it nothing but status is written.
        The same try once more is a success without a write.
        """
        assert self.round is not None
        # Without a claim nothing but the round as it was read says that nobody drives it.
        lease = self.round_status.get("lease") or {}
        mine = None if self.generation else (int(lease.get("generation") or 0), str(lease.get("holder") or ""))
        outcome = str(status.get("phase") or "")
        asked = self._presented(op, what or "status", outcome=outcome, unclaimed=mine)
        for attempt in range(WRITE_TRIES):
            decision = decide(self._record(), asked)
            if isinstance(decision, Rejected):
                why = f"round {self.round['metadata']['name']} is {self._record().phase or 'unclaimed'}"
                why += f", leased under generation {self._leased()}; ours was {asked.generation}"
                await self._refused(asked, decision, why)
                raise FenceLost(why)
            if isinstance(decision, Duplicate) and attempt:
                self._unsaid = []
                return  # the answer was lost, the write was not
            rows = [*self._unsaid, *([row(asked, decision, rfc3339(self.ctx.now_ms()))] if what else [])]
            body = {**status, "attempts": append(self.round_status.get("attempts") or [], rows)} if rows else status
            try:
                self.round = await self.kube.patch_status(
                    SYNCROUNDS,
                    self.namespace,
                    self.round["metadata"]["name"],
                    resource_version=self.round["metadata"]["resourceVersion"],
                    status=body,
                    timeout=API_SECONDS,
                )
                self._unsaid = []
                if self.generation:
                    self.ctx.metrics.round_moved(self.namespace, self.name, self.round)
                return
            except NotFound as e:
                await self._round_gone(asked, e)
            except (Conflict, Unknown, Unavailable):
                if attempt == WRITE_TRIES - 1:
                    raise
                await asyncio.sleep(0.05 * 2**attempt)
                try:
                    await self.read_round()
                except RoundGone as e:
                    await self._round_gone(asked, e)

    async def _round_gone(self, asked: Presented, cause: Exception) -> NoReturn:
        assert self.round is not None
        name = self.round["metadata"]["name"]
        decision = decide(RoundRecord(exists=False), asked)
        assert isinstance(decision, Rejected)
        await record_refusal(self.ctx, self.kube, self.pipeline, asked, decision, f"round {name} is gone")
        raise RoundGone(name) from cause

    async def _refused(self, asked: Presented, decision: Rejected, why: str) -> None:
        if self.round is not None:
            await record_refusal(self.ctx, self.kube, self.round, asked, decision, why)

    def _presented(
        self,
        op: AttemptOp,
        what: str,
        *,
        generation: int = 0,
        outcome: str = "",
        unclaimed: tuple[int, str] | None = None,
    ) -> Presented:
        """A try of ours. ``unclaimed``: generation and holder of a round that nobody drives, as it was read."""
        generation, holder = unclaimed or (generation or self.generation, self.holder)
        uid = str((self.round or {}).get("metadata", {}).get("uid") or "")
        return Presented(op, request_id(op, generation, what), uid, holder, generation, outcome)

    def _record(self) -> RoundRecord:
        """The round as last read."""
        return record_of(self.round_status)

    def _slot(self) -> RoundRecord:
        """The pipeline's slot as last read."""
        return slot_of(self.status, self.round_status)

    def _leased(self) -> int:
        return int((self.round_status.get("lease") or {}).get("generation") or 0)

    async def set_finalizer(self, present: bool) -> None:
        """Add or remove our finalizer on the round; no write when it is as wanted.

        With it the round gets its pipeline as an owner whose deletion waits for the round, whoever created it.
        """
        assert self.round is not None
        for attempt in range(WRITE_TRIES):
            finalizers = list(self.round["metadata"].get("finalizers") or [])
            if (labels.ROUND_FINALIZER in finalizers) == present:
                return
            if present and "deletionTimestamp" in self.round["metadata"]:
                return  # the apiserver takes no new finalizer on an object that is being deleted
            wanted = [f for f in finalizers if f != labels.ROUND_FINALIZER]
            if present:
                wanted.append(labels.ROUND_FINALIZER)
            try:
                self.round = await self.kube.patch_metadata(
                    SYNCROUNDS,
                    self.namespace,
                    self.round["metadata"]["name"],
                    resource_version=self.round["metadata"]["resourceVersion"],
                    finalizers=wanted,
                    owners=self._owners() if present else None,
                    timeout=API_SECONDS,
                )
                return
            except NotFound:
                if present:
                    raise RoundGone(self.round["metadata"]["name"]) from None
                return
            except (Conflict, Unknown, Unavailable):
                if attempt == WRITE_TRIES - 1:
                    raise
                await asyncio.sleep(0.05 * 2**attempt)
                try:
                    await self.read_round()
                except RoundGone:
                    if present:
                        raise
                    return

    def _owners(self) -> list[Obj]:
        assert self.round is not None
        others = [o for o in self.round["metadata"].get("ownerReferences") or [] if o.get("uid") != self.uid]
        mine = {"apiVersion": labels.API_VERSION, "kind": "RLPipeline", "name": self.name, "uid": self.uid}
        return [*others, {**mine, "blockOwnerDeletion": True}]

    def lease(self) -> Obj:
        """The round's lease as we hold it now; ``acquiredAt`` stays while the generation does."""
        now = rfc3339(self.ctx.now_ms())
        old = self.round_status.get("lease") or {}
        mine = old.get("generation") == self.generation
        return {
            "holder": self.holder,
            "generation": self.generation,
            "acquiredAt": old.get("acquiredAt", now) if mine else now,
            "renewedAt": now,
        }
