"""Specs change while a round runs: between what the operator read and what it writes, and in every way at once.

A round keeps the plan that it froze; what it reads anew (deadlines, limits) counts from then on. A change is no sign of
another operator, and a wrong one is taken back without a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e.cluster.local import ClusterError
from e2e.scenarios.kit import TERMINAL, wait_until
from tests.fault.proxy import Fault, Rule, at
from tests.fault.scenarios import plain_round
from tests.fault.stand import Stand
from tests.fault.test_outages import well

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

#: Writes of a round that are made on what was read before.
WRITES = (
    "PATCH rlpipelines/p/status claim Refresh #1",
    "PATCH syncrounds/round/status phase=Planned #1",
    "PATCH syncrounds/round/status phase=Staging #1",
    "PATCH syncrounds/round/status phase=Quiescing #1",
    "PATCH syncrounds/round/status phase=Transferring #1",
    "PATCH rlpipelines/p/status commit #1",
    "PATCH syncrounds/round/status phase=Committed #1",
    "PATCH syncrounds/round/status phase=Succeeded #1",
    "PATCH rlpipelines/p/status free #1",
)
TRANSFERRING = "PATCH syncrounds/round/status phase=Transferring #1"


def patch(stand: Stand, kind: str, name: str, spec: dict[str, Any]) -> None:
    body = json.dumps({"spec": spec})
    stand.cluster.kubectl("patch", kind, name, "-n", stand.namespace, "--type=merge", "-p", body)


@contextmanager
def held_at(stand: Stand, point: str) -> Iterator[str]:
    """Order a round; its name, when this call is on its way, and held until the block ends."""
    stand.wait_steady("the fleet to be steady before a round")
    stand.proxy.watch()
    stand.proxy.strike(Rule(at(point), Fault.FREEZE_BEFORE))
    version = stand.next_version()
    stand.fleet.publish(version)
    name = stand.fleet.order(version)
    wait_until(stand.proxy.fired.is_set, point, every=0.01)
    try:
        yield name
    finally:
        stand.operators[0].thaw()


@pytest.mark.parametrize("point", [p if "commit" in p else pytest.param(p, marks=pytest.mark.slow) for p in WRITES])
def test_a_spec_that_changes_under_a_write_is_no_other_operator(stand: Stand, point: str) -> None:
    """The write meets a newer resourceVersion, finds its own fence there, and goes on."""
    lost = stand.operator.log.read_text().count("fence lost")
    with held_at(stand, point) as name:
        patch(stand, "rlpipeline", "p", {"ttlSecondsAfterFinished": 3000 + stand.version})
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert done["status"]["plan"]["members"], done["status"]
    assert stand.operator.log.read_text().count("fence lost") == lost
    well(stand)


@dataclass(frozen=True)
class Change:
    """A change of one object's spec in mid-round, and how it is taken back. ``ends``: what the round may come to."""

    name: str
    kind: str
    spec: dict[str, Any]
    back: dict[str, Any]
    ends: frozenset[str] = field(default=frozenset({"Succeeded"}))
    #: Reason of the next round's end while the change stands; empty: it succeeds.
    next: str = ""


PIPELINE, POOL = "rlpipeline", "enginepool"
NOWHERE = [{"name": "nowhere", "type": "SGLangRouter", "url": "http://127.0.0.1:9"}]
CHANGES = [
    Change(
        "shorter deadlines",
        PIPELINE,
        {"sync": {"deadlines": {"stagingSeconds": 10, "pausedSeconds": 10}}},
        {"sync": {"deadlines": {"stagingSeconds": 60, "pausedSeconds": 60}}},
        ends=frozenset({"Succeeded", "Failed"}),
    ),
    Change(
        "longer deadlines",
        PIPELINE,
        {"sync": {"deadlines": {"stagingSeconds": 600, "pausedSeconds": 600}}},
        {"sync": {"deadlines": {"stagingSeconds": 60, "pausedSeconds": 60}}},
    ),
    Change(
        "limits",
        PIPELINE,
        {"sync": {"maxUnavailable": "50%", "onFailure": "Hold", "verify": "Required"}},
        {"sync": {"maxUnavailable": "10%", "onFailure": "Replace", "verify": "IfSupported"}},
    ),
    Change(
        "a transport that no engine can have",
        PIPELINE,
        {"transport": {"mode": "Broadcast"}},
        {"transport": {"mode": "CPUSerialize"}},
        next="TopologyUnknown",
    ),
    Change(
        "a sender that does not exist",
        PIPELINE,
        {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "nobody"}}}}},
        {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}},
        ends=frozenset({"Succeeded", "Failed"}),
    ),
    Change("more engines", POOL, {"replicas": 3}, {"replicas": 2}),
    Change("fewer engines", POOL, {"replicas": 1}, {"replicas": 2}),
    Change("no engines", POOL, {"replicas": 0}, {"replicas": 2}, ends=frozenset({"Succeeded", "Failed"})),
    Change(
        "a router that nobody answers for",
        POOL,
        {"routers": NOWHERE},
        {"routers": []},
        ends=frozenset({"Succeeded", "Failed"}),
    ),
]


@pytest.mark.parametrize(
    "change",
    [c if c.name == "fewer engines" else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES],
    ids=lambda c: c.name,
)
def test_a_change_in_mid_round_that_is_taken_back(stand: Stand, change: Change) -> None:
    target = "p" if change.kind == PIPELINE else "e"
    with held_at(stand, TRANSFERRING) as name:
        patch(stand, change.kind, target, change.spec)
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in change.ends, done["status"]
    if change.next:
        version = stand.next_version()
        stand.fleet.publish(version)
        refused = stand.fleet.ended(stand.fleet.order(version))
        assert refused["status"]["phase"] == "Failed", refused["status"]
        assert refused["status"]["failure"]["reason"] == change.next
    assert stand.wait_quiet(), "writes do not cease"
    patch(stand, change.kind, target, change.back)
    stand.fleet.ready_engines(stand.engines)
    well(stand)


@pytest.mark.slow
def test_specs_that_change_all_the_time(stand: Stand) -> None:
    """Another controller writes again and again, through several whole rounds: each of them succeeds."""
    for n in range(3):
        version = stand.next_version()
        stand.fleet.publish(version)
        name = stand.fleet.order(version)
        flips = 0
        while stand.fleet.phase(name) not in TERMINAL:
            flips += 1
            seconds = 61 + (n * 100 + flips) % 97
            patch(stand, "rlpipeline", "p", {"sync": {"deadlines": {"pendingSeconds": seconds}}})
            patch(stand, "enginepool", "e", {"bringUp": {"deadlineSeconds": 300 + seconds}})
        done = stand.fleet.ended(name)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert flips, "the specs were to change while the round ran"
    well(stand)


@pytest.mark.parametrize(
    ("point", "phase"),
    [
        pytest.param("PATCH syncrounds/round/status phase=Staging #1", "Cancelled", marks=pytest.mark.slow),
        pytest.param("PATCH syncrounds/round/status phase=Quiescing #1", "Cancelled", marks=pytest.mark.slow),
        (TRANSFERRING, "Succeeded"),
        pytest.param("PATCH rlpipelines/p/status commit #1", "Succeeded", marks=pytest.mark.slow),
    ],
)
def test_of_a_rounds_spec_only_its_cancel_can_change(stand: Stand, point: str, phase: str) -> None:
    """Before weights move a cancel ends the round; later it is noted, and the round goes on."""
    with held_at(stand, point) as name:
        for spec in ({"version": 10**6}, {"kind": "CatchUp"}, {"attempt": 7}, {"allowRollback": True}):
            with pytest.raises(ClusterError, match=r"(?i)invalid"):
                patch(stand, "syncround", name, spec)
        patch(stand, "syncround", name, {"cancel": True})
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] == phase, done["status"]
    if phase == "Cancelled":
        plain_round(stand)
    well(stand)
