"""EnginePool.status: how many engines are in each state, which versions they hold, what is wrong with whom.

Invariant: its size does not grow with the pool; every list is bounded and says what it leaves out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rlfleet.api.v1alpha1.common import (
    ATOMIC,
    MAX_LISTED_ENGINES,
    ConditionList,
    Count,
    DeviceId,
    Generation,
    NodeName,
    ReasonText,
    ShortText,
    Status,
    Time,
    Uid,
    WeightVersion,
)

#: Engine processes of one pool whose catch-up attempts are remembered; more wait until some are forgotten.
MAX_COUNTED = 128


class EngineState(StrEnum):
    """Where an engine is in its life."""

    PENDING = "Pending"
    BOOTING = "Booting"
    LOADING = "Loading"
    ACTIVE = "Active"
    DRAINING = "Draining"
    OFFLOADED = "Offloaded"
    QUARANTINED = "Quarantined"
    FAILED = "Failed"


class EngineCounts(Status):
    """How many engines are in each state."""

    pending: Count = Field(default=0, description="No pod yet, or its pod is not scheduled.")
    booting: Count = Field(default=0, description="The pod starts; the engine does not answer yet.")
    loading: Count = Field(default=0, description="The engine is up and closed: it waits for a round.")
    active: Count = Field(default=0, description="The engine holds the committed version and is open.")
    draining: Count = Field(
        default=0, description="The engine finishes its requests before it goes or sleeps, or sleeps by half."
    )
    offloaded: Count = Field(default=0, description="The engine sleeps: its process lives, its memory is released.")
    quarantined: Count = Field(default=0, description="The engine is closed: what it holds is not proven.")
    failed: Count = Field(default=0, description="The pod failed or is lost.")


class VersionGroup(Status):
    """Engines that hold one version."""

    version: WeightVersion = Field(description="Policy version; -1 is the base.")
    engines: Annotated[str, Field(max_length=8192, pattern=r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$")] = Field(
        description="Indices of the engines, as ranges: 0-2,5."
    )


class EngineEntry(Status):
    """One engine."""

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Name of the engine's pod.")
    index: Annotated[int, Field(ge=0, le=1_000_000)] = Field(description="Index of the engine in the pool.")
    pod_uid: Uid | None = Field(default=None, alias="podUID", description="UID of its pod.")
    incarnation: Uid | None = Field(default=None, description="Nonce of its engine process; absent before it started.")
    node: NodeName | None = Field(default=None, description="Node that its pod runs on.")
    gpus: Annotated[tuple[DeviceId, ...], Field(max_length=64)] | None = Field(
        default=None,
        description="UUIDs of its devices on this node, as its gate reports them or placement gave them; absent when "
        "they are not known.",
        json_schema_extra=ATOMIC,
    )
    state: EngineState = Field(description="Where it is in its life.")
    version: WeightVersion | None = Field(default=None, description="Version that it is proven to hold; absent: none.")
    fence: Generation | None = Field(default=None, description="Highest generation that its gate has stored.")
    routed: bool | None = Field(
        default=None,
        description="Whether every router lists it; absent when that is unknown or the pool has no router.",
    )
    failure: ShortText | None = Field(default=None, description="What is wrong with it: a reason, then what is known.")
    instance: Annotated[str, Field(max_length=64)] | None = Field(
        default=None,
        description="What the engine calls its own process. Dynamo: the instance id of its worker, as text, because "
        "it is an unsigned 64-bit number.",
    )
    loading_since: Time | None = Field(
        default=None,
        description="Since when it is awake and closed (Loading); absent once it is anything else. Condition "
        "StuckLoading counts from here, so that a restart of the operator does not begin anew.",
    )


class CatchUpCount(Status):
    """How often one engine process was tried to be brought to the committed version between rounds."""

    engine: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Name of the engine's pod.")
    incarnation: Uid = Field(description="Nonce of its engine process: another process begins at zero.")
    version: WeightVersion = Field(description="Version of the latest attempt.")
    attempts: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="Attempts so far. Counted when the engine is about to be touched; never lowered. Forgotten only "
        "with the process, or once it is proven at a version committed after its latest attempt."
    )
    round: Uid = Field(description="UID of the CatchUp of the latest attempt: one round counts once.")
    reason: ReasonText | None = Field(default=None, description="Why the latest attempt failed; absent if it did not.")


class StartFailure(Status):
    """Engines of one index that ended, or had to be replaced, one after the other before they ever served."""

    index: Annotated[int, Field(ge=0, le=1_000_000)] = Field(description="Index of the engine in the pool.")
    count: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        description="How many in a row. From the second on each successor waits longer, up to 5 minutes. Forgotten "
        "once an engine of this index serves."
    )
    node: NodeName | None = Field(default=None, description="Node of the latest; absent if it was on none.")
    on_node: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        description="How many of them, the latest included, were on that node in a row."
    )
    at: Time = Field(description="When the latest ended, by the apiserver's clock.")
    pod_uid: Uid = Field(alias="podUID", description="UID of the latest one's pod, which is counted once.")


class EnginePoolStatus(Status):
    """What the operator knows of a pool."""

    observed_generation: Generation = Field(default=0, description="The metadata.generation that this status reflects.")
    replicas: Count = Field(default=0, description="Engine pods that exist.")
    ready_replicas: Count = Field(default=0, description="Engine pods that are Ready.")
    selector: Annotated[str, Field(max_length=8192)] = Field(
        default="", description="Label selector of the pool's pods, for the scale subresource."
    )
    counts: EngineCounts | None = Field(default=None, description="How many engines are in each state.")
    versions: tuple[VersionGroup, ...] = Field(
        default=(),
        max_length=64,
        description="Which engines hold which version, newest version first.",
        json_schema_extra=ATOMIC,
    )
    engines: tuple[EngineEntry, ...] = Field(
        default=(),
        max_length=MAX_LISTED_ENGINES,
        description="Every engine of a pool of up to 64; in larger pools only those that are not active.",
        json_schema_extra=ATOMIC,
    )
    catch_up: tuple[CatchUpCount, ...] = Field(
        default=(),
        max_length=MAX_COUNTED,
        description="Engine processes that CatchUp rounds were tried on, and how often. Written by rounds only.",
        json_schema_extra=ATOMIC,
    )
    start_failures: tuple[StartFailure, ...] = Field(
        default=(),
        max_length=MAX_LISTED_ENGINES,
        description="Engines that fail before they serve, again and again; those with the most failures if there are "
        "more than fit.",
        json_schema_extra=ATOMIC,
    )
    pods_refused_since: Time | None = Field(
        default=None,
        description="Since when not all missing pods could be made; absent: all could. It is tried again after pauses "
        "as long as that has lasted, up to a minute, and at once when the spec changes.",
    )
    template_hash: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="Hash of the pod template that new pods are made from."
    )
    fencing: Literal["Cooperative", "Enforced"] | None = Field(
        default=None,
        description="Enforced: every engine was seen to refuse a control call without its key, so nobody but the gate "
        "can change it. Cooperative: others in the cluster could call an engine's control endpoints directly.",
    )
    admission_guarantee: Literal["Enforced", "DetectOnly"] | None = Field(
        default=None,
        description="Enforced: an engine is never routed before it is proven to hold the committed version. DetectOnly "
        "(adopted pods, Dynamo workers): an engine that restarts in place may serve what it started with until that "
        "is detected and it is closed, a poll later.",
    )
    conditions: ConditionList = Field(
        default=(),
        description="Ready, Progressing, VersionConsistent, AdmissionOpen, Degraded, TemplateOutdated, StuckLoading, "
        "ResidualMemoryHigh and HeterogeneousStates.",
    )
