"""What gates and senders tell of their devices, read through NVML from a driver library that we build."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.sim.device import ledger, nvml
from rlfleet import devices
from rlfleet.api.wire import DeviceReport

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("driver"))


class Node:
    """A simulated node: two GPUs, of which the second is cut into two slices."""

    def __init__(self, root: Path, driver: Path) -> None:
        self.root = root
        self._driver = driver
        ledger.create(root, "GPU-a", 80 * GIB)
        ledger.create(root, "GPU-b", 80 * GIB)
        ledger.create(root, "MIG-b1", 20 * GIB, parent="GPU-b")
        ledger.create(root, "MIG-b2", 40 * GIB, parent="GPU-b")

    def environment(self, visible: str) -> dict[str, str]:
        return {
            **os.environ,
            ledger.ROOT_ENV: str(self.root),
            ledger.VISIBLE_ENV: visible,
            "LD_LIBRARY_PATH": str(self._driver),
            "PYTHONPATH": f"{ROOT}/operator:{ROOT}",
        }

    def read(self, visible: str = "all", declared: list[str] | None = None, own_pod: str = "") -> DeviceReport:
        """As a container would read them that is given ``visible``. The library is found by its name at start."""
        code = (
            "import json, sys; from rlfleet.devices import Devices, of_pod; declared, own = json.loads(sys.argv[1]);"
            "print(Devices('node-1', declared, is_own=of_pod(own)).read().model_dump_json())"
        )
        argv = [sys.executable, "-c", code, json.dumps([declared, own_pod])]
        out = subprocess.run(
            argv, env=self.environment(visible), capture_output=True, text=True, check=True, timeout=120
        )
        return DeviceReport.model_validate_json(out.stdout)

    def fault(self, function: str, code: int) -> None:
        (self.root / "fault").write_text(f"{function} {code}\n")


@pytest.fixture
def node(tmp_path: Path, driver: Path) -> Node:
    return Node(tmp_path / "devices", driver)


HOLD = (
    "import os, sys; from e2e.sim.device.ledger import Account, visible; a = Account(visible(os.environ), 'trainer');"
    "a.add(int(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def hold(node: Node, visible: str, counted: int, **env: str) -> subprocess.Popen[str]:
    """Another process that uses a device until it is killed."""
    made = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(counted)],
        env={**node.environment(visible), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "held\n"
    return made


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_whole_devices_and_slices(node: Node) -> None:
    report = node.read()
    assert (report.source, report.node, report.problem) == ("NVML", "node-1", "")
    assert report.uuids == ("GPU-a", "MIG-b1", "MIG-b2")  # a GPU that is cut is not one that can be used whole
    assert report.memory is not None
    assert {u: m.total_bytes // GIB for u, m in report.memory.items()} == {"GPU-a": 80, "MIG-b1": 20, "MIG-b2": 40}


@pytest.mark.parametrize(("visible", "uuids"), [("GPU-a", ("GPU-a",)), ("MIG-b2", ("MIG-b2",))])
def test_only_what_the_container_is_given(node: Node, visible: str, uuids: tuple[str, ...]) -> None:
    assert node.read(visible).uuids == uuids


def test_only_what_is_declared_and_nothing_when_one_of_them_is_not_shown(node: Node) -> None:
    assert node.read(declared=["MIG-b1"]).uuids == ("MIG-b1",)
    report = node.read(declared=["GPU-a", "GPU-z"])
    assert (report.source, report.uuids, report.memory) == ("Declared", ("GPU-a", "GPU-z"), None)
    assert "GPU-z" in report.problem


def test_memory_is_everybodys_and_is_free_when_they_are_dead(node: Node) -> None:
    user = hold(node, "GPU-a", 30 * GIB)
    try:
        report = node.read()
        assert report.memory is not None
        assert report.memory["GPU-a"].used_bytes == 30 * GIB
        (process,) = report.processes
        assert (process.uuid, process.pid, process.name, process.used_bytes) == (
            "GPU-a", user.pid, "trainer", 30 * GIB,
        )  # fmt: skip
    finally:
        end(user)
    report = node.read()
    assert report.memory is not None
    assert (report.memory["GPU-a"].used_bytes, report.processes) == (0, ())


def test_a_pods_own_processes_are_no_other_tenants(node: Node) -> None:
    own, other = hold(node, "GPU-a", GIB, RLFLEET_POD_UID="mine"), hold(node, "GPU-a", 2 * GIB, RLFLEET_POD_UID="mi")
    try:
        assert [p.pid for p in node.read(own_pod="mine").processes] == [other.pid]
        assert [p.pid for p in node.read().processes] == [other.pid, own.pid]  # the largest first
    finally:
        end(own)
        end(other)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlInit", 9),
        ("nvmlDeviceGetCount", 999),
        ("nvmlDeviceGetHandleByIndex", 15),
        ("nvmlDeviceGetUUID", 15),
        ("nvmlDeviceGetMemoryInfo", 15),
    ],
)
def test_any_error_makes_everything_unknown(node: Node, function: str, code: int) -> None:
    node.fault(function, code)
    report = node.read()
    assert (report.source, report.uuids, report.memory) == ("Unknown", (), None)
    assert report.problem.startswith("NVML: ")
    assert node.read(declared=["GPU-a"]).source == "Declared"


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlSystemGetProcessName"])
def test_memory_is_read_without_the_right_to_see_processes(node: Node, function: str) -> None:
    user = hold(node, "GPU-a", GIB)
    try:
        node.fault(function, 4)
        report = node.read()
        assert report.memory is not None
        assert report.memory["GPU-a"].used_bytes == GIB
        assert [p.name for p in report.processes] in ([], [""])
    finally:
        end(user)


def test_a_node_without_the_driver(node: Node, tmp_path: Path) -> None:
    node._driver = tmp_path
    report = node.read()
    assert (report.source, report.memory) == ("Unknown", None)
    assert report.problem


def test_devices_of_nobody_are_unknown(node: Node) -> None:
    assert node.read("").source == "Unknown"


async def test_a_driver_that_hangs_costs_no_caller_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "READ_SECONDS", 0.05)
    release, calls = asyncio.Event(), 0
    loop = asyncio.get_running_loop()

    class Hanging(devices.Devices):
        def read(self) -> DeviceReport:
            nonlocal calls
            calls += 1
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return DeviceReport(source="NVML", node="n", uuids=("GPU-a",))

    reader = Hanging("n")
    reports: list[Any] = await asyncio.gather(reader.report(), reader.report(fresh=True), reader.report())
    assert {r.source for r in reports} == {"Unknown"}
    assert all("does not answer" in r.problem for r in reports)
    assert calls == 1
    release.set()
    while (report := await reader.report()).source == "Unknown":
        pass
    assert report.uuids == ("GPU-a",)


async def test_callers_that_ask_at_once_never_read_what_is_not_answered_yet() -> None:
    class Quick(devices.Devices):
        def read(self) -> DeviceReport:
            return DeviceReport(source="NVML", node="n")

    reader = Quick("n")
    for _ in range(50):
        reports = await asyncio.gather(*(reader.report(fresh=i % 2 == 0) for i in range(6)))
        assert {r.source for r in reports} == {"NVML"}


async def test_a_fresh_reading_begins_after_it_is_asked_for() -> None:
    class Counting(devices.Devices):
        count = 0

        def read(self) -> DeviceReport:
            self.count += 1
            return DeviceReport(source="NVML", node=str(self.count))

    reader = Counting("n")
    assert [(await reader.report()).node, (await reader.report()).node] == ["1", "1"]
    assert (await reader.report(fresh=True)).node == "2"
