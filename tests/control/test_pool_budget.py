"""What a rolling update knows of an engine before it takes one away."""

from __future__ import annotations

from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.pool_budget import serves
from rlfleet.control.pool_memory import PoolMemory
from tests.plan.pool_kit import fact, gate

READY = fact(0)


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
