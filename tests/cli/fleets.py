"""Fleets to draw: objects as a real apiserver answered them in a run with four engines, and larger ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fleets"
#: A moment shortly after the runs, as milliseconds.
NOW_MS = 1_796_011_000_000
Objects = dict[str, list[Any]]


def recorded(name: str) -> Objects:
    """``empty``, ``base``, ``staging`` (a round runs), ``failed`` (a gate is frozen) or ``asleep``."""
    found: Objects = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def large(engines: int) -> Objects:
    """The failed fleet with so many engines in its first pool, listed as the operator lists them."""
    found = recorded("failed")
    pool = found["enginepools"][0]
    rows = pool["status"]["engines"]
    pool["spec"]["replicas"] = engines
    pool["status"] |= {
        "replicas": engines,
        "readyReplicas": engines - 1,
        "counts": {**pool["status"]["counts"], "active": engines - 1},
        "versions": [{"version": 1, "engines": f"0-{engines - 1}"}],
        "engines": [rows[0]] if engines > 64 else [_row(rows[1], i) for i in range(engines)],
    }
    found["rlpipelines"][0]["status"]["engines"] = {"active": engines + 1, "asleep": 0, "total": engines + 2}
    return found


def _row(row: dict[str, Any], index: int) -> dict[str, Any]:
    made = copy.deepcopy(row)
    return {**made, "index": index, "name": f"e-{index}-0a1b2", "node": f"gpu-{index // 8:03d}"}
