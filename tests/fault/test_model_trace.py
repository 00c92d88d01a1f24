"""The explorer's operator is the real one: the effects of a recorded round come in the order of tests/model/program.py.

What is compared is what is done, in order, however often: calls to several gates at once interleave as they like.
"""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from tests.fault.calls import Call
from tests.fault.scenarios import plain_round
from tests.fault.stand import Stand
from tests.model import explore
from tests.model.scopes import budget
from tests.model.state import OLD, STEPS, Scope

#: Done at the same time by the executor, in any order.
TOGETHER = {"Resume": "reopen", "phase=Committed": "reopen"}
_MODEL = (
    (re.compile(r"claims generation"), "claim"),
    (re.compile(r"Fence at pod|asks the sender to fence"), "fence"),
    (re.compile(r"asks the sender to (hold|release)"), r"\1"),
    (re.compile(r"writes (\w+) to round"), r"phase=\1"),
    (re.compile(r"Stage at pod"), "Prepare"),
    (re.compile(rf"({'|'.join(STEPS)}) at pod"), r"\1"),
    (re.compile(r"commits  "), "commit"),
    (re.compile(r"frees the slot"), "free"),
)


def order(kinds: list[str]) -> list[str]:
    return [kind for kind, _ in groupby(TOGETHER.get(k, k) for k in kinds)]


def modelled() -> list[str]:
    """The effects of a round without a fault."""

    def over(state: explore.State) -> str:
        return "over" if explore.ended(state) and state[0].truth != OLD else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "broken", over)
        story = explore.explore(Scope("trace", budget(0), engines=2)).story
    kinds = []
    for line in story:
        for pattern, kind in _MODEL:
            if found := pattern.search(line):
                kinds.append(found.expand(kind))
                break
    return kinds


def kind_of(call: Call) -> str:
    """The effect that a recorded call is; empty: none of the model's."""
    if call.lane == "api":
        what = call.label.split(" ", 2)[-1]
        if what.startswith("claim"):
            return "claim"
        return what if what.startswith("phase=") or what in ("commit", "free") else ""
    what = call.label.split(" ", 2)[-1]
    return what if what in ("fence", "hold", "release", "Prepare", *STEPS) else ""


def test_the_model_does_what_the_executor_does(stand: Stand) -> None:
    stand.wait_steady("the fleet to be steady before the round")
    stand.journal.reset()
    plain_round(stand)
    calls = [c for c in stand.journal.calls if not c.read and c.who != "trainer"]
    recorded = order([kind for c in calls if (kind := kind_of(c))])
    # What comes before the claim and after the slot is free belongs to no round.
    begin, end = recorded.index("claim"), recorded.index("free")
    assert recorded[begin : end + 1] == order(modelled())
