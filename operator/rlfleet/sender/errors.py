"""What the sender raises in the trainer, and what its server answers to a caller.

Invariant: every error names the thing that is wrong (a tensor, a version, a field) and what to do about it.
"""

from __future__ import annotations

from rlfleet.api import wire


class SenderError(Exception):
    """Base of everything that the sender raises in the trainer."""


class InvalidStateDict(SenderError):
    """The state dict is empty, or holds something that cannot be carried; the message names it."""


class LayoutChanged(SenderError):
    """Names, dtypes or shapes differ from the first publish; engines cannot take them over."""


class VersionGoesBackwards(SenderError):
    """The version is below the one that the sender holds, and ``allow_rollback`` was not given."""


class CheckpointExists(SenderError):
    """The path of a checkpoint holds other bytes already, or something that is no complete checkpoint."""


class GatherFailed(SenderError):
    """Ranks of a sharded publish do not fit together, or one of them went away; the message names it where known."""


class GatherTimeout(SenderError):
    """A sharded publish was not gathered within ``deadline_seconds``: a rank does not take part."""


class PublishTimeout(SenderError):
    """A round held the bytes that this publish would have replaced for longer than ``timeout``."""


class SenderClosed(SenderError):
    """The sender has been closed."""


class Refused(Exception):
    """A refusal of the control protocol: becomes an HTTP answer, or the error of an operation's record."""

    def __init__(self, reason: wire.ErrorReason, message: str, held: wire.Held | None = None) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message
        self.held = held

    @property
    def status(self) -> int:
        """The HTTP status that it travels under."""
        return wire.HTTP_STATUS.get(self.reason, 409)

    def body(self) -> wire.ErrorBody:
        """The body that it travels as."""
        return wire.ErrorBody(reason=self.reason, message=self.message[:2048], held=self.held)
