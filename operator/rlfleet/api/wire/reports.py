"""What a gate reports: its engine, what it has proof of, what it has staged, its devices, and its own state.

A field that can be unknown is None when it is; None never stands for "no".
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from rlfleet.api.wire.common import ErrorBody, Held, MemoryTag, OperationState, Report, StagingMode, Transport


class EngineState(StrEnum):
    """What the gate sees of its engine process."""

    STARTING = "Starting"
    READY = "Ready"
    UNREACHABLE = "Unreachable"


class EngineReport(Report):
    """The engine as the gate sees it now; None means unknown, never "no"."""

    state: EngineState
    type: str = ""
    version: str | None = Field(default=None, description="the engine's own version")
    paused: bool | None = None
    weight_label: str | None = Field(default=None, description="weight version label read from the engine")
    world_size: int | None = Field(default=None, description="ranks that this engine takes in a broadcast group")
    layout: str | None = Field(default=None, description="hash of what must agree for checksums to be comparable")
    running: int | None = None
    waiting: int | None = None
    model: str | None = None
    refused: str | None = Field(
        default=None, description="why no weights can be brought to this engine, and what to do; null: nothing is known"
    )
    guarded: bool | None = Field(
        default=None, description="the engine was seen to refuse a control call that does not carry its admin key"
    )
    instance: str | None = Field(
        default=None,
        description="what the engine calls its own process (Dynamo: its instance id in decimal); another one than "
        "before is another engine process",
    )


class HoldsRecord(Report):
    """The weights that the gate has proof of, for the present incarnation."""

    version: int
    manifest_digest: str
    engine_digest: str | None = None


class LoadRecord(Report):
    """One load begun at this engine. ``state`` Running with no operation in flight means: no recorded end (Unknown)."""

    operation: str
    version: int
    manifest_digest: str
    state: OperationState
    verified: bool = False
    published: bool = False
    released: bool = Field(
        default=False, description="the engine gave memory back since: nothing of it can be relied on"
    )
    engine_digest: str | None = None


class StagedReport(Report):
    """Bytes received for one round."""

    operation: str
    version: int
    manifest_digest: str
    transport: Transport
    manifest_received: bool = False
    received_bytes: int = 0
    total_bytes: int = 0
    staging: StagingMode = StagingMode.FULL
    complete: bool = Field(
        default=False,
        description="every byte is here, every hash is the manifest's; with staging Bucket, and for Broadcast: the "
        "manifest is here",
    )
    error: ErrorBody | None = None


class DeviceMemory(Report):
    """Memory of one whole device (of a MIG slice: the slice's), whoever uses it."""

    used_bytes: int
    total_bytes: int


class DeviceProcess(Report):
    """A process of somebody else that uses a device."""

    uuid: str
    pid: int = Field(description="as the driver numbers it, which is the host's view")
    name: str = Field(default="", description="empty where the driver does not tell")
    used_bytes: int | None = Field(default=None, description="None: the driver does not tell")


class DeviceReport(Report):
    """GPUs of an engine or a trainer. ``source`` NVML: read from the driver; Declared: from the pod's environment only;
    Unknown: nothing is known.
    """

    source: Literal["NVML", "Declared", "Unknown"]
    node: str = ""
    uuids: tuple[str, ...] = Field(default=(), description="UUIDs of whole GPUs, or of MIG slices (MIG-...)")
    memory: dict[str, DeviceMemory] | None = Field(
        default=None, description="UUID -> memory, for every one of uuids; None: it could not be read"
    )
    processes: tuple[DeviceProcess, ...] = Field(
        default=(), description="other tenants of these devices, largest first, at most 16"
    )
    problem: str = Field(default="", max_length=512, description="why the driver could not be read; empty: it was")


#: Every gate that takes orders as they are written now has it in its status. Those from before say protocol 1, too.
_OF_TODAY: Final = "releasing"


class GateStatus(Report):
    """GET /v1/status on a gate, and the answer to fence and enroll."""

    protocol_version: int
    gate_version: str = ""
    capabilities: tuple[str, ...] = ()
    pod_uid: str
    incarnation: str | None = Field(default=None, description="None until the gate has met its engine process")
    enrolled: bool = False
    enrolment: str = Field(default="", description="EnrollRequest.digest of the latest one that was accepted")
    engine_process: str | None = Field(
        default=None, description="EnrollRequest.engineProcess of the engine that the incarnation stands for"
    )
    pipeline: str = ""
    pool: str = ""
    engine_name: str = ""
    fence: Held = Held()
    engine: EngineReport
    holds: HoldsRecord | None = None
    loads: tuple[LoadRecord, ...] = Field(default=(), description="latest last, at most 8")
    in_flight: str | None = Field(default=None, description="id of the running mutating operation")
    uncertain: bool = Field(
        default=False, description="an operation has no recorded end; only status, pause and close are allowed"
    )
    uncertain_seconds: float = Field(
        default=0.0, description="for how long that has been so, by the gate's own clock; 0 where nothing is uncertain"
    )
    wedged: bool = Field(
        default=False, description="the engine joined a broadcast group that never formed: its loop is stuck in it"
    )
    staged: StagedReport | None = None
    staging_capacity_bytes: int = 0
    routed: dict[str, bool | None] = Field(
        default_factory=dict, description="router name -> it lists us; None: unknown"
    )
    shunned: dict[str, str] = Field(
        default_factory=dict,
        description="router name -> why it sends us no requests although it lists us: its health check, or its circuit "
        "breaker; routers that do not say so are left out",
    )
    router_refusals: dict[str, str] = Field(
        default_factory=dict,
        description="router name -> how it refused to tell whether it lists us; those that told, and those that gave "
        "no answer at all, are left out",
    )
    devices: DeviceReport = DeviceReport(source="Unknown")
    released: tuple[MemoryTag, ...] = Field(
        default=(), description="what the engine has given back and not taken again"
    )
    releasing: bool = Field(
        default=False, description="a release or wake has no known end, so one tag may be here or gone"
    )
    startup: ErrorBody | None = Field(
        default=None, description="why the start-up promise does not hold yet; None: it holds"
    )
    attempts: dict[str, int] = Field(
        default_factory=dict, description='"operationUID/step" -> highest attempt in the log, for the latest operations'
    )

    @model_validator(mode="before")
    @classmethod
    def _from_before_todays_orders(cls, answer: Any) -> Any:
        """Such a gate refuses members of orders that it does not know, so it counts as protocol 0."""
        if isinstance(answer, dict) and "protocolVersion" in answer and _OF_TODAY not in answer:
            return {**answer, "protocolVersion": 0}
        return answer


# Bulk paths on a gate: PUT /v1/staging/{operation UID}/manifest (JSON) and .../buckets/{index} (raw bytes).
# Probes (no token): GET /livez, /startupz, /readyz, /enginez. Metrics: GET /metrics.
