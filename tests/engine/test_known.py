"""The list of versions that are known, and what becomes of others."""

from __future__ import annotations

import pytest

from e2e.engines.environments import ENVIRONMENTS
from rlfleet.engine.known import KNOWN, Evidence, find, refusal
from rlfleet.plan.pods import UNKNOWN_VERSION_ENV


def test_what_the_real_engines_tests_install_is_what_is_listed_as_tested() -> None:
    installed = {(e.engine, e.version) for e in ENVIRONMENTS.values()}
    assert {(k.engine, k.version) for k in KNOWN if k.evidence is Evidence.TESTED} == installed


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu", "0.5.23.post2+cu130"])
def test_a_build_of_a_known_release_is_that_release(version: str) -> None:
    found = find("SGLang", version)
    assert found is not None
    assert found.version == "0.5.23"
    assert refusal("SGLang", version) is None


@pytest.mark.parametrize("version", ["0.5.2", "0.5.230", "0.5.23rc1", "0.32.0", ""])
def test_others_are_refused_with_the_list_and_the_remedy(version: str) -> None:
    said = str(refusal("SGLang", version))
    assert "0.5.23 (tested)" in said
    assert "0.5.22 (read)" in said
    assert "spec.engine.allowUnknownVersion" in said
    assert UNKNOWN_VERSION_ENV in said, "the field is refused for pods that somebody else makes"


def test_a_type_of_which_nothing_is_listed_has_no_versions_to_know() -> None:
    assert refusal("Dynamo", "1.6.1") is None
