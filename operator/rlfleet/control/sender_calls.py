"""Calls to weight senders: what they hold, keeping it for a round, and sending it.

Invariant: an answer is taken only from the sender of the pod that was meant; another one at its address is silence.
"""

from __future__ import annotations

from typing import Any

from rlfleet.api import wire
from rlfleet.api.tokens import Scope
from rlfleet.control.peering import CALL_SECONDS, Caller, Peer, PeerCalls


class SenderCalls(PeerCalls):
    """The operator's calls to senders."""

    async def sender_status(self, sender: Peer, pipeline: str) -> wire.SenderStatus:
        """Read a sender's status."""
        raw = await self.call(sender, "GET", "/v1/status", scope=Scope.READ, caller=Caller(pipeline, "", 0))
        return self.status(sender, wire.SenderStatus, raw)

    async def sender_fence(self, sender: Peer, caller: Caller) -> wire.SenderStatus:
        """Raise a sender's fence and read its status."""
        body = wire.FenceRequest(**caller.fence())
        raw = await self.call(sender, "POST", "/v1/fence", scope=Scope.CONTROL, caller=caller, body=body)
        return self.status(sender, wire.SenderStatus, raw)

    async def hold(
        self, sender: Peer, caller: Caller, *, version: int, digest: str | None, deadline_seconds: float
    ) -> wire.SenderStatus:
        """Keep these bytes at the sender until release or the deadline."""
        body = wire.HoldRequest(
            **caller.fence(),
            version=version,
            manifest_digest=digest,
            deadline_seconds=deadline_seconds,
        )
        raw = await self.call(sender, "POST", "/v1/hold", scope=Scope.CONTROL, caller=caller, body=body)
        return self.status(sender, wire.SenderStatus, raw)

    async def release(self, sender: Peer, caller: Caller) -> wire.SenderStatus:
        """End this operation's hold, and read the sender's status."""
        body = wire.ReleaseRequest(**caller.fence())
        raw = await self.call(sender, "POST", "/v1/release", scope=Scope.CONTROL, caller=caller, body=body)
        return self.status(sender, wire.SenderStatus, raw)

    async def sender_start(
        self, sender: Peer, caller: Caller, *, incarnation: str, step: str, attempt: int, order: Any
    ) -> wire.OperationRecord:
        """Start one operation at the sender, or join it."""
        body = wire.SenderOperationRequest(
            **caller.fence(),
            sender_incarnation=incarnation,
            id=wire.operation_id(caller.operation, step, attempt, incarnation),
            attempt=attempt,
            order=order,
        )
        raw = await self.call(
            sender, "POST", "/v1/operations", scope=Scope.CONTROL, caller=caller, body=body, seconds=2 * CALL_SECONDS
        )
        return self.parse(sender, wire.OperationRecord, raw)
