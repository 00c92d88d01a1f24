"""Probes of the hollow kubelet in virtual time: regular ones as the spec says, eager looks at what comes up."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from e2e.cluster.hollow.probes import Prober

PROBE = {"httpGet": {"port": 80}, "periodSeconds": 10, "failureThreshold": 2}


class Scripted(Prober):
    """Up from ``up`` loop seconds on; knows when it was looked at."""

    def __init__(self, up: float) -> None:
        super().__init__({}, "", None, None)  # type: ignore[arg-type]
        self.up = up
        self.asked: list[float] = []

    async def _once(self, probe: dict[str, Any]) -> bool:
        self.asked.append(asyncio.get_running_loop().time())
        return self.asked[-1] >= self.up


async def first(prober: Prober, wanted: bool, **how: Any) -> float:
    """When the first verdict of this kind is given."""
    async with aclosing(prober.verdicts(PROBE, **how)) as verdicts:
        async for verdict in verdicts:
            if verdict is wanted:
                return asyncio.get_running_loop().time()
    raise AssertionError("verdicts end")


@pytest.mark.looptime
async def test_a_probe_is_made_once_in_its_period() -> None:
    prober = Scripted(up=12.0)
    assert await first(prober, True) == 20
    assert prober.asked == [0, 10, 20]


@pytest.mark.looptime
async def test_what_comes_up_is_seen_before_its_next_probe() -> None:
    assert await first(Scripted(up=12.0), True, eager=True) == 12


@pytest.mark.looptime
async def test_looks_between_probes_are_no_failures() -> None:
    prober = Scripted(up=1e9)
    assert await first(prober, False, eager=True) == 10, "the second probe, however often it was looked"
    assert len(prober.asked) > 20


@pytest.mark.looptime
async def test_looks_between_probes_end_after_a_while() -> None:
    prober = Scripted(up=31.0)
    assert await first(prober, True, eager=True) == 40
    assert [t for t in prober.asked if t > 20] == [30, 40]


@pytest.mark.looptime
async def test_of_many_that_come_up_at_once_each_is_looked_at_less_often() -> None:
    probers = [Scripted(up=9.0) for _ in range(60)]
    await asyncio.gather(*(first(p, True, eager=True) for p in probers))
    assert max(len(p.asked) for p in probers) < 8
