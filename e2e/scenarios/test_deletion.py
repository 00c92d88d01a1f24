"""What remains when rounds, pools, pipelines and namespaces are deleted, in whatever they do: nothing of ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.cluster.fixtures import temporary_namespace
from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, http, wait_until
from e2e.scenarios.routers import routed_fleet
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

DISK = "update_weights_from_disk"
PHASES = ("Pending", "Staging", "Quiescing", "Transferring", "Holding", "Committed")
MODES = ("background", "foreground", "orphan")
#: Deletions that run beside each other: most of their time they wait.
AT_ONCE = 3
SYNC: dict[str, Any] = {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}}


def reason(obj: dict[str, Any], kind: str) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["reason"]) for c in conditions if c["type"] == kind), "")


def message(obj: dict[str, Any], kind: str) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["message"]) for c in conditions if c["type"] == kind), "")


@contextlib.contextmanager
def round_in(fleet: Fleet, phase: str, pods: list[dict[str, Any]], *, held: bool = False) -> Any:
    """A round of version 1 that is in ``phase``; its name.

    But for Pending and Holding it goes on by itself; with ``held`` (Transferring) when pods[0] is healed.
    """
    frozen = ""
    hollow = fleet.cluster.hollow
    if phase == "Pending":
        name = fleet.order(1)  # the sender does not hold it
    else:
        if phase == "Quiescing":
            fleet.fault(pods[0], "pause_generation", action="delay", seconds=6, times=1)
        elif phase == "Transferring":
            how = {"action": "hold"} if held else {"action": "delay", "seconds": 6}
            fleet.fault(pods[0], DISK, times=1, when="before", **how)
        elif phase == "Committed":
            fleet.fault(pods[0], "continue_generation", action="delay", seconds=5, times=1)
        elif phase == "Holding":
            frozen = pods[0]["metadata"]["name"]
            hollow.freeze(fleet.namespace, frozen, "gate", spared=True)
        fleet.publish(1, bulk=384 if phase == "Staging" else 0)
        name = fleet.order(1)
    try:
        wait_until(lambda: fleet.phase(name) == phase, phase, every=0.02)
        yield name
    finally:
        if frozen:
            with contextlib.suppress(HollowError):  # It may have been replaced meanwhile.
                hollow.thaw(fleet.namespace, frozen, "gate")


def left(fleet: Fleet, kind: str) -> list[str]:
    """Names of what is left of a kind."""
    return [str(o["metadata"]["name"]) for o in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]]


def held_by_us(fleet: Fleet) -> list[str]:
    """Objects in the namespace that bear a finalizer of ours."""
    found = []
    for kind in ("rlpipelines", "enginepools", "syncrounds", "pods"):
        for o in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]:
            if any(str(f).startswith("rlfleet.dev/") for f in o["metadata"].get("finalizers") or []):
                found.append(f"{kind}/{o['metadata']['name']}")
    return found


def delete(fleet: Fleet, what: str, *, mode: str = "background", wait: str = "--timeout=120s") -> None:
    fleet.cluster.kubectl("delete", *what.split("/"), "-n", fleet.namespace, f"--cascade={mode}", wait, timeout=150)


def closed(fleet: Fleet, pods: list[dict[str, Any]]) -> bool:
    return all(fleet.paused(p) for p in pods)


def at_once(
    cluster: LocalCluster, operator: Operator, phases: Iterable[str], one: Callable[[Fleet, str], None]
) -> None:
    """Run ``one`` for every phase, a few at a time, each in a namespace of its own."""
    if operator.process is None:
        operator.start()

    def run(phase: str) -> None:
        with temporary_namespace(cluster) as namespace:
            one(Fleet(cluster, namespace), phase)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {phase: pool.submit(run, phase) for phase in phases}
    failed = {phase: error for phase, future in running.items() if (error := future.exception()) is not None}
    for phase, error in failed.items():
        error.add_note(f"in phase {phase}")
    if failed:
        raise BaseExceptionGroup(f"failed in {', '.join(failed)}", list(failed.values()))


def delete_pipeline_in(fleet: Fleet, phase: str, mode: str) -> None:
    """Delete the pipeline in a phase of a round: the round ends, the engines close, only the pool stays."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, phase, pods):
        delete(fleet, "rlpipeline/p", mode=mode, wait="--wait=false")
    wait_until(lambda: not left(fleet, "rlpipelines"), "the pipeline to be gone")
    # It waited for its engines; orphaned rounds stay, ended, as orphaned objects do.
    assert closed(fleet, pods)
    if mode == "orphan":
        assert all(fleet.get("syncround", r)["status"].get("phase") in ENDED for r in left(fleet, "syncrounds"))
    else:
        wait_until(lambda: not left(fleet, "syncrounds"), "its rounds to be gone")
    assert [f for f in held_by_us(fleet) if not f.startswith("enginepools/")] == []
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "PipelineNotFound", "the pool to say so")
    assert {p["metadata"]["uid"] for p in fleet.engines()} == {p["metadata"]["uid"] for p in pods}


ENDED = ("Succeeded", "Failed", "Superseded", "Cancelled", "Expired")


def test_a_pipeline_waits_for_engines_that_do_not_close_and_says_so(fleet: Fleet, cluster: LocalCluster) -> None:
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    stuck = str(pods[0]["metadata"]["name"])
    cluster.hollow.freeze(fleet.namespace, stuck, "engine")
    try:
        delete(fleet, "rlpipeline/p", wait="--wait=false")
        wait_until(lambda: f"closed: {stuck}" in message(fleet.get("rlpipeline", "p"), "Progressing"), "it to say why")
        assert reason(fleet.get("rlpipeline", "p"), "Progressing") == "Terminating"
        wait_until(lambda: fleet.paused(pods[1]), "the others to be closed meanwhile")
        wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "PipelineDeleting", "the pool to say so")
        late = fleet.order(2)
        wait_until(lambda: fleet.phase(late) == "Cancelled", "a late round to be refused")
        failure = fleet.status("syncround", late)["failure"]
        assert failure["reason"] == "PipelineDeleting"
        assert "create it again" in failure["message"]
    finally:
        cluster.hollow.thaw(fleet.namespace, stuck, "engine")
    wait_until(lambda: not left(fleet, "rlpipelines"), "the pipeline to be gone")
    assert closed(fleet, pods)
    wait_until(lambda: not left(fleet, "syncrounds"), "its rounds to be gone")
    assert held_by_us(fleet) == ["enginepools/e"]
    wait_until(lambda: reason(fleet.get("enginepool", "e"), "Ready") == "PipelineNotFound", "the pool to say so")


def test_a_pool_deleted_in_a_round_leaves_no_router_entry_and_no_pod(fleet: Fleet) -> None:
    router, pods = routed_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, "Transferring", pods, held=True) as name:
        delete(fleet, "enginepool/e", wait="--wait=false")
        wait_until(
            lambda: name in message(fleet.get("enginepool", "e"), "Progressing"), "the pool to say what it awaits"
        )
        assert {p["metadata"]["uid"] for p in fleet.engines()} == {p["metadata"]["uid"] for p in pods}
        fleet.heal(pods[0])
        done = fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    wait_until(lambda: not left(fleet, "enginepools"), "the pool to be gone")
    # Not later: whoever waits for the deletion knows that nothing is left.
    assert fleet.engines() == []
    assert router.listed() == set()
    assert held_by_us(fleet) == ["rlpipelines/p"]
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1


def test_what_is_deleted_while_no_operator_runs_goes_when_one_comes(fleet: Fleet, operator: Operator) -> None:
    serialized_fleet(fleet, 1)
    fleet.apply("RLPipeline", "never", fleet.get("rlpipeline", "p")["spec"])
    operator.kill()
    delete(fleet, "rlpipeline/never", wait="--timeout=20s")  # nobody ever claimed it
    name = fleet.order(1)
    delete(fleet, f"syncround/{name}", wait="--timeout=20s")
    for what in ("rlpipeline/p", "enginepool/e"):
        delete(fleet, what, wait="--wait=false")
    assert held_by_us(fleet) == ["rlpipelines/p", "enginepools/e"]
    operator.start()
    for kind in ("rlpipelines", "enginepools", "syncrounds"):
        wait_until(lambda kind=kind: not left(fleet, kind), f"{kind} to be gone")  # type: ignore[misc]
    assert held_by_us(fleet) == []
    wait_until(lambda: not fleet.engines(), "engines to be gone")


@contextlib.contextmanager
def own_namespace(fleet: Fleet) -> Any:
    """Another namespace, which the test itself deletes; the fleet in it."""
    name = f"{fleet.namespace}-own"
    fleet.cluster.kubectl("create", "namespace", name)
    fleet.cluster.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={name}", "--timeout=180s")
    fleet.cluster.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", f"--namespace={name}", "--timeout=180s")
    yield Fleet(fleet.cluster, name)


def test_a_namespace_deleted_in_a_round_goes_and_nothing_loops(fleet: Fleet, operator: Operator) -> None:
    with own_namespace(fleet) as mine:
        pods = serialized_fleet(mine, 2, sync=SYNC)
        with round_in(mine, "Transferring", pods):
            mark, logged = fleet.cluster.audit_mark(), len(operator.log.read_text())
            fleet.cluster.kubectl("delete", "namespace", mine.namespace, "--timeout=120s", timeout=150)
    refused = [e for e in fleet.cluster.audit(mark) if e.namespace == mine.namespace and e.code == 403]
    assert len([e for e in refused if "rlfleet" in e.user]) < 10, refused
    said = operator.log.read_text()[logged:]
    assert "Traceback" not in said
    assert said.count('"ERROR"') == 0
    assert said.count('"WARNING"') < 10, said


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_is_deleted_in_every_phase(cluster: LocalCluster, operator: Operator, mode: str) -> None:
    at_once(cluster, operator, PHASES, lambda fleet, phase: delete_pipeline_in(fleet, phase, mode))


def delete_round_in(fleet: Fleet, phase: str, mode: str) -> None:
    """Delete a round in a phase: it ends by the table of its phases, and the fleet serves what is committed."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, phase, pods) as name:
        delete(fleet, f"syncround/{name}", mode=mode)
    wait_until(lambda: not fleet.status("rlpipeline", "p").get("activeOperation"), "the slot to be free")
    committed = fleet.status("rlpipeline", "p")["committed"]["version"]
    assert committed == (1 if phase in ("Transferring", "Committed") else -1)
    if phase != "Holding":
        assert [fleet.label(p) for p in pods] == [str(committed)] * 2
        assert not any(fleet.paused(p) for p in pods)
    assert [f for f in held_by_us(fleet) if f.startswith("syncrounds/")] == []
    # The same order once more is another round under the same name.
    fleet.publish(2)
    assert fleet.ended(fleet.order(2))["status"]["phase"] == "Succeeded"
    assert not any(fleet.paused(p) for p in fleet.ready_engines(2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_round_is_deleted_in_every_phase(cluster: LocalCluster, operator: Operator, mode: str) -> None:
    at_once(cluster, operator, PHASES, lambda fleet, phase: delete_round_in(fleet, phase, mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_pool_is_deleted_in_every_phase(cluster: LocalCluster, operator: Operator, mode: str) -> None:
    at_once(cluster, operator, PHASES, lambda fleet, phase: delete_pool_in(fleet, phase, mode))


def delete_pool_in(fleet: Fleet, phase: str, mode: str) -> None:
    """Delete the pool in a phase of a round: its pods go, the round ends, and a new pool of its name is another one."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    with round_in(fleet, phase, pods) as name:
        delete(fleet, "enginepool/e", mode=mode)
        if mode == "orphan":
            assert {p["metadata"]["uid"] for p in fleet.engines()} == {p["metadata"]["uid"] for p in pods}
            for pod in fleet.engines():
                delete(fleet, f"pod/{pod['metadata']['name']}", wait="--wait=false")
        wait_until(lambda: not fleet.engines(), "the pods to be gone")
    if phase == "Pending":
        fleet.publish(1)
    done = fleet.ended(name)
    assert done["status"]["phase"] in ENDED
    assert held_by_us(fleet) == ["rlpipelines/p"]
    # A pool of the same name is another one: new pods, and the next round brings them the weights.
    fleet.pool(1)
    fresh = fleet.ready_engines(1)
    assert not {p["metadata"]["uid"] for p in fresh} & {p["metadata"]["uid"] for p in pods}
    assert fleet.sync(3)["status"]["phase"] == "Succeeded"


@pytest.mark.slow
def test_a_namespace_is_deleted_in_every_phase(cluster: LocalCluster, operator: Operator) -> None:
    at_once(cluster, operator, PHASES, delete_namespace_in)


def delete_namespace_in(fleet: Fleet, phase: str) -> None:
    """Delete a namespace in a phase of a round: it goes."""
    with own_namespace(fleet) as mine:
        pods = serialized_fleet(mine, 2, sync=SYNC)
        with round_in(mine, phase, pods):
            if phase == "Holding":
                # A frozen gate keeps its pod from ending in time; the kubelet kills it after its grace.
                fleet.cluster.kubectl("delete", "namespace", mine.namespace, "--wait=false")
        fleet.cluster.kubectl(
            "delete", "namespace", mine.namespace, "--timeout=120s", "--ignore-not-found", timeout=150
        )


@pytest.mark.slow
def test_an_engine_that_does_not_close_holds_a_deletion_up_for_five_minutes_only(
    fleet: Fleet, cluster: LocalCluster, operator: Operator
) -> None:
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    silent = pods[0]["metadata"]["name"]
    cluster.hollow.freeze(fleet.namespace, silent, "engine")
    began = time.monotonic()
    try:
        delete(fleet, "rlpipeline/p", wait="--wait=false")
        wait_until(lambda: not left(fleet, "rlpipelines"), "the ceiling", 420, every=1)
    finally:
        cluster.hollow.thaw(fleet.namespace, silent, "engine")
    assert time.monotonic() - began > 290
    assert fleet.paused(pods[1]), "the other one was closed meanwhile"
    events = fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]
    said = [e for e in events if e["reason"] == "FinalizerCeiling"]
    assert len(said) == 1
    assert silent in said[0]["note"]
    code, text = http("GET", f"http://127.0.0.1:{operator.port}/metrics")
    assert (code, 'rlfleet_finalizer_ceiling_total{kind="RLPipeline"} 1.0' in text) == (200, True)
    # Thawed, the engine may carry out the pause that it was asked for: then a new pipeline takes it over, else its pod
    # is replaced. Either way both serve what the new pipeline commits.
    fleet.pipeline(sync=SYNC)
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "both engines to serve")
    assert not any(fleet.paused(p) for p in fleet.ready_engines(2))
