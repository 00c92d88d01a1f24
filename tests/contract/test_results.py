"""The committed results are those of this suite, for the versions that `make engines` installs."""

from __future__ import annotations

from e2e.engines.environments import ENVIRONMENTS
from rlfleet.engine import ADAPTERS, Capability
from rlfleet.engine.known import Evidence, find
from tests.contract import results
from tests.contract.cases import CASES
from tests.contract.differences import ABSENT, DIFFERENCES


def test_results_are_complete_and_of_the_installed_versions() -> None:
    found = results.read()
    assert found["covers"] == {name: sorted(c.covers) for name, c in CASES.items()}
    assert found["engines"].keys() == ENVIRONMENTS.keys()
    for kind, engine in found["engines"].items():
        absent = {d.case for d in DIFFERENCES if d.kind == kind and d.real == ABSENT}
        assert engine["cases"].keys() == CASES.keys() - absent
        assert engine["version"] == ENVIRONMENTS[kind].version
        known = find(kind, engine["version"])
        assert known is not None
        assert known.evidence is Evidence.TESTED


def test_every_difference_is_of_a_case_and_has_a_reason() -> None:
    keys = [(d.kind, d.case) for d in DIFFERENCES]
    assert len(set(keys)) == len(keys)
    for difference in DIFFERENCES:
        assert difference.case in CASES
        assert difference.kind in ADAPTERS
        assert difference.reason


def test_every_capability_is_put_to_the_test() -> None:
    covered = {capability for case in CASES.values() for capability in case.covers}
    assert covered == set(Capability)
