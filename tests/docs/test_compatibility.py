"""docs/reference/compatibility.md says tested of what was recorded, and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from e2e.compatibility import __main__ as command
from e2e.compatibility.page import Difference, NotRecordedError, Program, Sources, page, pinned, verdict
from rlfleet.engine.adapter import Capability
from rlfleet.engine.known import KNOWN, Evidence, Known

REAL = Known("SGLang", "0.5.23", Evidence.TESTED)
READ = Known("SGLang", "0.5.22", Evidence.READ, "something")
RESULTS: dict[str, Any] = {
    "engines": {
        "SGLang": {
            "version": "0.5.23",
            "capabilities": ["Broadcast", "Checksum", "Pause/Keep", "Serialized"],
            "cases": {
                "a_load": None, "pause_keep": {"ended": False, "by": {"x": 1, "y": None}}, "pause_wait": "refused",
                "facts": {"version": "0.5.23", "capabilities": ["Broadcast"]},
            },
        }
    },
    "covers": {
        "a_load": ["Serialized"], "a_sleep": ["Offload"], "pause_keep": ["Pause/Keep"],
        "pause_wait": ["Pause/Wait"], "facts": [],
    },
}  # fmt: skip
SOURCES = Sources(RESULTS, (REAL, READ))


@pytest.mark.parametrize(
    ("capability", "tested", "read"),
    [
        (Capability.SERIALIZED, "tested", "read"),
        (Capability.PAUSE_KEEP, "tested", "read"),
        # The engine says that it can, but no case shows it.
        (Capability.BROADCAST, "told by the engine, not tested", "read"),
        (Capability.CHECKSUM, "told by the engine, not tested", "read"),
        (Capability.PAUSE_WAIT, "refused", "refused"),
        (Capability.OFFLOAD, "not offered", "not offered"),
    ],
)
def test_only_a_recorded_case_makes_a_capability_tested(capability: Capability, tested: str, read: str) -> None:
    assert verdict(RESULTS, REAL, capability) == tested
    assert verdict(RESULTS, READ, capability) == read
    assert verdict(RESULTS, Known("VLLM", "1", Evidence.READ), capability) == "not offered"


def test_the_page_shows_every_version_capability_and_case() -> None:
    text = page(replace(SOURCES, programs=(Program("router", ("1", "2"), "tested: so", "there"),)))
    assert "| SGLang | 0.5.22 | read | something |" in text
    for capability in Capability:
        assert f"| {capability} |" in text
    assert "| a load | Serialized | passed |" in text
    assert "| a sleep | Offload | not run: not offered |" in text
    assert "| facts |  | version: 0.5.23 |" in text
    assert "| pause keep | Pause/Keep | ended: no; by: (x: 1, y: none) |" in text
    assert "| pause wait | Pause/Wait | refused |" in text
    assert "| router | 1, 2 | tested: so | there |" in text
    assert "answers as the real ones in every case" in text
    told = page(replace(SOURCES, differences=(Difference("SGLang", "a_load", "because\n of | that"),)))
    assert "| SGLang | a load | because of \\| that |" in told


@pytest.mark.parametrize(
    "known",
    [(READ,), (REAL, Known("VLLM", "0.32.0", Evidence.TESTED)), (Known("SGLang", "0.5.24", Evidence.TESTED),)],
)
def test_a_table_and_a_record_that_do_not_fit_are_refused(known: tuple[Known, ...]) -> None:
    with pytest.raises(NotRecordedError, match=r"results\.json.*known\.py"):
        page(replace(SOURCES, known=known))


def test_a_record_that_is_not_whole_is_refused() -> None:
    lacking = {**RESULTS, "covers": {**RESULTS["covers"], "another_load": ["Serialized"]}}
    with pytest.raises(NotRecordedError, match="never recorded at the real SGLang: another_load"):
        page(replace(SOURCES, results=lacking))


def test_versions_are_those_that_are_pinned() -> None:
    assert pinned(["a>=1", "smg==1.13.0", "b==2"], "smg") == "1.13.0"
    with pytest.raises(NotRecordedError, match="c is not pinned"):
        pinned(["a>=1", "c>=2"], "c")


def test_the_committed_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr()
    made = command.sources()
    assert {k.engine for k in KNOWN if k.evidence is Evidence.TESTED} == made.results["engines"].keys()
