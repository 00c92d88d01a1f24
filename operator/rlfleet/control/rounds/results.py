"""What an order came to: a recorded end, or why there is none. Only a recorded success is ``ok``."""

from __future__ import annotations

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import PeerError, Refused, Silent

Ended = wire.OperationRecord | PeerError

#: Seconds of one long poll for an end; short enough that a pod found gone in between is noticed.
POLL_SECONDS = 5.0


def ok(result: Ended | None) -> bool:
    """The operation has a recorded, successful end."""
    return isinstance(result, wire.OperationRecord) and result.state is wire.OperationState.SUCCEEDED


def is_older(result: Ended, generation: int) -> bool:
    """The end of an order that somebody before ``generation`` gave under the same id."""
    return isinstance(result, wire.OperationRecord) and result.generation < generation


def why(result: Ended | None) -> tuple[Reason, str]:
    """What a result that is not ok says, as a reason of the closed list and a message."""
    if isinstance(result, Refused):
        return Reason.parse(result.body.reason.value), result.body.message
    if isinstance(result, Silent):
        return Reason.DEADLINE_EXCEEDED, result.what
    if isinstance(result, wire.OperationRecord):
        if result.error is not None:
            return Reason.parse(result.error.reason.value), result.error.message
        if result.state is wire.OperationState.RUNNING:
            return Reason.DEADLINE_EXCEEDED, f"{result.kind} did not end in time"
        if result.state is wire.OperationState.UNKNOWN:
            return Reason.UNCERTAIN, f"{result.kind} has no recorded end"
    return Reason.DEADLINE_EXCEEDED, "no answer"
