"""Stands for tests with faults, and the report of the sweeps at the end of a run."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.conftest import fleet, operator
from e2e.scenarios.kit import ROOT
from tests.fault.scenarios import Scenario
from tests.fault.stand import Stand
from tests.fault.sweep import Crew, Report, Sweep, Try, in_shard

__all__ = ["fleet", "make_crew", "make_stand", "operator", "report", "stand", "stands"]

#: Where the sweeps keep what they tried (`make fault` sets it); without it nothing is kept.
REPORT = os.environ.get("RLFLEET_FAULT_REPORT")
#: What is tested, for the report.
COMMIT = subprocess.run(
    ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
).stdout.strip()
#: `make fault SHARD=2/3` makes the second third of all tries: for several machines, or several runs.
SHARD = os.environ.get("RLFLEET_FAULT_SHARD") or ""
#: `make fault STANDS=n`: fleets of one scenario at the same time.
STANDS = int(os.environ.get("RLFLEET_FAULT_STANDS") or 2)
#: `make fault SECONDS=n`: each sweep begins no try later than that; the next run goes on there.
SECONDS = float(os.environ.get("RLFLEET_FAULT_SECONDS") or "inf")
#: `make fault REPEAT=n` makes each try so many times: for faults that depend on how fast things are.
REPEAT = int(os.environ.get("RLFLEET_FAULT_REPEAT") or 1)
#: Several stands at once leave each other some of the machine.
PROBE_SECONDS = 1.0
MakeCrew = Callable[..., Crew]
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
    found = Report(Path(REPORT) if REPORT else None, COMMIT)
    request.config.stash[_REPORT] = found
    return found


@pytest.fixture
def make_crew(cluster: LocalCluster, tmp_path: Path, report: Report) -> MakeCrew:
    """Runs this shard's tries of a scenario on several stands at once; the crew, when it is done."""
    numbers = itertools.count()

    def make(kind: type[Scenario], tries: Callable[[Sweep], list[Try]], *, title: str = "") -> Crew:
        def mine(sweep: Sweep) -> list[Try]:
            every = [replace(one, number=n) for n in range(1, REPEAT + 1) for one in tries(sweep)]
            return [one for one in every if in_shard(one.name, SHARD)]

        def stand() -> Stand:
            folder = tmp_path / f"stand-{next(numbers)}"
            return Stand(cluster, folder, **{"probe_seconds": PROBE_SECONDS, **kind.stand_options})

        crew = Crew(report, kind, stand, mine, title=title, until=time.monotonic() + SECONDS)
        crew.run(min(STANDS, kind.most_stands))
        return crew

    return make


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The sweeps' totals, for people."""
    found = config.stash.get(_REPORT, None)
    if found is not None and found.scenarios:
        terminalreporter.section("sweeps")
        for line in found.lines():
            terminalreporter.write_line(line)
