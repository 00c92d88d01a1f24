"""Calls to gates: how they are, where they belong, what they are to do.

Invariant: an answer is taken only from the gate of the pod that was meant; another one at its address is silence.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from rlfleet.api import wire
from rlfleet.api.tokens import Scope
from rlfleet.control.peering import CALL_SECONDS, Caller, Peer, PeerCalls, Silent


class GateCalls(PeerCalls):
    """The operator's calls to gates."""

    async def gate_status(self, gate: Peer, pipeline: str, *, seconds: float = CALL_SECONDS) -> wire.GateStatus:
        """Read a gate's status within ``seconds``; its pod UID must be the one that we think it is."""
        caller = Caller(pipeline, "", 0)
        raw = await self.call(gate, "GET", "/v1/status", scope=Scope.READ, caller=caller, seconds=seconds)
        return self.status(gate, wire.GateStatus, raw)

    async def clock_ms(self, gate: Peer) -> int:
        """Milliseconds since the epoch by a gate's clock, to a second: the Date header of its probe."""
        path = "/livez"
        try:
            async with self.client().get(gate.url.rstrip("/") + path, **self.transport(gate, CALL_SECONDS)) as response:
                return int(parsedate_to_datetime(response.headers["Date"]).timestamp() * 1000)
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError) as e:
            raise Silent(gate, f"no answer to GET {path} ({type(e).__name__})") from e

    async def enroll(self, gate: Peer, request: wire.EnrollRequest) -> wire.GateStatus:
        """Tell a gate its pipeline, routers and keys."""
        caller = Caller(request.pipeline, "", request.generation)
        raw = await self.call(gate, "POST", "/v1/enroll", scope=Scope.CONTROL, caller=caller, body=request)
        return self.status(gate, wire.GateStatus, raw)

    async def gate_fence(self, gate: Peer, caller: Caller) -> wire.GateStatus:
        """Raise a gate's fence and read its status."""
        body = wire.FenceRequest(**caller.fence())
        raw = await self.call(gate, "POST", "/v1/fence", scope=Scope.CONTROL, caller=caller, body=body)
        return self.status(gate, wire.GateStatus, raw)

    async def gate_start(
        self, gate: Peer, caller: Caller, *, incarnation: str, step: str, attempt: int, order: Any
    ) -> wire.OperationRecord:
        """Start one operation at a gate, or join it."""
        body = wire.OperationRequest(
            **caller.fence(),
            pod_uid=gate.pod_uid,
            incarnation=incarnation,
            id=wire.operation_id(caller.operation, step, attempt, incarnation),
            attempt=attempt,
            order=order,
        )
        raw = await self.call(gate, "POST", "/v1/operations", scope=Scope.CONTROL, caller=caller, body=body)
        return self.parse(gate, wire.OperationRecord, raw)
