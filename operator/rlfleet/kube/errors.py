"""What can come back from the apiserver besides an answer, as types.

Invariant: a write that was sent and not answered is ``Unknown``, never a failure and never a success; whoever wrote
must look before deciding.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A call that gave no usable answer. ``status`` is the HTTP code, 0 where there was none."""

    def __init__(
        self, message: str, *, status: int = 0, reason: str = "", call: str = "", body: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{call}: {message}" if call else message)
        self.message = message
        self.status = status
        self.reason = reason
        self.call = call
        self.body = body or {}


class NotLeader(Exception):
    """A mutation was refused by our own guard and not sent. No ApiError: whoever handles those must not handle this."""


class NotFound(ApiError):
    """404: the object (or its kind) is not there."""


class Conflict(ApiError):
    """409: the resourceVersion or UID named in the call is no longer the object's; nothing was written."""


class AlreadyExists(Conflict):
    """409 on create: an object of this name is there."""


class Forbidden(ApiError):
    """403, or 401 after the credentials were read again."""

    @property
    def namespace_terminating(self) -> bool:
        """Nothing can be created because the namespace is being deleted; it ends by itself."""
        causes = (self.body.get("details") or {}).get("causes") or []
        return any(c.get("reason") == "NamespaceTerminating" for c in causes)


class Invalid(ApiError):
    """400 or 422: the object breaks the schema or a rule; the message names the field. Asking again cannot help."""


class Gone(ApiError):
    """410: the resourceVersion of a list or watch is too old; list again."""


class TooManyRequests(ApiError):
    """429: not processed; come back after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.retry_after = retry_after


class Unavailable(ApiError):
    """Not processed (no connection, 503), or a read that got no answer: nothing changed by this call."""


class Unknown(ApiError):
    """A write was sent and no usable answer came (time-out, broken connection, 500, 502, 504): it may have happened."""
