"""SyncRound.status: how far a round is, who may move it, with whom it runs, what became of them, who tried to move it.

Invariants that the schema itself keeps: a commit is never taken back, the owner's generation never decreases, and an
ended round keeps its phase.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rlfleet.api.v1alpha1.common import (
    ATOMIC,
    MAX_EXACT,
    MAX_LISTED_ENGINES,
    MAX_MEMBERS,
    ByteCount,
    ConditionList,
    Count,
    Generation,
    ManifestDigest,
    Message,
    Milliseconds,
    ObjectName,
    ReasonText,
    ShortText,
    Status,
    Time,
    Uid,
    rule,
    rules,
)
from rlfleet.api.wire import StagingMode, Transport


class RoundPhase(StrEnum):
    """How far a round is; the last five are ends."""

    PENDING = "Pending"
    PLANNED = "Planned"
    STAGING = "Staging"
    QUIESCING = "Quiescing"
    TRANSFERRING = "Transferring"
    HOLDING = "Holding"
    COMMITTED = "Committed"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SUPERSEDED = "Superseded"
    CANCELLED = "Cancelled"
    EXPIRED = "Expired"

    @property
    def terminal(self) -> bool:
        """Whether the round has ended."""
        return self in TERMINAL_PHASES


TERMINAL_PHASES = frozenset(
    {RoundPhase.SUCCEEDED, RoundPhase.FAILED, RoundPhase.SUPERSEDED, RoundPhase.CANCELLED, RoundPhase.EXPIRED}
)
_ENDS = ", ".join(f"'{phase.value}'" for phase in RoundPhase if phase in TERMINAL_PHASES)


class RoundLease(Status):
    """Who may move this round."""

    holder: ShortText = Field(description="Identity of the operator process.")
    generation: int = Field(
        ge=0,
        le=MAX_EXACT,
        description="Fence generation under which it acts.",
        json_schema_extra=rules(rule("self >= oldSelf", "lease.generation never decreases")),
    )
    acquired_at: Time | None = Field(default=None, description="When this holder took the round.")
    renewed_at: Time | None = Field(
        default=None, description="When this holder last wrote a phase; for people and alerts."
    )


class PlannedMember(Status):
    """One engine of the round, as frozen at Planned."""

    engine: ObjectName = Field(description="Name of the engine: pool and index.")
    pod_uid: Uid = Field(alias="podUID", description="UID of its pod.")
    incarnation: Uid = Field(description="Nonce of its engine process.")
    transport: Transport = Field(description="How its weights travel.")
    rank_offset: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        default=None, description="First rank of the engine in the broadcast group; absent for Serialized."
    )
    world_size: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="How many ranks the engine takes; absent for Serialized."
    )
    reason: ShortText | None = Field(default=None, description="Why this transport, where it is not obvious.")


class RoundPlan(Status):
    """Members and transports, written once."""

    world_size: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="Ranks of the broadcast group, the sender included; 0 without a broadcast."
    )
    serialized: Count = Field(default=0, description="Members that get their weights serialized.")
    broadcast: Count = Field(default=0, description="Members that get their weights by broadcast.")
    staging: StagingMode = Field(
        default=StagingMode.FULL, description="How serialized weights pass the gates' memory; from the pipeline's spec."
    )
    bucket_mib: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=0, alias="bucketMiB", description="Largest bucket in MiB; from the pipeline's spec. 0: as published."
    )
    checkpoint: Count = Field(default=0, description="Members that load a checkpoint from a shared path.")
    members: tuple[PlannedMember, ...] = Field(
        default=(), max_length=MAX_MEMBERS, description="The members.", json_schema_extra=ATOMIC
    )
    silent: tuple[ObjectName, ...] = Field(
        default=(),
        max_length=MAX_MEMBERS,
        description="Live engines whose gates did not answer at Planned; they count against maxUnavailable.",
        json_schema_extra=ATOMIC,
    )
    blocked: tuple[Uid, ...] = Field(
        default=(),
        max_length=MAX_MEMBERS,
        description="UIDs of pods whose gates answered at Planned but took no orders: an operation there had no known "
        "end (as after a rendezvous with a trainer that died); they count against maxUnavailable.",
        json_schema_extra=ATOMIC,
    )


class MemberOutcome(StrEnum):
    """What became of a member."""

    OK = "Ok"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    LOST = "Lost"
    DROPPED = "Dropped"


class MemberResult(Status):
    """What became of one member."""

    engine: ObjectName = Field(description="Name of the engine.")
    result: MemberOutcome = Field(
        description="Ok: whole at the target. Failed: proven not to be. Unknown: neither is proven, so it stays "
        "closed. Lost: its pod or process is gone. Dropped: taken out on purpose."
    )
    reason: ReasonText | None = Field(default=None, description="Why; absent for Ok.")


class RoundTimings(Status):
    """Duration of each part, in milliseconds; absent parts did not happen."""

    plan_ms: Milliseconds | None = Field(default=None, description="Choosing members and transports.")
    stage_ms: Milliseconds | None = Field(default=None, description="Delivering bytes to the gates.")
    quiesce_ms: Milliseconds | None = Field(default=None, description="Pausing the engines.")
    transfer_ms: Milliseconds | None = Field(default=None, description="Broadcasting and loading.")
    verify_ms: Milliseconds | None = Field(default=None, description="Comparing checksums.")
    publish_ms: Milliseconds | None = Field(default=None, description="Writing the version label into the engines.")
    reopen_ms: Milliseconds | None = Field(default=None, description="Resuming and routing.")
    paused_ms: Milliseconds | None = Field(default=None, description="From the first pause to the last resume.")
    total_ms: Milliseconds | None = Field(default=None, description="From the claim to the end.")


class RoundFailure(Status):
    """Why the round ended without success."""

    stage: ReasonText = Field(description="Phase or step in which it failed.")
    reason: ReasonText = Field(description="Why, as one stable CamelCase word.")
    digest: Annotated[str, Field(max_length=128)] = Field(
        default="", description="Hash of the cause that is equal for equal causes."
    )
    message: Message = Field(description="Why, for people, and what to do.")


class RefusedRound(Status):
    """Why a round was refused before its transfer, and the engines that it holds nevertheless."""

    stage: ReasonText = Field(description="Phase in which it was refused.")
    reason: ReasonText = Field(description="Why, as one stable CamelCase word.")
    message: Message = Field(description="Why, for people.")
    pod_uids: tuple[Uid, ...] = Field(
        default=(),
        alias="podUIDs",
        max_length=MAX_MEMBERS,
        description="Pods that the round which it superseded left closed.",
        json_schema_extra=ATOMIC,
    )
    start_overs: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="How often the round has started over since."
    )


MAX_ATTEMPTS = 20


class AttemptOp(StrEnum):
    """How somebody tries to move a round."""

    CLAIM = "Claim"
    HANDOFF = "Handoff"
    ADVANCE = "Advance"
    SETTLE = "Settle"


class AttemptResult(StrEnum):
    """What came of a try."""

    APPLIED = "Applied"
    REJECTED = "Rejected"
    DUPLICATE = "Duplicate"


class RefusalReason(StrEnum):
    """Why a try was refused, in the order in which the reasons are checked."""

    UNKNOWN_ROUND = "UnknownRound"
    NOT_OPEN = "NotOpen"
    NOT_OWNER = "NotOwner"
    STALE_FENCE = "StaleFence"
    ALREADY_SETTLED = "AlreadySettled"
    EXCLUDED = "Excluded"


class RoundAttempt(Status):
    """One try to move the round, by whoever made it."""

    request_id: Annotated[str, Field(max_length=128)] = Field(
        description="Id of the try: the same one of the same owner has the same id."
    )
    op: AttemptOp = Field(
        description="Claim: take the free slot for it. Handoff: take it over from an earlier owner. Advance: write a "
        "phase or the commit. Settle: end it."
    )
    result: AttemptResult = Field(
        description="Applied; Duplicate: it had been applied before, which is a success; Rejected: nothing was done."
    )
    generation: Generation = Field(description="Generation under which it was tried.")
    reason: RefusalReason | None = Field(
        default=None,
        description="Why it was refused; absent otherwise. NotOpen: the round has ended. NotOwner: another operator "
        "owns it. StaleFence: under a later generation. AlreadySettled: with another outcome. Excluded: another "
        "operation owns the pipeline.",
    )
    at: Time = Field(description="When, by the apiserver's clock.")


class SyncRoundStatus(Status):
    """What the operator knows of a round."""

    observed_generation: Generation = Field(default=0, description="The metadata.generation that this status reflects.")
    phase: RoundPhase | None = Field(
        default=None,
        description="How far the round is. The last five are ends.",
        json_schema_extra=rules(
            rule(f"!(oldSelf in [{_ENDS}]) || self == oldSelf", "the round has ended: its phase cannot change"),
        ),
    )
    outcome: Literal["Succeeded", "Failed", "Superseded", "Cancelled", "Expired"] | None = Field(
        default=None, description="How the round ended; absent before."
    )
    lease: RoundLease | None = Field(
        default=None, description="Who may move this round; absent before the first claim."
    )
    manifest_digest: ManifestDigest | None = Field(default=None, description="Digest of the bytes that travel.")
    bytes: ByteCount | None = Field(default=None, description="Bytes of the whole model.")
    plan: RoundPlan | None = Field(default=None, description="Members and transports; absent before Planned.")
    members: tuple[MemberResult, ...] = Field(
        default=(),
        max_length=MAX_LISTED_ENGINES,
        description="Result of every member of a round of up to 64; in larger rounds only of those that are not Ok.",
        json_schema_extra=ATOMIC,
    )
    timings: RoundTimings | None = Field(default=None, description="Duration of each part.")
    committed: bool = Field(
        default=False,
        description="Whether the version was committed by this round; never by a CatchUp. A round can fail after "
        "that, when some engines could not be reopened.",
        json_schema_extra=rules(rule("self || !oldSelf", "committed cannot be taken back")),
    )
    failure: RoundFailure | None = Field(default=None, description="Why the round ended without success.")
    refused: RefusedRound | None = Field(
        default=None,
        description="Set while a round that was refused before its transfer stays in Holding, because it inherited "
        "closed engines from the round that it superseded.",
    )
    attempts: tuple[RoundAttempt, ...] = Field(
        default=(),
        max_length=MAX_ATTEMPTS,
        description="The latest tries to claim, hand over, advance or settle the round, refused ones too.",
        json_schema_extra=ATOMIC,
    )
    started_at: Time | None = Field(default=None, description="When the round was first claimed.")
    staging_at: Time | None = Field(
        default=None, description="When staging began: stagingSeconds count from here, whoever runs the round."
    )
    paused_at: Time | None = Field(
        default=None, description="When pausing began: pausedSeconds count from here, whoever runs the round."
    )
    finished_at: Time | None = Field(default=None, description="When it ended.")
    conditions: ConditionList = Field(default=(), description="Complete, Failed and Progressing.")
