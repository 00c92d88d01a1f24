"""Whoever reads a reason is told what to do about it, with commands, fields and pages that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.api.crdgen import KINDS, crd
from rlfleet.api.remedies import REMEDIES, remedy
from rlfleet.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
#: Nothing is wrong, or something is under way.
NEUTRAL = set(
    re.findall(
        r"\w+",
        """
    AsExpected Idle Terminating SenderReady CheckpointSource TopologyKnown TopologyNotNeeded BlockMoved RoundInProgress
    Planned Staging Quiescing Transferring Committed Succeeded AlreadyCommitted NoMembers Superseded Cancelled
    OperatorRestarted Dropped UnknownRound NotOpen NotOwner AlreadySettled Excluded Repairing Repaired Offloading Waking
    EnginesOffloaded LoadingNormally ResidualMemoryLow StatesAgree Granted AllEnginesActive VersionsAgree EnginesOpen
    NoRouters PodCreated PodDeleted Updating TemplateCurrent ScalingUp ScalingDown Replacing
    """,
    )
)

#: What follows the project's name in a sentence.
PROSE = {"in", "does"}


def test_every_reason_that_tells_of_trouble_has_a_remedy() -> None:
    assert {r.value for r in Reason if not remedy(r.value)} == NEUTRAL
    assert remedy("AWordOfANewerRelease") == ""


def fields(schema: dict[str, Any], path: str) -> set[str]:
    found = {path}
    for name, child in (schema.get("properties") or {}).items():
        found |= fields(child, f"{path}.{name}")
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Fields of all our kinds, by path."""
    found = set()
    for kind in KINDS:
        schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        found |= fields(schema["spec"], "spec") | fields(schema.get("status", {}), "status")
    return found


@pytest.mark.parametrize("reason", REMEDIES, ids=str)
def test_what_a_remedy_names_exists(reason: Reason, known: set[str]) -> None:
    text = REMEDIES[reason]
    assert set(re.findall(r"\b(?:spec|status)(?:\.\w+)+", text)) <= known
    assert set(re.findall(r"\brlfleet ([a-z]+)", text)) - PROSE <= {*COMMANDS, "round"}
    assert all((ROOT / page).exists() for page in re.findall(r"docs/[\w/.-]+\.md", text))
    assert not text.endswith(".")
