"""What a round brings to its members, and what went wrong with them on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlfleet.api import wire
from rlfleet.api.budgets import order_times
from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.results import Ended, ok, why
from rlfleet.plan.checkpoint import below
from rlfleet.plan.rounds import Engine, Member


@dataclass(frozen=True, slots=True)
class Target:
    """What this round brings to the engines."""

    operation: str
    version: int
    manifest_digest: str
    total_bytes: int
    sender_incarnation: str
    path: str | None = None
    """Where the checkpoint lies, as the volume is mounted in pods; None: a sender has the bytes."""


@dataclass(slots=True)
class Trouble:
    """Why members are not whole: engine -> (reason, message); the first trouble of an engine stays."""

    by_engine: dict[str, tuple[Reason, str]] = field(default_factory=dict)

    def note(self, engine: str, reason: Reason, message: str) -> None:
        """Remember what went wrong with an engine."""
        self.by_engine.setdefault(engine, (reason, message))

    def note_results(self, results: Mapping[str, Ended]) -> None:
        """Remember every result that is not a recorded success."""
        for engine, result in results.items():
            if not ok(result):
                self.note(engine, *why(result))

    def first(self) -> tuple[Reason, str] | None:
        """One of them, for a summary, with the engine named."""
        for engine in sorted(self.by_engine):
            reason, message = self.by_engine[engine]
            return reason, f"{engine}: {message}"
        return None


def prepare_order(
    target: Target, m: Member, engine: Engine | None, *, left: float, staging: wire.StagingMode
) -> wire.PrepareOrder:
    """The order with which one member gets ready for the bytes. ``left``: seconds until the deadline."""
    if m.transport is not wire.Transport.CHECKPOINT:
        return wire.PrepareOrder(
            transport=m.transport,
            version=target.version,
            manifest_digest=target.manifest_digest,
            total_bytes=target.total_bytes,
            staging=staging,
            sender_incarnation=target.sender_incarnation or None,
        )
    return wire.PrepareOrder(
        transport=m.transport,
        version=target.version,
        manifest_digest=target.manifest_digest,
        total_bytes=0,
        directory=below(engine.checkpoint_mount, target.path) if engine is not None and target.path else None,
        budget_seconds=max(left, 1.0),
    )


def load_order(
    target: Target,
    m: Member,
    *,
    paused_seconds: float,
    left: float,
    group: wire.BroadcastGroup | None = None,
    rank: int | None = None,
) -> wire.LoadOrder:
    """The order with which one member loads. ``left``: seconds until the deadline; ``group``, ``rank``: Broadcast."""
    return wire.LoadOrder(
        transport=m.transport,
        version=target.version,
        manifest_digest=target.manifest_digest,
        group=group,
        rank_offset=rank,
        **order_times(paused_seconds, left),
    )
