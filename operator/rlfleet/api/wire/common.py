"""What every message of the control protocol is made of: names, identity and fence, errors, operation records.

Whoever acts names the identity that it means and the fence under which it acts; see the package's docstring.
"""

from __future__ import annotations

import hashlib
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
#: Up to a week: a pipeline's deadlines, of which several are added up, have a day each.
Seconds = Annotated[float, Field(gt=0, le=604_800)]


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
    CHECKPOINT_MISSING = "CheckpointMissing"  # 409 no complete checkpoint lies at the path
    CHECKPOINT_INVALID = "CheckpointInvalid"  # 409 what lies there is not what its manifest says
    NOT_STAGED = "NotStaged"  # 409 load without complete staged bytes
    STAGING_TOO_LARGE = "StagingTooLarge"  # 409 more bytes than the memory volume may take
    VERSION_NOT_HELD = "VersionNotHeld"  # 409 the sender does not hold these bytes
    UNSUPPORTED = "Unsupported"  # 409 engine or sender lacks the capability
    OFFLOADED = "Offloaded"  # 409 the engine's memory is released, or may be; Wake comes first
    INSUFFICIENT_MEMORY = "InsufficientMemory"  # operation failure: the device has no room to wake the engine
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


class FenceRequest(Fenced):
    """POST /v1/fence (gate and sender): store this fence and answer the status. Step 3 of the takeover barrier."""


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


class MemoryTag(StrEnum):
    """A part of an engine's device memory that can be given back and taken again on its own."""

    WEIGHTS = "Weights"  # what they held is gone afterwards
    KV_CACHE = "KVCache"
    CUDA_GRAPH = "CudaGraph"


class Transport(StrEnum):
    """How weights reach one engine."""

    SERIALIZED = "Serialized"
    BROADCAST = "Broadcast"
    CHECKPOINT = "Checkpoint"  # from a path that gate and engine both mount; nobody sends anything


class StagingMode(StrEnum):
    """How serialized weights pass a gate's memory."""

    FULL = "Full"  # all of them are there before an engine is paused
    BUCKET = "Bucket"  # one bucket at a time, while the engine loads


class BroadcastGroup(Request):
    """One collective group: the sender is rank 0, each engine takes its own ranks from ``rankOffset``."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: int = Field(ge=1, le=65535)
    group_name: Name
    world_size: int = Field(ge=2, le=100_000)
    backend: Literal["nccl", "gloo"]
