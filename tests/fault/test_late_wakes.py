"""A wake without a good end may still come: the slot is freed under a generation at which gates refuse it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.scenarios.kit import wait_until
from e2e.scenarios.test_elastic import RESUME
from tests.fault.calls import Call
from tests.fault.catalog import Sleep
from tests.fault.scenarios import everybody_serves
from tests.fault.stand import Stand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]


def generation(call: Call) -> int:
    """What a claim, or a call to a gate, was made under."""
    if call.lane == "peer":
        return int(call.body["generation"])
    return int(call.body["status"]["activeOperation"]["generation"])


@pytest.mark.slow
def test_a_wake_that_fails_is_fenced_off_before_the_slot_is_free(make_stand: Callable[..., Stand]) -> None:
    stand = make_stand(**Sleep.stand_options)
    scenario = Sleep(stand)
    scenario.active(1)
    wait_until(lambda: (stand.fleet.status("enginepool", "e").get("counts") or {}).get("offloaded") == 1, "a sleeper")
    wait_until(lambda: not stand.fleet.status("rlpipeline", "p").get("activeOperation"), "a free slot")
    stand.fleet.fault(stand.fleet.engines()[1], RESUME, action="http500", times=1, when="before")
    stand.journal.reset()
    scenario.active(None)
    wait_until(lambda: everybody_serves(stand), "the engine to have caught up")
    calls = [c for c in stand.journal.calls if c.status in (200, 202) and not c.read]
    wake = next(i for i, c in enumerate(calls) if c.label.endswith("e-1 Wake"))
    until_free = calls[wake : next(i for i, c in enumerate(calls) if i > wake and c.label.endswith("free"))]
    (claim,) = [c for c in until_free if c.label.endswith("claim Wake")]
    assert generation(claim) > generation(calls[wake])
    fenced = {c.peer for c in until_free if c.label.endswith("fence") and generation(c) == generation(claim)}
    assert "e-1" in fenced
    assert not stand.violations()
