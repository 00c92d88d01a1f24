"""One sync as a SyncRound: what to create, what its status means. No calls are made here.

Invariant: the name of a round follows from what is asked for, so asking again finds the same round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlfleet.api import labels, naming
from rlfleet.api.checkpoint import INCARNATION
from rlfleet.api.condition_list import find_condition
from rlfleet.api.conditions import Reason, RoundCondition
from rlfleet.api.v1alpha1 import RLPipeline, RoundPhase, SyncRound
from rlfleet.client.errors import RoutingDegraded, SyncFailed, SyncRefused


@dataclass(frozen=True, slots=True)
class Order:
    """What a trainer asks for."""

    pipeline: RLPipeline
    version: int
    incarnation: str
    manifest_digest: str | None
    rollback_from: int | None

    def name(self, attempt: int) -> str:
        """The round's name for one attempt."""
        meta = self.pipeline.metadata
        return naming.round_name(meta.name, meta.uid, self.incarnation, self.version, attempt)

    def body(self, attempt: int) -> dict[str, Any]:
        """The SyncRound to create."""
        meta = self.pipeline.metadata
        spec: dict[str, Any] = {
            "pipeline": meta.name,
            "version": self.version,
            "kind": "Refresh",
            "senderIncarnation": self.incarnation,
            "attempt": attempt,
        }
        if self.manifest_digest is not None:
            spec["manifestDigest"] = self.manifest_digest
        if self.rollback_from is not None:
            spec |= {"allowRollback": True, "expectedCommitted": self.rollback_from}
        return {
            "apiVersion": labels.API_VERSION,
            "kind": "SyncRound",
            "metadata": {
                "name": self.name(attempt),
                "namespace": meta.namespace,
                "labels": {labels.PIPELINE: meta.name},
                "ownerReferences": [
                    {"apiVersion": labels.API_VERSION, "kind": "RLPipeline", "name": meta.name, "uid": meta.uid}
                ],
            },
            "spec": spec,
        }


@dataclass(frozen=True, slots=True)
class SyncResult:
    """A version that is committed and served.

    ``round`` and ``attempt`` are None when the version with these bytes was committed before and nothing was asked.
    ``timings`` in milliseconds, as in SyncRound.status.timings (planMs, stageMs, ..., pausedMs, totalMs);
    ``transports``: how many engines got their weights which way; ``bytes`` of the whole model;
    ``seconds``: how long this call took.
    """

    version: int
    manifest_digest: str
    round: str | None = None
    attempt: int | None = None
    timings: Mapping[str, int] = field(default_factory=dict)
    transports: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def already_committed(self) -> bool:
        """Nothing had to be done."""
        return self.round is None


def named_checkpoint(version: int, manifest_digest: str | None) -> str:
    """What stands for the sender where weights come from checkpoints; SyncRefused unless the caller names the bytes."""
    if manifest_digest is None:
        raise SyncRefused(
            f"version {version} was not asked for: with spec.weights.checkpoint the caller names the bytes, "
            "sync(version, manifest_digest=checkpoint.write(...).digest)",
            version=version,
            reason="DigestRequired",
        )
    return INCARNATION


def succeeded(found: SyncRound) -> bool:
    """The round ended as it should."""
    return found.status.phase is RoundPhase.SUCCEEDED


def ended(found: SyncRound) -> bool:
    """The round ended, well or not."""
    return found.status.phase is not None and found.status.phase.terminal


def result(found: SyncRound, seconds: float) -> SyncResult:
    """What a round that succeeded brought."""
    status = found.status
    plan = status.plan
    moved = {}
    if plan is not None:
        moved = {"Serialized": plan.serialized, "Broadcast": plan.broadcast, "Checkpoint": plan.checkpoint}
    return SyncResult(
        version=found.spec.version,
        manifest_digest=status.manifest_digest or "",
        round=found.metadata.name,
        attempt=found.spec.attempt,
        timings=status.timings.to_dict() if status.timings is not None else {},
        transports={way: n for way, n in moved.items() if n},
        bytes=status.bytes or 0,
        seconds=seconds,
    )


def detail(found: SyncRound) -> str:
    """What the round waits for, in words; empty when it says nothing."""
    rows = [condition.model_dump() for condition in found.status.conditions]
    progressing = find_condition(rows, RoundCondition.PROGRESSING)
    return str(progressing["message"]) if progressing is not None else ""


def has_been_seen(found: SyncRound) -> bool:
    """An operator has said something about the round."""
    return found.status.phase is not None or bool(found.status.conditions)


def needs_action(found: SyncRound) -> str | None:
    """What a person must do for a round that cannot heal by itself; None: nothing."""
    if ended(found):
        return None
    rows = [condition.model_dump() for condition in found.status.conditions]
    progressing = find_condition(rows, RoundCondition.PROGRESSING)
    if progressing is None or progressing["reason"] != Reason.HOLDING_NEEDS_ACTION.value:
        return None
    return str(progressing["message"])


def failure(found: SyncRound, advice: str = "") -> SyncFailed:
    """The error of a round that ended without success."""
    status = found.status
    phase = status.phase.value if status.phase is not None else ""
    why = status.failure
    took_effect = (
        f"version {found.spec.version} IS committed, but not every engine serves it yet: go on, do not send it again"
        if status.committed
        else f"version {found.spec.version} is not committed"
    )
    said = f"{why.reason} in {why.stage}: {why.message}" if why is not None else detail(found) or "no reason was given"
    kind = RoutingDegraded if status.committed else SyncFailed
    return kind(
        f"SyncRound {found.metadata.name} ended as {phase} ({said}); {took_effect}" + (f". {advice}" if advice else ""),
        version=found.spec.version,
        round=found.metadata.name,
        committed=status.committed,
        phase=phase,
        stage=why.stage if why is not None else phase,
        reason=why.reason if why is not None else phase,
        digest=why.digest if why is not None else "",
    )
