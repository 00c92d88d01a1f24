"""Somebody else writes to our objects, or deletes them and makes them anew; and an operator with nothing to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from e2e.scenarios.kit import wait_until
from tests.fault.scenarios import fleet_state, plain_round
from tests.fault.stand import Stand
from tests.fault.sweep import healthy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

#: Writes that settling one fight may take.
MOST_WRITES = 60


def patch(stand: Stand, kind: str, name: str, change: dict[str, Any]) -> None:
    stand.cluster.kubectl("patch", kind, name, "-n", stand.namespace, "--type=merge", "-p", json.dumps(change))


def well(stand: Stand) -> None:
    plain_round(stand)
    assert healthy(fleet_state(stand)), fleet_state(stand)
    assert stand.wait_quiet(), "writes do not cease"
    assert not stand.violations()


def test_an_operator_that_is_restarted_without_a_change_writes_nothing(stand: Stand) -> None:
    plain_round(stand)
    assert stand.wait_quiet()
    stand.restart()
    polls = "GET sender status"
    wait_until(lambda: [c.label for c in stand.journal.calls].count(polls) >= 3, "three polls of the new process")
    assert stand.wait_quiet()
    written = [c.point for c in stand.journal.calls if c.lane == "api" and c.counted]
    ordered = [c.point for c in stand.journal.calls if c.lane == "peer" and not c.read]
    assert not written
    # A new leader may raise fences; it changes nothing else.
    assert not [point for point in ordered if not point.split()[2].startswith(("fence", "enroll"))], ordered


def relabel(stand: Stand) -> None:
    """Take a pod from its pool, and give it back."""
    pod = stand.fleet.engines()[0]["metadata"]
    for value in (None, pod["labels"]["rlfleet.dev/pool"]):
        patch(stand, "pod", pod["name"], {"metadata": {"labels": {"rlfleet.dev/pool": value}}})
        time.sleep(1)


def disown(stand: Stand) -> None:
    """Remove the owner of a pod."""
    patch(stand, "pod", stand.fleet.engines()[0]["metadata"]["name"], {"metadata": {"ownerReferences": None}})


def unhook(stand: Stand) -> None:
    """Remove our finalizer from the pool, again and again."""
    for _ in range(3):
        patch(stand, "enginepool", "e", {"metadata": {"finalizers": None}})
        wait_until(lambda: stand.fleet.get("enginepool", "e")["metadata"].get("finalizers"), "our finalizer to be back")


def resize(stand: Stand) -> None:
    """Another controller flips the size."""
    for replicas in (stand.engines + 1, stand.engines, stand.engines + 1, stand.engines):
        patch(stand, "enginepool", "e", {"spec": {"replicas": replicas}})
        time.sleep(0.5)


def scribble(stand: Stand) -> None:
    """Another writer of status."""
    for kind, name in (("enginepools", "e"), ("rlpipelines", "p")):
        change = {"status": {"conditions": [], "observedGeneration": 0}}
        stand.cluster.kubectl(
            "patch", kind, name, "-n", stand.namespace, "--subresource=status", "--type=merge", "-p", json.dumps(change)
        )


FIGHTS: list[Callable[[Stand], None]] = [relabel, disown, unhook, resize, scribble]


@pytest.mark.parametrize(
    "fight", [f if f is unhook else pytest.param(f, marks=pytest.mark.slow) for f in FIGHTS], ids=lambda f: f.__name__
)
def test_a_second_writer(stand: Stand, fight: Callable[[Stand], None]) -> None:
    stand.proxy.watch()
    fight(stand)
    stand.fleet.ready_engines(stand.engines)
    assert stand.wait_quiet(), "writes do not cease"
    assert stand.writes() <= MOST_WRITES, [c.point for c in stand.journal.calls if c.lane == "api" and c.counted]
    if fight is scribble:
        # A status that somebody else has taken back is no word of ours.
        stand.checker.violations = [v for v in stand.checker.violations if not v.startswith("I8")]
    well(stand)


def test_a_pool_that_is_deleted_and_made_anew_is_another_one(stand: Stand) -> None:
    old = {p["metadata"]["uid"] for p in stand.fleet.engines()}
    uid = stand.fleet.get("enginepool", "e")["metadata"]["uid"]
    stand.cluster.kubectl("delete", "enginepool", "e", "-n", stand.namespace, "--timeout=180s")
    stand.fleet.pool(stand.engines)
    assert stand.fleet.get("enginepool", "e")["metadata"]["uid"] != uid

    def fresh() -> list[dict[str, Any]] | None:
        pods = stand.fleet.ready_engines(stand.engines)
        return None if old & {p["metadata"]["uid"] for p in pods} else pods

    stand.pods = wait_until(fresh, "engines of the new pool")
    well(stand)
