"""The metric table: naming, bounded labels, and that what is exported is what the table says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlfleet.api import metrics
from rlfleet.api.metrics import Component, Metric, Type
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.gate.metrics import GateMetrics
from rlfleet.plan.summary import ledger_row, summarize
from rlfleet.sender.metrics import Metrics as SenderMetrics

PACKAGE = Path(metrics.__file__).parents[1]
CODE = {
    Component.OPERATOR: PACKAGE / "app/metrics.py",
    Component.GATE: PACKAGE / "gate/metrics.py",
    Component.SENDER: PACKAGE / "sender/metrics.py",
}
ALL = [(component, m) for component, table in metrics.TABLES.items() for m in table]
UNITS = ("_seconds", "_bytes", "_ratio")
#: What names a thing that is counted or numbered, where no unit fits.
COUNTED = ("_generation", "_version", "_versions", "_lag", "_info", "_tensors", "_condition", "_paused", "_uncertain")
NOUNS = ("engines", "routers", "desired", "depth", "running", "leader", "transitions", "leaked")


@pytest.mark.parametrize(("component", "metric"), ALL, ids=[m.name for _, m in ALL])
def test_names_say_what_is_measured_in_base_units(component: Component, metric: Metric) -> None:
    prefix = {Component.OPERATOR: "rlfleet_", Component.GATE: "rlfleet_gate_", Component.SENDER: "rlfleet_sender_"}
    assert metric.name.startswith(prefix[component])
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
    assert (metric.type is Type.COUNTER) == metric.name.endswith("_total")
    assert not re.search(r"_(ms|milli\w*|micro\w*|minutes?|hours?|kb|mb|mib|gib|percent)(_|$)", metric.name)
    if metric.type is not Type.COUNTER:
        assert metric.name.endswith((*UNITS, *COUNTED, *NOUNS)), metric.name
    assert metric.help.endswith("."), "a sentence"
    assert bool(metric.buckets) == (metric.type is Type.HISTOGRAM)
    for label in metric.labels:
        assert re.fullmatch(r"[a-z]+", label.name)
        assert label.name not in ("pod", "round", "node", "engine", "uid"), "unbounded"
        assert label.of, "what bounds it"


def test_no_name_is_given_twice() -> None:
    names = [m.name for _, m in ALL]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("component", list(Component))
def test_every_metric_of_the_table_is_used_and_no_other(component: Component) -> None:
    table = {m.name for m in metrics.TABLES[component]}
    assert set(re.findall(r'"(rlfleet_\w+)"', CODE[component].read_text())) == table


@pytest.mark.parametrize("made", [OperatorMetrics, GateMetrics, SenderMetrics])
def test_a_scrape_shows_the_whole_table(made: Any) -> None:
    families = {f.name: f for f in text_string_to_metric_families(made().render().decode())}
    component = {OperatorMetrics: Component.OPERATOR, GateMetrics: Component.GATE}.get(made, Component.SENDER)
    for metric in metrics.TABLES[component]:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.type.value, metric.help)


def test_series_lead_back_to_their_metric() -> None:
    assert metrics.find("rlfleet_rounds_total") is not None
    found = metrics.find("rlfleet_round_phase_seconds_bucket")
    assert found is not None
    assert found.name == "rlfleet_round_phase_seconds"
    assert metrics.find("rlfleet_engines_bucket") is None
    assert metrics.find("rlfleet_nothing") is None


CONDITIONS = [
    {"type": "Ready", "status": "Unknown", "reason": "GatesUnreachable"},
    {"type": "Degraded", "status": "True", "reason": "RoutingDegraded"},
]


def pipeline(**status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": "p"}, "status": status}


def a_round(**status: Any) -> dict[str, Any]:
    meta = {"namespace": "ns", "name": "r", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": meta, "spec": {"pipeline": "p", "version": 3}, "status": status}


ENDED = a_round(
    phase="Failed",
    outcome="Failed",
    lease={"generation": 7, "renewedAt": "2026-01-01T00:00:09Z"},
    startedAt="2026-01-01T00:00:01Z",
    finishedAt="2026-01-01T00:00:11Z",
    failure={"stage": "Staging", "reason": "StagingFailed", "digest": "", "message": "m"},
    plan={"serialized": 70, "broadcast": 2, "members": [{}] * 72},
    members=[{"engine": "e-1", "result": "Unknown"}],
    timings={"planMs": 100, "stageMs": 2500, "pausedMs": 1500, "totalMs": 9100},
)


def test_conditions_of_a_pipeline_keep_one_series_each_and_go_with_it() -> None:
    made = OperatorMetrics()
    made.pipeline(
        "ns", "p", pipeline(fence=9, conditions=CONDITIONS, committed={"version": 3}, cacheReady={"version": 5})
    )
    text = made.render().decode()
    ready = 'rlfleet_pipeline_condition{condition="Ready",namespace="ns",pipeline="p",reason='
    assert ready + '"GatesUnreachable"} -1.0' in text
    assert 'rlfleet_pipeline_version_lag{namespace="ns",pipeline="p"} 2.0' in text
    made.pipeline("ns", "p", pipeline(conditions=[{"type": "Ready", "status": "True", "reason": "AllEnginesActive"}]))
    text = made.render().decode()
    assert ready + '"AllEnginesActive"} 1.0' in text
    assert "GatesUnreachable" not in next(line for line in text.splitlines() if line.startswith(ready))
    assert "rlfleet_pipeline_version_lag{" not in text
    made.round_ended("ns", "p", summarize(ENDED))
    made.round_moved("ns", "p", a_round(phase="Holding", startedAt="2026-01-01T00:00:01Z"))
    assert 'pipeline="p"' in made.render().decode()
    made.pipeline("ns", "p", None)
    assert 'pipeline="p"' not in made.render().decode()


def test_how_long_a_round_may_take_is_its_pipelines_own_word() -> None:
    """The alert on rounds that do not end goes by it."""
    made = OperatorMetrics()
    deadlines = {"pendingSeconds": 600, "stagingSeconds": 3000, "pausedSeconds": 150}
    series = 'rlfleet_pipeline_round_seconds{namespace="ns",pipeline="p"} '
    for quiesce, expected in (({}, 3150), ({"mode": "Wait"}, 3180)):
        spec = {"sync": {"deadlines": deadlines, "drainSeconds": 30, "quiesce": quiesce}}
        made.pipeline("ns", "p", pipeline() | {"spec": spec})
        assert f"{series}{expected}.0" in made.render().decode()
    made.pipeline("ns", "p", None)
    assert series not in made.render().decode()


def test_a_running_round_shows_its_phase_and_age_until_it_ends() -> None:
    made = OperatorMetrics()
    running = a_round(phase="Holding", startedAt="2026-01-01T00:00:01Z", lease={"renewedAt": "2026-01-01T00:00:09Z"})
    made.round_moved("ns", "p", running)
    text = made.render().decode()
    series = 'rlfleet_round_phase_start_timestamp_seconds{kind="Refresh",namespace="ns",phase="Holding",pipeline="p"} '
    assert f"{series}1.767225609e+09" in text
    assert 'rlfleet_round_start_timestamp_seconds{kind="Refresh",namespace="ns",pipeline="p"} 1.767225601e+09' in text
    made.round_moved("ns", "p", ENDED)
    assert "rlfleet_round_start_timestamp_seconds{" not in made.render().decode()


def test_an_ended_round_is_counted_by_parts_and_members() -> None:
    made = OperatorMetrics()
    made.round_ended("ns", "p", summarize(ENDED))
    text = made.render().decode()
    for line in (
        'rlfleet_rounds_total{kind="Refresh",namespace="ns",outcome="Failed",pipeline="p",transport="Mixed"} 1.0',
        'rlfleet_round_failures_total{kind="Refresh",reason="StagingFailed"} 1.0',
        'rlfleet_round_phase_seconds_sum{kind="Refresh",outcome="Failed",phase="stage"} 2.5',
        'rlfleet_round_duration_seconds_sum{kind="Refresh",outcome="Failed"} 9.1',
        'rlfleet_round_members_total{kind="Refresh",result="Ok"} 71.0',
        'rlfleet_round_members_total{kind="Refresh",result="Unknown"} 1.0',
        'rlfleet_paused_seconds_total{namespace="ns",pipeline="p"} 1.5',
        'rlfleet_last_round_phase_seconds{namespace="ns",phase="stage",pipeline="p"} 2.5',
    ):
        assert line in text, line


def test_a_round_that_nobody_claimed_leaves_the_parts_of_the_one_before_it() -> None:
    made = OperatorMetrics()
    made.round_ended("ns", "p", summarize(ENDED))
    made.round_ended(
        "ns", "p", summarize(a_round(phase="Expired", outcome="Expired", finishedAt="2026-01-01T00:01:00Z"))
    )
    text = made.render().decode()
    assert 'rlfleet_last_round_phase_seconds{namespace="ns",phase="stage",pipeline="p"} 2.5' in text
    ends = [line for line in text.splitlines() if line.startswith("rlfleet_last_round_end_timestamp_seconds{")]
    assert ends == [
        'rlfleet_last_round_end_timestamp_seconds{namespace="ns",outcome="Expired",pipeline="p"} 1.76722566e+09'
    ]


def test_a_round_that_several_operators_ran_counts_from_its_first_claim() -> None:
    status = {**ENDED["status"], "timings": {"totalMs": 1000}}
    assert summarize(a_round(**status)).duration == 10
    assert summarize(a_round(phase="Superseded", outcome="Superseded")).duration is None


def test_a_ledger_row_has_all_of_the_status() -> None:
    row = ledger_row(ENDED)
    assert row["status"] == ENDED["status"]
    assert (row["pipeline"], row["round"], row["roundUID"], row["generation"]) == ("ns/p", "r", "u1", 7)
    assert (row["outcome"], row["version"], row["transport"]) == ("Failed", 3, "Mixed")


def test_a_pool_shows_how_far_its_engines_are_behind() -> None:
    made = OperatorMetrics()
    status = {
        "counts": {"active": 1, "loading": 1},
        "versions": [{"version": 7}, {"version": 4}],
        "conditions": CONDITIONS,
    }
    made.pool("ns", "e", status, 2, 7)
    text = made.render().decode()
    assert 'rlfleet_engine_version_lag{namespace="ns",pool="e"} 3.0' in text
    assert 'rlfleet_engines_desired{namespace="ns",pool="e"} 2.0' in text
    assert 'rlfleet_pool_condition{condition="Degraded",namespace="ns",pool="e",reason="RoutingDegraded"} 1.0' in text
    made.pool("ns", "e", status, 2, None)
    assert "rlfleet_engine_version_lag{" not in made.render().decode()


def test_the_oldest_deletion_that_waits_is_shown_per_kind() -> None:
    made = OperatorMetrics()
    made.deleting("SyncRound", "ns", "a", 100.0)
    made.deleting("SyncRound", "ns", "b", 50.0)
    series = 'rlfleet_deletion_oldest_timestamp_seconds{kind="SyncRound"}'
    assert f"{series} 50.0" in made.render().decode()
    made.deleting("SyncRound", "ns", "b", None)
    assert f"{series} 100.0" in made.render().decode()
    made.deleting("SyncRound", "ns", "a", None)
    assert f"{series} " not in made.render().decode()


def test_the_docs_name_only_metrics_that_exist() -> None:
    root = PACKAGE.parents[1]
    for page in [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]:
        for name in re.findall(r"\brlfleet_[a-z_]+\b", page.read_text()):
            if (PACKAGE.parent / name).is_dir():
                continue  # a package beside ours
            assert metrics.find(name) is not None, f"{page.relative_to(root)} names {name}"
