"""Every scope is explored to its end, and no invariant breaks; from every state every round can still end."""

from __future__ import annotations

import pytest

from tests.model.explore import explore, stuck
from tests.model.scopes import ENDING, ENDING_LARGE, LARGE, SCOPES
from tests.model.state import Scope


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: s.name)
def test_no_invariant_breaks(scope: Scope) -> None:
    report = explore(scope)
    print(report)
    assert report.exhausted, str(report)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scope", LARGE, ids=lambda s: s.name)
def test_no_invariant_breaks_in_the_large(scope: Scope) -> None:
    report = explore(scope)
    print(report)
    assert report.exhausted, str(report)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "scope",
    [*ENDING, *(pytest.param(s, marks=pytest.mark.slow) for s in ENDING_LARGE)],
    ids=lambda s: s.name,
)
def test_every_round_ends_once_faults_stop(scope: Scope) -> None:
    report, way = stuck(scope)
    print(report)
    assert report.exhausted
    assert not way, str(report)
