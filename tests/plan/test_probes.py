"""What one greedy token of each engine says."""

from __future__ import annotations

import pytest

from rlfleet.plan.probes import Probe, judge_probes


def tokens(*values: int | None, layout: str = "L") -> list[Probe]:
    return [Probe(f"e{i}", layout, token=v) for i, v in enumerate(values)]


@pytest.mark.parametrize(
    ("given", "bad"),
    [
        ((7,), ()),
        ((7, 7, 7), ()),
        ((7, 7, 9), ("e2",)),
        ((7, 9), ("e0", "e1")),  # two that disagree: nobody knows which is right
        ((7, 7, 9, 9), ("e0", "e1", "e2", "e3")),
        ((7, 7, 7, 9, 9), ("e3", "e4")),
        ((7, None, 7), ()),
    ],
)
def test_engines_of_one_layout_must_agree(given: tuple[int | None, ...], bad: tuple[str, ...]) -> None:
    verdict = judge_probes(tokens(*given), proven_layouts=())
    assert tuple(verdict.bad) == bad


def test_where_checksums_agreed_a_token_proves_nothing_more() -> None:
    assert judge_probes(tokens(7, 9), proven_layouts={"L"}).bad == {}


def test_layouts_are_not_compared_with_each_other() -> None:
    mixed = [Probe("a", "L", token=7), Probe("b", "M", token=9)]
    assert judge_probes(mixed, proven_layouts=()).bad == {}


def test_no_answer_is_unknown_and_a_refusal_is_bad_even_where_checksums_agreed() -> None:
    verdict = judge_probes([*tokens(7, None), Probe("x", "L", error="EngineRefused: no")], proven_layouts={"L"})
    assert verdict.bad == {"x": "EngineRefused: no"}
    assert tuple(verdict.unknown) == ("e1",)
