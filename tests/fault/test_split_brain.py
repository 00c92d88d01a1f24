"""Two operators: the leader is frozen past its Lease, in the middle of a call, and another one takes over.

What the old leader left half done, or does when it is thawed, must have no effect: its writes meet a higher fence or a
newer resourceVersion, and gates and sender refuse its generation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster
from e2e.scenarios.kit import wait_until
from tests.fault.calls import Call
from tests.fault.proxy import Fault, Rule, at
from tests.fault.scenarios import fleet_state, plain_round
from tests.fault.stand import Instance, Stand
from tests.fault.sweep import healthy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0), pytest.mark.slow]

#: Where the leader stops: before the call arrives, or after it was carried out and before it learns of it.
POINTS = [
    (fault, point)
    for point in (
        "PATCH rlpipelines/p/status claim Refresh #1",
        "PATCH syncrounds/round/status phase=Planned #1",
        "PATCH syncrounds/round/status phase=Staging #1",
        "POST sender Push #1",
        "PATCH syncrounds/round/status phase=Quiescing #1",
        "POST e-0 Pause #1",
        "PATCH syncrounds/round/status phase=Transferring #1",
        "POST e-0 Load #1",
        "POST e-1 Verify #1",
        "POST e-0 Publish #1",
        "PATCH rlpipelines/p/status commit #1",
        "POST e-0 Resume #1",
        "PATCH syncrounds/round/status phase=Succeeded #1",
        "PATCH rlpipelines/p/status free #1",
    )
    for fault in (Fault.FREEZE_BEFORE, Fault.FREEZE_AFTER)
]


#: Here nobody shall lose its Lease but by being frozen, on a busy machine neither.
LEASE = {"RLFLEET_LEASE_SECONDS": "15", "RLFLEET_LEASE_RENEW_SECONDS": "12", "RLFLEET_LEASE_RETRY_SECONDS": "1"}


@pytest.fixture(scope="module")
def pair(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Two operators that elect a leader."""
    with Stand(cluster, tmp_path_factory.mktemp("pair"), instances=2, operator_env=LEASE) as made:
        yield made


def leader_of(stand: Stand) -> Instance:
    """Who holds the Lease, with both operators up: a test that failed may have left one dead or frozen."""
    for instance in stand.operators:
        assert instance.proxy is not None
        instance.proxy.rules = []
        if not instance.running():
            instance.restart()
        instance.thaw()

    def look() -> Instance | None:
        who = holder(stand)
        return next((i for i in stand.operators if i.running() and i.proxy and who.startswith(i.proxy.name)), None)

    return wait_until(look, "a leader", 60)


def end(stand: Stand, name: str, old: Instance, calls_before: int) -> None:
    """The round ends without the old leader, whose late calls had no effect; everything goes on."""
    wait_until(lambda: not old.running(), "the deposed leader to end its process", 60)
    old.restart()
    for instance in stand.operators:
        if not instance.running():
            instance.restart()
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
    late = [c for c in stand.journal.calls[calls_before:] if effective(c, old)]
    assert not late, [c.point for c in late]
    plain_round(stand)
    assert healthy(fleet_state(stand))
    assert not stand.violations()


def effective(call: Call, whose: Instance) -> bool:
    """A write of this process that was carried out."""
    assert whose.proxy is not None
    counted = call.counted and not call.read
    return call.who == whose.proxy.name and counted and call.status is not None and call.status < 300


def holder(stand: Stand) -> str:
    """The identity in the Lease."""
    lease = stand.cluster.get("lease", "rlfleet-operator", "-n", OPERATOR_NAMESPACE)
    return str(lease["spec"].get("holderIdentity") or "")


def fenced(stand: Stand, old: Instance) -> bool:
    """Every gate has stored a generation of somebody else."""
    assert old.proxy is not None
    told = [c for c in list(stand.journal.calls) if c.who != old.proxy.name and c.label.endswith(" fence")]
    return len({c.peer for c in told if c.status == 200 and c.peer != "sender"}) == stand.engines


def claimed(stand: Stand) -> bool:
    """Somebody has claimed the pipeline."""
    return bool(stand.fleet.status("rlpipeline", "p").get("activeOperation"))


@pytest.mark.parametrize(("fault", "point"), POINTS, ids=str)
def test_a_leader_that_is_frozen_past_its_lease(pair: Stand, fault: Fault, point: str) -> None:
    old = leader_of(pair)
    assert old.proxy is not None
    version = pair.next_version()
    pair.fleet.publish(version)
    old.proxy.watch()
    old.proxy.strike(Rule(at(point), fault))
    name = pair.fleet.order(version)
    wait_until(old.proxy.fired.is_set, f"the leader to be frozen at {point}")
    mine = old.proxy.name
    wait_until(lambda: (who := holder(pair)) and not who.startswith(mine), "the other one to lead")
    # What the old one was about to send may still be accepted by a gate that nobody has told of the new generation: the
    # barrier waits for that. From the fence on nothing of it may have an effect.
    wait_until(lambda: fenced(pair, old) or not claimed(pair), "the other one to pass the barrier, or to free the slot")
    before = len(pair.journal.calls)
    old.proxy.rules = []
    old.thaw()
    end(pair, name, old, before)
