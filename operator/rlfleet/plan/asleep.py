"""Whether an engine's device memory is released, from its gate's record (DESIGN section 7, Offloaded).

Invariant: asleep is proven or not: a release or wake without a known end, or a gate that does not answer, is neither
"asleep" nor "awake". Weights and KV cache make an engine asleep; part of them leaves it half released, which neither
serves nor loads until the rest is released too, or what was released is taken back.
"""

from __future__ import annotations

from typing import Final

from rlfleet.api.wire import GateStatus, MemoryTag

#: What must be released for an engine to count as Offloaded.
FULL: Final = frozenset({MemoryTag.WEIGHTS, MemoryTag.KV_CACHE})


def is_offloaded(status: GateStatus | None) -> bool:
    """The gate proves that the engine sleeps."""
    return status is not None and not status.releasing and status.released != () and set(status.released) >= FULL


def is_touched(status: GateStatus | None) -> bool:
    """Some of its memory is released, or may be: it can not take part in a round before it is woken."""
    return status is not None and (status.releasing or bool(status.released))
