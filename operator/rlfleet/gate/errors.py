"""Refusals and failures inside the gate, each carrying the protocol's reason."""

from __future__ import annotations

from rlfleet.api.fencing import Fence
from rlfleet.api.wire import HTTP_STATUS, ErrorBody, ErrorReason, Held

_MAX = 2048


class GateError(Exception):
    """A request is refused or an operation failed, for a reason that the caller can act on."""

    def __init__(self, reason: ErrorReason, message: str, *, held: Fence | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message if len(message) <= _MAX else message[: _MAX - 1] + "…"
        self.held = held

    @property
    def status(self) -> int:
        """HTTP status under which the reason travels."""
        return HTTP_STATUS.get(self.reason, 409)

    def body(self) -> ErrorBody:
        """The body of the answer."""
        held = self.held
        return ErrorBody(
            reason=self.reason,
            message=self.message,
            held=None
            if held is None
            else Held(pipeline=held.pipeline, operation=held.operation, generation=held.generation),
        )


class EffectUnknown(GateError):
    """An order was given to the engine and no answer came: it may still take effect."""
