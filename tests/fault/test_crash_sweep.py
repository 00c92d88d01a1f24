"""The operator dies, or is refused, at every write of a serialized round; nobody ever serves unproven weights.

A round makes about eleven writes. Each point uses the next version of one fleet: strike, look at what serves while
nobody leads, restart without the fault, and the round must end with every engine at what is committed.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import TERMINAL, wait_until
from tests.fault.conftest import Stand
from tests.fault.proxy import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

#: Writes to strike: eleven of a round, and one that says what the sender holds. A test asserts that it makes no more.
WRITES = 12


def serving_is_committed(stand: Stand) -> None:
    """Whoever takes requests now holds what the pipeline's status names as committed."""
    committed = stand.fleet.status("rlpipeline", "p")["committed"]
    digests = {d["digest"] for d in committed["engineDigests"]}
    for pod in stand.pods:
        if not stand.fleet.paused(pod):
            assert stand.fleet.checksum(pod) in digests, (pod["metadata"]["name"], committed)
            assert stand.fleet.label(pod) == str(committed["version"])


def all_serve_committed(stand: Stand) -> dict[str, Any]:
    """Every engine is open at the committed version, the slot is free; what is committed."""
    status = stand.fleet.status("rlpipeline", "p")
    assert status.get("activeOperation") is None
    assert not any(stand.fleet.paused(pod) for pod in stand.pods)
    serving_is_committed(stand)
    committed: dict[str, Any] = status["committed"]
    return committed


def no_finalizers_left(stand: Stand) -> bool:
    """Ended rounds can be deleted: none holds on to our finalizer."""
    listed = stand.fleet.cluster.get("syncrounds", "-n", stand.fleet.namespace)["items"]
    return not [r for r in listed if r["status"].get("phase") in TERMINAL and r["metadata"].get("finalizers")]


def check_end(stand: Stand, name: str, version: int, digest: str) -> None:
    """The struck round has ended well or without effect, its traces are gone, and the next round succeeds."""
    before = version - 1 if version > 1 else -1
    done = stand.fleet.ended(name)
    committed = all_serve_committed(stand)
    if done["status"]["phase"] == "Succeeded":
        assert (committed["version"], committed["manifestDigest"]) == (version, digest)
    else:
        assert done["status"]["phase"] == "Failed", done["status"]
        assert done["status"]["failure"]["reason"] == "OperatorRestarted", done["status"]["failure"]
        assert committed["version"] == before
    wait_until(lambda: no_finalizers_left(stand), "finalizers of ended rounds to be removed", 20)


def follow_up(stand: Stand) -> None:
    """A round without a fault."""
    version = stand.next_version()
    digest = stand.fleet.publish(version)
    done = stand.fleet.ended(stand.fleet.order(version))
    assert done["status"]["phase"] == "Succeeded", done["status"]
    committed = all_serve_committed(stand)
    assert (committed["version"], committed["manifestDigest"]) == (version, digest)


def test_a_round_makes_no_more_writes_than_are_struck(stand: Stand) -> None:
    version = stand.next_version()
    stand.fleet.publish(version)
    stand.proxy.watch()
    name = stand.fleet.order(version)
    wait_until(
        lambda: stand.fleet.phase(name) in TERMINAL and no_finalizers_left(stand), "the round to end", every=0.02
    )
    assert 0 < len(stand.proxy.writes) <= WRITES, "\n".join(stand.proxy.writes)


@pytest.mark.parametrize("when", [Fault.KILL_BEFORE, Fault.KILL_AFTER])
@pytest.mark.parametrize("at", range(1, WRITES + 1))
def test_an_operator_that_dies_at_a_write(stand: Stand, at: int, when: Fault) -> None:
    version = stand.next_version()
    digest = stand.fleet.publish(version)
    stand.proxy.arm(when, at)
    name = stand.fleet.order(version)

    def struck_or_over() -> bool:
        return stand.proxy.fired.is_set() or (
            stand.fleet.phase(name) in TERMINAL and not stand.fleet.get("syncround", name)["metadata"].get("finalizers")
        )

    wait_until(struck_or_over, f"write {at}")
    serving_is_committed(stand)
    stand.restart()
    check_end(stand, name, version, digest)
    follow_up(stand)


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.ERROR, Fault.BUSY, Fault.DROP])
def test_every_write_is_struck_once(stand: Stand, fault: Fault) -> None:
    version = stand.next_version()
    digest = stand.fleet.publish(version)
    stand.proxy.arm_every_other(fault)
    name = stand.fleet.order(version)
    check_end(stand, name, version, digest)
    stand.proxy.watch()
    follow_up(stand)


@pytest.mark.parametrize("phase", ["Staging", "Transferring"])
def test_an_apiserver_outage_in_a_round(stand: Stand, phase: str) -> None:
    version = stand.next_version()
    digest = stand.fleet.publish(version, bulk=64)
    if phase == "Transferring":
        for pod in stand.pods:
            stand.fleet.fault(pod, "update_weights_from_disk", action="delay", seconds=1, times=1, when="before")
    name = stand.fleet.order(version)
    wait_until(lambda: stand.fleet.phase(name) == phase, phase, every=0.01)
    stand.proxy.outage(True)
    try:
        wait_until(lambda: "scripted 503" in stand.operator.tail(), "the outage to be met")
        serving_is_committed(stand)
    finally:
        stand.proxy.outage(False)
    check_end(stand, name, version, digest)
    follow_up(stand)
