"""What was observed at real engines, in a file that is committed, and what is expected of the next run.

``results.json``: by engine type ``version``, ``capabilities`` (what the adapter found) and ``cases`` (name ->
observed). ``covers``: case -> capabilities. Whoever describes what was tested reads it from there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.contract.cases import CASES
from tests.contract.differences import ABSENT, DIFFERENCES
from tests.contract.subjects import REAL, REFERENCE

FILE = Path(__file__).with_name("results.json")
WRITE = "RLFLEET_WRITE_CONTRACT"


def read() -> dict[str, Any]:
    """The file."""
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"engines": {}, "covers": {}}
    return found


def compare(kind: str, where: str, case: str, observed: Any, capabilities: list[str]) -> None:
    """Assert that this is what a run is expected to observe; where asked to, write down what a real engine showed."""
    if os.environ.get(WRITE):
        if where == REAL:
            _write(kind, case, observed, capabilities)
        return
    known = read()["engines"].get(kind, {}).get("cases", {})
    told = next((d for d in DIFFERENCES if (d.kind, d.case) == (kind, case)), None)
    expected = known.get(case, ABSENT)
    if told is not None:
        assert told.real == expected, f"differences.py: the real {kind} observed {expected} in {case}, not {told.real}"
        assert told.real != told.reference, f"differences.py: {kind} in {case} is no difference any more"
        expected = told.reference if where == REFERENCE else expected
    assert expected != ABSENT, f"{kind}: {case} was never run at the real engine: make test-engines with {WRITE}=1"
    assert observed == expected, f"{where} {kind} in {case}: expected {expected}, observed {observed}"


def _write(kind: str, case: str, observed: Any, capabilities: list[str]) -> None:
    found = read()
    engine = found["engines"].setdefault(kind, {"version": "", "capabilities": [], "cases": {}})
    engine["capabilities"] = capabilities
    if isinstance(observed, dict) and "version" in observed:
        engine["version"] = observed["version"]
    engine["cases"] = {n: v for n, v in {**engine["cases"], case: observed}.items() if n in CASES}
    found["covers"] = {name: sorted(c.covers) for name, c in sorted(CASES.items())}
    FILE.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
