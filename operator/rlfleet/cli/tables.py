"""Drawing what ``rlfleet.show`` found: trees, bars and tables for a terminal of 80 columns, for pipes and for files.

Invariant: pure functions from data to something rich can print; meaning is never carried by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlfleet.cli.checks import Check, Level
from rlfleet.show.facts import age, duration, size, version_text
from rlfleet.show.fleet import Engine, Pipeline, Pool
from rlfleet.show.rounds import PARTS, Member, Round, bar, meaning, remedy
from rlfleet.show.topology import Place

_GOOD, _WAIT, _BAD = "green", "yellow", "red"
STYLES = {
    **dict.fromkeys(("Active", "True", "Succeeded", "Ok", "Granted"), _GOOD),
    **dict.fromkeys(("Quarantined", "Failed", "False", "Expired", "Lost", "Silent"), _BAD),
    **dict.fromkeys(("Pending", "Booting", "Loading", "Draining", "Unknown", "Holding", "Cancelled"), _WAIT),
    **dict.fromkeys(("Offloaded", "Superseded", "Dropped"), "blue"),
}
_PART_STYLES = dict(
    zip("psqtvur", ("white", "cyan", "yellow", "magenta", "blue", "green", "bright_green"), strict=True)
)
LEGEND = "  ".join(f"{letter} {part}" for part, letter in PARTS)
_PROBLEM_ROWS = 6


def _word(text: str) -> Text:
    return Text(text, style=STYLES.get(text, ""))


def columns(*headers: str, right: Sequence[str] = (), keep: Sequence[str] = ()) -> Table:
    """A table without lines. ``right``: columns of numbers; ``keep``: columns that never wrap."""
    found = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for h in headers:
        found.add_column(h, justify="right" if h in right else "left", no_wrap=h in keep, overflow="fold")
    return found


def _note(text: str, indent: int, style: str = _BAD) -> Padding:
    return Padding(Text(f"! {text}", style=style), (0, 0, 0, indent))


# ------------------------------------------------------------------------------------------------ status


def status_tree(found: Sequence[Pipeline], *, wide: bool, ascii_only: bool = False) -> RenderableType:
    """The tree of the fleet."""
    if not found:
        return Text("No RLPipeline here. Other namespaces: -A. A first one: docs/quickstart.md")
    parts: list[RenderableType] = []
    for p in found:
        if parts:
            parts.append(Text())
        parts += _pipeline(p, wide=wide, ascii_only=ascii_only)
    return Group(*parts)


def warning(check: Check) -> RenderableType:
    """What is to be known before anything else is believed."""
    message = f"{check.message}: {check.fix}" if check.fix else check.message
    if check.level is Level.FAIL:
        return _note(f"nobody keeps this up to date: {message}", 0)
    return _note(f"{check.what}: {message}", 0, _WAIT)


def _pipeline(p: Pipeline, *, wide: bool, ascii_only: bool) -> Iterable[RenderableType]:
    head = Text()
    head.append(f"{p.namespace}/{p.name}", style="bold")
    head.append("  ").append(_ready(p.ready, p.reason))
    yield head
    facts = [f"committed {version_text(p.committed)}"]
    if p.lag:
        facts.append(f"{p.lag} behind {p.source} {version_text(p.newest)}")
    elif p.newest is not None and p.committed is None:
        facts.append(f"{p.source} has {version_text(p.newest)}")
    asleep = f" (+{p.engines_asleep} asleep)" if p.engines_asleep else ""
    facts += [f"engines {p.engines_active}/{p.engines_total}{asleep}", p.mode]
    if p.progress is not None:
        facts.append(f"rollouts {p.progress}%")
    yield Padding(Text(", ".join(facts)), (0, 0, 0, 2))
    running = p.operation or "nothing"
    if p.waiting:
        running += f"; waiting: {', '.join(p.waiting[:3])}" + (f" and {len(p.waiting) - 3} more" * (len(p.waiting) > 3))
    yield Padding(Text(f"now: {running}; fence {p.fence or '-'}; last round: {p.last_round or '-'}"), (0, 0, 0, 2))
    for row in p.problems[:_PROBLEM_ROWS]:
        yield _note(_said(row), 2, _style(row))
    if p.pools:
        yield _engines(p, wide=wide, ascii_only=ascii_only)
    for pool in p.pools:
        for row in pool.problems[:_PROBLEM_ROWS]:
            yield _note(f"{pool.name}: {_said(row)}", 2, _style(row))
        for e in pool.engines:
            if e.failure:
                yield _note(f"{e.name}: {e.failure}", 2, _WAIT)


def _ready(status: str, reason: str) -> Text:
    if status == "True":
        return Text("Ready", style=_GOOD)
    return Text(f"{'Not ready' if status == 'False' else 'Readiness unknown'} ({reason or 'nothing observed'})", _BAD)


def _said(row: Mapping[str, str]) -> str:
    return f"{row['reason']}: {row['message']}" if row["message"] else row["reason"]


def _style(row: Mapping[str, str]) -> str:
    return _WAIT if row["status"] == "Unknown" else _BAD


def _engines(p: Pipeline, *, wide: bool, ascii_only: bool) -> Table:
    more = ("NODE", "POD UID") if wide else ()
    table = columns(
        "POOL / ENGINE", "STATE", "VERSION", "FENCE", "ROUTED", "TRANSPORT", "GPU", *more, keep=("VERSION",)
    )
    tee, last = ("|- ", "`- ") if ascii_only else ("├─ ", "└─ ")
    for pool in p.pools:
        table.add_row(Text(f"{pool.name} ({_awake(pool)})", style="bold"), *_pool_cells(pool), *("" for _ in more))
        for e in pool.engines:
            end = e is pool.engines[-1] and not pool.unlisted
            table.add_row(f"{last if end else tee}{e.name}", *_engine_cells(e, p, wide=wide))
        if pool.unlisted:
            rest = f"{last}{pool.unlisted} more"
            held = "; ".join(f"{version_text(_number(v))}: {v.get('engines')}" for v in pool.versions)
            table.add_row(rest, _word("Active"), Text(held if wide else ""), "", "", "", "", *("" for _ in more))
    return table


def _number(v: Mapping[str, object]) -> int | None:
    found = v.get("version")
    return found if isinstance(found, int) else None


def _awake(pool: Pool) -> str:
    return f"{pool.counts.get('active', 0)}/{pool.wanted}"


def _pool_cells(pool: Pool) -> list[RenderableType]:
    held = sorted({n for v in pool.versions if (n := _number(v)) is not None}, reverse=True)
    ready = {"True": "Ready", "False": "Not ready"}.get(pool.ready, "Unknown")
    return [
        Text(ready, style={"True": _GOOD, "False": _BAD}.get(pool.ready, _WAIT)),
        " ".join(version_text(v) for v in held[:3]) or "-",
        pool.fencing or "",
        "",
        "",
        "",
    ]


def _engine_cells(e: Engine, p: Pipeline, *, wide: bool) -> list[RenderableType]:
    fence = "-" if e.fence is None else str(e.fence) if wide else "current" if e.fenced else "behind"
    version = Text(version_text(e.version), style="" if e.version == p.committed else _WAIT)
    gpus = "-" if e.gpus is None else ",".join(e.gpus) if wide else str(len(e.gpus))
    cells: list[RenderableType] = [
        _word(e.state),
        version,
        Text(fence, style=_WAIT if e.fenced is False else ""),
        {True: "yes", False: "no", None: "-"}[e.routed],
        e.transport or "-",
        gpus,
    ]
    return [*cells, e.node or "-", e.pod_uid or "-"] if wide else cells


# ------------------------------------------------------------------------------------------------ rounds


def rounds_table(found: Sequence[Round], now_ms: int, *, wide: bool, namespaces: bool = False) -> RenderableType:
    """One line for each round, with a bar of where the time went."""
    if not found:
        return Text("No SyncRound here. A trainer makes them (client.sync), or: rlfleet sync PIPELINE")
    more = ("KIND", "STARTED", "BYTES") if wide else ()
    table = columns("ROUND", "OUTCOME", "ENG", "TOTAL", "PAUSED", "PHASES", "AGE", *more, right=("ENG", "TOTAL"))
    table.columns[5].no_wrap = True
    width = 40 if wide else 16
    parts: list[RenderableType] = [table]
    for r in found:
        share = "-" if r.paused_share is None else f"{round(100 * r.paused_share)}%"
        cells: list[RenderableType] = [
            f"{r.namespace}/{r.name}" if namespaces else r.name,
            _word(r.outcome or r.phase),
            str(r.members or "-"),
            duration(r.total_ms),
            share,
            phase_bar(r, width),
            age(r.finished_ms or r.created_ms, now_ms),
        ]
        if wide:
            cells += [r.kind, age(r.started_ms, now_ms), size(r.bytes)]
        table.add_row(*cells)
    parts.append(Text(f"PHASES: {LEGEND}", style="dim"))
    told = [r for r in found if r.failure is not None or r.waits]
    if told:
        parts.append(Text())
    for r in told:
        failure = r.failure
        said = f"{failure['stage']}: {failure['reason']}: {failure['message']}" if failure else f"now: {r.waits}"
        parts.append(_note(f"{r.name}: {said}", 0, _BAD if failure else _WAIT))
    return Group(*parts)


def phase_bar(r: Round, width: int) -> Text:
    """The round's time as letters, in colour where there is colour."""
    text = Text()
    for letter in bar(r.parts, width):
        text.append(letter, style=_PART_STYLES[letter])
    return text


def round_page(r: Round, rows: Sequence[Member], attempts: Sequence[Mapping[str, object]], now_ms: int) -> Group:
    """Everything about one round."""
    head = Text(f"{r.namespace}/{r.name}", style="bold")
    head.append("  ").append(_word(r.outcome or r.phase))
    facts = columns("", "")
    facts.show_header = False
    taken = "yes: its version took effect" if r.committed else "no: its version did not take effect"
    if not (r.committed or r.outcome):
        taken = "not yet"
    for label, value in (
        ("pipeline", r.pipeline),
        ("kind", r.kind),
        ("version", f"{version_text(r.version)} (attempt {r.attempt})"),
        ("committed", taken),
        ("created", f"{age(r.created_ms, now_ms)} ago"),
        ("bytes", size(r.bytes)),
        ("total", duration(r.total_ms)),
        ("paused", f"{duration(r.paused_ms)}" + ("" if r.paused_share is None else f" ({r.paused_share:.0%})")),
    ):
        facts.add_row(Text(label, style="dim"), value)
    if r.waits:
        facts.add_row(Text("now", style="dim"), r.waits)
    parts: list[RenderableType] = [head, facts]
    if r.parts:
        phases = columns("PHASE", "TIME", "", right=("TIME",))
        longest = max(r.parts.values()) or 1
        for part, letter in PARTS:
            if part in r.parts:
                cells = max(1, round(40 * r.parts[part] / longest))
                phases.add_row(part, duration(r.parts[part]), Text(letter * cells, style=_PART_STYLES[letter]))
        parts += [Text(), phases]
    if r.failure is not None:
        parts += [Text(), *_failure(r, r.failure)]
    if rows:
        table = columns("ENGINE", "TRANSPORT", "RANKS", "RESULT", "REASON")
        for m in rows:
            table.add_row(m.engine, m.transport or "-", m.ranks or "-", _word(m.result or "-"), m.reason or "")
        parts += [Text(), table]
    if attempts:
        table = columns("TRY", "RESULT", "GENERATION", "REASON", "AT")
        for a in attempts:
            why = str(a.get("reason") or "")
            table.add_row(str(a.get("op")), str(a.get("result")), str(a.get("generation")), why, str(a.get("at")))
        parts += [Text(), table]
    return Group(*parts)


def _failure(r: Round, failure: Mapping[str, str]) -> Iterable[RenderableType]:
    yield Text(f"Failed in {failure['stage']}: {failure['reason']}", style=_BAD)
    for label, text in (
        ("meaning", meaning(failure["reason"])),
        ("message", failure["message"]),
        ("remedy", remedy(r)),
        ("digest", failure["digest"]),
    ):
        if text:
            yield Padding(Text(f"{label}: {text}"), (0, 0, 0, 2))


# ------------------------------------------------------------------------------------------------ topology


def topology_table(places: Sequence[Place], *, wide: bool) -> RenderableType:
    """Devices by node, and who is on them."""
    if not places:
        return Text("No object names a device here. Devices are known once gates report them, or from the specs.")
    table = columns("NODE", "DEVICE", "HELD BY")
    node = None
    for place in places:
        device = place.device or ("(devices unknown)" if place.holders else "(nobody)")
        for i, h in enumerate(place.holders or (None,)):
            who = Text() if h is None else Text(f"{h.kind} {h.name}")
            if h is not None and h.detail:
                who.append(" (").append(_word(h.detail)).append(")")
            if place.shared and place.device and not i:
                who.append("  shared", style=_WAIT)
            first = place.node if place.node != node else ""
            table.add_row(first, (device if wide else _short(device)) if not i else "", who)
            node = place.node
    return table


def _short(device: str) -> str:
    return device if len(device) <= 20 or device.startswith("(") else f"{device[:12]}…{device[-6:]}"
