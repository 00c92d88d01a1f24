"""Pictures of the dashboards from a fleet at work; with RLFLEET_PICTURES=docs/images they are the docs' pictures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from e2e.cluster.local import LocalCluster
from e2e.observability.panels import BOARDS
from e2e.observability.pictures import draw
from e2e.observability.prometheus import Prometheus
from e2e.observability.require import require_prometheus
from e2e.scenarios.kit import Fleet, Operator, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROUNDS = 8


def test_dashboards_are_drawn_from_a_fleet_at_work(
    operator: Operator, fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    require_prometheus()
    pods = serialized_fleet(
        fleet, 3, sync={"deadlines": {"pendingSeconds": 2, "stagingSeconds": 60, "pausedSeconds": 60}}
    )
    targets = {
        "rlfleet-operator": [f"127.0.0.1:{operator.port}"],
        "gate": [f"{p['status']['podIP']}:9440" for p in pods],
        "sender": [f"{fleet.pod('trainer')['status']['podIP']}:9450"],
    }
    started = time.time()
    with Prometheus(tmp_path / "prometheus", targets) as prometheus:
        wait_until(lambda: prometheus.query("rlfleet_leader"), "a scrape")
        for version in range(1, ROUNDS + 1):
            fleet.publish(version, bulk=16 * version)
            assert fleet.ended(fleet.order(version))["status"]["phase"] == "Succeeded"
        assert fleet.ended(fleet.order(99))["status"]["phase"] == "Expired"
        cluster.hollow.crash(fleet.namespace, pods[0]["metadata"]["name"], "engine")
        fleet.ready_engines(3)
        fleet.serving(fleet.engines()[-1], ROUNDS)
        ready = f'rlfleet_pipeline_condition{{namespace="{fleet.namespace}",condition="Ready"}} == 1'
        wait_until(lambda: prometheus.query(ready), "the pipeline to be ready")
        folder = Path(os.environ.get("RLFLEET_PICTURES") or tmp_path / "pictures")
        variables = {"namespace": ".*", "pipeline": "p", "pool": ".*"}
        for board in BOARDS:
            file = folder / f"{board.uid}.png"
            draw(board, prometheus, variables, started, time.time(), file)
            assert file.stat().st_size > 30_000
