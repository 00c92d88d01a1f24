"""The operator dies before and after its calls; it is restarted, and everything ends as if it had not died.

Calls are writes to the apiserver and calls to gates and the sender (pushes of the sender to gates too). By default a
sample of the points is tried, the same in every run; `make fault` tries all of them.
"""

from __future__ import annotations

import os

import pytest

from tests.fault.catalog import SCENARIOS, CatchUp, Takeover
from tests.fault.conftest import MakeCrew
from tests.fault.lives import Quarantine
from tests.fault.scenarios import Round, Scenario
from tests.fault.stand import Stand
from tests.fault.sweep import KILLS, Outcome, Report, Sweep, Try, sample, swept
from tests.fault.ways import Blocks, Stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

#: `make fault POINTS=n` tries n of each scenario's points and sides, evenly spread.
MOST_POINTS = int(os.environ.get("RLFLEET_FAULT_POINTS") or 10**6)
#: `make fault POINT=text` tries those whose name contains the text.
ONLY = os.environ.get("RLFLEET_FAULT_POINT") or ""
#: How many of the points are tried by default.
SAMPLES: dict[type[Scenario], int] = {Round: 12, Takeover: 3, CatchUp: 3, Stream: 2, Blocks: 2, Quarantine: 2}


def check(outcomes: list[Outcome], stand: Stand) -> None:
    """All are good."""
    bad = [f"{o.name}: {o.failure} {o.problems}" for o in outcomes if not o.good]
    assert not bad, "\n".join(bad)
    assert not stand.violations()


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.name)
def test_a_sample_of_points(kind: type[Scenario], stand: Stand, report: Report) -> None:
    def chosen(sweep: Sweep) -> list[Try]:
        return sample(sweep.tries(KILLS), SAMPLES[kind])

    check(swept(report, kind, stand, chosen), stand)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCENARIOS, ids=lambda kind: kind.name)
def test_every_point(kind: type[Scenario], make_crew: MakeCrew) -> None:
    def chosen(sweep: Sweep) -> list[Try]:
        return sample(sweep.tries(KILLS, lambda point: ONLY in point), MOST_POINTS)

    crew = make_crew(kind, chosen)
    bad = [f"{o.name}: {o.failure} {o.problems}" for o in crew.outcomes if not o.good]
    assert not bad, "\n".join(bad)
    assert not crew.left, f"{crew.left} tries are left for another run"
