"""Who may connect to what, by the chart's NetworkPolicies and the labels that pods really carry.

The test's cluster enforces none of them (hollow nodes have loopback addresses), so this evaluates the rules themselves.
That the apiserver takes them is in test_apiserver.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.local import ROOT
from rlfleet.plan.pods import build_pod
from tests.chart.kit import ON, Obj, chart, of_kind, one, pod_specs
from tests.plan.pool_kit import pool

SYSTEM = "rlfleet-system"
ENGINE, GATE = 30000, 9440


@dataclass(frozen=True)
class Pod:
    """What a policy sees of a pod."""

    namespace: str
    labels: Mapping[str, str]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector, with all of its operators."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in selector.get("matchExpressions") or []:
        value, values = labels.get(rule["key"]), rule.get("values") or []
        held = {
            "Exists": value is not None,
            "DoesNotExist": value is None,
            "In": value in values,
            "NotIn": value not in values,
        }[rule["operator"]]
        if not held:
            return False
    return True


def allowed(policies: list[Obj], source: Pod, target: Pod, port: int) -> bool:
    """Whether ``source`` may connect: no policy selects the target, or one that does has a rule for it."""
    mine = [
        p["spec"]
        for p in policies
        if p["metadata"]["namespace"] == target.namespace
        and "Ingress" in p["spec"]["policyTypes"]
        and matches(p["spec"]["podSelector"], target.labels)
    ]
    return not mine or any(
        _port(rule, port) and _peer(rule, source, spec_namespace=target.namespace)
        for spec in mine
        for rule in spec.get("ingress") or []
    )


def _port(rule: Mapping[str, Any], port: int) -> bool:
    ports = rule.get("ports")
    return ports is None or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports)


def _peer(rule: Mapping[str, Any], source: Pod, *, spec_namespace: str) -> bool:
    peers = rule.get("from")
    if peers is None:
        return True
    for peer in peers:
        spaces = peer.get("namespaceSelector")
        here = source.namespace == spec_namespace
        if spaces is not None:
            here = matches(spaces, {"kubernetes.io/metadata.name": source.namespace})
        if here and matches(peer.get("podSelector") or {}, source.labels):
            return True
    return False


def engine(namespace: str, pipeline: str = "demo") -> Pod:
    """An engine pod as the operator makes it."""
    made = pool()
    made["spec"]["pipeline"] = pipeline
    made["metadata"]["namespace"] = namespace
    return Pod(namespace, build_pod(made, 0, "e-0-00000", public_keys={"k": "AAAA"})["metadata"]["labels"])


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Obj]:
    return chart(tmp_path_factory.mktemp("values"), ON)


@pytest.fixture(scope="module")
def operator(objects: list[Obj]) -> Pod:
    return Pod(SYSTEM, one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"])


@pytest.fixture(scope="module")
def policies(objects: list[Obj]) -> list[Obj]:
    return of_kind(objects, "NetworkPolicy")


TRAINER, ROUTER, STRANGER = {"app": "demo-trainer"}, {"app": "demo-router"}, {"app": "stranger"}


def test_gates_are_reached_by_operator_trainer_router_and_monitoring_alone(policies: list[Obj], operator: Pod) -> None:
    target, port = engine("team-b"), 9441
    for source in (operator, Pod("team-b", TRAINER), Pod("team-b", ROUTER), Pod("monitoring", {})):
        assert allowed(policies, source, target, port), source
    for source in (
        Pod("team-b", STRANGER),
        Pod("team-b", {"app": "worker"}),
        Pod("team-a", TRAINER),
        Pod("elsewhere", operator.labels),
        Pod(SYSTEM, {**operator.labels, "app.kubernetes.io/component": "uninstall"}),
        engine("team-b"),
    ):
        assert not allowed(policies, source, target, port), source


def test_engines_are_reached_by_routers_and_named_clients_alone(policies: list[Obj], operator: Pod) -> None:
    target, port = engine("team-b"), 8000
    for labels in (ROUTER, {"app": "worker"}, {"app": "eval", "tier": "gpu", "more": "x"}):
        assert allowed(policies, Pod("team-b", labels), target, port), labels
    for source in (
        operator,
        Pod("team-b", TRAINER),
        Pod("team-b", {"app": "eval"}),
        Pod("team-b", STRANGER),
        Pod("team-a", ROUTER),
        Pod("monitoring", {}),
    ):
        assert not allowed(policies, source, target, port), source


def test_without_a_router_nobody_reaches_the_engine_from_outside_its_pod(policies: list[Obj], operator: Pod) -> None:
    for source in (operator, Pod("team-a", TRAINER), Pod("team-a", ROUTER), engine("team-a")):
        assert not allowed(policies, source, engine("team-a"), ENGINE), source
    assert allowed(policies, Pod("team-a", TRAINER), engine("team-a"), GATE)


def test_collectives_connect_trainer_and_engines_of_one_pipeline(policies: list[Obj], operator: Pod) -> None:
    target = engine("team-b")
    for port, is_open in ((32767, False), (32768, True), (60999, True), (61000, False), (8000, False)):
        assert allowed(policies, engine("team-b"), target, port) is is_open, port
        assert allowed(policies, Pod("team-b", TRAINER), target, port) is is_open, port
    for source in (operator, engine("team-b", "other"), Pod("team-b", STRANGER)):
        assert not allowed(policies, source, target, 40000), source
    # Where no ports are named for them there are none.
    assert not allowed(policies, Pod("team-a", TRAINER), engine("team-a"), 40000)


@pytest.mark.parametrize("labels", [{"app": "demo-engines", "x": "y"}, {"app": "more", "role": "leader"}])
def test_adopted_engines_are_as_closed_as_the_others(
    policies: list[Obj], operator: Pod, labels: dict[str, str]
) -> None:
    """Their pods bear no label of ours: the selectors of their pools say which they are."""
    target = Pod("team-b", labels)
    for source, port, is_open in (
        (operator, 9441, True),
        (Pod("team-b", TRAINER), 9441, True),
        (Pod("team-b", ROUTER), 8000, True),
        (Pod("team-b", TRAINER), 40000, True),
        (engine("team-b"), 40000, True),
        (Pod("team-b", {"app": "demo-engines"}), 40000, True),
        (Pod("team-b", STRANGER), 9441, False),
        (Pod("team-b", STRANGER), 8000, False),
        (Pod("team-b", STRANGER), 40000, False),
        (Pod("team-a", TRAINER), 9441, False),
    ):
        assert allowed(policies, source, target, port) is is_open, (source, port)
    assert allowed(policies, target, engine("team-b"), 40000), "both kinds of engines are in one process group"
    assert allowed(policies, Pod("team-b", STRANGER), Pod("team-b", {"app": "more"}), 1234)
    assert allowed(policies, Pod("team-a", STRANGER), Pod("team-a", labels), 1234)


def test_other_pipelines_and_pods_are_left_alone(policies: list[Obj]) -> None:
    for target in (engine("team-b", "other"), Pod("team-b", TRAINER), engine("team-c")):
        assert allowed(policies, Pod("team-b", STRANGER), target, 1234), target


def test_worker_discovery_is_read_by_those_that_are_named(policies: list[Obj], operator: Pod, tmp_path: Path) -> None:
    assert allowed(policies, Pod("team-b", TRAINER), operator, 8002)
    assert not allowed(policies, Pod("team-b", STRANGER), operator, 8002)
    for values, is_open in (({"discovery": {"enabled": True}}, True), ({}, False)):
        found = of_kind(chart(tmp_path, values), "NetworkPolicy")
        assert allowed(found, Pod("anywhere", {}), operator, 8001) is is_open


def test_the_operator_serves_metrics_to_everybody(objects: list[Obj], policies: list[Obj], operator: Pod) -> None:
    assert allowed(policies, Pod("anywhere", {}), operator, 9460)
    assert not allowed(policies, Pod("anywhere", {}), operator, 9461)
    # Hooks have other labels; nothing connects to them.
    assert all("ports" not in c for where, spec in pod_specs(objects) if "Job" in where for c in spec["containers"])


@pytest.mark.parametrize(("name", "labels"), [("trainer", TRAINER), ("router", ROUTER)])
def test_the_labels_above_are_those_of_real_pods(name: str, labels: dict[str, str]) -> None:
    documents = yaml.safe_load_all((ROOT / f"e2e/demo/manifests/{name}.yaml").read_text())
    assert [d["metadata"]["labels"] for d in documents if d["kind"] == "Pod"] == [labels]


def test_off_means_none(tmp_path: Path) -> None:
    assert of_kind(chart(tmp_path, {**ON, "networkPolicy": {"enabled": False}}), "NetworkPolicy") == []
