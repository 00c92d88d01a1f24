"""64 engines, each its own process with its own gate: one sync takes all of them along within the write budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator
from e2e.scenarios.test_rounds import wait_quiet, writes_of

# It takes the whole machine for minutes.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINES = 64


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of its own with room for 64 GPUs."""
    with LocalCluster(tmp_path / "cluster", nodes=ENGINES // 8, say=print, nursery=True) as started:
        yield started


def resident_mib(pods: int) -> float:
    """Memory of all engine and gate processes, as proportional shares where the kernel tells them."""
    total = 0
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "e2e.sim.engine" in words or "rlfleet.gate" in words:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    assert total, f"no process of {pods} pods was found"
    return total / 2**20


def test_a_64_engine_pool_syncs(
    wide: LocalCluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    operator = Operator(wide, tmp_path / "operator", RLFLEET_POLL_SECONDS="5")
    operator.start()
    try:
        wide.kubectl("create", "namespace", "wide")
        for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
            wide.kubectl("wait", "--for=create", thing, "-n", "wide", "--timeout=180s")
        fleet = Fleet(wide, "wide")
        fleet.pipeline(sync={"deadlines": {"pendingSeconds": 120, "stagingSeconds": 120, "pausedSeconds": 120}})
        began = time.monotonic()
        fleet.pool(ENGINES)
        fleet.trainer()
        pods = fleet.ready_engines(ENGINES, 600)
        ready = time.monotonic() - began
        assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
        first = fleet.sync(1)
        wait_quiet(wide, fleet, 12)
        mark = wide.audit_mark()
        done = fleet.sync(2)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert done["status"]["plan"]["serialized"] == ENGINES
        wait_quiet(wide, fleet, 12)
        writes = writes_of(wide, fleet, mark)
        assert len(writes) <= 14 + 1, writes
        assert {fleet.label(p) for p in pods} == {"2"}
        assert len({fleet.checksum(p) for p in pods}) == 1
        assert len(str(fleet.status("syncround", done["metadata"]["name"]))) < 32_000
        assert len(str(fleet.status("enginepool", "e"))) < 32_000
        for name, value in {
            "ready_seconds": round(ready, 1),
            "round_ms": [r["status"]["timings"]["totalMs"] for r in (first, done)],
            "paused_ms": [r["status"]["timings"]["pausedMs"] for r in (first, done)],
            "engines_and_gates_mib": round(resident_mib(ENGINES)),
        }.items():
            record_property(name, value)
            print(f"{ENGINES} engines: {name} = {value}")
    finally:
        operator.stop()
