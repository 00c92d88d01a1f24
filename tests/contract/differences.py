"""Where the reference engine does not answer as the real one of its type does, each with the reason.

Everything that is not listed here must be equal; an entry that is not true any more fails a test, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The real engine can not do it at all where the tests run (a CPU).
ABSENT = "not there"


@dataclass(frozen=True)
class Difference:
    """In ``case`` of engine type ``kind`` the two observe different things. ``real`` ABSENT: it was not run there."""

    kind: str
    case: str
    real: Any
    reference: Any
    reason: str


_CHECKSUM = (
    "on CPUs vLLM packs the weights of linear layers away, and they hash as nothing; the reference engine's are all "
    "there, so that verification by checksum is tested with vLLM's form of it as well"
)
_MEMORY = "engines on CPUs have no memory that they could give back"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "VLLM",
        "a_directory_is_loaded",
        real={"checksum means something": False, "checksum moves": True},
        reference={"checksum means something": True, "checksum moves": True},
        reason=_CHECKSUM,
    ),
    Difference(
        "VLLM",
        "memory_is_given_back_and_taken_again",
        real=ABSENT,
        reference={"tags": ["KVCache", "Weights"]},
        reason=_MEMORY,
    ),
    Difference(
        "SGLang",
        "memory_is_given_back_and_taken_again",
        real=ABSENT,
        reference={"tags": ["KVCache", "CudaGraph", "Weights"]},
        reason=_MEMORY,
    ),
)
