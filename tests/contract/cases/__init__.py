"""What every adapter promises of its engine, case by case.

A case asserts what must hold of every engine, and returns what it observed where engines may differ by type. The real
engine and the reference engine of one type must return the same (tests/contract/differences.py lists exceptions).
"""

from __future__ import annotations

# Imported for their cases, in the order in which these run.
from tests.contract.bench import CASES

from tests.contract.cases import serving, weights, broadcast, memory  # isort: skip

__all__ = ["CASES", "broadcast", "memory", "serving", "weights"]
