"""Every router that a gate can drive, with requests flowing: rounds, a joiner, a router that is replaced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.scenarios.kit import ROOT, Fleet, engine_url, wait_until
from e2e.scenarios.routers import NO_WORKER, PROGRAMS, Router, routed_fleet, router_entry, urls

pytestmark = pytest.mark.cluster


@contextmanager
def load(router: Router, summary: Path) -> Iterator[None]:
    """A client that asks the router all the time; at the end it waits for its answers and leaves its books."""
    command = [sys.executable, "-m", "e2e.sim.load", "--router", router.url, "--summary", str(summary)]
    client = subprocess.Popen([*command, "--concurrency", "3"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
        client.send_signal(signal.SIGTERM)
        client.wait(120)
    finally:
        client.kill()
        client.wait()


def books_of(summary: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def rounds(fleet: Fleet, router: Router, versions: range) -> None:
    """One round after the other; when one has ended nobody behind the router answers with anything older."""
    for version in versions:
        assert fleet.sync(version)["status"]["phase"] == "Succeeded"
        code, answer = router.generate()
        assert (code, answer["meta_info"]["weight_version"]) == (200, str(version))


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("kind", PROGRAMS)
def test_twenty_rounds_and_a_joiner_fail_no_request_and_send_none_to_an_unproven_engine(
    fleet: Fleet, tmp_path: Path, kind: str
) -> None:
    router, pods = routed_fleet(fleet, 2, kind)
    summary = tmp_path / "load.json"
    with load(router, summary):
        rounds(fleet, router, range(10))
        # A joiner starts with weights of nobody's, and its label says so.
        fleet.cluster.kubectl("scale", "epool/e", "--replicas=3", "-n", fleet.namespace)
        pods = fleet.ready_engines(3)
        wait_until(lambda: router.listed() == urls(pods), "the joiner in the router")
        rounds(fleet, router, range(10, 20))
        # One that goes leaves the router first, and ends what it runs.
        fleet.cluster.kubectl("scale", "epool/e", "--replicas=1", "-n", fleet.namespace)
        pods = fleet.ready_engines(1)
        assert router.listed() == urls(pods)
    books = books_of(summary)
    assert books["failures"] == {}, books
    assert books["answered"] > 100
    # "default" is what an engine says whose weights nobody has proven.
    assert set(books["versions"]) <= {str(v) for v in range(-1, 20)}, books
    assert len(books["versions"]) > 10, books
    # The router forgets everything: the engines come back, and until then the client hears so.
    router = router.replaced()
    wait_until(lambda: router.listed() == urls(pods), "the entries of the new router")
    assert router.generate()[0] == 200
    # Gone for good: taken out of the list by whoever deletes the pool.
    fleet.cluster.kubectl("delete", "epool/e", "-n", fleet.namespace, "--wait=true", timeout=120)
    assert router.listed() == set()
    assert router.generate()[0] == NO_WORKER[kind]


def test_every_router_of_a_pool_lists_the_engine_while_it_is_proven_and_one_that_is_replaced_is_healed(
    fleet: Fleet,
) -> None:
    """One router of each kind before one engine, and the label that an InferencePool selects."""
    fleet.pipeline()
    behind = {kind: Router(fleet, kind, kind.lower()) for kind in PROGRAMS}
    gateway = {"name": "gateway", "type": "InferencePool"}
    fleet.pool(1, routers=[*(router_entry(kind, kind.lower()) for kind in PROGRAMS), gateway])
    fleet.trainer()
    (pod,) = fleet.ready_engines(1)
    for kind, router in behind.items():
        assert router.listed() == set()
        assert router.generate()[0] == NO_WORKER[kind], kind
    assert labelled(fleet) == []
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    for router in behind.values():
        assert router.listed() == {engine_url(pod)}
        code, answer = router.generate()
        assert (code, answer["meta_info"]["weight_version"]) == (200, "-1")
    wait_until(lambda: labelled(fleet) == [pod["metadata"]["name"]], "the label that an InferencePool selects")
    # Closed means paused: entries stay, so that requests wait instead of failing.
    rounds(fleet, behind["SMG"], range(2))
    assert all(router.listed() == {engine_url(pod)} for router in behind.values())
    # A router that is replaced has forgotten everything.
    behind = {kind: router.replaced() for kind, router in behind.items()}
    for router in behind.values():
        wait_until(lambda router=router: router.listed() == {engine_url(pod)}, "the entry")  # type: ignore[misc]
        assert router.generate()[0] == 200
    # An engine that a person takes out of service leaves them all.
    name = pod["metadata"]["name"]
    fleet.cluster.kubectl("annotate", "pod", name, "-n", fleet.namespace, "rlfleet.dev/quarantine=look")
    for router in behind.values():
        wait_until(lambda router=router: router.listed() == set(), "the entry to go")  # type: ignore[misc]
    wait_until(lambda: labelled(fleet) == [], "the label to go")


def labelled(fleet: Fleet) -> list[str]:
    """Pods that the selector of an InferencePool finds, asked of the apiserver."""
    found = fleet.cluster.get("pods", "-n", fleet.namespace, "-l", "rlfleet.dev/pool=e,rlfleet.dev/serving=true")
    return [str(p["metadata"]["name"]) for p in found["items"]]
