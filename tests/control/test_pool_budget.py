"""What a rolling update knows of an engine before it takes one away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.context import ControlSettings
from rlfleet.control.pool_budget import rolling, serves
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS
from tests.plan.pool_kit import fact, gate, pool
from tests.web.apiserver import Apiserver

READY = fact(0)
NOBODY: frozenset[int] = frozenset()


def test_an_engine_serves_by_its_state() -> None:
    memory = PoolMemory("pool-uid", gates={READY.uid: gate()})
    assert serves(READY, memory) is None
    for state in EngineState:
        memory.note_state(READY, state, 0)
        assert serves(READY, memory) is (state in (EngineState.ACTIVE, EngineState.OFFLOADED))


def test_a_ready_pod_whose_gate_was_not_heard_yet_is_unknown() -> None:
    """A new operator shows it as booting: it must not be taken for one that is out of service already."""
    memory = PoolMemory("pool-uid")
    memory.note_state(READY, EngineState.BOOTING, 0)
    assert serves(READY, memory) is None
    never_up = fact(1, ready=False)
    memory.note_state(never_up, EngineState.BOOTING, 0)
    assert serves(never_up, memory) is False


@pytest.mark.parametrize(
    ("obstacle", "demanded", "taken"),
    [("", NOBODY, {"uid-1"}), ("exceeded quota", NOBODY, set()), ("", frozenset({1}), {"uid-0"})],
)
async def test_an_engine_is_taken_only_where_another_can_be_made(
    obstacle: str, demanded: frozenset[int], taken: set[str]
) -> None:
    mine = pool(replicas=2, updateStrategy={"type": "RollingUpdate"})
    facts = [fact(i, template_hash="v1-0") for i in range(2)]
    memory = PoolMemory("pool-uid", gates={f.uid: gate() for f in facts})
    for one in facts:
        memory.note_state(one, EngineState.ACTIVE, 0)
    asked: list[str] = []

    async def why() -> str:
        asked.append(obstacle)
        return obstacle

    served = Apiserver({})
    await served.server.start_server()

    async def source() -> Credentials:
        return Credentials(str(served.server.make_url("")).rstrip("/"), authorization="Bearer all")

    try:
        async with KubeClient(source) as kube:
            ctx = SimpleNamespace(kube=kube, pods=Reflector(kube, PODS), settings=ControlSettings())
            how = {"demanded": demanded, "obstacle": why}
            found = await rolling(ctx, mine, facts, memory, [], owned=False, **how)  # type: ignore[arg-type]
            assert found.replace == taken
            assert asked == [obstacle]
            assert (obstacle in found.waits[0][1]) is True
            owned = await rolling(ctx, mine, facts, memory, [], owned=True, **how)  # type: ignore[arg-type]
            assert (owned.replace, len(asked)) == (frozenset(), 1), "nobody is asked for nothing"
    finally:
        await served.server.close()
