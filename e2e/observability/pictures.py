"""Pictures of the dashboards, drawn from a Prometheus: what Grafana would show, as far as a plotting library can.

Grafana itself is not needed, so the docs' pictures can be made wherever the tests run.
"""

from __future__ import annotations

import math
from datetime import UTC
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure

from e2e.observability.panels import Board, Kind, Panel
from e2e.observability.prometheus import Prometheus

_COLUMNS = 24
_HEIGHTS = {Kind.STAT: 4, Kind.STATES: 10}
_HEIGHT = 8
_POINTS = 240
_MOST = 10
_STATES = {1: "#3a923a", 0: "#b8b8b8", -1: "#e1a128"}
_UNITS = {"s": "s", "percentunit": "%", "bytes": "MiB", "Bps": "MiB/s"}


def concrete(expression: str, variables: dict[str, str], rate: str) -> str:
    """An expression with Grafana's variables filled in."""
    for name, value in variables.items():
        expression = expression.replace(f"${name}", value)
    return expression.replace("$__rate_interval", rate)


def draw(board: Board, prometheus: Prometheus, variables: dict[str, str], start: float, end: float, file: Path) -> None:
    """Draw a dashboard over a span of time."""
    placed: list[tuple[Panel, int, int, int]] = []
    titles: list[tuple[str, int]] = []
    y = 0
    for title, panels in board.rows:
        titles.append((title, y))
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            height = _HEIGHTS.get(panel.kind, _HEIGHT)
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append((panel, x, y, height))
            x, tallest = x + panel.width, max(tallest, height)
        y += tallest
    figure = Figure(figsize=(16, y * 0.36 + 0.6), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.01, 1 - 0.3 / (y * 0.36 + 0.6), board.title, fontsize=15, weight="bold", va="center")
    top = 1 - 0.6 / (y * 0.36 + 0.6)
    for title, at in titles:
        figure.text(0.01, top * (1 - (at + 0.5) / y), title, fontsize=11, weight="bold", color="#444444", va="center")
    for panel, x, at, height in placed:
        left, width = 0.01 + 0.98 * x / _COLUMNS, 0.98 * panel.width / _COLUMNS
        bottom, tall = top * (1 - (at + height) / y), top * height / y
        axes = figure.add_axes((left + 0.03, bottom + 0.28 * tall, width - 0.04, 0.56 * tall))
        axes.set_title(panel.title, fontsize=9, loc="left", weight="bold")
        _fill(axes, panel, prometheus, variables, start, end)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=70)


def _series(
    panel: Panel, prometheus: Prometheus, variables: dict[str, str], start: float, end: float
) -> list[tuple[str, list[float], list[float]]]:
    step = _step(start, end)
    found = []
    for expression, legend in panel.queries:
        for one in prometheus.range(concrete(expression, variables, "15s"), start, end, step):
            values = [(float(t), float(v)) for t, v in one["values"]]
            found.append((_named(legend, one["metric"]), [t for t, _ in values], [v for _, v in values]))
    return found


def _step(start: float, end: float) -> float:
    return max(1.0, (end - start) / _POINTS)


def _named(legend: str, labels: dict[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def _fill(
    axes: Axes, panel: Panel, prometheus: Prometheus, variables: dict[str, str], start: float, end: float
) -> None:
    series = _series(panel, prometheus, variables, start, end)
    if panel.kind is Kind.STAT:
        axes.axis("off")
        now = [s for s in series if end - s[1][-1] < 2 * _step(start, end)]
        shown = [f"{_text(values[-1], panel.unit)} {name}" for name, _, values in now[:3]]
        axes.text(0, 0.35, "\n".join(shown) or "no data", fontsize=12 if len(shown) < 3 else 9, va="center")
        return
    if panel.kind is Kind.STATES:
        _states(axes, series, start, end)
        return
    if panel.kind is Kind.STACKED:
        series = [s for s in series if any(v for v in s[2])]
    scale = {"percentunit": 100.0, "bytes": 2.0**-20, "Bps": 2.0**-20}.get(panel.unit, 1.0)
    if panel.kind is Kind.STACKED and series:
        _stacked(axes, series, scale)
    else:
        for name, times, values in series[:_MOST]:
            axes.plot([_date(t) for t in times], [v * scale for v in values], label=name, linewidth=1.2)
    if not series:
        axes.text(0.5, 0.5, "nothing happened", transform=axes.transAxes, ha="center", fontsize=8, color="#888888")
    axes.set_xlim(_date(start), _date(end))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _dress(axes, _UNITS.get(panel.unit, ""))
    if series:
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=4, frameon=False)


def _stacked(axes: Axes, series: list[tuple[str, list[float], list[float]]], scale: float) -> None:
    times = sorted({t for _, ts, _ in series for t in ts})
    layers = []
    for _, ts, values in series[:_MOST]:
        known = dict(zip(ts, values, strict=True))
        layers.append([0.0 if math.isnan(v := known.get(t, 0.0)) else v * scale for t in times])
    axes.stackplot([_date(t) for t in times], layers, labels=[n for n, _, _ in series[:_MOST]], alpha=0.75)


def _states(axes: Axes, series: list[tuple[str, list[float], list[float]]], start: float, end: float) -> None:
    shown = series[:14]
    for row, (_, times, values) in enumerate(shown):
        step = _step(start, end)
        for t, value in zip(times, values, strict=True):
            axes.barh(row, step / 86400, left=_date(t), height=0.7, color=_STATES.get(int(value), "#888888"))
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown], fontsize=6)
    # Names are long: they take the room of the bars.
    box = axes.get_position()
    axes.set_position((box.x0 + 0.11, box.y0, box.width - 0.11, box.height))
    axes.set_xlim(_date(start), _date(end))
    axes.invert_yaxis()
    _dress(axes, "")


def _dress(axes: Axes, unit: str) -> None:
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S", tz=UTC))  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=5))  # type: ignore[no-untyped-call]
    axes.tick_params(labelsize=6)
    axes.set_ylabel(unit, fontsize=7)
    axes.grid(alpha=0.3)


def _date(seconds: float) -> float:
    return seconds / 86400  # matplotlib counts days since the epoch


def _text(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    return f"{value:.0f}{' s' if unit == 's' else ''}"
