"""Who owns a pipeline's work: the arithmetic of the fence, and the takeover barrier as a step function.

Invariants (DESIGN section 5, Fence and Takeover barrier):
- a claim is above everything that its maker has seen, and above the apiserver's clock, so it rises even where the
  status that held the last one was lost;
- whoever sees a fence that is not its own has been deposed and writes nothing more;
- before a decision the claim is in the round, at the sender and at every gate that answers, and nothing older runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: Claims tried when gates show higher generations than the pipeline's status (a lost or restored status).
CLAIM_TRIES = 5


def next_fence(held: int, shown: int, date_ms: int) -> int:
    """The generation of a new claim.

    ``held``: the fence in RLPipeline.status; ``shown``: the highest generation that a gate or sender named;
    ``date_ms``: the apiserver's clock, which is ahead of every claim ever made, also of those that nobody remembers.
    """
    return max(held + 1, shown + 1, date_ms)


def is_deposed(fence: int, mine: int) -> bool:
    """The fence in RLPipeline.status is not the one that I claimed: somebody claimed after me."""
    return fence != mine


def claim_landed(live: Any, wanted: Any) -> bool:
    """A claim's answer was lost: ``live`` activeOperation, read back, is the very one that was written.

    Holder and generation are part of it, so nobody else's claim can look like this one.
    """
    return bool(wanted) and live == wanted


class Step(StrEnum):
    """What the takeover barrier does next."""

    WRITE_ROUND = "WriteRound"  # the generation into SyncRound.status
    FENCE = "Fence"  # to the sender and to every gate
    READ_PIPELINE = "ReadPipeline"  # somebody showed a generation that is not below ours: deposed, or status lost?
    CLAIM_ABOVE = "ClaimAbove"  # the fence in status is still ours: claim above what was shown, then from the start
    WAIT = "Wait"  # operations of somebody before us run at gates
    DEPOSED = "Deposed"
    DECIDE = "Decide"  # everybody that answers stands behind this generation


@dataclass(frozen=True, slots=True)
class Barrier:
    """How far a takeover has come under its present claim."""

    generation: int
    needs_round: bool
    """The round was claimed before, so its status must carry the new generation too."""
    written: bool = False
    fenced: bool = False
    shown: int = 0
    """The highest generation that a gate or the sender refused us with; 0: nobody refused."""
    fence: int | None = None
    """The fence in RLPipeline.status, read after the refusal."""
    claims: int = 1
    waited: bool = False
    """Operations in flight have ended, or the time for that has passed."""


def barrier_step(b: Barrier) -> Step:
    """The next step; a refusal (412) is never taken for an answer about the engines."""
    if b.needs_round and not b.written:
        return Step.WRITE_ROUND
    if not b.fenced:
        return Step.FENCE
    if b.shown >= b.generation:
        if b.fence is None:
            return Step.READ_PIPELINE
        if is_deposed(b.fence, b.generation) or b.claims >= CLAIM_TRIES:
            return Step.DEPOSED
        return Step.CLAIM_ABOVE
    return Step.DECIDE if b.waited else Step.WAIT
