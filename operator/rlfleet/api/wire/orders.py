"""What a gate is asked: enrolment and the orders of one engine, one mutating operation at a time.

An order says what shall be true of the engine and how long it may take; what came of it stands in the operation's
record (``result``, by kind: see each order's docstring), never in the answer that accepted it.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rlfleet.api.wire.common import (
    Addressed,
    BroadcastGroup,
    Digest,
    MemoryTag,
    Name,
    OperationId,
    Request,
    Seconds,
    StagingMode,
    Transport,
    Uid,
    Url,
    Version,
)


class RouterType(StrEnum):
    """Routers that a gate can add its engine to."""

    SGLANG_ROUTER = "SGLangRouter"
    SMG = "SMG"
    VLLM_ROUTER = "VLLMRouter"


class RouterEndpoint(Request):
    """A router as the gate must reach it. ``gone``: its pod is proven gone, so it counts as done."""

    name: Name
    type: RouterType
    url: Url
    gone: bool = False
    metrics: Url | None = Field(default=None, description="base URL of its metrics, where circuit breakers are told")


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
    engine_process: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="what the kubelet calls the engine's present container; only told where it may restart in place "
        "(adopted pods). Another one than before is another engine process: the gate stores a new incarnation. One "
        "that was replaced already comes from a view that lags behind, and is passed over",
    )

    def digest(self) -> str:
        """Names what is told, whatever the generation, so that a gate that was told anything else is told again."""
        body = self.model_dump(mode="json", by_alias=True, exclude={"generation"})
        if self.engine_process is None:
            del body["engineProcess"]  # as gates and operators from before it was there have it
        for router in body["routers"]:
            if router["metrics"] is None:
                del router["metrics"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


class PauseMode(StrEnum):
    """How running requests are held while weights change (RLPipeline.spec.sync.quiesce.mode)."""

    RETRACT = "Retract"  # back to the queue, recomputed later
    KEEP = "Keep"  # frozen where they are; only where caches can be reset under them
    ABORT = "Abort"  # running requests end with finish reason abort
    WAIT = "Wait"  # drain first, then as the engine's type does by default


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
    """Get ready for one round's bytes: reserve memory (Serialized) and expect the manifest from the sender (also
    Broadcast), or read and hash the checkpoint in ``directory`` (Checkpoint).

    Replaces what an earlier round staged. Result: ``{"capacityBytes": n}``.
    """

    kind: Literal["Prepare"] = "Prepare"
    transport: Transport
    version: Version
    manifest_digest: Digest
    total_bytes: int = Field(ge=0, description="0 only with Checkpoint, where nobody knows it before")
    directory: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Checkpoint only: path below the gate's checkpoint directory"
    )
    budget_seconds: Seconds | None = Field(
        default=None, description="Checkpoint only: seconds for reading and hashing, counted from reception"
    )
    staging: StagingMode = Field(
        default=StagingMode.FULL,
        description="Serialized only. Bucket: the manifest alone is staged; buckets come while a Load runs, one at a "
        "time, and each push is answered when the engine has loaded it",
    )
    sender_incarnation: Uid | None = Field(
        default=None, description="only this sender process may push, by its header Rlfleet-Sender; None: any"
    )


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


class ReleaseOrder(Request):
    """Give the engine's device memory back, tag by tag; what was released stays recorded, whatever comes after.

    Refused (NotProven) unless the engine reads back paused, idle and in no router; Unsupported without capability
    Offload, and for a tag that this type of engine gives back only together with another one that is still here (vLLM:
    Weights with KVCache). Its proof (``holds``) is withdrawn before the first release. Result: ``{"released": [tag],
    "memory": {uuid: {"usedBytes", "totalBytes"}} | null, "residual": "Ok" | "High" | "Unknown"}``: what is released now
    in all, and memory as it was read at the end. Residual Unknown: memory can not be read, or no limit was given.
    """

    kind: Literal["Release"] = "Release"
    tags: tuple[MemoryTag, ...] | None = Field(
        default=None, min_length=1, max_length=8, description="None: all that the engine has"
    )
    residual_bytes: int | None = Field(
        default=None, ge=0, description="most memory that may be in use on each of the devices, by whomever"
    )
    budget_seconds: Seconds | None = Field(
        default=None, description="what is left for it, waiting for memory included, counted from reception"
    )


class WakeOrder(Request):
    """Take back exactly what is recorded as released. The engine stays paused, and nothing proves its weights.

    Fails (InsufficientMemory) before anything is touched where a device is seen to lack the room.
    Result: ``{"awake": [tag]}``.
    """

    kind: Literal["Wake"] = "Wake"
    budget_seconds: Seconds | None = Field(default=None, description="what is left for it, counted from reception")


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
    | DiscardOrder
    | ReleaseOrder
    | WakeOrder,
    Field(discriminator="kind"),
]


class OperationRequest(Addressed):
    """POST /v1/operations on a gate: start (or join) one operation. Answer: 202 or 200 with an OperationRecord.

    One mutating operation runs at a time; a second with another id gets 409 Busy.
    """

    id: OperationId
    #: A round in Holding asks an engine to pause with every look, for days if nobody acts.
    attempt: int = Field(default=1, ge=1, le=2**31)
    order: Order
