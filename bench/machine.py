"""What a benchmark ran on. A figure without it says nothing; only ratios within one run are comparable."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """Processor, kernel and versions of what moves the bytes."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    versions = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "torch", "xxhash"))
    load = os.getloadavg()[0]
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores (load {load:.1f}), Linux {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def report(what: str, size: int, ours: Sequence[float], baseline: Sequence[float], budget: float) -> None:
    """Print medians, rates and their ratio; ``ours`` and ``baseline`` are seconds per repetition."""
    mine, other = statistics.median(ours), statistics.median(baseline)
    mib = size / 2**20
    print(f"{what}: {mib:.0f} MiB, {len(ours)} repetitions each, alternating")
    print(f"  ours     {mine * 1000:7.0f} ms  {mib / mine:7.0f} MiB/s  (range {_range(ours)})")
    print(f"  baseline {other * 1000:7.0f} ms  {mib / other:7.0f} MiB/s  (range {_range(baseline)})")
    print(f"  ratio of rates {other / mine:.2f} (budget >= {budget})", flush=True)


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1000:.0f}-{max(seconds) * 1000:.0f} ms"


if __name__ == "__main__":
    print(describe())
