"""Processes of a nursery are like those that were started: own environment, own log, own end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.scenarios.kit import wait_until
from tests.fault.nursery import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


def test_a_process_has_its_own_arguments_environment_folder_and_log(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrong = {**os.environ, "RLFLEET_LEASE_SECONDS": "none"}
    child = nursery.fork(["operator"], wrong, str(tmp_path), str(log))
    assert child.wait(120) == 2
    assert child.poll() == 2
    child.kill()
    assert "RLFLEET_LEASE_SECONDS" in log.read_text()
    again = nursery.fork(["version"], dict(os.environ), str(tmp_path), str(log))
    assert again.wait(120) == 0
    assert len(log.read_text().splitlines()[-1].split(".")) == 3
    assert "RLFLEET_LEASE_SECONDS" not in os.environ


def test_a_process_is_killed_stopped_and_never_outlives_its_nursery(tmp_path: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    def gone(pid: int) -> bool:
        try:
            return state(pid) == "Z"
        except FileNotFoundError:
            return True

    # A log that nobody reads: they wait for it, for as long as this test takes.
    log = tmp_path / "log"
    os.mkfifo(log)
    with Nursery() as nursery:
        one, other = (nursery.fork(["version"], dict(os.environ), str(tmp_path), str(log)) for _ in range(2))
        one.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(one.pid) == "T", "one of them to be stopped")
        one.kill()
        assert one.wait(120) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.01)
        assert other.poll() is None
    wait_until(lambda: gone(other.pid), "the other one to end with its nursery")
