"""What people see of a fleet: metrics in a real Prometheus, alerts, dashboards' queries, log lines, the ledger."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster.local import LocalCluster
from e2e.cluster.programs import ensure_programs
from e2e.observability.collector import Collector
from e2e.observability.panels import BOARDS, ENGINES
from e2e.observability.pictures import concrete
from e2e.observability.prometheus import Prometheus, lint, scraped
from e2e.observability.require import require_prometheus
from e2e.observability.rules import eager
from e2e.scenarios.kit import ROOT, Fleet, Operator, wait_until
from e2e.scenarios.test_rounds import serialized_fleet
from rlfleet.api import metrics

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    require_prometheus()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture(scope="module")
def operator(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Operator]:
    """One that leads by its Lease, as an installed one does, and sends traces."""
    env = {"RLFLEET_LEADER_ELECT": "true", "RLFLEET_OTLP_ENDPOINT": collector.url}
    one = Operator(cluster, tmp_path_factory.mktemp("operator"), **env)
    one.start()
    yield one
    one.stop()


def targets(operator: Operator, fleet: Fleet) -> dict[str, list[str]]:
    """Addresses by job, as the chart's monitors find them."""
    gates = [f"{p['status']['podIP']}:9440" for p in fleet.engines()]
    return {
        "operator": [f"127.0.0.1:{operator.port}"],
        "gate": gates,
        "sender": [f"{fleet.pod('trainer')['status']['podIP']}:9450"],
    }


def lines(operator: Operator) -> list[dict[str, Any]]:
    """The operator's log."""
    return [json.loads(x) for x in operator.log.read_text().splitlines() if x.startswith("{")]


def check(component: metrics.Component, text: str) -> None:
    """A scrape has what the table says and nothing else, with labels from their lists."""
    table = {m.name: m for m in metrics.TABLES[component]}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            metric = metrics.find(sample.name)
            assert metric is not None, sample
            assert metric.name in table, sample
            labels = {k: v for k, v in sample.labels.items() if k != "le"}
            assert set(labels) == {label.name for label in metric.labels}, sample
            for label in metric.labels:
                assert not label.values or labels[label.name] in label.values, sample
    assert lint(text) == ""


def test_a_round_is_seen_by_prometheus_the_log_and_the_ledger(
    fleet: Fleet, operator: Operator, cluster: LocalCluster, collector: Collector, tmp_path: Path
) -> None:
    serialized_fleet(fleet, 2)
    done = fleet.sync(1)
    assert done["status"]["phase"] == "Succeeded"
    where = targets(operator, fleet)
    for component in metrics.Component:
        for address in where[component.value]:
            check(component, scraped(address))
    of_ours = f'namespace="{fleet.namespace}",pipeline="p"'
    with Prometheus(tmp_path / "prometheus", where, eager()) as prometheus:
        # What the operator knows at its next looks.
        for expression, value in {
            f"rlfleet_pipeline_committed_version{{{of_ours}}}": 1,
            f"rlfleet_pipeline_version_lag{{{of_ours}}}": 0,
            f'sum(rlfleet_rounds_total{{{of_ours},outcome="Succeeded",kind="Refresh"}})': 2,
            f'rlfleet_engine_version_lag{{namespace="{fleet.namespace}",pool="e"}}': 0,
            f'rlfleet_engines{{namespace="{fleet.namespace}",pool="e",state="active"}}': 2,
            f'sum(rlfleet_pipeline_condition{{{of_ours},condition="Ready"}})': 1,
            'sum(rlfleet_gate_engine_version{job="gate"})': 2,
            'rlfleet_sender_version{job="sender"}': 1,
        }.items():
            shows(prometheus, expression, value)
        timings, status = done["status"]["timings"], done["status"]
        stage = f'rlfleet_last_round_phase_seconds{{{of_ours},phase="stage"}}'
        shows(prometheus, stage, timings["stageMs"] / 1000)
        queries_of_dashboards_work(prometheus, fleet)
        # Waited for: a scrape that a busy machine missed looks like an operator that is gone.
        wait_until(lambda: "RlfleetNoLeader" not in prometheus.firing(), "the leader to be seen")
        name, uid = done["metadata"]["name"], done["metadata"]["uid"]
        commands_of_runbooks_work(cluster, fleet, name)
        # The trainer dies: Prometheus tells.
        cluster.hollow.crash(fleet.namespace, "trainer", "trainer")
        ours = {"namespace": fleet.namespace, "pipeline": "p"}
        wait_until(
            lambda: any(ours.items() <= a.items() for a in prometheus.firing().get("RlfleetSenderNotReady", ())),
            "the alert about the sender",
            60,
        )
        # Series go with their object.
        cluster.kubectl("delete", "sr", name, "-n", fleet.namespace, "--wait=true", "--timeout=180s")
        cluster.kubectl("delete", "epool", "e", "-n", fleet.namespace, "--wait=true", "--timeout=120s")
        cluster.kubectl("delete", "rlp", "p", "-n", fleet.namespace, "--wait=true", "--timeout=120s")
        gone = f'{{job="operator",namespace="{fleet.namespace}"}}'
        wait_until(lambda: not prometheus.query(gone), "the series to go with their objects")
    # The round object is gone; the ledger has all of its status.
    (row,) = [x for x in lines(operator) if x.get("event") == "RoundLedger" and x["roundUID"] == uid]
    assert row["status"] == status
    assert (row["pipeline"], row["round"], row["generation"]) == (
        f"{fleet.namespace}/p",
        name,
        status["lease"]["generation"],
    )
    # One line per phase, each keyed by pipeline, round and generation.
    told = [x for x in lines(operator) if x.get("roundUID") == uid and x["logger"].endswith("executor")]
    assert [x["message"].partition(":")[0] for x in told] == [
        "Planned", "Staging", "Quiescing", "Transferring", "Committed",
    ]  # fmt: skip
    assert all(x["pipeline"] == row["pipeline"] and x["generation"] == row["generation"] for x in told)
    secrets_stay_secret(cluster, operator)
    # One trace: the root is the round, with its parts below.
    operator.stop()
    root = next(s for s in collector.spans if s.name == "Refresh Succeeded" and name in str(s.attributes))
    parts = [s.name for s in collector.spans if s.parent_span_id == root.span_id]
    assert parts == ["plan", "stage", "quiesce", "transfer", "verify", "publish", "reopen"]


def shows(prometheus: Prometheus, expression: str, value: float) -> None:
    """Wait until a query gives this one value."""

    def look() -> bool:
        return [float(s["value"][1]) for s in prometheus.query(expression)] == [value]

    wait_until(look, f"{expression} to be {value}; it is {prometheus.query(expression)}")


#: Panels without data in a fleet in which nothing is wrong, no round runs, and no trainer reports progress or samples.
EMPTY = {
    "Round that runs",
    "Rollout progress",
    "Rounds that succeeded",  # over an hour, of which Prometheus has seen none
    "Failures by reason",
    "Staleness of samples",
    "Operations that did not succeed",
    "Quarantines by reason",
    "Refusals by reason",
}


def queries_of_dashboards_work(prometheus: Prometheus, fleet: Fleet) -> None:
    """Prometheus executes every query of every dashboard, and all have data but those about what did not happen."""
    variables = {"namespace": fleet.namespace, "pipeline": "p", "pool": "e"}

    def silent() -> set[str]:
        found = set()
        for board in BOARDS:
            for panel in board.panels():
                # Targets of this Prometheus have no namespace of their own, as pods have with a PodMonitor.
                own = {"namespace": ".*", "pool": ".*"} if panel.title in OF_PODS else {}
                for expression, _ in panel.queries:
                    if not prometheus.query(concrete(expression, {**variables, **own}, "15s")):
                        found.add(panel.title)
        return found

    wait_until(lambda: silent() <= EMPTY, f"data in every panel; empty: {sorted(silent() - EMPTY)}", every=1.0)


#: Panels of gates and senders.
OF_PODS = {p.title for title, panels in ENGINES.rows if title in ("Gates", "Senders") for p in panels}


def commands_of_runbooks_work(cluster: LocalCluster, fleet: Fleet, name: str) -> None:
    """Every command that a runbook tells to type, with the names that it leaves open."""
    names = {"NAMESPACE": fleet.namespace, "PIPELINE": "p", "POOL": "e", "ROUND": name}
    names |= {"OPERATOR_NAMESPACE": "rlfleet-system", "KUBECONFIG": str(cluster.kubeconfig)}
    commands: set[str] = set()
    for page in sorted((ROOT / "docs/runbooks").glob("*.md")):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            commands.update(block.splitlines())
    assert len(commands) > 20
    script = "set -eu\n" + "\n".join(sorted(commands))
    path = f"{ensure_programs(['kubectl'])['kubectl'].parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-xc", script],
        env={**os.environ, **names, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def secrets_stay_secret(cluster: LocalCluster, operator: Operator) -> None:
    """Neither a token nor a private key is in the log."""
    text = operator.log.read_text()
    assert not re.search(r"eyJ[\w-]+\.[\w-]+\.[\w-]+", text)
    assert "PRIVATE KEY" not in text
    found = cluster.get("secrets", "-n", "rlfleet-system")["items"]
    assert found, "the operator's key"
    for secret in found:
        for value in (secret.get("data") or {}).values():
            raw = base64.b64decode(value)
            assert value not in text
            assert len(raw) < 16 or raw.decode(errors="replace") not in text
