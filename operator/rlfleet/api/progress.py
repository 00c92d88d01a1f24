"""Progress of a training step's rollouts: absolute counters per stream, and one figure over all of them.

Pure arithmetic that the trainer's SDK and the operator share, so that both know what is worth a write. The rule comes
from the coordinator that this project descends from: a target is at least 1, what was collected counts up to its
target, and the sum is shown in steps of 2 %.

Invariant: the figure follows from the counters alone, never from how often they were reported: a report that was lost,
repeated or late changes nothing that the next one does not put right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

#: Steps from nothing to all: one is 2 %.
BUCKETS = 50


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """One stream of rollouts. ``batch``: which batch the counters are about; ``target``, ``collected``: absolute."""

    key: str
    batch: int
    target: int
    collected: int

    @property
    def completed(self) -> int:
        """What counts: no more than the target, however many were collected."""
        return min(max(0, self.collected), self.wanted)

    @property
    def wanted(self) -> int:
        """The target, at least 1: a stream without one would count as done."""
        return max(1, self.target)


@dataclass(frozen=True, slots=True)
class Progress:
    """All streams together. ``collected`` is not clamped; ``completed`` is, stream by stream."""

    target: int
    collected: int
    completed: int
    batches: str
    """Names the streams and their batches: another one means that counting began anew."""

    @property
    def bucket(self) -> int:
        """From 0 to 50, rounded down."""
        return min(BUCKETS, self.completed * BUCKETS // self.target)

    @property
    def percent(self) -> int:
        """The bucket as a percentage: an even number from 0 to 100."""
        return self.bucket * 100 // BUCKETS

    def same_as(self, other: Progress | None) -> bool:
        """Nothing that is worth a write lies between the two: the same batches of the same streams, the same bucket."""
        return other is not None and (self.bucket, self.batches) == (other.bucket, other.batches)


def aggregate(streams: Iterable[StreamProgress]) -> Progress | None:
    """One figure over all streams; None where there is no stream."""
    each = sorted(streams, key=lambda s: s.key)
    if not each:
        return None
    text = "\0".join(f"{s.key}\0{s.batch}" for s in each)
    return Progress(
        target=sum(s.wanted for s in each),
        collected=sum(max(0, s.collected) for s in each),
        completed=sum(s.completed for s in each),
        batches=hashlib.sha256(text.encode()).hexdigest()[:16],
    )
