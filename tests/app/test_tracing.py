"""A trace per round, sent to a real collector's door by the real exporter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.observability.collector import Collector
from rlfleet.app.settings import Settings, SettingsError
from rlfleet.app.tracing import RoundTraces

AT = 1_767_225_600_000
ROUND: dict[str, Any] = {
    "metadata": {"namespace": "ns", "name": "r", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"pipeline": "p", "version": 3},
    "status": {
        "phase": "Failed",
        "outcome": "Failed",
        "lease": {"generation": 7},
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:10Z",
        "failure": {"stage": "Staging", "reason": "StagingFailed", "message": "m"},
        "timings": {"totalMs": 9500},
    },
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


def test_parts_of_several_operators_are_one_trace_below_the_round(collector: Collector) -> None:
    first, second = (RoundTraces(collector.url, identity=name) for name in ("a", "b"))
    first.part(ROUND, "plan", 0.5, AT + 1000)
    first.close()
    second.part(ROUND, "stage", 2.0, AT + 4000)
    second.round_ended(ROUND)
    second.close()
    spans = {s.name: s for s in collector.spans}
    assert set(spans) == {"plan", "stage", "Refresh Failed"}
    root = spans["Refresh Failed"]
    assert len({s.trace_id for s in spans.values()}) == 1
    assert spans["plan"].parent_span_id == spans["stage"].parent_span_id == root.span_id
    assert root.parent_span_id == b""
    assert spans["stage"].start_time_unix_nano == (AT + 2000) * 1_000_000
    assert spans["stage"].end_time_unix_nano == (AT + 4000) * 1_000_000
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano for s in spans.values())
    assert all(root.end_time_unix_nano >= s.end_time_unix_nano for s in spans.values())
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["rlfleet.round.uid"].string_value == "u1"
    assert attributes["rlfleet.generation"].int_value == 7
    assert (root.status.code, root.status.message) == (2, "Staging: StagingFailed")


def test_a_collector_that_is_away_delays_nobody_and_the_end_gives_up() -> None:
    made = RoundTraces("http://127.0.0.1:9", identity="a")
    made.round_ended(ROUND)
    made.close()


def test_the_endpoint_must_be_a_url() -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint"):
        Settings(otlp_endpoint="collector:4318")
    assert Settings(otlp_endpoint="http://collector:4318").otlp_endpoint
