"""What the operator knows of an RLPipeline: its status.

Invariants: status.fence never decreases (the schema itself refuses it), and status.committed is written by the
commit of a SyncRound only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlfleet.api.v1alpha1.common import (
    ATOMIC,
    MAX_EXACT,
    UNIQUE,
    ConditionList,
    Count,
    DeviceId,
    Generation,
    ManifestDigest,
    NodeName,
    ObjectName,
    Port,
    ReasonText,
    ReportedUrl,
    ShortText,
    Status,
    Time,
    Uid,
    WeightVersion,
    WholeNumber,
    keyed_by,
    rule,
    rules,
)

#: Rendezvous ports that one pipeline may claim at the same time; more than one only if senders died in broadcasts.
MAX_CLAIMS = 64
#: Layouts of engines whose checksums are remembered with what is committed.
MAX_LAYOUTS = 16


class OperationKind(StrEnum):
    """What kind of work owns the slot of a pipeline; at most one does at a time."""

    REFRESH = "Refresh"
    CATCH_UP = "CatchUp"
    REPAIR = "Repair"
    OFFLOAD = "Offload"
    WAKE = "Wake"
    QUARANTINE = "Quarantine"


class ActiveOperation(Status):
    """The work that owns the pipeline's engines now."""

    kind: OperationKind = Field(
        description="Refresh and CatchUp: a SyncRound. Repair: the operator puts right what no round left so, between "
        "rounds. Offload, Wake and Quarantine: engines are taken out of service or put back, between rounds."
    )
    name: ShortText = Field(description="Name of the SyncRound, or of the work between rounds.")
    uid: Uid = Field(description="UID of the operation; gates refuse calls of another one under the same generation.")
    generation: Generation = Field(description="Fence generation under which it acts.")
    committed: bool = Field(default=False, description="Whether its commit was written: from then on only forward.")
    holder: ShortText = Field(default="", description="Identity of the operator process that runs it.")


class EngineDigest(Status):
    """The checksum that engines of one layout agreed on."""

    layout: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="Hash of model, parallelism, dtype and engine version; checksums compare only within one layout."
    )
    digest: Annotated[str, Field(max_length=128)] = Field(description="The engines' own checksum of their weights.")


class CommittedVersion(Status):
    """Weights that a round has proven and committed."""

    version: WeightVersion = Field(description="Policy version; -1 is the base.")
    manifest_digest: ManifestDigest = Field(description="Digest of the sender's manifest: the name of these bytes.")
    sender_incarnation: Uid = Field(description="Sender process that published them, or checkpoint.")
    engine_digests: tuple[EngineDigest, ...] = Field(
        default=(),
        max_length=MAX_LAYOUTS,
        description="Checksum per engine layout; empty where engines have no usable checksum.",
        json_schema_extra=keyed_by("layout"),
    )


class CacheReady(Status):
    """Newest complete weights at the sender."""

    version: WeightVersion = Field(description="Policy version; -1 is the base.")
    manifest_digest: ManifestDigest = Field(description="Digest of the sender's manifest.")


class SenderIdentity(Status):
    """The sender that was found."""

    pod_uid: Uid = Field(alias="podUID", description="UID of its pod.")
    incarnation: Uid = Field(description="Nonce of its process; a restarted trainer has another one.")
    url: ReportedUrl = Field(description="Base URL under which it answers.")


class PublicKey(Status):
    """One key that verifies the operator's tokens."""

    kid: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")] = Field(description="Key id.")
    key: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9+/]{43}=$")] = Field(
        description="Raw Ed25519 public key, base64."
    )


class RendezvousClaim(Status):
    """A port on which the sender may listen while a broadcast group forms and lives."""

    address: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Address of the sender: of its pod, or of its node where it uses the host's network."
    )
    port: Port = Field(description="Port of transport.rendezvousPorts.")
    operation: Uid = Field(description="UID of the SyncRound that claimed it.")
    sender_incarnation: Uid = Field(description="Sender process that may listen.")
    sender_pod: ShortText | None = Field(default=None, description="Name of its pod; absent for a sender named by url.")
    sender_pod_uid: Uid | None = Field(
        default=None, alias="senderPodUID", description="UID of its pod; absent for a sender named by url."
    )
    leaked: bool = Field(
        default=False,
        description="The operation ended and the sender never said how its broadcast did. The port is used by nobody "
        "until that sender answers, or its pod is gone.",
    )


class EngineTotals(Status):
    """Engines of all pools of the pipeline."""

    total: Count = Field(default=0, description="Engines that should be awake.")
    active: Count = Field(default=0, description="Engines that hold the committed version and are open.")
    asleep: Count = Field(default=0, description="Engines that sleep because they are to.")


class DemandPriority(StrEnum):
    """What a trainer wants devices for; earlier ones go first, and none takes devices from another."""

    INITIALIZATION = "Initialization"
    ACTOR_TRAINING = "ActorTraining"
    CRITIC_TRAINING = "CriticTraining"
    OLD_LOG_PROBS = "OldLogProbs"
    REF_LOG_PROBS = "RefLogProbs"
    VALUE_COMPUTE = "ValueCompute"


class GrantedDevices(Status):
    """GPUs of one node that a trainer demands."""

    node: NodeName = Field(description="Name of the Node.")
    devices: tuple[DeviceId, ...] = Field(
        max_length=64, description="UUIDs of physical GPUs or MIG slices.", json_schema_extra=UNIQUE
    )


class Grant(Status):
    """What became of one demand of the trainer for devices. While it stands, engines on these devices sleep."""

    cluster: ObjectName = Field(description="Which part of the trainer demands them, in its own words.")
    priority: DemandPriority = Field(description="What for.")
    step: WeightVersion = Field(description="Training step that they are demanded for.")
    id: Annotated[str, Field(max_length=64)] = Field(default="", description="The request's own id.")
    granted: bool = Field(
        description="The devices are free: engines on them are Offloaded or gone, and memory in use is within "
        "spec.residualMemoryGiB of their pools. It stays true until the demand is withdrawn or is for another step."
    )
    reason: ReasonText = Field(description="Granted, or why not yet.")
    message: ShortText = Field(default="", description="What it waits for, by name.")
    devices: tuple[GrantedDevices, ...] = Field(
        max_length=256, description="The devices, by node.", json_schema_extra=keyed_by("node")
    )


class BlockStatus(Status):
    """Where a train block is."""

    name: ObjectName = Field(description="Name of the block.")
    claim: Annotated[str, Field(max_length=253)] = Field(description="Name of its ResourceClaim.")
    claim_uid: Uid = Field(alias="claimUID", description="UID of its ResourceClaim.")
    node: NodeName | None = Field(default=None, description="Node that it was given; absent: none yet.")
    devices: tuple[DeviceId, ...] = Field(
        default=(),
        max_length=32,
        description="UUIDs of its GPUs as last known, slot by slot.",
        json_schema_extra=ATOMIC,
    )
    moved_from: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Node and GPUs that it had before, until a round that was planned for the new ones has ended.",
    )
    moved_after: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="The lastRound when the move was seen; empty: none had ended."
    )


class PipelineProgress(Status):
    """How far the rollouts of the present batches are, over all streams. Written anew for every 2 %, not more often."""

    target: WholeNumber = Field(description="Trajectories wanted.")
    collected: WholeNumber = Field(description="Trajectories collected; some may be beyond their stream's target.")
    completed: WholeNumber = Field(description="Trajectories that count towards the target.")
    percent: Annotated[int, Field(ge=0, le=100)] = Field(description="Completed of target, in steps of 2 %.")
    batches: Annotated[str, Field(max_length=16)] = Field(
        description="Names the streams and their batches; another value means that counting began anew."
    )


class UpdateRoom(Status):
    """Time that a round which could start left to rolling updates."""

    since: Time = Field(description="When it began to wait, by the apiserver's clock.")
    until: Time = Field(
        description="When it started at the latest. Decided with since: neither a restart of the operator nor a change "
        "of spec.sync.drainSeconds makes the wait longer."
    )


class RLPipelineStatus(Status):
    """What the operator knows of a pipeline."""

    observed_generation: Generation = Field(default=0, description="The metadata.generation that this status reflects.")
    fence: int = Field(
        default=0,
        ge=0,
        le=MAX_EXACT,
        description="Highest generation claimed. Gates and the sender refuse calls of a lower one. It may be removed "
        "(never lowered): the next claim is above what gates hold.",
        json_schema_extra=rules(rule("self >= oldSelf", "fence never decreases")),
    )
    active_operation: ActiveOperation | None = Field(
        default=None, description="The work that owns the engines now; absent when none runs."
    )
    committed: CommittedVersion | None = Field(
        default=None,
        description="The version that engines may serve; absent before the first round, and after its record was lost "
        "(condition reason CommittedUnknown).",
    )
    cache_ready: CacheReady | None = Field(
        default=None, description="Newest complete weights at the sender; absent before the sender is ready."
    )
    sender: SenderIdentity | None = Field(default=None, description="The sender that was found; absent when none is.")
    public_keys: tuple[PublicKey, ...] = Field(
        default=(),
        max_length=8,
        description="Keys with which senders verify the operator's tokens.",
        json_schema_extra=keyed_by("kid"),
    )
    rendezvous_claims: tuple[RendezvousClaim, ...] = Field(
        default=(),
        max_length=MAX_CLAIMS,
        description="Ports claimed for broadcast groups. A port that any pipeline claims is used by no other whose "
        "sender has the same address.",
        json_schema_extra=ATOMIC,
    )
    last_round: ObjectName | None = Field(default=None, description="Name of the SyncRound that ended last.")
    engines: EngineTotals | None = Field(default=None, description="Engines of all pools of the pipeline.")
    grants: tuple[Grant, ...] = Field(
        default=(),
        max_length=64,
        description="Demands of the trainer for devices, and whether they may be used.",
        json_schema_extra=ATOMIC,
    )
    blocks: tuple[BlockStatus, ...] = Field(
        default=(), max_length=16, description="Where the train blocks are.", json_schema_extra=keyed_by("name")
    )
    update_room: UpdateRoom | None = Field(
        default=None,
        description="The last time that rounds which follow each other made room for a RollingUpdate of a pool; absent "
        "if none ever did. One in which no engine was replaced is followed by none for five times its length.",
    )
    progress: PipelineProgress | None = Field(
        default=None, description="Progress of the rollouts as the trainer reports it; absent when it reports none."
    )
    conditions: ConditionList = Field(
        default=(), description="SenderReady, Ready, Progressing, Degraded and TopologyValid."
    )
