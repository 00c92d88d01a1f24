"""Engines that ended as if they were asked to: who asked stands in the kubelet's Events, if it was the kubelet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlfleet.control.context import ControlSettings
from rlfleet.control.pool_endings import explain
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.plan.lifecycle import PodFact
from tests.plan.pool_kit import fact, pool
from tests.web.apiserver import Apiserver

OBEYED = "engine ended with exit code 0 (Completed)"
EVICTION: dict[str, Any] = {
    "metadata": {"name": "x"},
    "reason": "Evicted",
    "note": "Usage of EmptyDir volume exceeds the limit",
    "regarding": {"kind": "Pod", "uid": "uid-0"},
}


def over(index: int, **changes: Any) -> PodFact:
    """An engine's pod that is over, and whose status keeps to itself why."""
    state = {"finished": True, "phase": "Succeeded", "failure": OBEYED, "unexplained": True}
    return replace(fact(index), **{**state, **changes})


async def told(memory: PoolMemory, *failed: PodFact, token: str = "all") -> tuple[list[str], list[str]]:
    """What is said of these pods, and what the apiserver was asked for to say it."""
    served = Apiserver({"events": [EVICTION]})
    await served.server.start_server()

    async def source() -> Credentials:
        return Credentials(str(served.server.make_url("")).rstrip("/"), authorization=f"Bearer {token}")

    try:
        async with KubeClient(source) as kube:
            ctx = SimpleNamespace(kube=kube, settings=ControlSettings())
            said = await explain(ctx, pool(), failed, memory)  # type: ignore[arg-type]
    finally:
        await served.server.close()
    return [f.failure for f in said], [path for path, _ in served.seen]


async def test_the_kubelet_s_words_are_told_where_the_pod_s_status_lost_them() -> None:
    memory = PoolMemory("pool")
    evicted, exited = over(0), over(1)
    failed, _ = memory.see([evicted, exited], 0)
    words, asked = await told(memory, *failed)
    assert words == [f"Evicted: {EVICTION['note']}", OBEYED]
    assert len(asked) == 1, "one call, however many ended"
    # In status too, for as long as the pod is there.
    assert [f.failure for f in memory.explained([evicted, exited])] == words
    memory.see([], 1)
    assert memory.words == {}


async def test_a_pod_that_is_gone_when_its_end_is_told_leaves_nothing_behind() -> None:
    memory = PoolMemory("pool")
    memory.see([over(0, phase="Running")], 0)
    failed, _ = memory.see([], 1)
    words, _ = await told(memory, *failed)
    assert words == [f"Evicted: {EVICTION['note']}"]
    assert memory.words == {}


@pytest.mark.parametrize("known", ["Evicted: the node was low on memory", "engine ended with exit code 137 (Error)"])
async def test_an_end_that_explains_itself_costs_no_call(known: str) -> None:
    words, asked = await told(PoolMemory("pool"), over(0, failure=known, unexplained=False))
    assert (words, asked) == ([known], [])


async def test_a_refusal_of_the_apiserver_leaves_the_status_own_words() -> None:
    words, asked = await told(PoolMemory("pool"), over(0), token="one")
    assert (words, len(asked)) == ([OBEYED], 1)
