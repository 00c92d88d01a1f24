"""docs/protocol.md says which test checks each invariant; those tests exist, and no invariant is left out.

So do the explorer's scopes and the sweeps that it names for what befalls engines.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.fault import invariants
from tests.fault.catalog import SCENARIOS
from tests.model.scopes import SCOPES

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_RECORDED = re.compile(r"\bI\d+\b")


def section() -> str:
    """The page's section about invariants."""
    page = (ROOT / "docs/protocol.md").read_text()
    return page.split("## Invariants, and what checks them\n")[1].split("\n## ")[0]


def rows() -> list[str]:
    """The table's rows, without its head."""
    return [line for line in section().splitlines() if line.startswith("| ") and not line.startswith("| invariant")]


def defined_in(file: Path) -> set[str]:
    """Names of the test functions that a module defines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_invariant_names_a_test() -> None:
    assert len(rows()) >= 13
    assert [row for row in rows() if not _TEST.search(row)] == []


def test_the_named_tests_exist() -> None:
    named = _TEST.findall(section())
    missing = [f"{file}::{name}" for file, name in named if name not in defined_in(ROOT / file)]
    assert missing == []


def test_whatever_recorded_histories_are_judged_by_is_on_the_page() -> None:
    judged = set(re.findall(r"^\| (I\d+) \|", str(invariants.__doc__), re.MULTILINE))
    assert judged
    assert {i for row in rows() for i in _RECORDED.findall(row)} == judged


def test_what_befalls_engines_is_explored_and_swept() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    part = page.split("## What befalls engines beside rounds, and what explores it\n")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.split("|")[2:5]] for line in part.splitlines() if line.startswith("| ")][1:]
    assert len(found) >= 6
    for scopes, sweep, test in found:
        assert {s.strip() for s in scopes.split(";")} <= {s.name for s in SCOPES}
        assert sweep.strip("`") in {s.name for s in SCENARIOS}
        ((file, name),) = _TEST.findall(test)
        assert name in defined_in(ROOT / file)
