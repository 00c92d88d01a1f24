"""docs/guides/frameworks.md counts what a loop gains, and names examples that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/frameworks.md").read_text()


def row(example: str) -> list[str]:
    """Cells of the table's first row that names this example."""
    line = next(line for line in PAGE.splitlines() if line.startswith("|") and f"({example})" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_lines_of_the_torch_loop_are_counted() -> None:
    text = (ROOT / "docs/examples/torch_loop.py").read_text()
    assert row("../examples/torch_loop.py")[3] == str(len(re.findall(r"# rlfleet$", text, re.MULTILINE)))


def test_every_example_that_it_names_is_there() -> None:
    named = set(re.findall(r"\(\.\./examples/([a-z_]+\.py)\)", PAGE))
    assert len(named) >= 5
    assert named <= {p.name for p in (ROOT / "docs/examples").glob("*.py")}
