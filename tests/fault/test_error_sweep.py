"""Calls that are refused, lost, late or answered wrongly: nothing is believed that was not seen, and nothing repeats
without end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.scenarios.kit import TERMINAL, wait_until
from tests.fault.calls import Call
from tests.fault.conftest import MakeCrew
from tests.fault.proxy import RETRY_AFTER_SECONDS, Fault, Rule, at, of_record
from tests.fault.scenarios import DISK, Round, plain_round
from tests.fault.stand import Stand
from tests.fault.sweep import Outcome, Report, Sweep, Try, healthy, sample, swept

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

#: Answers of an apiserver, or of something in front of it.
API_FAULTS = (
    Fault.CONFLICT,
    Fault.INVALID,
    Fault.THROTTLED,
    Fault.ERROR,
    Fault.BUSY,
    Fault.TIMEOUT,
    Fault.RESET,
    Fault.DROP,
    Fault.TRUNCATE,
)
BY_DEFAULT = (Fault.CONFLICT, Fault.THROTTLED, Fault.TIMEOUT, Fault.DROP)
#: What can become of a call to a gate or sender.
PEER_FAULTS = (Fault.RESET, Fault.DROP, Fault.TRUNCATE, Fault.BUSY, Fault.TIMEOUT, Fault.DELAY)


def api(point: str) -> bool:
    return point.split()[1].partition("/")[0] in ("rlpipelines", "syncrounds", "enginepools", "pods")


def peer(point: str) -> bool:
    return not api(point)


def check(outcomes: list[Outcome], stand: Stand) -> None:
    bad = [f"{o.name}: {o.failure} {o.problems}" for o in outcomes if not o.good]
    assert not bad, "\n".join(bad)
    assert not stand.violations()


def after(stand: Stand, name: str) -> None:
    """The round is over, whatever became of it; the next one succeeds and all serve it."""
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
    for proxy in (stand.proxy, stand.pushes):
        proxy.rules = []
    plain_round(stand)
    scenario = Round(stand)
    scenario.round = name
    assert healthy(scenario.end_state()), scenario.end_state()
    assert not stand.violations()


class Once:
    """Accepts the first call with each label, of those that ``wanted`` accepts."""

    def __init__(self, wanted: Callable[[Call], bool]) -> None:
        self.wanted = wanted
        self.struck: set[str] = set()

    def __call__(self, call: Call) -> bool:
        if call.label in self.struck or not self.wanted(call):
            return False
        self.struck.add(call.label)
        return True


def strike_each_once(stand: Stand, fault: Fault, wanted: Callable[[Call], bool]) -> set[str]:
    """Rounds until one comes to its end without a new label: a struck call may end the round before its next one."""
    once = Once(wanted)
    stand.proxy.watch()
    for proxy in (stand.proxy, stand.pushes):
        proxy.rules = [Rule(once, fault, times=0, seconds=1.0)]
    for _ in range(40):
        before = len(once.struck)
        version = stand.next_version()
        stand.fleet.publish(version)
        name = stand.fleet.order(version)
        done = stand.fleet.ended(name)
        assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
        if len(once.struck) == before and done["status"]["phase"] == "Succeeded":
            break
    after(stand, name)
    return once.struck


@pytest.mark.parametrize(
    "fault", [f if f in BY_DEFAULT else pytest.param(f, marks=pytest.mark.slow) for f in API_FAULTS]
)
def test_every_write_of_the_record_is_struck_once(stand: Stand, fault: Fault) -> None:
    struck = strike_each_once(stand, fault, of_record)
    phases = {f"PATCH syncrounds/round/status phase={p}" for p in ("Planned", "Staging", "Transferring", "Succeeded")}
    assert phases | {"PATCH rlpipelines/p/status claim Refresh", "PATCH rlpipelines/p/status commit"} <= struck


def test_a_write_that_is_throttled_is_not_repeated_before_it_may_be(stand: Stand) -> None:
    stand.wait_steady("the fleet to be steady before a round")
    stand.proxy.watch()
    rule = stand.proxy.strike(Rule(Once(of_record), Fault.THROTTLED, times=3))
    version = stand.next_version()
    stand.fleet.publish(version)
    name = stand.fleet.order(version)
    after(stand, name)
    calls = list(stand.journal.calls)
    assert rule.struck == 3
    repeated = 0
    for refused in stand.proxy.struck:
        assert refused.ended is not None
        # Old rounds are deleted one after the other, under one label; the next one is another write.
        written = (refused.method, refused.path, refused.label)
        for again in calls:
            if (again.method, again.path, again.label) == written and again.number > refused.number:
                assert again.began - refused.ended >= RETRY_AFTER_SECONDS, (refused.point, again.began - refused.ended)
                repeated += 1
    assert repeated


@pytest.mark.parametrize("phase", ["Staging", "Transferring"])
def test_an_apiserver_outage_in_a_round(stand: Stand, phase: str) -> None:
    version = stand.next_version()
    stand.fleet.publish(version, bulk=64)
    if phase == "Transferring":
        for pod in stand.fleet.engines():
            stand.fleet.fault(pod, DISK, action="delay", seconds=1, times=1, when="before")
    name = stand.fleet.order(version)
    wait_until(lambda: stand.fleet.phase(name) in (phase, *TERMINAL), phase, every=0.01)
    stand.proxy.outage(True)
    try:
        wait_until(lambda: "scripted 503" in stand.operator.tail(), "the outage to be met")
    finally:
        stand.proxy.outage(False)
    # Asserts that the round has ended, that the next one succeeds, and that no invariant broke.
    after(stand, name)


@pytest.mark.parametrize(
    "fault", [f if f is Fault.DROP else pytest.param(f, marks=pytest.mark.slow) for f in PEER_FAULTS]
)
def test_every_gate_and_sender_call_is_struck_once(stand: Stand, fault: Fault) -> None:
    struck = strike_each_once(stand, fault, lambda call: call.lane == "peer")
    # Orders to gates and sender, polls, and the sender's own pushes.
    assert {"POST e-0 Pause", "POST e-1 Load", "POST sender Push", "GET sender status", "PUT e-0 manifest"} <= struck


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.BUSY])
def test_a_hold_whose_end_was_not_heard_keeps_no_trainer_waiting(stand: Stand, fault: Fault) -> None:
    stand.wait_steady("the fleet to be steady before a round")
    stand.proxy.watch()
    rule = stand.proxy.strike(Rule(at("POST sender release #1"), fault))
    version = stand.next_version()
    stand.fleet.publish(version)
    name = stand.fleet.order(version)
    # What is published next waits for the hold's end, and not for as long as the hold may last.
    after(stand, name)
    assert rule.struck == 1


def test_a_hold_whose_end_nobody_heard_is_ended_once_the_sender_answers(stand: Stand) -> None:
    stand.wait_steady("the fleet to be steady before a round")
    rule = stand.proxy.strike(Rule(lambda call: call.point.startswith("POST sender release"), Fault.BUSY, times=0))
    version = stand.next_version()
    stand.fleet.publish(version)
    # The round is over although its last word to the sender was never heard; from then on the sender answers.
    after(stand, stand.fleet.order(version))
    assert rule.struck > 1


def faults_of(sweep: Sweep) -> list[Try]:
    return [*sweep.tries(API_FAULTS, api), *sweep.tries(PEER_FAULTS, peer)]


def test_a_sample_of_points(stand: Stand, report: Report) -> None:
    check(swept(report, Round, stand, lambda sweep: sample(faults_of(sweep), 5), title="round, errors"), stand)


@pytest.mark.slow
def test_every_point(make_crew: MakeCrew) -> None:
    crew = make_crew(Round, faults_of, title="round, errors")
    bad = [f"{o.name}: {o.failure} {o.problems}" for o in crew.outcomes if not o.good]
    assert not bad, "\n".join(bad)
    assert not crew.left, f"{crew.left} tries are left for another run"
