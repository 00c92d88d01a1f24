"""docs/decisions/README.md: one table, with a row for every decision, in their order."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).resolve().parents[2] / "docs/decisions"
_ROW = re.compile(r"^\| \[(\d{4})\]\((\d{4})-[\w-]+\.md\) \|")


def test_the_table_has_every_decision_in_order_and_without_a_gap() -> None:
    lines = (DECISIONS / "README.md").read_text().splitlines()
    at = [n for n, line in enumerate(lines) if _ROW.match(line)]
    assert at == list(range(at[0], at[0] + len(at))), "a row outside of the table is shown as text"
    rows = [match.groups() for line in lines if (match := _ROW.match(line))]
    pages = sorted(page.name[:4] for page in DECISIONS.glob("[0-9]*.md"))
    assert rows == [(number, number) for number in pages]
