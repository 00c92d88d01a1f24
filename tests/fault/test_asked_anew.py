"""What a predecessor asked for and what came of it is no answer to its successor: that asks gates anew.

Each test has an order fail at a gate for a reason that is over by the time of the takeover, and kills the operator
before it learns of it. Joining the recorded end would make the failure the successor's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import wait_until
from tests.fault.proxy import Fault, Rule, at
from tests.fault.stand import Stand

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def ordered(stand: Stand) -> str:
    """A round of the next version; its name."""
    version = stand.next_version()
    stand.fleet.publish(version)
    return stand.fleet.order(version)


def attempts(stand: Stand, step: str) -> list[int]:
    """Attempts at ``step`` of the first engine that its gate took, in order."""
    calls = [c for c in list(stand.journal.calls) if c.label == f"POST e-0 {step}" and c.status in (200, 202)]
    return [int(c.body["attempt"]) for c in calls]


def check_all_ok(stand: Stand, name: str) -> dict[str, Any]:
    """The round has succeeded with every member whole, and every engine serves it."""
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert [m["result"] for m in done["status"]["members"]] == ["Ok"] * stand.engines
    stand.wait_steady("the fleet to be steady")
    assert [stand.fleet.label(p) for p in stand.fleet.engines()] == [str(stand.version)] * stand.engines
    assert not any(stand.fleet.paused(p) for p in stand.fleet.engines())
    assert stand.violations() == []
    return done


def test_a_successor_resumes_an_engine_whose_resume_failed(stand: Stand) -> None:
    first = stand.fleet.engines()[0]
    stand.proxy.watch()
    stand.proxy.strike(Rule(at("GET e-0 operation Resume #1"), Fault.KILL_AFTER))
    stand.fleet.fault(first, "continue_generation", action="http500", times=1)
    name = ordered(stand)
    wait_until(lambda: not stand.operators[0].running(), "the operator to die of the answer")
    assert attempts(stand, "Resume") == [1]
    assert stand.fleet.paused(first)
    stand.operator.start()
    check_all_ok(stand, name)
    assert attempts(stand, "Resume") == [1, 2]


def test_a_successor_verifies_what_was_not_verified(stand: Stand) -> None:
    first = stand.fleet.engines()[0]
    stand.proxy.watch()
    late = stand.proxy.strike(Rule(at("POST e-0 Verify #1"), Fault.DELAY, seconds=3))
    name = ordered(stand)
    wait_until(lambda: late.struck, "the first engine to be verified", every=0.02)
    stand.fleet.fault(first, "weights_checker", action="http500")
    stand.proxy.strike(Rule(at("GET e-0 operation Verify #1"), Fault.KILL_AFTER))
    wait_until(lambda: not stand.operators[0].running(), "the operator to die of the answer")
    stand.fleet.heal(first)
    assert attempts(stand, "Verify") == [1]
    stand.operator.start()
    check_all_ok(stand, name)
    assert attempts(stand, "Verify") == [1, 2]
