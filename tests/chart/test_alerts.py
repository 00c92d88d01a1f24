"""Alerts: every query asks for metrics that exist, every rule fires when it should and is quiet when not.

Every alert has a runbook, every runbook an alert. That a real fleet provokes them: e2e/scenarios/test_alerts.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.observability.queries import problems
from e2e.observability.require import require_prometheus
from tests.chart.kit import chart, of_kind, one

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "charts/rlfleet/files/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
NAMES = [str(rule["alert"]) for rule in RULES]

PIPELINE = 'namespace="ns",pipeline="p"'
POOL = 'namespace="ns",pool="e"'


def condition(of: str, kind: str, reason: str = "Internal") -> str:
    what = "pipeline" if "pipeline" in of else "pool"
    return f'rlfleet_{what}_condition{{{of},condition="{kind}",reason="{reason}"}}'


#: By alert: series (name, values by the minute) with which it fires at ``at``, and with which it does not.
CASES: dict[str, tuple[str, list[tuple[str, str]], list[tuple[str, str]]]] = {
    "RlfleetNoLeader": ("5m", [('rlfleet_leader{instance="a"}', "0x10")], [('rlfleet_leader{instance="a"}', "1x10")]),
    "RlfleetQueueStuck": (
        "10m",
        [('rlfleet_queue_oldest_seconds{instance="a"}', "60x20")],
        [('rlfleet_queue_oldest_seconds{instance="a"}', "60 60 0x20")],
    ),
    "RlfleetReconcileErrors": (
        "20m",
        [('rlfleet_reconciles_total{kind="Pool",result="Error"}', "0+1x30")],
        [('rlfleet_reconciles_total{kind="Pool",result="Retry"}', "0+9x30")],
    ),
    "RlfleetApiErrors": (
        "15m",
        [('rlfleet_api_calls_total{code="0"}', "0+1x30"), ('rlfleet_api_calls_total{code="200"}', "0+9x30")],
        [('rlfleet_api_calls_total{code="409"}', "0+9x30"), ('rlfleet_api_calls_total{code="200"}', "0+9x30")],
    ),
    "RlfleetApiThrottled": (
        "20m",
        [('rlfleet_api_throttle_seconds_total{instance="a"}', "0+50x30")],
        [('rlfleet_api_throttle_seconds_total{instance="a"}', "0+10x30")],
    ),
    "RlfleetRepairRuleFailing": (
        "16m",
        [('rlfleet_repair_rule_failures_total{rule="History"}', "0+1x30")],
        [('rlfleet_repair_rule_failures_total{rule="History"}', "0 1x30")],
    ),
    "RlfleetFenceRejected": (
        "16m",
        [('rlfleet_round_refusals_total{reason="StaleFence"}', "0+1x30")],
        [('rlfleet_round_refusals_total{reason="StaleFence"}', "0 2x30"), ("rlfleet_peer_calls_total", "0+9x30")],
    ),
    "RlfleetFinalizerStuck": (
        "6m",
        [('rlfleet_deletion_oldest_timestamp_seconds{kind="RLPipeline"}', "0x30")],
        [('rlfleet_deletion_oldest_timestamp_seconds{kind="RLPipeline"}', "200x30")],
    ),
    "RlfleetRoundsFailing": (
        "20m",
        [(f'rlfleet_rounds_total{{{PIPELINE},kind="Refresh",outcome="Failed"}}', "0 1 2 3x30")],
        [(f'rlfleet_rounds_total{{{PIPELINE},kind="CatchUp",outcome="Failed"}}', "0+1x30")],
    ),
    "RlfleetRoundHolding": (
        "10m",
        [(f'rlfleet_round_phase_start_timestamp_seconds{{{PIPELINE},phase="Holding"}}', "1x20")],
        [(f'rlfleet_round_phase_start_timestamp_seconds{{{PIPELINE},phase="Staging"}}', "1x20")],
    ),
    "RlfleetRoundTooLong": (
        "20m",
        # As long as the pipeline's own deadlines say, and five minutes more.
        [
            (f'rlfleet_round_start_timestamp_seconds{{{PIPELINE},kind="Refresh"}}', "60x60"),
            (f"rlfleet_pipeline_round_seconds{{{PIPELINE}}}", "780x60"),
        ],
        [
            (f'rlfleet_round_start_timestamp_seconds{{{PIPELINE},kind="Refresh"}}', "60x60"),
            (f"rlfleet_pipeline_round_seconds{{{PIPELINE}}}", "3600x60"),
        ],
    ),
    "RlfleetVersionLag": (
        "20m",
        [(f"rlfleet_pipeline_version_lag{{{PIPELINE}}}", "3x30")],
        [(f"rlfleet_pipeline_version_lag{{{PIPELINE}}}", "2x30")],
    ),
    "RlfleetSenderNotReady": (
        "15m",
        # A reason that changes does not begin anew.
        [
            (condition(PIPELINE, "SenderReady", "SenderAbsent"), "0x5 _x30"),
            (condition(PIPELINE, "SenderReady", "SenderUnreachable"), "_x4 0x30"),
        ],
        [(condition(PIPELINE, "SenderReady", "SenderReady"), "1x30")],
    ),
    "RlfleetDegraded": ("20m", [(condition(POOL, "Degraded"), "1x30")], [(condition(POOL, "Degraded"), "0x30")]),
    "RlfleetPoolClosed": (
        "10m",
        [(condition(POOL, "AdmissionOpen"), "0x30"), (condition(POOL, "Ready"), "0x30")],
        # Everybody sleeps, as wanted.
        [(condition(POOL, "AdmissionOpen"), "0x30"), (condition(POOL, "Ready"), "1x30")],
    ),
    "RlfleetVersionsDiffer": (
        "5m",
        [(condition(POOL, "VersionConsistent", "VersionsDiffer"), "0x30")],
        [(condition(POOL, "VersionConsistent", "GatesUnreachable"), "-1x30")],
    ),
    "RlfleetEnginesQuarantined": (
        "15m",
        [
            (f'rlfleet_engines{{{POOL},state="quarantined"}}', "1x30"),
            (f'rlfleet_engines{{{POOL},state="active"}}', "7x30"),
        ],
        [
            (f'rlfleet_engines{{{POOL},state="quarantined"}}', "1x30"),
            (f'rlfleet_engines{{{POOL},state="active"}}', "9x30"),
        ],
    ),
    "RlfleetStuckLoading": (
        "10m",
        [(condition(POOL, "StuckLoading"), "1x30")],
        [(condition(POOL, "StuckLoading"), "0x30")],
    ),
    "RlfleetResidualMemoryHigh": (
        "10m",
        [(condition(POOL, "ResidualMemoryHigh"), "1x30")],
        [(condition(POOL, "ResidualMemoryHigh"), "-1x30")],
    ),
    "RlfleetGateUncertain": ("15m", [("rlfleet_gate_uncertain", "1x30")], [("rlfleet_gate_uncertain", "1x5 0 1x30")]),
}


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_alerts_ask_for_what_exists_and_lead_to_a_runbook(rule: dict[str, Any]) -> None:
    assert not problems(rule["expr"])
    assert re.fullmatch(r"Rlfleet[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    assert {"summary", "description"} <= set(rule["annotations"])


@pytest.mark.parametrize("name", NAMES)
def test_runbooks_say_what_it_means_what_it_does_how_to_look_and_what_to_do(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert re.findall(r"^#+ (.*)$", text, re.MULTILINE) == [name, "Meaning", "Impact", "Diagnosis", "Remedy"]
    assert "```bash\nkubectl " in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "docs/runbooks/{}.md"),
        (
            {"runbookBaseUrl": "https://git.example.org/x/docs/runbooks/"},
            "https://git.example.org/x/docs/runbooks/{}.md",
        ),
        (
            {"runbookBaseUrl": "https://docs.example.org/runbooks", "runbookSuffix": "/"},
            "https://docs.example.org/runbooks/{}/",
        ),
    ],
)
def test_the_chart_says_where_runbooks_lie(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    made = one(chart(tmp_path, {"alerts": {"enabled": True, **given}}), "PrometheusRule")
    found = {r["alert"]: r["annotations"]["runbook_url"] for g in made["spec"]["groups"] for r in g["rules"]}
    assert found == {name: expected.format(name) for name in NAMES}
    stripped = [r | {"annotations": {}} for g in made["spec"]["groups"] for r in g["rules"]]
    assert stripped == [r | {"annotations": {}} for r in RULES], "nothing else is changed"


def test_runbooks_call_lease_and_account_of_the_operator_as_the_chart_does(tmp_path: Path) -> None:
    # `kubectl auth can-i --list --as=...` answers for an account that does not exist, too.
    objects = chart(tmp_path, {}, "--no-hooks")
    (account,) = {o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")}
    text = "\n".join(page.read_text() for page in sorted(RUNBOOKS.glob("*.md")))
    assert set(re.findall(r'serviceaccount:"\$OPERATOR_NAMESPACE":(\S+)', text)) == {account}
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {f"--lease-name={name}" for name in re.findall(r"get lease (\w\S*)", text)} <= set(container["args"])


def test_no_runbook_without_an_alert_and_no_name_twice() -> None:
    assert sorted(p.stem for p in RUNBOOKS.glob("*.md")) == sorted(set(NAMES))
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rlfleet_nothing > 0", "rlfleet_nothing is no metric"),
        ('rlfleet_leader{pool="x"}', "rlfleet_leader has no label pool"),
        ('rlfleet_engines{state=~"active|asleep"}', "rlfleet_engines: state is never asleep"),
        ("sum by (pod) (rlfleet_engines)", "no metric of it has the label pod"),
        ("up == 0", "it asks for no metric of ours"),
    ],
)
def test_a_query_for_what_does_not_exist_is_found(expression: str, problem: str) -> None:
    assert problems(expression) == [problem]


@pytest.fixture(scope="module")
def promtool() -> Path:
    return require_prometheus()["promtool"]


@pytest.fixture
def run(promtool: Path, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "rules.yml").write_text(FILE.read_text())

    def one(*arguments: str) -> str:
        done = subprocess.run(
            [str(promtool), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return one


def test_promtool_accepts_the_rules(run: Any) -> None:
    assert f"{len(RULES)} rules found" in run("check", "rules", "rules.yml")


def test_every_alert_fires_when_it_should_and_not_otherwise(run: Any, tmp_path: Path) -> None:
    assert list(CASES) == NAMES
    tests = []
    for name, (at, loud, quiet) in CASES.items():
        for series, fires in ((loud, True), (quiet, False)):
            tests.append(
                {
                    "name": f"{name} {'fires' if fires else 'is quiet'}",
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series],
                    # Whether it fires at all: what its labels and texts are is Prometheus' doing.
                    "promql_expr_test": [
                        {
                            "eval_time": at,
                            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                            "exp_samples": [{"value": int(fires), "labels": "{}"}],
                        }
                    ],
                }
            )
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests}))
    run("test", "rules", "tests.yml")
