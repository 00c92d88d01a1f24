"""docs/reference/coordinator-errors.md: every error names a test that exists and holds the message that is quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_protocol import defined_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/coordinator-errors.md"
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_QUOTED = re.compile(r"`([^`]+)`")
#: Python joins literals that stand beside each other, and patterns escape what is special in them.
_JOINED = re.compile(r"[\"']\s*\n\s*f?r?[\"']")
_NAME = re.compile(r"(?:[A-Z][a-z]+){2,}")
HEADS = ("| the coordinator refuses", "| the coordinator's error")


def rows() -> list[tuple[str, str, str]]:
    """Error, answer and tests of each row."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(HEADS):
            error, answer, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((error, answer, tests))
    return found


def held(file: str) -> str:
    """A test module's text as its strings are read."""
    return _JOINED.sub("", (ROOT / file).read_text()).replace("\\", "")


def is_words(quoted: str) -> bool:
    """A quoted message; single words of code are names of reasons, fields and calls."""
    return " " in quoted or "." in quoted


def test_the_page_has_every_part() -> None:
    parts = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(parts) == 8
    assert len(rows()) >= 50


@pytest.mark.parametrize(("error", "answer", "tests"), rows(), ids=[r[0][:50] for r in rows()])
def test_each_error_has_a_test_with_its_message(error: str, answer: str, tests: str) -> None:
    named = _TEST.findall(tests)
    assert named, f"{error}: no test"
    missing = [f"{file}::{name}" for file, name in named if name not in defined_in(ROOT / file)]
    assert missing == []
    texts = [held(file) for file, _ in named]
    for quoted in _QUOTED.findall(answer):
        if is_words(quoted):
            assert any(quoted in text for text in texts), f"{error}: no named test holds {quoted!r}"


def test_reasons_that_are_named_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "operator").rglob("*.py"))
    named = {q for _, answer, _ in rows() for q in _QUOTED.findall(answer) if _NAME.fullmatch(q)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", code)] == []
