"""Events at the real apiserver: once per thing said, bounded per object, and never in the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.kube.client import KubeClient
from rlfleet.kube.events import SIMILAR, EventRecorder
from rlfleet.kube.resources import EVENTS
from tests.kube.proxy import Mode, Proxy


def subject(namespace: str, name: str = "a") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
    return {"apiVersion": "rlfleet.dev/v1alpha1", "kind": "EnginePool", "metadata": metadata}


async def written(kube: KubeClient, namespace: str) -> list[dict[str, Any]]:
    return (await kube.list(EVENTS, namespace, timeout=60)).items


@pytest.mark.cluster
async def test_the_same_thing_is_said_once_and_another_thing_again(kube: KubeClient, namespace: str) -> None:
    recorder = EventRecorder(kube, instance="me")
    for _ in range(5):
        recorder.record(subject(namespace), "Warning", "PodFailed", "a-0 failed")
    recorder.record(subject(namespace), "Warning", "PodFailed", "a-1 failed")
    recorder.record(subject(namespace, "b"), "Normal", "PodCreated", "x" * 5000)
    recorder.record(subject(namespace, "c"), "Warning", "PodFailed", "x" + "\N{SNOWMAN}" * 1000)
    await recorder.flush(10)
    events = await written(kube, namespace)
    assert sorted((e["regarding"]["name"], e["reason"], e["note"][:10]) for e in events) == [
        ("a", "PodFailed", "a-0 failed"),
        ("a", "PodFailed", "a-1 failed"),
        ("b", "PodCreated", "xxxxxxxxxx"),
        ("c", "PodFailed", "x" + "\N{SNOWMAN}" * 9),
    ]
    assert recorder.dropped == 0


@pytest.mark.cluster
async def test_one_object_gets_a_bounded_number(kube: KubeClient, namespace: str) -> None:
    recorder = EventRecorder(kube, instance="me", burst=3)
    for i in range(10):
        recorder.record(subject(namespace), "Normal", "PodCreated", f"pod {i}")
    recorder.record(subject(namespace, "b"), "Normal", "PodCreated", "of another object")
    await recorder.flush(10)
    assert len(await written(kube, namespace)) == 4
    assert recorder.dropped == 7


@pytest.mark.cluster
async def test_events_that_cannot_be_written_are_dropped_and_later_ones_are_not(
    kube: KubeClient, proxied: KubeClient, proxy: Proxy, namespace: str
) -> None:
    recorder = EventRecorder(proxied, instance="me", api_timeout=60)
    task = asyncio.create_task(recorder.run())
    await proxied.list(EVENTS, namespace, timeout=60)
    proxy.mode = Mode.CUT
    recorder.record(subject(namespace), "Normal", "PodCreated", "lost")
    async with asyncio.timeout(120):
        while not recorder.dropped:
            await asyncio.sleep(0.02)
    proxy.mode = Mode.PASS
    recorder.record(subject(namespace), "Normal", "PodCreated", "kept")
    # Nobody has heard the other one, so it is no repetition.
    recorder.record(subject(namespace), "Normal", "PodCreated", "lost")
    async with asyncio.timeout(120):
        while {e["note"] for e in await written(kube, namespace)} != {"kept", "lost"}:
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_repeats_are_said_again_after_a_while_and_the_allowance_refills() -> None:
    async def nowhere() -> Any:
        raise AssertionError("nothing is sent here")

    recorder = EventRecorder(KubeClient(nowhere), instance="me", burst=1, refill_seconds=30, repeat_seconds=100)
    recorder.record(subject("ns"), "Normal", "PodCreated", "one")
    recorder.record(subject("ns"), "Normal", "PodCreated", "two")
    assert recorder.dropped == 1
    await asyncio.sleep(30)
    recorder.record(subject("ns"), "Normal", "PodCreated", "two")
    assert recorder.dropped == 1
    await asyncio.sleep(31)
    recorder.record(subject("ns"), "Normal", "PodCreated", "one")
    assert recorder.dropped == 1, "said within 100 s: not counted, not repeated"
    await asyncio.sleep(60)
    recorder.record(subject("ns"), "Normal", "PodCreated", "one")
    assert recorder.pending == 3


@pytest.mark.cluster
async def test_what_repeats_is_counted_in_its_event(kube: KubeClient, namespace: str) -> None:
    recorder = EventRecorder(kube, instance="me", repeat_seconds=0.0)
    for _ in range(3):
        recorder.record(subject(namespace), "Warning", "PodFailed", "a-0 failed")
        await recorder.flush(10)
    (event,) = await written(kube, namespace)
    assert event["series"]["count"] == 3
    # Events expire: then it is said anew.
    name, uid = event["metadata"]["name"], event["metadata"]["uid"]
    await kube.delete(EVENTS, namespace, name, uid=uid, timeout=60)
    recorder.record(subject(namespace), "Warning", "PodFailed", "a-0 failed")
    await recorder.flush(10)
    (again,) = await written(kube, namespace)
    assert (again["note"], again.get("series")) == ("a-0 failed", None)


@pytest.mark.looptime
async def test_many_notes_of_one_reason_become_one() -> None:
    async def nowhere() -> Any:
        raise AssertionError("nothing is sent here")

    recorder = EventRecorder(KubeClient(nowhere), instance="me", burst=1000)
    for i in range(500):
        recorder.record(subject("ns"), "Warning", "PodFailed", f"engine {i} failed")
    assert recorder.pending == SIMILAR + 1
    recorder.record(subject("ns"), "Warning", "PodFailed", "engine 3 failed")
    recorder.record(subject("ns"), "Warning", "PodLost", "engine 3 is lost")
    recorder.record(subject("ns", "b"), "Warning", "PodFailed", "engine 3 failed")
    assert recorder.pending == SIMILAR + 3
    await asyncio.sleep(601)
    recorder.record(subject("ns"), "Warning", "PodFailed", "engine 501 failed")
    assert recorder.pending == SIMILAR + 4


async def test_a_reason_that_is_in_no_list_is_refused() -> None:
    async def nowhere() -> Any:
        raise AssertionError("nothing is sent here")

    with pytest.raises(ValueError, match="SomethingElse"):
        EventRecorder(KubeClient(nowhere), instance="me").record(subject("ns"), "Normal", "SomethingElse", "x")


@pytest.mark.cluster
async def test_a_namespace_that_goes_is_told_nothing_for_a_while(
    cluster: LocalCluster, kube: KubeClient, namespace: str
) -> None:
    going = f"{namespace}-going"
    cluster.kubectl("create", "namespace", going)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "holds", "namespace": going, "finalizers": ["test.rlfleet.dev/holds"]},
        }
    )
    try:
        cluster.kubectl("delete", "namespace", going, "--wait=false")
        recorder = EventRecorder(kube, instance="me")
        task = asyncio.create_task(recorder.run())
        recorder.record(subject(going), "Normal", "PodCreated", "refused")
        async with asyncio.timeout(120):
            while not recorder.dropped:
                await asyncio.sleep(0.02)
        recorder.record(subject(going), "Normal", "PodCreated", "not even tried")
        assert (recorder.pending, recorder.dropped) == (0, 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        patch = '{"metadata":{"finalizers":null}}'
        cluster.kubectl("patch", "configmap", "holds", "-n", going, "--type=merge", "-p", patch)
