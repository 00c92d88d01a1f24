"""What the SDK raises.

Invariant: every error says what was asked, what the answer was, and what to do; an error about a sync says whether the
version was committed, because that decides whether the trainer may go on.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of everything that the SDK raises."""


class ConfigError(ClientError):
    """No usable kubeconfig or service account."""


class ApiUnavailable(ClientError):
    """The apiserver did not answer, or answered only transient errors, until the deadline."""


class Unauthenticated(ClientError):
    """The apiserver does not accept our credentials."""


class Forbidden(ClientError):
    """RBAC does not allow a call. ``verb`` and ``resource`` say what is missing."""

    def __init__(self, message: str, *, verb: str, resource: str) -> None:
        super().__init__(message)
        self.verb = verb
        self.resource = resource


class NotFound(ClientError):
    """An object does not exist, or its kind is not installed."""


class PipelineNotFound(NotFound):
    """There is no such RLPipeline in the namespace."""


class NamespaceNotFound(NotFound):
    """There is no such namespace."""


class RoundNotFound(NotFound):
    """There is no such SyncRound in the namespace."""


class DemandNotFound(NotFound):
    """There is no such TrainerDemand in the namespace."""


class NotInstalled(NotFound):
    """The cluster does not serve rlfleet.dev/v1alpha1."""


class SyncError(ClientError):
    """Base of errors about one sync. ``round`` is the SyncRound's name, or None when none was made.

    ``committed``: the version took effect, whatever failed after that.
    """

    def __init__(self, message: str, *, version: int, round: str | None = None, committed: bool = False) -> None:
        super().__init__(message)
        self.version = version
        self.round = round
        self.committed = committed


class SyncRefused(SyncError):
    """The sync was not begun: it cannot be what was meant. ``reason`` is a stable word."""

    def __init__(self, message: str, *, version: int, reason: str, round: str | None = None) -> None:
        super().__init__(message, version=version, round=round)
        self.reason = reason


class SenderNotReady(SyncRefused):
    """The operator does not report the weight sender (yet). Nothing was made."""


class SyncFailed(SyncError):
    """The round ended without success. ``phase`` is its end, the rest is its ``status.failure``."""

    def __init__(
        self,
        message: str,
        *,
        version: int,
        round: str,
        committed: bool,
        phase: str,
        stage: str,
        reason: str,
        digest: str,
    ) -> None:
        super().__init__(message, version=version, round=round, committed=committed)
        self.phase = phase
        self.stage = stage
        self.reason = reason
        self.digest = digest


class RoutingDegraded(SyncFailed):
    """The version IS committed, but some engines could not be reopened or routed; ``committed`` is always True.

    The trainer may go on: what serves, serves this version, and the operator repairs the rest. Sending the version
    again would do nothing.
    """


class HoldingNeedsAction(SyncError):
    """The round holds engines closed and cannot heal by itself: a person must act. It goes on meanwhile.

    The message names the engines and the remedy, as the round's condition does.
    """


class SyncTimeout(SyncError):
    """The round had not ended in time. It goes on by itself; ``phase`` is how far it was."""

    def __init__(self, message: str, *, version: int, round: str, committed: bool, phase: str) -> None:
        super().__init__(message, version=version, round=round, committed=committed)
        self.phase = phase


class GrantTimeout(ClientError):
    """GPUs were not free for the trainer in time; the request was withdrawn. ``reason`` is what stood in the way."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class DemandRefused(ClientError):
    """The apiserver did not take a report or request (the message names the field), or the GPUs can never come free."""


class WaitTimeout(ClientError):
    """Something that was waited for (public keys, a committed version) did not come in time."""
