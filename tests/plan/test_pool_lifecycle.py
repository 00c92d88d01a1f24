"""States of engines: what is proven, what is unknown, and which changes are not believed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import EngineState as Process
from rlfleet.api.wire import ErrorReason, GateStatus, MemoryTag, OperationState
from rlfleet.plan.lifecycle import TRANSITIONS, Closed, Derived, Sleep, derive, pod_fact, refuse
from tests.plan.pool_kit import COMMITTED, OLD_DIGEST, fact, gate

S = EngineState
R = frozenset({"r"})
OPEN = gate(routed={"r": True})


def state(status: GateStatus | None, **how: Any) -> Derived:
    return derive(
        how.pop("pod", fact(0)),
        status,
        committed=how.pop("committed", COMMITTED),
        routers=how.pop("routers", R),
        **how,
    )


@pytest.mark.parametrize(
    ("status", "expected", "reason"),
    [
        (OPEN, S.ACTIVE, None),
        (gate(routed={"r": False}), S.LOADING, Reason.ENGINES_CLOSED),
        (gate(routed={"r": None}), S.LOADING, Reason.ROUTER_UNREACHABLE),
        (gate(routed={}), S.LOADING, Reason.ROUTER_UNREACHABLE),
        (gate(routed={"r": True}, paused=True), S.LOADING, Reason.ENGINES_CLOSED),
        (gate(routed={"r": True}, paused=None), S.LOADING, Reason.ROUTER_UNREACHABLE),
        (gate(routed={"r": True}, uncertain=True), S.QUARANTINED, Reason.UNCERTAIN),
        (gate(holds=None, routed={"r": False}), S.LOADING, Reason.CATCH_UP_PENDING),
        (gate(holds=(11, OLD_DIGEST), routed={"r": False}), S.LOADING, Reason.CATCH_UP_PENDING),
        (gate(holds=(12, OLD_DIGEST), routed={"r": True}), S.QUARANTINED, Reason.VERSIONS_DIFFER),
        (gate(holds=None, load=OperationState.UNKNOWN), S.QUARANTINED, Reason.POISONED),
        (gate(holds=None, load=OperationState.FAILED), S.QUARANTINED, Reason.POISONED),
        (gate(state=Process.STARTING), S.BOOTING, None),
        (gate(incarnation=None), S.BOOTING, None),
    ],
)
def test_of_what_the_gate_says(status: GateStatus, expected: S, reason: Reason | None) -> None:
    found = state(status)
    assert (found.state, found.reason) == (expected, reason)


def test_a_router_that_refuses_to_tell_is_cited() -> None:
    """A key that was changed: people must read what to do where they look, and silence says nothing new each time."""
    told = gate(routed={"r": None}).model_copy(update={"router_refusals": {"r": "HTTP 401: show a key", "s": "no"}})
    assert state(told).message == "whether the engine is open is not known: router r: HTTP 401: show a key"
    assert state(gate(routed={"r": None})).message == "whether the engine is open is not known"


@pytest.mark.parametrize("waiting", [gate(holds=None), gate(holds=None, load=OperationState.FAILED)])
def test_closed_engines_say_what_can_help(waiting: GateStatus) -> None:
    key = (fact(0).name, waiting.incarnation or "")
    given_up = Closed(exhausted={key: "VerifyFailed"}, awaiting="the sender is gone")
    found = state(waiting, closed=given_up)
    assert (found.state, found.reason) == (S.QUARANTINED, Reason.CATCH_UP_EXHAUSTED)
    assert "VerifyFailed" in found.message
    # Of another process nothing is known, and one that serves needs no help.
    other = Closed(exhausted={(key[0], "earlier"): ""})
    assert state(waiting, closed=other) == state(waiting)
    assert state(OPEN, closed=Closed(exhausted={(key[0], OPEN.incarnation or ""): ""})).state is S.ACTIVE


def test_where_only_a_refresh_helps_that_is_said() -> None:
    found = state(gate(holds=None), closed=Closed(awaiting="the sender is gone"))
    assert (found.state, found.reason) == (S.LOADING, Reason.AWAITING_ROUND)


def test_a_version_number_without_its_bytes_is_not_the_committed_version() -> None:
    assert state(gate(holds=(12, OLD_DIGEST), routed={"r": False})).state is not S.ACTIVE


def test_nothing_committed_means_nothing_is_active() -> None:
    found = state(gate(holds=None), committed=None, routers=frozenset())
    assert (found.state, found.reason) == (S.LOADING, Reason.NOTHING_COMMITTED)


def test_without_routers_open_means_not_paused() -> None:
    assert state(gate(), routers=frozenset()).state is S.ACTIVE


@pytest.mark.parametrize("known", [S.LOADING, S.ACTIVE, S.QUARANTINED])
def test_silence_changes_no_state_and_is_said(known: S) -> None:
    found = state(None, previous=known)
    assert (found.state, found.reason) == (known, Reason.GATES_UNREACHABLE)


def test_silence_of_a_pod_that_just_starts_is_no_trouble() -> None:
    assert state(None, pod=fact(0, ready=False, started=False, ip="")).state is S.PENDING
    booting = state(None, pod=fact(0, ready=False))
    assert (booting.state, booting.reason) == (S.BOOTING, None)
    assert state(None, pod=fact(0, ready=True)).reason is Reason.GATES_UNREACHABLE


def test_engine_that_does_not_answer_its_gate_keeps_its_state() -> None:
    hung = gate(state=Process.UNREACHABLE, routed={"r": True})
    assert state(hung, previous=S.ACTIVE) == state(hung, previous=S.ACTIVE)
    assert state(hung, previous=S.ACTIVE).state is S.ACTIVE
    assert state(hung).state is S.LOADING, "it was up once: it holds something"
    assert state(gate(state=Process.UNREACHABLE, holds=None)).state is S.BOOTING


def test_start_that_waits_for_a_router_says_so() -> None:
    waits = gate(state=Process.STARTING, incarnation=None, startup=ErrorReason.ROUTER_UNREACHABLE)
    assert (state(waits).state, state(waits).reason) == (S.BOOTING, Reason.ROUTER_UNREACHABLE)
    normal = gate(state=Process.STARTING, incarnation=None, startup=ErrorReason.NOT_ENROLLED)
    assert state(normal).reason is None


def test_pod_facts_overrule_the_gate() -> None:
    assert state(OPEN, pod=fact(0, finished=True, failure="exit 1")).state is S.FAILED
    assert state(OPEN, pod=fact(0, deleting=True)).state is S.DRAINING
    assert state(OPEN, draining=True).state is S.DRAINING


def test_engine_that_starts_again_in_the_same_pod_is_not_believed() -> None:
    found = state(gate(state=Process.STARTING), previous=S.ACTIVE)
    assert (found.state, found.reason) == (S.QUARANTINED, Reason.IDENTITY_MISMATCH)
    assert state(OPEN, previous=S.FAILED).state is S.FAILED


W, K, G = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
GOING = Sleep(going=True)


@pytest.mark.parametrize(
    ("released", "releasing", "sleep", "expected", "reason"),
    [
        ((W, K), False, Sleep(), S.OFFLOADED, None),
        ((W, K, G), False, GOING, S.OFFLOADED, None),
        # A wake that its gate refused has touched nothing: it sleeps, and that is the trouble.
        ((W, K), False, Sleep(problem=(Reason.WAKE_FAILED, "no room")), S.OFFLOADED, Reason.WAKE_FAILED),
        ((W, K), True, Sleep(), S.DRAINING, Reason.OFFLOADING),
        ((), True, Sleep(), S.DRAINING, Reason.OFFLOADING),
        ((K,), False, Sleep(), S.DRAINING, Reason.HALF_RELEASED),
        ((K, G), False, Sleep(), S.DRAINING, Reason.HALF_RELEASED),
        ((), False, GOING, S.DRAINING, Reason.OFFLOADING),
        ((K,), False, Sleep(problem=(Reason.WAKE_FAILED, "no room")), S.DRAINING, Reason.WAKE_FAILED),
        ((), False, Sleep(going=True, problem=(Reason.ENGINES_BUSY, "3")), S.DRAINING, Reason.ENGINES_BUSY),
        ((), False, Sleep(), S.LOADING, Reason.CATCH_UP_PENDING),
    ],
)
def test_asleep_is_offloaded_and_half_released_drains(
    released: tuple[MemoryTag, ...], releasing: bool, sleep: Sleep, expected: S, reason: Reason | None
) -> None:
    status = gate(holds=None, paused=True, routed={"r": False}).model_copy(
        update={"released": released, "releasing": releasing}
    )
    found = state(status, sleep=sleep)
    assert (found.state, found.reason) == (expected, reason)
    # Silence changes nothing that is known, and an end that is not known is not believed.
    assert state(None, previous=S.OFFLOADED).state is S.OFFLOADED
    unsure = status.model_copy(update={"uncertain": True})
    assert (state(unsure, sleep=sleep).state, state(unsure).reason) == (S.QUARANTINED, Reason.UNCERTAIN)


def test_the_table_of_transitions_is_complete() -> None:
    assert set(TRANSITIONS) == set(S)
    for before in S:
        for after in S:
            why = refuse(before, after)
            assert (why is None) == (before is after or after in TRANSITIONS[before])
            assert why is None or before.value in why or before is S.FAILED
    assert refuse(S.BOOTING, S.OFFLOADED) is None
    assert refuse(S.OFFLOADED, S.LOADING) is None
    assert refuse(S.OFFLOADED, S.BOOTING), "it would be another process"
    assert TRANSITIONS[S.FAILED] == frozenset()


STATUSES = st.one_of(
    st.none(),
    st.builds(
        gate,
        state=st.sampled_from(list(Process)),
        paused=st.sampled_from([True, False, None]),
        holds=st.sampled_from([None, (12, COMMITTED.manifest_digest), (11, OLD_DIGEST)]),
        routed=st.sampled_from([{}, {"r": True}, {"r": False}, {"r": None}]),
        uncertain=st.booleans(),
        load=st.sampled_from([None, OperationState.SUCCEEDED, OperationState.UNKNOWN]),
    ),
)
PODS = st.builds(
    fact,
    st.just(0),
    ready=st.booleans(),
    started=st.booleans(),
    deleting=st.booleans(),
    finished=st.booleans(),
    ip=st.sampled_from(["", "10.0.0.1"]),
)


TAGS = st.sets(st.sampled_from([W, K, G])).map(lambda s: tuple(sorted(s)))


@given(PODS, STATUSES, st.booleans(), st.sampled_from([None, *S]), st.sampled_from([None, COMMITTED]), TAGS, st.data())
def test_any_observation_gives_a_legal_next_state(
    pod: Any, status: Any, draining: bool, previous: Any, committed: Any, tags: Any, data: st.DataObject
) -> None:
    if status is not None:
        status = status.model_copy(update={"released": tags, "releasing": data.draw(st.booleans())})
    sleep = Sleep(going=data.draw(st.booleans()))
    found = derive(pod, status, committed=committed, routers=R, draining=draining, previous=previous, sleep=sleep)
    if found.state is S.OFFLOADED and status is not None and status.engine.state is Process.READY:
        assert {W, K} <= set(tags)
        assert not status.releasing
    if found.state is S.ACTIVE and status is not None and status.engine.state is Process.READY:
        assert tags == ()
    assert previous is None or found.state == previous or found.state in TRANSITIONS[previous] | {S.QUARANTINED}
    if found.state is S.ACTIVE and status is not None and status.engine.state is Process.READY:
        assert committed is not None
        assert status.holds is not None
        assert status.holds.manifest_digest == committed.manifest_digest
        assert status.routed == {"r": True}
        assert status.engine.paused is False


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "a-0-1",
            "uid": "u",
            "labels": {"rlfleet.dev/engine-index": "0"},
            "ownerReferences": [{"uid": "other"}, {"uid": "pool-uid", "controller": True}],
        },
        "spec": {"nodeName": "n"},
        "status": status,
    }


def test_pod_whose_engine_ended_is_finished_even_while_its_sidecar_still_runs() -> None:
    ended = {"name": "engine", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    found = pod_fact(pod(phase="Running", containerStatuses=[ended]), owner_uid="pool-uid")
    assert found.finished
    assert found.failure == "engine ended with exit code 137 (Error)"


def test_pod_that_never_ran_says_why() -> None:
    evicted = pod_fact(pod(phase="Failed", reason="Evicted", message="low on memory"), owner_uid="pool-uid")
    assert (evicted.finished, evicted.failure) == (True, "Evicted: low on memory")
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}
    assert pod_fact(pod(conditions=[unscheduled]), owner_uid="pool-uid").failure == "not scheduled: 0/3 nodes"
    pulling = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    assert "ImagePullBackOff" in pod_fact(pod(containerStatuses=[pulling]), owner_uid="pool-uid").failure


def test_ownership_is_by_uid_of_the_controller() -> None:
    assert pod_fact(pod(), owner_uid="pool-uid").owned
    assert not pod_fact(pod(), owner_uid="other").owned
