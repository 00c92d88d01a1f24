"""The fence: who may still act on an engine or a sender. Pure; the gate and the sender both keep one.

Invariant (DESIGN section 5, Fence): what is held never decreases, a call with a lower generation changes nothing,
and a value so high that no honest operator could have made it is refused instead of locking everyone out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Generations are milliseconds of the apiserver's clock at least; one further ahead than this is refused.
MAX_AHEAD_MS = 24 * 3600 * 1000
MAX_GENERATION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fence:
    """The highest (pipeline UID, operation UID, generation) stored so far; generation 0 means none yet."""

    pipeline: str = ""
    operation: str = ""
    generation: int = 0


class Admission(StrEnum):
    """What a fenced call may do."""

    ACCEPT = "Accept"  # equal or higher: act (a higher one must be stored durably first)
    STALE = "StaleFence"  # lower than what is held
    OTHER_OPERATION = "OtherOperation"  # same generation, other operation: one generation has one owner
    OTHER_PIPELINE = "OtherPipeline"  # another pipeline without a higher fence, or while not closed
    POISONED = "FencePoisoned"  # too far ahead of our own clock


def admit(held: Fence, asked: Fence, *, now_ms: int, closed: bool) -> Admission:
    """Decide one call. ``now_ms``: this process's wall clock; ``closed``: paused and out of every router.

    A new pipeline's UID is accepted only with a higher fence and while closed (DESIGN section 5).
    """
    if asked.generation > now_ms + MAX_AHEAD_MS or asked.generation > MAX_GENERATION:
        return Admission.POISONED
    if held.generation and asked.pipeline != held.pipeline:
        return Admission.ACCEPT if asked.generation > held.generation and closed else Admission.OTHER_PIPELINE
    if asked.generation < held.generation:
        return Admission.STALE
    if asked.generation == held.generation and held.operation and asked.operation != held.operation:
        return Admission.OTHER_OPERATION
    return Admission.ACCEPT
