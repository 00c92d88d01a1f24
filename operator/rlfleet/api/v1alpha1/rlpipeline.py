"""RLPipeline: one training pipeline, where its weights come from and how they travel.

Invariant: an order that contradicts itself is refused by the schema, not found out in a round. What is known of a
pipeline stands in ``rlpipeline_status``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import (
    COUNT_OR_PERCENT,
    UNIQUE,
    KubernetesObject,
    NodeDevices,
    ObjectName,
    Spec,
    keyed_by,
    rule,
    rules,
)
from rlfleet.api.v1alpha1.rlpipeline_status import RLPipelineStatus
from rlfleet.api.v1alpha1.weights import Weights
from rlfleet.api.wire import PauseMode, StagingMode

DeviceAttribute = Annotated[
    str, Field(min_length=3, max_length=317, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z][A-Za-z0-9_]*$")
]

Seconds = Annotated[int, Field(ge=1, le=86_400)]


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
        description="Absent: Retract on SGLang, Keep on vLLM and Dynamo. Retract: running requests go back to the "
        "queue and are recomputed with the new weights. Keep: they are frozen and go on afterwards; refused on SGLang, "
        "whose cache could not be flushed under them; on vLLM and Dynamo the same as Retract, as they lose their "
        "cache. Abort: they end with finish reason abort. Wait: they finish first, for at most drainSeconds; what "
        "still runs then is held as by default. With Abort and Wait engines are also taken out of their routers.",
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
        json_schema_extra=COUNT_OR_PERCENT,
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


class RLPipeline(KubernetesObject):
    """One training pipeline: where its weights come from, how they travel, and which version is committed."""

    spec: RLPipelineSpec
    status: RLPipelineStatus = RLPipelineStatus()
