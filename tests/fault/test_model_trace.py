"""The explorer's operator is the real one: recorded effects come in the order of tests/model/program.py.

Of a round, and of a quarantine and its release.

What is compared is what is done, in order, however often: calls to several gates at once interleave as they like.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby

import pytest

from e2e.scenarios.kit import wait_until
from tests.fault.calls import Call
from tests.fault.lives import Quarantine
from tests.fault.scenarios import plain_round
from tests.fault.stand import Stand
from tests.model import effects, explore
from tests.model.scopes import budget
from tests.model.state import OLD, STEPS, Column, Scope

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


def modelled(scope: Scope, over: Callable[[explore.State], bool]) -> list[str]:
    """The effects until it is over, the shortest way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explore, "broken", lambda state: "over" if over(state) else "")
        story = explore.explore(scope).story
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


def recorded(stand: Stand) -> list[str]:
    """What the operator did since the journal was reset, from its first claim to the last slot that it freed."""
    calls = [c for c in stand.journal.calls if not c.read and c.who != "trainer"]
    found = order([kind for c in calls if (kind := kind_of(c))])
    # What comes before the claim and after the slot is free belongs to nothing that is modelled.
    return found[found.index("claim") : len(found) - found[::-1].index("free")]


def test_the_model_does_what_the_executor_does(stand: Stand) -> None:
    stand.wait_steady("the fleet to be steady before the round")
    stand.journal.reset()
    plain_round(stand)
    scope = Scope("trace", budget(0), engines=2)
    assert recorded(stand) == order(modelled(scope, lambda s: explore.ended(s) and s[0].truth != OLD))


def test_the_model_quarantines_and_releases_as_the_operator_does(stand: Stand) -> None:
    stand.wait_steady("the fleet to be steady before the quarantine")
    scenario = Quarantine(stand)
    scenario.prepare()
    scenario.begin(stand.journal.reset)

    def over() -> bool:
        scenario.drive()
        return scenario.over()

    wait_until(over, "the engine to be closed and to serve again")
    closed = Column(admit=0, paused=1)  # where no router is there is nothing to open
    shut = Scope("trace", budget(1, shut=1), engines=2, later=True)
    free = Scope("trace", budget(0, shut=1), columns=(Column(), closed), later=True)
    steps = modelled(shut, lambda s: s[0].pipeline.fence == 1 and effects.content(shut, s) and explore.ended(s))
    steps += modelled(free, lambda s: s[0].pipeline.fence == 1 and effects.content(free, s) and explore.ended(s))
    assert recorded(stand) == order(steps)
