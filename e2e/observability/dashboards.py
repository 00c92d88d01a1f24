"""Writes charts/rlfleet/files/dashboards/*.json from e2e/observability/panels.py.

``python -m e2e.observability.dashboards --write`` writes them, ``--check`` fails when a file differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from e2e.observability.panels import BOARDS, Board, Kind, Panel

FOLDER = Path(__file__).resolve().parents[2] / "charts/rlfleet/files/dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def build(board: Board) -> str:
    """The dashboard as JSON."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["rlfleet"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    above = ""
    for name, metric in board.variables:
        matcher = f"{{{above}}}" if above else ""
        made = made.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(f"label_values({metric}{matcher}, {name})")
            .include_all(True)
            .all_value(".*")
            .multi(True)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
        )
        above = f'{name}=~"${name}"'
    for title, panels in board.rows:
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel | statetimeline.Panel:
    made: stat.Panel | timeseries.Panel | statetimeline.Panel
    match panel.kind:
        case Kind.STAT:
            made = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        case Kind.STATES:
            made = statetimeline.Panel()
        case Kind.LINES | Kind.STACKED:
            made = timeseries.Panel().show_points(shapes.VisibilityMode.NEVER).fill_opacity(10)
            if panel.kind is Kind.STACKED:
                made = made.fill_opacity(60).stacking(
                    common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A")
                )
    height = {Kind.STAT: 4, Kind.STATES: 10}.get(panel.kind, 8)
    made = made.title(panel.title).description(panel.help).unit(panel.unit).datasource(SOURCE)
    made = made.span(panel.width).height(height)
    for letter, (expression, legend) in zip("ABCDEFG", panel.queries, strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        query = query.format(PromQueryFormat.TIME_SERIES)
        made = made.with_target(query.instant() if panel.kind is Kind.STAT else query.range())
    return made


def files() -> dict[Path, str]:
    """Every generated file."""
    return {FOLDER / f"{board.uid}.json": build(board) for board in BOARDS}


def main(arguments: list[str]) -> int:
    """0 when everything is written or equal."""
    if arguments not in (["--write"], ["--check"]):
        print("usage: python -m e2e.observability.dashboards --write | --check", file=sys.stderr)
        return 2
    made = files()
    different = [p for p, text in made.items() if not p.exists() or p.read_text() != text]
    different += [p for p in FOLDER.glob("*.json") if p not in made]
    if arguments == ["--check"]:
        for path in different:
            print(f"out of date: {path.relative_to(FOLDER.parents[3])}; run `make generate`", file=sys.stderr)
        return bool(different)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in different:
        if path in made:
            path.write_text(made[path])
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
