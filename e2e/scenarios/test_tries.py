"""An engine whose load never works in a round: so many tries, then a new pod or a person, whatever time is left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, condition, wait_until
from e2e.scenarios.test_identity import uids
from e2e.scenarios.test_rounds import serialized_fleet
from rlfleet.client import Client, HoldingNeedsAction

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Nobody waits for these deadlines here: what ends is the number of tries.
DEADLINES = {"pendingSeconds": 600, "stagingSeconds": 600, "pausedSeconds": 600}
#: As the operator's: one try more would work.
TRIES = 3


def test_a_trainer_is_told_when_a_round_needs_a_person_and_waits_for_what_it_does(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    pods = serialized_fleet(fleet, 2, sync={"deadlines": DEADLINES, "maxUnavailable": 0, "onFailure": "Hold"})
    ill, good = pods
    name = str(ill["metadata"]["name"])
    fleet.fault(ill, "update_weights_from_disk", action="http500", times=TRIES, when="before")
    fleet.publish(1)
    with Client(fleet.namespace, "p", kubeconfig=cluster.kubeconfig) as client, ThreadPoolExecutor(1) as pool:
        with pytest.raises(HoldingNeedsAction, match=f"{name}.*3 tries.*delete the named pods") as held:
            client.sync(1, sender_incarnation=fleet.incarnation, timeout=150)
        assert held.value.committed is False
        round_name = str(held.value.round)
        # The round goes on: it keeps what it owns closed, and whoever asks again finds the same one.
        assert fleet.phase(round_name) == "Holding"
        assert (fleet.label(good), fleet.paused(good)) == ("1", True)
        assert fleet.paused(ill)
        patient = pool.submit(client.sync, 1, sender_incarnation=fleet.incarnation, timeout=150, on_holding="wait")
        cluster.kubectl("delete", "pod", name, "-n", fleet.namespace, "--wait=false")
        result = patient.result()
    assert (result.version, result.round) == (1, round_name)
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
    fleet.serving(good, 1)
    fresh = next(p for p in fleet.ready_engines(2) if p["metadata"]["uid"] not in uids(pods))
    fleet.serving(fresh, 1)


def test_an_engine_that_used_its_tries_up_is_replaced_before_the_time_is_over(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 2, sync={"deadlines": DEADLINES, "maxUnavailable": 0, "onFailure": "Replace"})
    ill, good = pods
    fleet.fault(ill, "update_weights_from_disk", action="http500", times=TRIES, when="before")
    done = fleet.sync(1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    results = {m["engine"]: m["result"] for m in done["status"]["members"]}
    assert results == {ill["metadata"]["name"]: "Lost", good["metadata"]["name"]: "Ok"}
    assert ill["metadata"]["uid"] not in uids(fleet.ready_engines(2))
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the new engine to catch up")
    assert {fleet.label(p) for p in fleet.engines()} == {"1"}
