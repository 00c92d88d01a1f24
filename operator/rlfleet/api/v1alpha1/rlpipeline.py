"""RLPipeline: one training pipeline, how its weights travel, and which version is committed.

Invariants: status.fence never decreases (the schema itself refuses it), and status.committed is written by the
commit of a SyncRound only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import (
    ATOMIC,
    MAX_EXACT,
    UNIQUE,
    ConditionList,
    Count,
    DeviceId,
    Generation,
    KubernetesObject,
    ManifestDigest,
    NodeDevices,
    NodeName,
    ObjectName,
    Port,
    ReasonText,
    ShortText,
    Spec,
    Status,
    Uid,
    Url,
    WeightVersion,
    keyed_by,
    rule,
    rules,
)
from rlfleet.api.v1alpha1.weights import Weights
from rlfleet.api.wire import PauseMode, StagingMode

DeviceAttribute = Annotated[
    str, Field(min_length=3, max_length=317, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z][A-Za-z0-9_]*$")
]
Seconds = Annotated[int, Field(ge=1, le=86_400)]

#: Rendezvous ports that one pipeline may claim at the same time; more than one only if senders died in broadcasts.
MAX_CLAIMS = 64


class TransportMode(StrEnum):
    """How the transport of each engine is chosen."""

    CPU_SERIALIZE = "CPUSerialize"
    BROADCAST = "Broadcast"
    AUTO = "Auto"


class Backend(StrEnum):
    """Library that carries a broadcast."""

    NCCL = "nccl"
    GLOO = "gloo"


class VerifyMode(StrEnum):
    """How much proof a round demands from engines."""

    IF_SUPPORTED = "IfSupported"
    REQUIRED = "Required"
    OFF = "Off"


class OnFailure(StrEnum):
    """What becomes of an engine that does not heal."""

    REPLACE = "Replace"
    HOLD = "Hold"


class TrainBlock(Spec):
    """GPUs of one trainer pod, on one node, that engines may share slot by slot."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.slots * self.devicesPerSlot <= 32",
                "slots times devicesPerSlot must not exceed 32: a ResourceClaim holds no more devices",
                at=".slots",
            ),
            rule(
                "self == oldSelf",
                "a train block is immutable, as its ResourceClaim is: remove it and add one under another name",
            ),
        )
    )

    name: ObjectName = Field(
        description="Name of the block. Its ResourceClaim is called <pipeline>.<block>; the trainer's container "
        "uses the whole claim, the engine of slot i its request slot-i."
    )
    device_class_name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="DeviceClass of the GPUs, for instance gpu.nvidia.com."
    )
    slots: Annotated[int, Field(ge=1, le=32)] = Field(description="How many engines the block has room for.")
    devices_per_slot: Annotated[int, Field(ge=1, le=32)] = Field(
        default=1, description="GPUs of one slot; equals engine.gpusPerEngine of the pool that uses the block."
    )
    match_attributes: tuple[DeviceAttribute, ...] = Field(
        default=(),
        max_length=8,
        description="Attributes that all GPUs of the block have in common, such as resource.kubernetes.io/pcieRoot.",
        json_schema_extra=UNIQUE,
    )


class Trainer(Spec):
    """Where the trainer runs."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.gpus) || has(self.blocks)",
                "gpus or blocks must be set; leave trainer out where its devices are not known",
            ),
        )
    )

    gpus: tuple[NodeDevices, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The train pool: physical GPUs that the trainer uses. Engines on these never join a broadcast.",
        json_schema_extra=keyed_by("node"),
    )
    blocks: tuple[TrainBlock, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="The train pool by ResourceClaims (resource.k8s.io/v1): the operator makes one claim per block, "
        "the scheduler picks its node and GPUs, trainer and engines share them. Pools use them with placement Claims.",
        json_schema_extra=keyed_by("name"),
    )


class RendezvousPorts(Spec):
    """Range of ports, both ends included."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.first <= self.last", "first must not be above last", at=".first"),
        )
    )

    first: int = Field(default=29500, ge=1024, le=65535, description="Lowest port of the range.")
    last: int = Field(default=29599, ge=1024, le=65535, description="Highest port of the range.")


class TransportSpec(Spec):
    """How weights travel from the sender to the engines."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!self.assertMixed || self.mode == 'Auto'",
                "assertMixed needs mode Auto: no other mode mixes transports",
                at=".assertMixed",
            ),
        )
    )

    mode: TransportMode = Field(
        default=TransportMode.CPU_SERIALIZE,
        description="CPUSerialize: bytes go over HTTP to each engine's gate; works wherever the engines run. "
        "Broadcast: one collective among the sender and all engines; refused unless every engine is known to be off "
        "the train GPUs. Auto: broadcast for engines known to be off the train GPUs, serialized for those on them.",
    )
    assert_mixed: bool = Field(
        default=False,
        description="Refuse rounds that do not use both transports. Only with mode Auto.",
    )
    backend: Backend = Field(
        default=Backend.NCCL,
        description="Library of broadcast groups: nccl for GPUs, gloo for CPUs.",
    )
    bucket_mib: int = Field(
        default=512,
        ge=1,
        le=65_536,
        alias="bucketMiB",
        description="Largest bucket in MiB: weights travel in buckets of whole tensors, smaller than the trainer's own "
        "where this is less. A larger tensor gets a bucket of its own.",
    )
    staging: StagingMode = Field(
        default=StagingMode.FULL,
        description="Full: serialized weights are complete in the gate's memory volume before an engine is paused, so "
        "the pause lasts for the load only. Bucket: they stream while engines are paused, one bucket at a time in the "
        "volume, for models that do not fit in it; a transfer that breaks off leaves an engine closed until it is "
        "loaded anew.",
    )
    rendezvous_ports: RendezvousPorts = Field(
        default=RendezvousPorts(),
        description="Ports that the sender may listen on for a broadcast group. A round claims one in "
        "status.rendezvousClaims before it is used, and takes another where the sender finds it in use.",
    )


class Deadlines(Spec):
    """How long a round may take, by part."""

    pending_seconds: Seconds = Field(
        default=600, description="Seconds that a round may wait for its turn and for the sender to hold its version."
    )
    staging_seconds: Seconds = Field(
        default=600, description="Seconds for delivering all bytes to the gates. Engines serve meanwhile."
    )
    paused_seconds: Seconds = Field(
        default=150,
        description="Seconds from the first pause of an engine to the commit. Engines do not serve meanwhile. "
        "Gates and the sender divide them: 0.15 to form a broadcast group, 0.5 to move weights, 0.15 for one "
        "collective in flight, 0.1 to tear down, the rest for the proof. With quiesce.mode Wait drainSeconds are "
        "added.",
    )


class Quiesce(Spec):
    """How running requests are held while weights change."""

    mode: PauseMode | None = Field(
        default=None,
        description="Absent: Retract on SGLang, Keep on vLLM. Retract: running requests go back to the queue and are "
        "recomputed with the new weights. Keep: they are frozen and go on afterwards; refused on SGLang, whose cache "
        "could not be flushed under them. Abort: they end with finish reason abort. Wait: they finish first, for at "
        "most drainSeconds; what still runs then is held as by default. With Abort and Wait engines are also taken out "
        "of their routers.",
    )


class SyncSpec(Spec):
    """How rounds run and what they demand."""

    deadlines: Deadlines = Field(default=Deadlines(), description="How long a round may take, by part.")
    quiesce: Quiesce = Field(default=Quiesce(), description="How running requests are held while weights change.")
    drain_seconds: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="Seconds that running requests get to finish where an engine is drained: before a pause with "
        "quiesce.mode Wait, and before an engine is removed. What still runs then is held with Wait, and aborted with "
        "a removal.",
    )
    verify: VerifyMode = Field(
        default=VerifyMode.IF_SUPPORTED,
        description="Required: refuse rounds with engines whose checksum cannot be compared. IfSupported: compare "
        "where possible and say in a condition where not. Off: trust delivered bytes.",
    )
    max_unavailable: int | str = Field(
        default="10%",
        description="How many engines of a round may be missing for it to go on: a number, or a percentage of the "
        "members, rounded up. More than that and the round fails before anything is committed.",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "maxLength": 32,
            "minimum": 0,
            "maximum": 4096,
            # A rule instead of a pattern, whose answer would only cite a regular expression.
            **rules(
                rule(
                    "type(self) == int || self.matches('^(100|[1-9]?[0-9])%$')",
                    "maxUnavailable must be a number of engines, or a percentage from 0% to 100%",
                )
            ),
        },
    )
    probe_generation: bool = Field(
        default=False,
        description="After a commit, have each resumed engine generate one greedy token before routers get it back. "
        "Engines without usable checksums must give the same token. An engine that answers wrongly is closed, and the "
        "round ends as RoutingDegraded.",
    )
    on_failure: OnFailure = Field(
        default=OnFailure.REPLACE,
        description="What happens to an engine that cannot be proven to hold the committed weights. Replace: its pod "
        "is replaced. Hold: it stays closed until a person or a later round deals with it.",
    )


class RLPipelineSpec(Spec):
    """What the user wants of a pipeline."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.weights.checkpoint) || !has(self.transport) || self.transport.mode == 'CPUSerialize'",
                "transport.mode is about a sender: leave it out with weights.checkpoint",
                at=".transport.mode",
                reason="FieldValueForbidden",
            ),
        )
    )

    trainer: Trainer | None = Field(
        default=None,
        description="Where the trainer runs. Needed by transports Broadcast and Auto.",
    )
    weights: Weights = Field(description="Where complete weights come from.")
    transport: TransportSpec = Field(
        default=TransportSpec(), description="How weights travel from the sender to the engines."
    )
    sync: SyncSpec = Field(default=SyncSpec(), description="How rounds run and what they demand.")
    history_limit: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="How many ended SyncRounds are kept. The round with the highest fence is kept in any case, and so "
        "is every round that is the only evidence of what an engine went through.",
    )
    ttl_seconds_after_finished: int = Field(
        default=3600,
        ge=0,
        le=31_536_000,
        description="Seconds after its end that a SyncRound is kept. The exceptions of historyLimit hold here too.",
    )


# ------------------------------------------------------------------------------------------------ status


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
        max_length=16,
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
    url: Url = Field(description="Base URL under which it answers.")


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
        max_length=16,
        description="Demands of the trainer for devices, and whether they may be used.",
        json_schema_extra=ATOMIC,
    )
    blocks: tuple[BlockStatus, ...] = Field(
        default=(), max_length=16, description="Where the train blocks are.", json_schema_extra=keyed_by("name")
    )
    conditions: ConditionList = Field(
        default=(), description="SenderReady, Ready, Progressing, Degraded and TopologyValid."
    )


class RLPipeline(KubernetesObject):
    """One training pipeline: where its weights come from, how they travel, and which version is committed."""

    spec: RLPipelineSpec
    status: RLPipelineStatus = RLPipelineStatus()
