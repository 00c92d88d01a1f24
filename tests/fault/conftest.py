"""Stands for tests with faults, and the report of the sweeps at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.conftest import fleet, operator
from tests.fault.stand import Stand
from tests.fault.sweep import Report

__all__ = ["fleet", "make_stand", "operator", "report", "stand", "stands"]

#: Where the sweeps keep what they tried (`make fault` sets it); without it nothing is kept.
REPORT = os.environ.get("RLFLEET_FAULT_REPORT")
_REPORT = pytest.StashKey[Report]()


@pytest.fixture(scope="package")
def stands(cluster: LocalCluster) -> Iterator[list[Stand]]:
    """The stand that tests of this package share, if there is one."""
    kept: list[Stand] = []
    yield kept
    for one in kept:
        one.__exit__(None, None, None)


@pytest.fixture
def stand(cluster: LocalCluster, stands: list[Stand], tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """A fleet of two numpy engines whose base is committed; a new one if the last test left it in disorder."""
    if stands and not stands[0].usable():
        stands.pop().__exit__(None, None, None)
    if not stands:
        stands.append(Stand(cluster, tmp_path_factory.mktemp("stand")).__enter__())
    return stands[0]


@pytest.fixture
def make_stand(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Stand]]:
    """Makes stands of the test's own; they are gone at its end."""
    made: list[Stand] = []

    def make(**options: Any) -> Stand:
        made.append(Stand(cluster, tmp_path / f"stand-{len(made)}", **options).__enter__())
        return made[-1]

    yield make
    for one in reversed(made):
        one.__exit__(None, None, None)


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """What all sweeps of this run, and of earlier ones with the same report file, tried."""
    found = Report(Path(REPORT) if REPORT else None)
    request.config.stash[_REPORT] = found
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The sweeps' totals, for people."""
    found = config.stash.get(_REPORT, None)
    if found is not None and found.scenarios:
        terminalreporter.section("sweeps")
        for line in found.lines():
            terminalreporter.write_line(line)
