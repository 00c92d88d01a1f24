"""The control protocol between operator, gate and sender: every body that travels, as models.

Both servers speak JSON over HTTP; bulk bytes travel as raw bodies. Requests refuse unknown fields (an older server
says so instead of ignoring half of an order); reports ignore them (an older operator reads what it knows).

Invariants:
- every mutating call carries the identity it is meant for (pod UID, incarnation) and the fence
  (pipeline UID, operation UID, generation); the bearer token repeats the fence, and both must agree;
- an operation has an id chosen by the caller from (operation UID, step, attempt, incarnation): asking again with the
  same id joins the running one or returns its recorded end; it never starts a second;
- "accepted" is 202, never a result: a result is read from the operation's record.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rlfleet.api.budgets import TIME_FIELDS

#: Raised when a gate or sender of an older version could misread an order. See docs/reference/gate.md.
PROTOCOL_VERSION = 1

DEFAULT_GATE_PORT = 9440
DEFAULT_SENDER_PORT = 9450

#: Header of a push: the incarnation of the sender process that makes it.
SENDER_HEADER = "Rlfleet-Sender"

#: Longest a poll with waitSeconds is held open by a server.
MAX_WAIT_SECONDS = 30

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$")]
Uid = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
OperationId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Url = Annotated[str, Field(max_length=512, pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$")]
Version = Annotated[int, Field(ge=-1, le=2**53)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Request(BaseModel):
    """Base of what a caller sends: camelCase on the wire, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def wire(self) -> dict[str, Any]:
        """The JSON object to send."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Report(BaseModel):
    """Base of what a server answers: camelCase on the wire, unknown fields ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def wire(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


# ---------------------------------------------------------------------------------------------- errors


class ErrorReason(StrEnum):
    """Why a gate or a sender refused, with the HTTP status it travels under."""

    UNAUTHENTICATED = "Unauthenticated"  # 401 no token, or one that does not verify
    FORBIDDEN = "Forbidden"  # 403 the token's scope, operation or generation does not allow this
    INVALID = "Invalid"  # 400 the body is not what the protocol says
    TOO_LARGE = "TooLarge"  # 413 over a limit of size or count
    NOT_FOUND = "NotFound"  # 404
    STALE_FENCE = "StaleFence"  # 412 a higher generation is held
    OTHER_OPERATION = "OtherOperation"  # 412 this generation belongs to another operation
    OTHER_PIPELINE = "OtherPipeline"  # 412
    FENCE_POISONED = "FencePoisoned"  # 412 generation too far ahead of the server's clock
    IDENTITY_MISMATCH = "IdentityMismatch"  # 409 other pod UID or incarnation
    NOT_ENROLLED = "NotEnrolled"  # 409
    BUSY = "Busy"  # 409 another mutating operation runs
    OPERATION_CONFLICT = "OperationConflict"  # 409 same id, other order
    UNCERTAIN = "Uncertain"  # 409 an operation of this gate has no recorded end
    NOT_PROVEN = "NotProven"  # 409 resume or open without proof of the committed weights
    NOT_STAGED = "NotStaged"  # 409 load without complete staged bytes
    STAGING_TOO_LARGE = "StagingTooLarge"  # 409 more bytes than the memory volume may take
    VERSION_NOT_HELD = "VersionNotHeld"  # 409 the sender does not hold these bytes
    UNSUPPORTED = "Unsupported"  # 409 engine or sender lacks the capability
    ENGINE_UNREACHABLE = "EngineUnreachable"  # operation failure
    ENGINE_REFUSED = "EngineRefused"  # operation failure
    ROUTER_UNREACHABLE = "RouterUnreachable"  # operation failure
    HASH_MISMATCH = "HashMismatch"  # delivered bytes are not the manifest's
    CHECKSUM_UNCHANGED = "ChecksumUnchanged"  # the engine's checksum did not move though the bytes differ
    DIGEST_MISMATCH = "DigestMismatch"  # engine checksum is not the expected one
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    TRANSPORT_FAILED = "TransportFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INTERNAL = "Internal"  # 500


HTTP_STATUS: dict[ErrorReason, int] = {
    ErrorReason.UNAUTHENTICATED: 401,
    ErrorReason.FORBIDDEN: 403,
    ErrorReason.INVALID: 400,
    ErrorReason.TOO_LARGE: 413,
    ErrorReason.NOT_FOUND: 404,
    ErrorReason.STALE_FENCE: 412,
    ErrorReason.OTHER_OPERATION: 412,
    ErrorReason.OTHER_PIPELINE: 412,
    ErrorReason.FENCE_POISONED: 412,
    ErrorReason.INTERNAL: 500,
}  # every other reason: 409


class Held(Report):
    """The fence that a server holds, named in a 412 so that the caller knows what it lost to."""

    pipeline: str = ""
    operation: str = ""
    generation: int = 0


class ErrorBody(Report):
    """Body of every non-2xx answer and of a failed operation's ``error``."""

    reason: ErrorReason
    message: str = Field(max_length=2048, description="what is wrong, naming the field, and what to do")
    held: Held | None = None


# ---------------------------------------------------------------------------------------------- identity


class Fenced(Request):
    """What every mutating call carries."""

    pipeline: Uid = Field(description="UID of the RLPipeline")
    operation: Uid = Field(description="UID of the SyncRound, or of the work outside rounds, that acts")
    generation: int = Field(ge=1, description="the fence generation under which it acts")


class Addressed(Fenced):
    """A fenced call meant for exactly one engine process."""

    pod_uid: Uid
    incarnation: Uid = Field(description="nonce of the engine process; see GateStatus.incarnation")


def order_identity(order: Request) -> dict[str, Any]:
    """What makes two orders the same: everything but the time that they are given, and tokens, which are signed anew.

    A successor that asks again has less time left and newer tokens; it joins the operation instead of a conflict.
    """
    body = {k: v for k, v in order.wire().items() if k not in TIME_FIELDS}
    if "targets" in body:
        body["targets"] = [{k: v for k, v in target.items() if k != "token"} for target in body["targets"]]
    return body


def operation_id(operation: str, step: str, attempt: int, incarnation: str) -> str:
    """The id of one step of an operation at one engine process (or sender incarnation).

    It leaves the generation out, so that a successor which asks again joins the running operation.
    """
    text = "\0".join([operation, step, str(attempt), incarnation])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class OperationState(StrEnum):
    """State of an operation's record. UNKNOWN: the server restarted and found no recorded end."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class OperationRecord(Report):
    """What a server knows of one operation; the same for gate and sender."""

    id: str
    kind: str
    operation: str = Field(description="UID of the round or other work that asked")
    generation: int
    attempt: int = 1
    state: OperationState
    error: ErrorBody | None = None
    result: dict[str, Any] = Field(default_factory=dict, description="by kind; see the order's docstring")
    started_ms: int = 0
    ended_ms: int | None = None


# ---------------------------------------------------------------------------------------------- gate


class RouterType(StrEnum):
    """Routers that a gate can add its engine to."""

    SGLANG_ROUTER = "SGLangRouter"


class RouterEndpoint(Request):
    """A router as the gate must reach it. ``gone``: its pod is proven gone, so it counts as done."""

    name: Name
    type: RouterType
    url: Url
    gone: bool = False


class EnrollRequest(Request):
    """POST /v1/enroll: tells a gate where it belongs. Idempotent; also pushes changes of routers and keys.

    Accepted when ``generation`` is not below the one held; it does not raise the fence of a gate that holds one.
    """

    pipeline: Uid
    generation: int = Field(ge=0)
    pod_uid: Uid
    pool: Name
    engine: Name = Field(description="engine name, for logs and labels")
    engine_url: Url = Field(description="the URL under which routers know this engine")
    routers: tuple[RouterEndpoint, ...] = Field(default=(), max_length=16)
    public_keys: dict[str, str] = Field(default_factory=dict, max_length=8)

    def digest(self) -> str:
        """Names what is told, whatever the generation, so that a gate that was told anything else is told again."""
        body = self.model_dump(mode="json", by_alias=True, exclude={"generation"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


class FenceRequest(Fenced):
    """POST /v1/fence (gate and sender): store this fence and answer the status. Step 3 of the takeover barrier."""


class PauseMode(StrEnum):
    """How running requests are held while weights change (RLPipeline.spec.sync.quiesce.mode)."""

    RETRACT = "Retract"  # back to the queue, recomputed later
    KEEP = "Keep"  # frozen where they are; only where caches can be reset under them
    ABORT = "Abort"  # running requests end with finish reason abort
    WAIT = "Wait"  # drain first, then as the engine's type does by default


class Transport(StrEnum):
    """How weights reach one engine."""

    SERIALIZED = "Serialized"
    BROADCAST = "Broadcast"


class PauseOrder(Request):
    """Pause the engine and verify it. Result: ``{"paused": true}``."""

    kind: Literal["Pause"] = "Pause"
    mode: PauseMode | None = Field(
        default=None, description="None: the way of this engine type in which no request is lost"
    )
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 30
    budget_seconds: Seconds | None = Field(default=None, description="what is left for it, counted from reception")
    withdraw_proof: bool = Field(
        default=False, description="also forget that its weights were proven: peers show that they are not those"
    )


class ResumeOrder(Request):
    """Resume generation; refused (NotProven) unless the gate's record proves exactly these weights."""

    kind: Literal["Resume"] = "Resume"
    version: Version
    manifest_digest: Digest
    engine_digest: str | None = Field(default=None, max_length=128, description="None: whatever was recorded as proven")


class PrepareOrder(Request):
    """Get ready for one round's bytes: reserve memory (Serialized) and expect the manifest from the sender (both).

    Replaces what an earlier round staged. Result: ``{"capacityBytes": n}``.
    """

    kind: Literal["Prepare"] = "Prepare"
    transport: Transport
    version: Version
    manifest_digest: Digest
    total_bytes: int = Field(ge=1)
    sender_incarnation: Uid | None = Field(
        default=None, description="only this sender process may push, by its header Rlfleet-Sender; None: any"
    )


class BroadcastGroup(Request):
    """One collective group: the sender is rank 0, each engine takes its own ranks from ``rankOffset``."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: int = Field(ge=1, le=65535)
    group_name: Name
    world_size: int = Field(ge=2, le=100_000)
    backend: Literal["nccl", "gloo"]


class LoadOrder(Request):
    """Load this round's weights into the paused engine. The start is recorded durably before the engine is touched.

    Result: ``{"checksumBefore": str|null, "loadMs": int, "bytes": int}``.
    """

    kind: Literal["Load"] = "Load"
    transport: Transport
    version: Version
    manifest_digest: Digest
    group: BroadcastGroup | None = Field(default=None, description="Broadcast only")
    rank_offset: int | None = Field(default=None, ge=1, description="Broadcast only")
    rendezvous_seconds: Seconds = 22.5
    transport_seconds: Seconds = 75
    collective_seconds: Seconds = 22.5
    teardown_seconds: Seconds = 15
    budget_seconds: Seconds | None = Field(
        default=None, description="what is left for all parts together, counted from reception (api.budgets)"
    )


class VerifyOrder(Request):
    """Flush caches (body checked), read the engine's checksum.

    Result: ``{"engineDigest": str|null, "changed": bool|null, "meaningful": bool, "delivered": bool}``;
    ``engineDigest`` null and ``meaningful`` false where the engine has no usable checksum.
    """

    kind: Literal["Verify"] = "Verify"
    version: Version
    manifest_digest: Digest
    expected_engine_digest: str | None = Field(default=None, max_length=128)


class PublishOrder(Request):
    """Write the version label to the engine once, without aborting requests, and read it back; then record as proven.

    Result: ``{"label": str}``.
    """

    kind: Literal["Publish"] = "Publish"
    version: Version
    manifest_digest: Digest
    engine_digest: str | None = Field(default=None, max_length=128)


class ProbeOrder(Request):
    """Have a resumed engine generate one greedy token for a fixed prompt. Result: ``{"token": int}``.

    Fails (EngineRefused) where the engine answers no, no token, or a token of another weight version.
    """

    kind: Literal["Probe"] = "Probe"
    deadline_seconds: Seconds = 20


class OpenOrder(Request):
    """Add the engine's own URL to every router; ends when each router lists it. Refused unless proven and resumed."""

    kind: Literal["Open"] = "Open"
    deadline_seconds: Seconds = 30


class CloseOrder(Request):
    """Remove the engine's URL from every router and read that back."""

    kind: Literal["Close"] = "Close"
    deadline_seconds: Seconds = 30


class DiscardOrder(Request):
    """Drop staged bytes and end a receive that waits for them."""

    kind: Literal["Discard"] = "Discard"


Order = Annotated[
    PauseOrder
    | ResumeOrder
    | PrepareOrder
    | LoadOrder
    | VerifyOrder
    | PublishOrder
    | ProbeOrder
    | OpenOrder
    | CloseOrder
    | DiscardOrder,
    Field(discriminator="kind"),
]


class OperationRequest(Addressed):
    """POST /v1/operations on a gate: start (or join) one operation. Answer: 202 or 200 with an OperationRecord.

    One mutating operation runs at a time; a second with another id gets 409 Busy.
    """

    id: OperationId
    attempt: int = Field(default=1, ge=1, le=1000)
    order: Order


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
    complete: bool = Field(default=False, description="every byte is here, every hash is the manifest's")
    error: ErrorBody | None = None


class DeviceReport(Report):
    """GPUs of the engine. ``source`` Declared: from the pod's environment; Unknown: nothing is known."""

    source: Literal["NVML", "Declared", "Unknown"]
    node: str = ""
    uuids: tuple[str, ...] = ()


class GateStatus(Report):
    """GET /v1/status on a gate, and the answer to fence and enroll."""

    protocol_version: int
    gate_version: str = ""
    capabilities: tuple[str, ...] = ()
    pod_uid: str
    incarnation: str | None = Field(default=None, description="None until the gate has met its engine process")
    enrolled: bool = False
    enrolment: str = Field(default="", description="EnrollRequest.digest of the latest one that was accepted")
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
    devices: DeviceReport = DeviceReport(source="Unknown")
    startup: ErrorBody | None = Field(
        default=None, description="why the start-up promise does not hold yet; None: it holds"
    )
    attempts: dict[str, int] = Field(
        default_factory=dict, description='"operationUID/step" -> highest attempt in the log, for the latest operations'
    )


# Bulk paths on a gate: PUT /v1/staging/{operation UID}/manifest (JSON) and .../buckets/{index} (raw bytes).
# Probes (no token): GET /livez, /startupz, /readyz. Metrics: GET /metrics.


# ---------------------------------------------------------------------------------------------- sender


class SenderCache(Report):
    """Complete weights that the sender holds."""

    version: int
    manifest_digest: str
    total_bytes: int
    tensors: int
    buckets: int
    nan_tensors: tuple[str, ...] = Field(default=(), description="tensors with NaN, at most 8 names: legal, but said")
    layout_changed: bool = Field(default=False, description="names, dtypes or shapes differ from the first publish")


class SenderHold(Report):
    """A round's hold on a digest; while it lasts these bytes stay."""

    operation: str
    version: int
    manifest_digest: str
    expires_ms: int


class SenderStatus(Report):
    """GET /v1/status on a sender, and the answer to its fence call."""

    protocol_version: int
    sender_version: str = ""
    capabilities: tuple[str, ...] = Field(
        default=(), description='among "Serialized", "Broadcast/gloo", "Broadcast/nccl", "SecondSlot"'
    )
    pod_uid: str
    incarnation: str = Field(description="nonce of the sender process")
    fence: Held = Held()
    cache: SenderCache | None = Field(default=None, description="the newest complete weights; None before any publish")
    slots: tuple[SenderCache, ...] = Field(default=(), description="all complete weights held, newest last")
    publish_waiting: bool = Field(default=False, description="a newer publish waits for a hold to end")
    hold: SenderHold | None = None
    in_flight: str | None = None
    devices: DeviceReport = DeviceReport(source="Unknown")


class HoldRequest(Fenced):
    """POST /v1/hold: keep these bytes until release or the deadline. Answer: SenderStatus; 409 VersionNotHeld."""

    version: Version
    manifest_digest: Digest | None = Field(default=None, description="None: whichever digest this version has now")
    deadline_seconds: Seconds


class ReleaseRequest(Fenced):
    """POST /v1/release: end this operation's hold. Idempotent."""


class PushTarget(Request):
    """One gate to push to."""

    engine: Name
    url: Url = Field(description="base URL of the gate")
    pod_uid: Uid
    buckets: bool = Field(description="True: manifest and buckets (Serialized); False: the manifest only (Broadcast)")
    token: Annotated[str, Field(max_length=4096)] = Field(description="push token for this round, generation and gate")


class PushOrder(Request):
    """Push manifest and buckets to gates, in parallel, from one read of the buckets.

    Result: ``{"targets": {engine: {"ok": bool, "bytes": int, "error": str|null}}, "bytes": int}``. The operation
    succeeds when it ran to its end; per-target outcomes are in the result, and the gates' own status is the evidence.
    """

    kind: Literal["Push"] = "Push"
    manifest_digest: Digest
    targets: tuple[PushTarget, ...] = Field(min_length=1, max_length=1024)
    deadline_seconds: Seconds


class BroadcastOrder(Request):
    """Open the group as rank 0, broadcast every bucket in order, tear the group down.

    ``masterAddress`` is the address to listen on and to hand to engines; EADDRINUSE fails the operation at once with
    TransportFailed. Result: ``{"bytes": int, "rendezvousMs": int, "transportMs": int}``.
    """

    kind: Literal["Broadcast"] = "Broadcast"
    manifest_digest: Digest
    group: BroadcastGroup
    rendezvous_seconds: Seconds = 22.5
    transport_seconds: Seconds = 75
    collective_seconds: Seconds = 22.5
    teardown_seconds: Seconds = 15
    budget_seconds: Seconds | None = Field(
        default=None, description="what is left for all parts together, counted from reception (api.budgets)"
    )


SenderOrder = Annotated[PushOrder | BroadcastOrder, Field(discriminator="kind")]


class SenderOperationRequest(Fenced):
    """POST /v1/operations on a sender. Answer: 202 or 200 with an OperationRecord; same id = same operation."""

    sender_incarnation: Uid
    id: OperationId
    attempt: int = Field(default=1, ge=1, le=1000)
    order: SenderOrder


# Both servers: GET /v1/operations/{id}?waitSeconds=n answers the record, at the latest after n seconds (<= 30).
