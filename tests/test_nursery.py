"""Processes of a nursery are like those that were started: own environment, own log, own end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.nursery import Nursery
from e2e.scenarios.kit import ROOT, operators, wait_until

CLI = "rlfleet.app.cli"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with operators() as one:
        yield one


def test_a_process_has_its_own_arguments_environment_folder_and_log(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrong = {**os.environ, "RLFLEET_LEASE_SECONDS": "none"}
    child = nursery.fork(CLI, ["operator"], wrong, str(tmp_path), str(log))
    assert child.wait(120) == 2
    assert child.poll() == 2
    child.kill()
    assert "RLFLEET_LEASE_SECONDS" in log.read_text()
    again = nursery.fork(CLI, ["version"], dict(os.environ), str(tmp_path), str(log))
    assert again.wait(120) == 0
    assert len(log.read_text().splitlines()[-1].split(".")) == 3
    assert "RLFLEET_LEASE_SECONDS" not in os.environ


def test_what_differs_before_a_line_of_the_program_runs_is_not_born(nursery: Nursery) -> None:
    usual = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    assert nursery.bears(CLI, {**usual, "RLFLEET_WEB_BIND": "127.0.0.1:1"})
    assert not nursery.bears("rlfleet.gate", usual)
    assert not nursery.bears(CLI, {**usual, "LD_PRELOAD": "libfaketime.so.1"})
    assert not nursery.bears(CLI, {**usual, "PYTHONPATH": "/elsewhere"})


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
    with operators() as nursery:
        one, other = (
            nursery.fork(CLI, ["version"], dict(os.environ), str(tmp_path), str(log), kept=kept)
            for kept in (True, False)
        )
        # At once: a signal to a group that is not there yet would be lost.
        os.killpg(one.pid, signal.SIGSTOP)
        wait_until(lambda: state(one.pid) == "T", "one of them to be stopped")
        one.kill()
        wait_until(lambda: state(one.pid) == "Z", "its pid to be kept")
        one.reap()
        assert one.wait(120) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.01)
        assert other.poll() is None
    wait_until(lambda: gone(other.pid), "the other one to end with its nursery")
