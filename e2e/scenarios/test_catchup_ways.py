"""Late engines whose weights come another way, or who must answer before they serve: by broadcast, with the probe."""

from __future__ import annotations

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_catchup import DEADLINES, catch_ups, closed_joiner, counted, outcomes, scaled
from e2e.scenarios.test_rounds import serialized_fleet
from e2e.scenarios.test_transports import FREE, NODE, TRAIN, pinned

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_late_joiner_gets_the_committed_weights_by_broadcast(fleet: Fleet) -> None:
    fleet.pipeline(
        transport={"mode": "Broadcast", "backend": "gloo"},
        trainer={"gpus": [{"node": NODE, "devices": TRAIN}]},
        sync={"deadlines": DEADLINES},
    )
    fleet.pool(1, backend="torch", placement=pinned(FREE))
    fleet.trainer()
    pods = fleet.ready_engines(1, 240)
    for version in (-1, 1):
        assert fleet.sync(version)["status"]["phase"] == "Succeeded"
    committed = fleet.status("rlpipeline", "p")["committed"]
    fresh = scaled(fleet, 2, pods)
    fleet.serving(fresh, 1)
    assert fleet.checksum(fresh) == fleet.checksum(pods[0])
    wait_until(lambda: outcomes(fleet) == ["Succeeded"], "its round to end")
    plan = catch_ups(fleet)[0]["status"]["plan"]
    assert (plan["broadcast"], plan["serialized"], plan["worldSize"]) == (1, 0, 2)
    assert [(m["engine"], m["rankOffset"]) for m in plan["members"]] == [(fresh["metadata"]["name"], 1)]
    assert fleet.status("rlpipeline", "p")["committed"] == committed
    # Both in one group again.
    done = fleet.sync(2)
    assert (done["status"]["phase"], done["status"]["plan"]["broadcast"]) == ("Succeeded", 2), done["status"]


def test_a_late_joiner_that_cannot_generate_does_not_serve(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 1, sync={"deadlines": DEADLINES, "probeGeneration": True})
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    fresh = closed_joiner(fleet, cluster, 2, pods)
    fleet.fault(fresh, "generate", action="http500", times=1)
    cluster.hollow.thaw(fleet.namespace, "trainer", "trainer")
    wait_until(lambda: outcomes(fleet)[:1] == ["Failed"], "the first catch-up to fail")
    failed = catch_ups(fleet)[0]["status"]
    assert failed["failure"]["reason"] == "ProbeFailed", failed
    # The next one finds it able to, and that is what opens it.
    wait_until(lambda: outcomes(fleet) == ["Failed", "Succeeded"], "the second one to succeed")
    assert counted(fleet, fresh) == 2
    assert not fleet.paused(fresh)
    assert fleet.label(fresh) == "1"
    assert fleet.checksum(fresh) == fleet.checksum(pods[0])
