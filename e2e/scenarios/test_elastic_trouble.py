"""What goes wrong while engines sleep and wake, as conditions that name engine, device and remedy; and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import ROOT, Fleet, Operator, condition, engine_url, http, wait_until
from e2e.scenarios.test_elastic import RELEASE, RESUME, SYNC, elastic_fleet, elastic_pool, set_active, settled, states
from e2e.sim.device import ledger
from rlfleet.client import Client

pytestmark = pytest.mark.cluster

NODE = "hollow-000"
DEVICES = [f"GPU-{NODE}-00", f"GPU-{NODE}-01"]
GIB = 2**30
PAUSE = "pause_generation"

NEIGHBOUR = """
import sys, time
from pathlib import Path
from e2e.sim.device.ledger import Account
Account([Path(sys.argv[1])], "neighbour").add(int(sys.argv[2]))
print("holds", flush=True)
time.sleep(600)
"""


@contextmanager
def neighbour(cluster: LocalCluster, device: str, gib: int) -> Iterator[None]:
    """Somebody else's process that has memory of a device."""
    folder = cluster.state / "hollow" / "devices" / NODE / device
    command = [sys.executable, "-c", NEIGHBOUR, str(folder), str(gib * GIB)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield
        finally:
            process.kill()


def pinned_fleet(fleet: Fleet, **spec: Any) -> list[dict[str, Any]]:
    """Two engines that take 64 of the 80 GiB of their device each, and serve the base."""
    place = {"mode": "Pinned", "devices": [{"node": NODE, "devices": DEVICES}]}
    args = ("--mem-fraction-static", "0.8")
    return elastic_fleet(fleet, 2, gpus=(NODE, DEVICES), placement=place, engine_args=args, **spec)


def message(fleet: Fleet, kind: str, wanted: str, of: str = "enginepool") -> str:
    """Wait until a condition has this reason; its message."""
    name = "e" if of == "enginepool" else "p"

    def look() -> str | None:
        found = next((c for c in fleet.status(of, name).get("conditions") or [] if c["type"] == kind), None)
        return str(found["message"]) if found and found["reason"] == wanted else None

    return wait_until(look, f"{kind} with reason {wanted}")


def test_a_neighbour_on_the_device_is_named_and_keeps_an_engine_from_waking(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    """ResidualMemoryHigh while it sleeps, WakeFailed when it is to wake; both end with the neighbour."""
    pods = pinned_fleet(fleet)
    set_active(fleet, 1)
    settled(fleet, {0: "Active", 1: "Offloaded"})
    assert message(fleet, "ResidualMemoryHigh", "ResidualMemoryLow")
    with neighbour(cluster, DEVICES[1], 40):
        said = message(fleet, "ResidualMemoryHigh", "ResidualMemoryHigh")
        assert said.startswith(
            f"{NODE}/{DEVICES[1]}: more than 13 GiB in use although its engines sleep; others there:"
        )
        set_active(fleet, 2)
        said = message(fleet, "Degraded", "WakeFailed")
        assert pods[1]["metadata"]["name"] in said
        assert "InsufficientMemory" in said
        assert states(fleet)[1] == "Offloaded", "the engine was not asked for what would end it"
        assert pods[1]["metadata"]["name"] in message(fleet, "Degraded", "WakeFailed", "rlpipeline")
    settled(fleet, {0: "Active", 1: "Active"})
    wait_until(lambda: condition(fleet.get("enginepool", "e"), "Degraded") == "False", "the trouble to be over")
    assert [p["metadata"]["uid"] for p in fleet.engines()] == [p["metadata"]["uid"] for p in pods]


@pytest.mark.slow
def test_memory_that_an_engine_only_says_it_released_keeps_the_trainer_out_until_its_pod_is_gone(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    pods = pinned_fleet(fleet)
    fleet.fault(pods[1], RELEASE, action="keep")
    with Client(fleet.namespace, "p", cluster.kubeconfig) as client, ThreadPoolExecutor() as threads:
        heard: list[tuple[str, str]] = []
        want = [{"node": NODE, "devices": [DEVICES[1]]}]
        asked = threads.submit(
            client.request_gpus, 1, devices=want, timeout=180.0, on_progress=lambda *told: heard.append(told)
        )
        message(fleet, "ResidualMemoryHigh", "ResidualMemoryHigh")
        assert states(fleet) == {0: "Active", 1: "Offloaded"}
        wait_until(lambda: any(reason == "ResidualMemoryHigh" for reason, _ in heard), "the trainer to hear of it")
        assert any(f"{NODE}/{DEVICES[1]} has 64" in text for _, text in heard), heard
        cluster.kubectl("delete", "pod", pods[1]["metadata"]["name"], "-n", fleet.namespace)
        # None is made in its place on a device that the trainer demands.
        assert asked.result(180).granted
        wait_until(lambda: [p["metadata"]["uid"] for p in fleet.engines()] == [pods[0]["metadata"]["uid"]], "one pod")
        client.release_gpus()
    settled(fleet, {0: "Active", 1: "Active"}, 180)


@pytest.mark.slow
def test_an_engine_that_ends_as_it_wakes_is_replaced(fleet: Fleet) -> None:
    """What [engines] has of a wake without room: the process is gone."""
    pods = elastic_fleet(fleet, 2)
    set_active(fleet, 1)
    settled(fleet, {0: "Active", 1: "Offloaded"})
    fleet.fault(pods[1], RESUME, action="die")
    set_active(fleet, 2)
    wait_until(lambda: pods[1]["metadata"]["uid"] not in {p["metadata"]["uid"] for p in fleet.engines()}, "another pod")
    settled(fleet, {0: "Active", 1: "Active"}, 180)


@pytest.mark.slow
def test_an_engine_that_sleeps_by_half_is_named_and_sleeps_in_the_end(fleet: Fleet, cluster: LocalCluster) -> None:
    """Somebody lets it run between two tags: the gate releases nothing under an engine that may serve."""
    pods = pinned_fleet(fleet)
    book, url = cluster.state / "hollow" / "devices" / NODE / DEVICES[1], engine_url(pods[1])
    awake = sum(ledger.holders(book).values())
    fleet.fault(pods[1], PAUSE, action="delay", seconds=3, times=1, when="after")
    set_active(fleet, 1)
    wait_until(lambda: fleet.paused(pods[1]), "the pause, whose answer takes its time", every=0.02)
    # The first tag's answer takes its time, too; and it can not be paused again.
    rules = {RELEASE: {"action": "delay", "seconds": 6, "times": 1, "when": "after"}, PAUSE: {"action": "http500"}}
    assert http("POST", url + "/_sim/faults", rules)[0] == 200
    wait_until(lambda: sum(ledger.holders(book).values()) < awake, "the first tag to be released", every=0.02)
    assert http("POST", url + "/continue_generation", {})[0] == 200
    said = message(fleet, "HeterogeneousStates", "HalfReleased")
    assert said.startswith(f"{pods[1]['metadata']['name']}: only KVCache is released, so it neither sleeps nor serves")
    assert states(fleet) == {0: "Active", 1: "Draining"}
    fleet.heal(pods[1])
    settled(fleet, {0: "Active", 1: "Offloaded"})
    wait_until(lambda: condition(fleet.get("enginepool", "e"), "HeterogeneousStates") == "False", "states to agree")
    set_active(fleet, 2)
    settled(fleet, {0: "Active", 1: "Active"})


@pytest.mark.slow
def test_an_engine_that_stays_closed_after_its_wake_is_stuck_whoever_operates(fleet: Fleet, operator: Operator) -> None:
    """The sender has gone on to a version that nobody syncs, so no CatchUp can help; a restart refills no patience."""
    pods = elastic_fleet(fleet, 2)
    set_active(fleet, 1)
    settled(fleet, {0: "Active", 1: "Offloaded"})
    short = {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 10, "pausedSeconds": 10}}
    fleet.pipeline(sync={**SYNC, **short})
    fleet.publish(1)
    set_active(fleet, 2)

    def since() -> str:
        entry = next(e for e in fleet.status("enginepool", "e")["engines"] if e["index"] == 1)
        return str(entry.get("loadingSince") or "") if entry["state"] == "Loading" else ""

    first = wait_until(since, "the engine to be awake and closed")
    operator.kill()
    operator.start()
    said = message(fleet, "StuckLoading", "StuckLoading")
    assert said.startswith(f"{pods[1]['metadata']['name']}: awake and closed for more than 20 s")
    assert since() == first
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    settled(fleet, {0: "Active", 1: "Active"})
    wait_until(lambda: condition(fleet.get("enginepool", "e"), "StuckLoading") == "False", "nobody to be stuck")
    assert all("loadingSince" not in e for e in fleet.status("enginepool", "e")["engines"])


# ------------------------------------------------------------------------------------------------ demands


def test_a_demand_is_heard_while_a_round_holds_the_engines(fleet: Fleet, cluster: LocalCluster) -> None:
    """Of engines elsewhere the trainer hears what holds them; for those that the round misses it is the way out."""
    spec = {"trainer": {"gpus": [{"node": NODE, "devices": DEVICES}]}}
    fleet.pipeline(sync={**SYNC, "maxUnavailable": 0, "onFailure": "Hold"}, **spec)
    place = {"mode": "Pinned", "devices": [{"node": NODE, "devices": DEVICES}]}
    elastic_pool(fleet, 2, placement=place)
    fleet.trainer()
    pods = fleet.ready_engines(2)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    fleet.fault(pods[1], "update_weights_from_disk", action="http400")
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Holding", "Holding")
    with Client(fleet.namespace, "p", cluster.kubeconfig) as client, ThreadPoolExecutor() as threads:
        heard: list[tuple[str, str]] = []

        def ask(cluster_name: str, device: str) -> Any:
            want = [{"node": NODE, "devices": [device]}]
            return threads.submit(
                client.request_gpus,
                1,
                cluster=cluster_name,
                devices=want,
                timeout=120.0,
                on_progress=lambda *told: heard.append(told),
            )

        whole = ask("whole", DEVICES[0])
        wait_until(lambda: any(r == "Holding" and name in text for r, text in heard), "word of the round")
        assert fleet.phase(name) == "Holding"
        missing = ask("missing", DEVICES[1])
        # Nobody waits any more for an engine that is to sleep: the round commits, and both go to sleep.
        done = fleet.ended(name)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        assert whole.result(120).granted
        assert missing.result(120).granted
        assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1
        settled(fleet, {0: "Offloaded", 1: "Offloaded"})
        fleet.heal(pods[1])
        client.release_gpus("whole")
        client.release_gpus("missing")
    for pod in pods:
        fleet.serving(pod, 1)


@pytest.mark.slow
def test_pods_of_a_pool_that_shrinks_by_deletion_go_for_a_demand(fleet: Fleet, cluster: LocalCluster) -> None:
    """Placement Pinned: the list says who lies there, and none is made there before the device is given back."""
    pods = pinned_fleet(fleet, shrink="Delete")
    with Client(fleet.namespace, "p", cluster.kubeconfig) as client:
        want = [{"node": NODE, "devices": [DEVICES[1]]}]
        assert client.request_gpus(1, devices=want, timeout=120.0).granted
        # Its containers have ended by then; the object goes when its kubelet says so.
        wait_until(
            lambda: [p["metadata"]["uid"] for p in fleet.engines()] == [pods[0]["metadata"]["uid"]],
            "one pod to be left",
        )
        assert fleet.sync(1)["status"]["phase"] == "Succeeded"
        client.release_gpus()
    settled(fleet, {0: "Active", 1: "Active"}, 180)
    assert fleet.status("enginepool", "e")["versions"] == [{"version": 1, "engines": "0-1"}]
