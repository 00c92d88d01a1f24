"""Views that are behind: watches that went deaf, an apiserver that has fallen behind, a history that was compacted.

A stale watch is legal at any time; stale reads are not, as the operator makes them. Of both must hold: nothing that is
decided on them has an effect, and all is well again soon after they end.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import TERMINAL, wait_until
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import credential_source
from rlfleet.kube.resources import Resource
from tests.fault.proxy import Fault, FaultProxy, Rule, Watching
from tests.fault.scenarios import fleet_state, plain_round
from tests.fault.stale import Snapshot
from tests.fault.stand import Stand
from tests.fault.sweep import healthy
from tests.fault.test_outages import KINDS, loading, well

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
#: Reads of one kind that were answered from the past: enough for several reconciles.
OLD_READS = 6


def old_reads(stand: Stand, plural: str) -> int:
    return sum(c.fault == "stale" and c.plural == plural for c in list(stand.journal.calls))


def remove(stand: Stand, pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    stand.cluster.kubectl("delete", "pod", name, "-n", stand.namespace, "--force", "--grace-period=0")


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {str(p["metadata"]["uid"]) for p in pods}


def replaced(stand: Stand, gone: dict[str, Any]) -> list[dict[str, Any]]:
    """Wait until another pod serves in its place; all engines."""

    def look() -> list[dict[str, Any]] | None:
        pods = stand.fleet.ready_engines(stand.engines)
        return None if gone["metadata"]["uid"] in uids(pods) else pods

    return wait_until(look, "a new pod", 240)


@pytest.mark.slow
def test_streams_that_went_deaf_are_left_after_a_while(stand: Stand) -> None:
    """They neither tell anything nor end: only their silence, longer than that between two bookmarks, gives them away.

    Nothing but the watch tells of a new pool, and of a pod's end nothing else tells its pool.
    """
    stand.wait_quiet()
    stand.proxy.deafen(*KINDS)
    gone = stand.fleet.engines()[0]
    remove(stand, gone)
    stand.fleet.pool(1, name="f")
    replaced_by = wait_until(
        lambda: next((p for p in stand.fleet.engines() if p["metadata"]["labels"]["rlfleet.dev/pool"] == "f"), None),
        "the pod of a pool that no stream told of",
        240,
    )
    assert replaced_by["metadata"]["uid"]
    wait_until(
        lambda: (
            len(ready := stand.fleet.ready_engines(stand.engines + 1)) == stand.engines + 1
            and gone["metadata"]["uid"] not in uids(ready)
        ),
        "a new pod",
        240,
    )
    stand.cluster.kubectl("delete", "enginepool", "f", "-n", stand.namespace, "--timeout=180s")
    stand.fleet.ready_engines(stand.engines)
    well(stand)


@pytest.mark.slow
@pytest.mark.parametrize("plurals", [("pods",), ("rlpipelines",), ("syncrounds",), KINDS], ids=",".join)
def test_an_operator_that_starts_in_the_past_undoes_nothing(stand: Stand, plurals: tuple[str, ...]) -> None:
    """Since that past a round was committed and an engine was replaced; what serves now is left alone."""
    stand.wait_steady("the fleet to be steady before its past is taken down")
    past = [Snapshot(stand.cluster, stand.namespace, plural) for plural in plurals]
    gone = stand.fleet.engines()[0]
    remove(stand, gone)
    serving = replaced(stand, gone)
    plain_round(stand)
    committed = stand.fleet.status("rlpipeline", "p")["committed"]

    stand.restart()
    stand.proxy.go_back(*past)
    stand.operators[0].restart()
    try:
        for plural in plurals:
            wait_until(lambda plural=plural: old_reads(stand, plural) >= min(OLD_READS, 1 + len(plurals)), "old reads")
        assert stand.wait_quiet(), "writes do not cease"
    finally:
        stand.proxy.go_back()
    assert uids(serving) <= uids(stand.fleet.engines())
    assert stand.fleet.status("rlpipeline", "p")["committed"] == committed
    stand.fleet.ready_engines(stand.engines)
    assert uids(serving) == uids(stand.fleet.engines())
    well(stand)


@pytest.mark.slow
@pytest.mark.parametrize("plurals", [("pods",), ("rlpipelines",), ("syncrounds",), KINDS], ids=",".join)
def test_a_round_whose_reads_fall_back_before_its_beginning(stand: Stand, plurals: tuple[str, ...]) -> None:
    stand.wait_steady("the fleet to be steady before its past is taken down")
    past = [Snapshot(stand.cluster, stand.namespace, plural) for plural in plurals]
    name = loading(stand, 1.0)
    stand.proxy.go_back(*past)
    try:
        wait_until(
            lambda: (
                stand.fleet.phase(name) in TERMINAL
                or all(old_reads(stand, plural) >= OLD_READS for plural in plurals if plural != "enginepools")
            ),
            "reads from the past",
        )
    finally:
        stand.proxy.go_back()
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
    well(stand)


@pytest.mark.slow
def test_history_is_compacted_while_watches_are_behind(stand: Stand) -> None:
    """The apiserver ends them with 410, and what happened meanwhile is seen by new lists."""
    gone = stand.fleet.engines()[0]
    stand.proxy.set_watching(Watching.HOLD, *KINDS)
    stand.proxy.expired.clear()
    remove(stand, gone)
    stand.cluster.compact()
    stand.cluster.restart("kube-apiserver")
    stand.proxy.set_watching(Watching.PASS, *KINDS)
    replaced(stand, gone)
    assert stand.proxy.expired["pods"], stand.proxy.expired
    well(stand)


async def test_a_list_whose_history_is_compacted_between_two_pages_is_whole(stand: Stand) -> None:
    """The apiserver may answer the second page with 410: then it is listed in one piece, of one moment."""
    names = [f"c{i}" for i in range(5)]
    for name in names:
        stand.cluster.kubectl("create", "configmap", name, "-n", stand.namespace)
    rule = Rule(lambda c: c.plural == "configmaps", Fault.EXPIRED, skip=1)
    with FaultProxy(stand.cluster.kubeconfig, stand.folder, name="pages") as proxy:
        proxy.strike(rule)
        async with KubeClient(credential_source(str(proxy.kubeconfig))) as kube:
            found = await kube.list(CONFIGMAPS, stand.namespace, page=2, timeout=60)
    assert rule.struck == 1
    listed = [o["metadata"]["name"] for o in found.items]
    assert sorted(n for n in listed if n in names) == names
    assert healthy(fleet_state(stand))
