"""The sender's side of the protocol: what it holds, holds on it, and the two ways in which it moves weights.

A round's hold keeps the bytes of one digest until its deadline; nothing is pushed or broadcast without one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlfleet.api.wire.common import (
    BroadcastGroup,
    Digest,
    Fenced,
    Held,
    Name,
    OperationId,
    Report,
    Request,
    Seconds,
    Uid,
    Url,
    Version,
)
from rlfleet.api.wire.reports import DeviceReport


class SenderCache(Report):
    """Complete weights that the sender holds."""

    version: int
    manifest_digest: str
    total_bytes: int
    tensors: int
    buckets: int
    largest_tensor: str = Field(default="", description="name of the largest tensor: no bucket can be smaller")
    largest_tensor_bytes: int = 0
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
    server_name: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="name that the gate's certificate must carry; None: its URL says http"
    )
    token: Annotated[str, Field(max_length=4096)] = Field(description="push token for this round, generation and gate")


class PushOrder(Request):
    """Push manifest and buckets to gates, in parallel, from one read of the buckets.

    Result: ``{"targets": {engine: {"ok": bool, "bytes": int, "error": str|null}}, "bytes": int}``. The operation
    succeeds when it ran to its end; per-target outcomes are in the result, and the gates' own status is the evidence.
    """

    kind: Literal["Push"] = "Push"
    manifest_digest: Digest
    targets: tuple[PushTarget, ...] = Field(min_length=1, max_length=4096)
    bucket_bytes: int | None = Field(
        default=None,
        ge=1,
        description="cut into buckets of at most so much, as far as tensors allow; None: as they are",
    )
    stall_seconds: Seconds = Field(
        default=30, description="a gate that takes no byte, or gives no answer, for so long is given up"
    )
    deadline_seconds: Seconds


class BroadcastOrder(Request):
    """Open the group as rank 0, broadcast every bucket in order, tear the group down.

    ``masterAddress`` is the address to listen on and to hand to engines; EADDRINUSE fails the operation at once with
    TransportFailed. Result: ``{"bytes": int, "rendezvousMs": int, "transportMs": int}``.
    """

    kind: Literal["Broadcast"] = "Broadcast"
    manifest_digest: Digest
    group: BroadcastGroup
    bucket_bytes: int | None = Field(default=None, ge=1, description="as in PushOrder: gates have that manifest")
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
