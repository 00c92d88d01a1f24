"""The coordinator's environment variables, read as it reads them.

Invariant: no value is guessed. What is set and cannot be meant is an error that names the variable; what is not set has
the coordinator's default.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

TRANSPORT = "RLIX_MILES_UPDATE_TRANSPORT"
ASSERT_MIXED = "RLIX_ASSERT_MIXED_TRANSPORT"
RESIDUAL = "MILES_MAX_RESIDUAL_GPU_MEM_GB"
DEFER = "MILES_INIT_DEFER_ADD_WORKER"
CONTROL_PLANE = "RLIX_CONTROL_PLANE"

#: The coordinator's words for transports, and RLPipeline.spec.transport.mode's.
MODES = {"cpu_serialize": "CPUSerialize", "broadcast": "Broadcast", "auto": "Auto"}
DEFAULT_RESIDUAL_GIB = 13.0


def transport_mode() -> str | None:
    """Trimmed and lower-cased; None where the variable is empty or not set. RuntimeError lists the valid values."""
    word = os.environ.get(TRANSPORT, "").strip().lower()
    if not word:
        return None
    if word not in MODES:
        raise RuntimeError(f"{TRANSPORT}={word!r} is not a transport mode: use one of {', '.join(sorted(MODES))}")
    return word


def asserts_mixed() -> bool:
    """Only the exact value 1 asks for it."""
    return os.environ.get(ASSERT_MIXED) == "1"


def deferred_start() -> bool:
    """Engines must come up asleep; only the exact value 1 asks for it."""
    return os.environ.get(DEFER) == "1"


def residual_gib() -> float | None:
    """Gibibytes that may stay in use on a device whose engines sleep; None where the variable is not set."""
    text = os.environ.get(RESIDUAL)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise RuntimeError(f"{RESIDUAL}={text!r} is not a positive number of GiB (default {DEFAULT_RESIDUAL_GIB:g})")
    return value


def check_mixed(mode: str, train: Sequence[int] | None, infer: Sequence[int] | None, per_engine: int) -> None:
    """The assertion that both transports would be used, on the full set of engines. RuntimeError says why not."""
    if not asserts_mixed():
        return
    if mode != "auto":
        raise RuntimeError(f"{ASSERT_MIXED}=1 needs transport mode auto, it is {mode}: no other mode mixes")
    if not infer:
        raise RuntimeError(f"{ASSERT_MIXED}=1 needs infer_gpu_ids: which engines share devices is not known without")
    pool, own = sorted(infer), frozenset(train or ())
    engines = [frozenset(pool[i : i + per_engine]) for i in range(0, len(pool) - per_engine + 1, per_engine)]
    shared = sum(bool(e & own) for e in engines)
    if not 0 < shared < len(engines):
        only = "cpu_serialize" if shared else "broadcast"
        raise RuntimeError(
            f"{ASSERT_MIXED}=1, but every one of {len(engines)} engines would use {only}: train GPUs {sorted(own)}, "
            f"infer GPUs {pool}, {per_engine} for each engine"
        )
