"""Who is woken by what; and the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.app.metrics import OperatorMetrics
from rlfleet.app.triggers import Triggers
from rlfleet.control.context import Kind, Priority, QueueKey
from rlfleet.kube.reflector import Change

POOL, OTHER = QueueKey(Kind.POOL, "ns", "a"), QueueKey(Kind.POOL, "ns", "b")
PIPELINE = QueueKey(Kind.PIPELINE, "ns", "p")


class Woken:
    """Collects what is enqueued."""

    def __init__(self) -> None:
        self.keys: list[QueueKey] = []

    def __call__(self, key: QueueKey, *, after: float = 0.0, priority: Priority = Priority.SCALE) -> None:
        self.keys.append(key)

    def take(self) -> set[QueueKey]:
        found, self.keys = set(self.keys), []
        return found


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def triggers(woken: Woken) -> Triggers:
    made = Triggers(woken)
    router = {"name": "r", "podSelector": {"matchLabels": {"app": "router"}}}
    made.pool("ns", "a", {"pipeline": "p", "routers": [router]})
    made.pool("ns", "b", {"pipeline": "q"})
    made.pipeline("ns", "p", {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}})
    woken.take()
    return made


def change(labels: dict[str, str], old: dict[str, str] | None = None, namespace: str = "ns") -> Change:
    return Change((namespace, "pod"), "uid", labels, old or {})


def test_pool_wakes_itself_and_its_pipeline_also_when_it_goes(triggers: Triggers, woken: Woken) -> None:
    triggers.pool("ns", "a", {"pipeline": "p"})
    assert woken.take() == {POOL, PIPELINE}
    triggers.pool("ns", "a", None)
    assert woken.take() == {POOL, PIPELINE}
    triggers.pipeline("ns", "p", {})
    assert woken.take() == {PIPELINE}, "a pool that is gone is woken no more"


def test_pipeline_wakes_its_pools_and_no_others(triggers: Triggers, woken: Woken) -> None:
    triggers.pipeline("ns", "p", None)
    assert woken.take() == {POOL, PIPELINE}


def test_a_pod_wakes_the_pool_that_adopts_it_and_its_pipeline(triggers: Triggers, woken: Woken) -> None:
    adopt = {"adopt": {"selector": {"matchLabels": {"app": "engine"}}}}
    triggers.pool("ns", "b", {"pipeline": "p", "source": adopt})
    woken.take()
    triggers.pod(change({"app": "engine", "x": "y"}))
    assert woken.take() == {OTHER, PIPELINE}
    triggers.pod(change({}, {"app": "engine"}))
    assert woken.take() == {OTHER, PIPELINE}, "it does not bear the label any more"
    triggers.pool("ns", "b", None)
    woken.take()
    triggers.pod(change({"app": "engine"}))
    assert woken.take() == set()


def test_round_wakes_its_pipeline(triggers: Triggers, woken: Woken) -> None:
    triggers.round("ns", {"pipeline": "p"})
    assert woken.take() == {PIPELINE}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (change({"rlfleet.dev/pool": "b", "rlfleet.dev/pipeline": "p"}), {OTHER, PIPELINE}),
        (change({}, {"rlfleet.dev/pool": "b"}), {OTHER}),
        (change({"app": "router"}), {POOL}),
        (change({}, {"app": "router"}), {POOL}),
        (change({"app": "trainer", "x": "y"}), {PIPELINE}),
        (change({"app": "else"}), set()),
        (change({"app": "router"}, namespace="other"), set()),
    ],
)
def test_pods_wake_whoever_they_belong_to(triggers: Triggers, woken: Woken, event: Change, expected: set[Any]) -> None:
    triggers.pod(event)
    assert woken.take() == expected


def test_metrics_of_a_pool_go_with_it() -> None:
    metrics = OperatorMetrics()
    metrics.pool("ns", "a", {"counts": {"active": 3}}, 3, None)
    assert b'rlfleet_engines{namespace="ns",pool="a",state="active"} 3.0' in metrics.render()
    assert b'state="failed"} 0.0' in metrics.render()
    metrics.pool("ns", "a", None, 0, None)
    metrics.pool("ns", "never", None, 0, None)
    assert b'pool="a"' not in metrics.render()


def test_metrics_count_what_happens() -> None:
    metrics = OperatorMetrics()
    metrics.reconciled("Pool", "Retry", 0.1)
    metrics.api_call("get", "pods", 200, 0.01)
    metrics.api_call("create", "pods", 0, 0.01)
    metrics.queue_state(2, 1, 0.5)
    text = metrics.render().decode()
    for line in (
        'rlfleet_queue_retries_total{kind="Pool"} 1.0',
        'rlfleet_api_calls_total{code="200",resource="pods",verb="get"} 1.0',
        'rlfleet_api_calls_total{code="0",resource="pods",verb="create"} 1.0',
        "rlfleet_queue_depth 2.0",
        "rlfleet_queue_oldest_seconds 0.5",
    ):
        assert line in text


def test_a_demand_wakes_the_pipeline_of_its_name(triggers: Triggers, woken: Woken) -> None:
    woken.take()
    triggers.demand("ns", "p")
    assert woken.take() == {PIPELINE}
