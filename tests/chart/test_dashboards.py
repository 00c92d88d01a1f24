"""Dashboards: their files are what the source makes, and every query asks for what the metric table has.

That the queries run in a real Prometheus, and give data, is seen by e2e/scenarios/test_observability.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from e2e.observability.dashboards import FOLDER, files, main
from e2e.observability.panels import BOARDS, Board, Panel
from e2e.observability.queries import problems

PANELS = [(board, panel) for board in BOARDS for panel in board.panels()]


def loaded(board: Board) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FOLDER / f"{board.uid}.json").read_text())
    return made


def test_files_are_what_the_source_makes() -> None:
    assert main(["--check"]) == 0
    assert {p.name for p in FOLDER.glob("*.json")} == {p.name for p in files()}


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.uid}/{p.title}" for b, p in PANELS])
def test_every_query_asks_for_what_exists(board: Board, panel: Panel) -> None:
    variables = {f"${name}" for name, _ in board.variables} | {"$__rate_interval"}
    assert panel.help.endswith(".")
    for expression, _ in panel.queries:
        assert not problems(expression), expression
        used = {f"${word}" for word in re.findall(r"\$(\w+)", expression)}
        assert used <= variables


@pytest.mark.parametrize("board", BOARDS, ids=[b.uid for b in BOARDS])
def test_a_dashboard_has_every_panel_and_variable_once(board: Board) -> None:
    made = loaded(board)
    assert made["uid"] == board.uid
    panels = [p for p in made["panels"] if p["type"] != "row"]
    assert [p["title"] for p in panels] == [p.title for p in board.panels()]
    assert [v["name"] for v in made["templating"]["list"]] == ["datasource", *(n for n, _ in board.variables)]
    for panel, source in zip(panels, board.panels(), strict=True):
        assert [t["expr"] for t in panel["targets"]] == [e for e, _ in source.queries]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
