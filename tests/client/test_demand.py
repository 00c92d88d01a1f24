"""Progress and GPUs through the SDK, at the real apiserver; the test plays the operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import pki
from e2e.cluster.local import ClusterError, LocalCluster
from rlfleet.client import Client, DemandRefused, Forbidden, GrantTimeout, SyncFailed, SyncRefused, credentials
from rlfleet.client.aio import AsyncClient
from tests.client.fleet import INCARNATION, SECONDS, Fleet
from tests.client.test_access import grant, rule
from tests.fault.proxy import Fault, FaultProxy, Rule

pytestmark = pytest.mark.cluster


def demand(fleet: Fleet) -> dict[str, Any]:
    return dict(fleet.cluster.get("trainerdemands", "demo", f"--namespace={fleet.namespace}"))


def wants(fleet: Fleet) -> list[dict[str, Any]]:
    try:
        return list(demand(fleet)["spec"].get("requests") or [])
    except ClusterError:
        return []


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)
    return found


def answer(fleet: Fleet, *, granted: bool, reason: str = "Granted", message: str = "", **changes: Any) -> None:
    """Answer the one request that stands there."""
    (request,) = until(lambda: wants(fleet), "request")
    row = {k: request[k] for k in ("cluster", "priority", "step", "id")} | {
        "granted": granted,
        "reason": reason,
        "message": message,
        "devices": [{"node": "n0", "devices": ["GPU-0"]}],
    }
    fleet.pipeline_status(grants=[row | changes])


@pytest.fixture
def trainer(cluster: LocalCluster, fleet: Fleet) -> Any:
    with Client(fleet.namespace, "demo", cluster.kubeconfig, pod_uid="pod-1", pod_name="trainer-0") as made:
        yield made


def test_progress_is_written_when_it_is_news(fleet: Fleet, trainer: Client) -> None:
    written = [n for n in range(101) if trainer.report_progress(n, target=100, batch=7)]
    assert written == [0, *range(2, 101, 2)], "one write for each 2 %"
    found = demand(fleet)
    assert found["spec"]["trainer"] == {"podUID": "pod-1", "podName": "trainer-0"}
    assert found["spec"]["streams"] == [{"key": "actor-train", "batch": 7, "target": 100, "collected": 100}]
    assert found["metadata"]["ownerReferences"][0]["kind"] == "RLPipeline"
    assert trainer.report_progress(0, target=100, batch=8), "another batch"
    assert trainer.report_progress(0, target=100, batch=8, stream="critic"), "another stream"
    assert not trainer.report_progress(1, target=100, batch=8, stream="critic")
    assert trainer.report_progress(1, target=100, batch=8, stream="critic", force=True)
    assert trainer.clear_progress("critic")
    assert not trainer.clear_progress("critic")
    assert [s["key"] for s in demand(fleet)["spec"]["streams"]] == ["actor-train"]


def test_a_step_begins_with_a_grant_of_this_very_request_and_gives_the_gpus_back(fleet: Fleet, trainer: Client) -> None:
    heard: list[tuple[str, str]] = []
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(trainer.before_train_step, 3, timeout=SECONDS, on_progress=lambda *what: heard.append(what))
        # The grant of an earlier request for the same step is still there: it is being taken back.
        answer(fleet, granted=True, id="an earlier one")
        answer(fleet, granted=False, reason="EnginesAwake", message="demo-0 must be Offloaded or gone first")
        why = ("EnginesAwake", "demo-0 must be Offloaded or gone first")
        until(lambda: why in heard, "word of what is waited for")
        assert not asked.done()
        answer(fleet, granted=True)
        grant = asked.result(SECONDS)
    assert (grant.step, grant.granted) == (3, True)
    assert [r["step"] for r in wants(fleet)] == [3], "it stands while the step runs"
    assert trainer.release_gpus()
    assert wants(fleet) == []
    assert not trainer.release_gpus(), "nothing to give back"


def test_gpus_are_given_back_whatever_happened(fleet: Fleet, trainer: Client) -> None:
    def step() -> None:
        with trainer.train_gpus(4, timeout=SECONDS):
            assert [r["step"] for r in wants(fleet)] == [4]
            raise RuntimeError("the step failed")

    with ThreadPoolExecutor() as pool:
        running = pool.submit(step)
        answer(fleet, granted=True)
        with pytest.raises(RuntimeError, match="the step failed"):
            running.result(SECONDS)
        assert wants(fleet) == []
        # A sync that fails gives them back as well, and its own error is what is raised.
        asked = pool.submit(trainer.before_train_step, 5, timeout=SECONDS)
        answer(fleet, granted=True)
        asked.result(SECONDS)
        syncing = pool.submit(trainer.after_train_step, 1, sender_incarnation=INCARNATION, timeout=SECONDS)
        (made,) = fleet.wait_rounds()
        fleet.fail(made["metadata"]["name"])
        with pytest.raises(SyncFailed):
            syncing.result(SECONDS)
    assert wants(fleet) == []


def test_a_release_that_fails_is_said_and_hides_no_error(
    fleet: Fleet, proxied: Client, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(proxied.request_gpus, 6, timeout=SECONDS)
        answer(fleet, granted=True)
        asked.result(SECONDS)
    proxy.strike(Rule(lambda call: call.method == "PATCH", Fault.INVALID, times=0))
    with pytest.raises(DemandRefused, match="scripted 422"):
        proxied.release_gpus()
    fleet.committed(5)
    with pytest.raises(SyncRefused, match="version 0 is below version 5"):
        proxied.after_train_step(0)
    assert "could not be given back, engines on them stay asleep" in caplog.text
    proxy.watch()
    assert proxied.release_gpus()


def test_what_nobody_answers_in_time_is_withdrawn_and_the_error_says_who_owns_the_engines(
    fleet: Fleet, trainer: Client
) -> None:
    with pytest.raises(GrantTimeout, match="no operator has answered"):
        trainer.request_gpus(3, timeout=0.5)
    active = {"kind": "Refresh", "name": "r7", "uid": "u", "generation": 1, "holder": "op", "committed": False}
    fleet.pipeline_status(activeOperation=active)
    with pytest.raises(GrantTimeout, match="Refresh r7 owns the engines"):
        trainer.request_gpus(3, timeout=0.5)
    assert wants(fleet) == []


def test_gpus_that_can_never_come_free_are_refused_at_once(fleet: Fleet, trainer: Client) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(trainer.request_gpus, 3, timeout=SECONDS)
        answer(fleet, granted=False, reason="Unsupported", message="e-0 can give no device up")
        with pytest.raises(DemandRefused, match="e-0 can give no device up"):
            asked.result(SECONDS / 2)
    assert wants(fleet) == []


def test_bad_requests_are_refused_by_the_apiserver_with_the_field(fleet: Fleet, trainer: Client) -> None:
    with pytest.raises(DemandRefused, match=r"spec\.requests\[0\]\.cluster"):
        trainer.request_gpus(3, cluster="Not A Name", timeout=SECONDS)
    with pytest.raises(DemandRefused, match=r"spec\.streams\[0\]\.target"):
        trainer.report_progress(1, target=-1)


def test_another_trainer_begins_anew_and_a_recreated_pipeline_has_its_own_demand(
    cluster: LocalCluster, fleet: Fleet, trainer: Client
) -> None:
    trainer.report_progress(5, target=10)
    with Client(fleet.namespace, "demo", cluster.kubeconfig, pod_uid="pod-2") as other:
        other.report_progress(1, target=10, stream="critic")
        assert demand(fleet)["spec"]["trainer"] == {"podUID": "pod-2"}
        assert [s["key"] for s in demand(fleet)["spec"]["streams"]] == ["critic"]
        first = demand(fleet)["metadata"]["ownerReferences"][0]["uid"]
        cluster.kubectl("delete", "rlpipeline", "demo", f"--namespace={fleet.namespace}")
        fleet.create_pipeline()
        fleet.sender_seen()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(other.request_gpus, 3, timeout=SECONDS)
            answer(fleet, granted=True)
            assert asked.result(SECONDS).granted
        assert demand(fleet)["metadata"]["ownerReferences"][0]["uid"] != first


def test_a_trainer_that_is_told_to_end_takes_nothing_from_its_successor(
    cluster: LocalCluster, fleet: Fleet, trainer: Client
) -> None:
    """It reports on for as long as its pod lives; engines would wake on GPUs that are in use."""
    trainer.report_progress(5, target=10)
    with Client(fleet.namespace, "demo", cluster.kubeconfig, pod_uid="pod-2", pod_name="trainer-0") as successor:
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(successor.request_gpus, 3, timeout=SECONDS)
            answer(fleet, granted=True)
            assert asked.result(SECONDS).granted
        before = demand(fleet)
        assert not trainer.report_progress(6, target=10, force=True)
        assert not trainer.clear_progress()
        assert not trainer.release_gpus()
        assert demand(fleet) == before
        assert successor.release_gpus()
    # Nothing is asked for now, so nothing is lost; who only reports may be the one that trains.
    assert trainer.report_progress(7, target=10)
    assert demand(fleet)["spec"]["trainer"]["podUID"] == "pod-1"


def test_lost_answers_change_nothing(fleet: Fleet, proxied: Client, proxy: FaultProxy) -> None:
    created = proxy.strike(Rule(lambda call: call.method == "POST", Fault.DROP))
    proxied.report_progress(5, target=10)
    patched = proxy.strike(Rule(lambda call: call.method == "PATCH", Fault.DROP))
    proxied.report_progress(10, target=10)
    assert (created.struck, patched.struck) == (1, 1)
    assert [s["collected"] for s in demand(fleet)["spec"]["streams"]] == [10]


def test_a_trainer_that_may_not_is_told_what_to_grant(cluster: LocalCluster, fleet: Fleet, tmp_path: Path) -> None:
    token = grant(cluster, fleet.namespace, [rule("rlpipelines", "get")])
    server = credentials.find(cluster.kubeconfig).server
    path = tmp_path / "kubeconfig"
    pki.write_kubeconfig(path, server, cluster.state / "pki" / "ca.crt", token=token, namespace=fleet.namespace)
    with (
        Client(fleet.namespace, "demo", path) as client,
        pytest.raises(Forbidden, match=r'Grant the verb "get" on trainerdemands\.rlfleet\.dev'),
    ):
        client.report_progress(1, target=2)


async def test_the_same_from_an_event_loop(cluster: LocalCluster, fleet: Fleet) -> None:
    async with AsyncClient(fleet.namespace, "demo", cluster.kubeconfig, pod_uid="pod-1") as client:
        assert await client.report_progress(5, target=10)

        async def step() -> None:
            async with client.train_gpus(3, timeout=SECONDS) as grant:
                assert grant.granted
                raise RuntimeError("the step failed")

        running = asyncio.ensure_future(step())
        await asyncio.to_thread(answer, fleet, granted=True)
        with pytest.raises(RuntimeError, match="the step failed"):
            await running
        assert await asyncio.to_thread(wants, fleet) == []
        # Cancelled while it waits: what it asked for is withdrawn.
        waiting = asyncio.ensure_future(step())
        await asyncio.to_thread(until, lambda: wants(fleet), "request")
        waiting.cancel()
        await asyncio.to_thread(answer, fleet, granted=True)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(wants, fleet) == []
