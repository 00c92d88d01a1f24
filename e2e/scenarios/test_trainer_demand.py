"""A trainer that shares its GPUs with engines: they sleep for its steps, wake after them, and progress is shown."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_elastic import elastic_pool, settled
from rlfleet.client import Client

pytestmark = pytest.mark.cluster

NODE = "hollow-000"
SHARED, OWN = f"GPU-{NODE}-00", f"GPU-{NODE}-01"
SECONDS = 120.0


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    """The SDK as the trainer's pod would use it."""
    fleet.pipeline(trainer={"gpus": [{"node": NODE, "devices": [SHARED]}]})
    elastic_pool(fleet, 2, placement={"mode": "Pinned", "devices": [{"node": NODE, "devices": [SHARED, OWN]}]})
    fleet.trainer()
    fleet.ready_engines(2)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    uid = fleet.pod("trainer")["metadata"]["uid"]
    with Client(fleet.namespace, "p", fleet.cluster.kubeconfig, pod_uid=uid, pod_name="trainer") as made:
        yield made


def grants(fleet: Fleet) -> list[dict[str, Any]]:
    return list(fleet.status("rlpipeline", "p").get("grants") or [])


def test_engines_on_train_gpus_sleep_for_a_step_and_wake_with_what_was_committed_meanwhile(
    fleet: Fleet, client: Client
) -> None:
    """One engine lies on the trainer's device, the other does not."""
    settled(fleet, {0: "Active", 1: "Active"})
    assert client.report_progress(0, target=50, batch=1)
    with client.train_gpus(1, timeout=SECONDS) as grant:
        assert [(d.node, list(d.devices)) for d in grant.devices] == [(NODE, [SHARED])]
        settled(fleet, {0: "Offloaded", 1: "Active"})
        assert not any(client.report_progress(n, target=50, batch=1) for n in (0,))
        assert client.report_progress(25, target=50, batch=1)
        digest = fleet.publish(1, seed=101)
        done = client.sync(1, manifest_digest=digest, timeout=SECONDS)
        assert done.version == 1
        wait_until(
            lambda: (fleet.status("rlpipeline", "p").get("progress") or {}).get("percent") == 50, "progress of 50 %"
        )
        settled(fleet, {0: "Offloaded", 1: "Active"})
    settled(fleet, {0: "Active", 1: "Active"})
    assert grants(fleet) == []
    versions = fleet.status("enginepool", "e")["versions"]
    assert versions == [{"version": 1, "engines": "0-1"}], "the sleeper caught up"
    assert client.clear_progress()
    wait_until(lambda: "progress" not in fleet.status("rlpipeline", "p"), "no progress")


@pytest.mark.slow
def test_a_trainer_that_is_gone_gives_its_gpus_back(fleet: Fleet, client: Client) -> None:
    client.before_train_step(1, timeout=SECONDS)
    settled(fleet, {0: "Offloaded", 1: "Active"})
    fleet.cluster.kubectl("delete", "pod", "trainer", "-n", fleet.namespace, "--force", "--grace-period=0")
    wait_until(lambda: grants(fleet) == [], "the grant to go with its trainer")
    # Nobody wakes before a sender has weights; the next trainer's first version takes the engine along.
    fleet.trainer()
    fleet.publish(1, seed=101)
    wait_until(lambda: fleet.status("enginepool", "e")["engines"][0]["state"] != "Offloaded", "the engine to wake")
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    settled(fleet, {0: "Active", 1: "Active"})


@pytest.mark.slow
def test_an_operator_that_died_finds_the_demand_and_the_grant_stands(
    fleet: Fleet, client: Client, operator: Any
) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.before_train_step, 1, timeout=SECONDS)
        wait_until(lambda: grants(fleet), "the demand to be recorded")
        operator.kill()
        operator.start()
        grant = asked.result(SECONDS)
    before = grants(fleet)
    operator.kill()
    operator.start()
    settled(fleet, {0: "Offloaded", 1: "Active"})
    assert grants(fleet) == before
    assert grants(fleet)[0]["id"] == grant.id
    client.release_gpus()
    settled(fleet, {0: "Active", 1: "Active"})
