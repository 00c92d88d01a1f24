"""Each row of docs/reference/features.md names a test or a file that is there."""

from __future__ import annotations

import re

from tests.docs.test_protocol import ROOT, defined_in

_SHOWN = re.compile(r"`([\w/.-]+?)(?:::(test_\w+))?`")


def rows() -> list[list[str]]:
    page = (ROOT / "docs/reference/features.md").read_text()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.match(r"\| \d+ \|", line)
    ]


def test_rows_are_counted_without_a_gap() -> None:
    assert [int(number) for number, *_ in rows()] == list(range(1, 38))


def test_what_shows_a_feature_exists() -> None:
    missing = []
    for number, _, _, shown in rows():
        found = _SHOWN.fullmatch(shown)
        assert found is not None, f"row {number} names neither a test nor a file: {shown}"
        file, name = ROOT / found[1], found[2]
        if not file.is_file() or (name is not None and name not in defined_in(file)):
            missing.append(f"row {number}: {shown}")
    assert missing == []
