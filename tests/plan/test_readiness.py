"""Pods whose readiness is the router: which condition they get, and how they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.plan.lifecycle import Derived, adopted_fact, pod_fact
from rlfleet.plan.pods import READY_WHEN_PROVEN_ENV, build_pod
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.readiness import changes, label_changes
from rlfleet.plan.template import GATE, is_outdated, template_hash
from rlfleet.router.readiness import pod_condition
from tests.plan.pool_kit import fact, gate, pool

READINESS = [{"name": "service", "type": "Readiness"}]
S = EngineState


def row(index: int, state: EngineState, current: bool | None, reason: Reason | None = None, **pod: Any) -> Row:
    return Row(fact(index, current=current, **pod), Derived(state, reason, "why"), gate(), answered=True)


def test_only_what_differs_is_written_and_withdrawals_come_first() -> None:
    rows = [
        row(0, S.ACTIVE, False),
        row(1, S.ACTIVE, True),
        row(2, S.QUARANTINED, True, Reason.POISONED),
        row(3, S.LOADING, False),
        row(4, S.DRAINING, True, Reason.SCALING_DOWN),
    ]
    found = changes(rows, operating=False)
    assert [(c.uid, c.current) for c in found] == [("uid-2", False), ("uid-4", False), ("uid-0", True)]
    assert (found[0].reason, found[0].message) == ("Poisoned", "why")


@pytest.mark.parametrize("state", [s for s in EngineState if s is not S.ACTIVE])
def test_no_other_state_than_active_is_admitted(state: EngineState) -> None:
    assert changes([row(0, state, False)], operating=False) == ()
    assert [c.current for c in changes([row(0, state, True)], operating=False)] == [False]


def test_an_engine_whose_gate_was_not_heard_yet_keeps_its_condition() -> None:
    """As a new operator finds it: the pod is Ready, and its gate has not answered this process."""

    def unheard(state: EngineState, **pod: Any) -> Row:
        return replace(row(0, state, True, **pod), gate=None, answered=False)

    assert changes([unheard(S.BOOTING), unheard(S.PENDING)], operating=False) == ()
    assert [c.current for c in changes([unheard(S.DRAINING)], operating=False)] == [False]
    # What the kubelet restarted in place is another engine, whatever its gate may say.
    assert [c.current for c in changes([unheard(S.BOOTING, process="docker://2")], operating=False)] == [False]


def test_pods_without_the_gate_or_on_their_way_out_are_left_alone() -> None:
    rows = [row(0, S.ACTIVE, None), row(1, S.DRAINING, True, deleting=True), row(2, S.FAILED, True, finished=True)]
    assert changes(rows, operating=False) == ()


def test_an_engine_that_a_round_closed_stays_admitted_and_one_that_failed_does_not() -> None:
    rows = [row(0, S.LOADING, True, Reason.CATCH_UP_PENDING), row(1, S.QUARANTINED, True, Reason.POISONED)]
    assert [(c.uid, c.current) for c in changes(rows, operating=True)] == [("uid-1", False)]
    assert [c.uid for c in changes(rows, operating=False)] == ["uid-0", "uid-1"]
    # It holds the committed version already: somebody is about to open it.
    assert changes([row(0, S.LOADING, True, Reason.ENGINES_CLOSED)], operating=False) == ()
    # What it opens again is admitted while it still runs.
    assert [c.current for c in changes([row(0, S.ACTIVE, False)], operating=True)] == [True]


def test_a_label_follows_the_same_states() -> None:
    rows = [
        row(0, S.ACTIVE, None),
        row(1, S.ACTIVE, None, serving=True),
        row(2, S.QUARANTINED, None, Reason.POISONED, serving=True),
        row(3, S.LOADING, None, Reason.CATCH_UP_PENDING, serving=True),
        row(4, S.DRAINING, None, deleting=True, serving=True),
    ]
    found = label_changes(rows, operating=False, by_label=True)
    assert [(c.uid, c.current) for c in found] == [("uid-2", False), ("uid-3", False), ("uid-0", True)]
    # A round alone changes none.
    assert [c.uid for c in label_changes(rows, operating=True, by_label=True)] == ["uid-2", "uid-0"]


def test_no_pod_keeps_the_label_where_no_router_goes_by_it() -> None:
    rows = [row(0, S.ACTIVE, None), row(1, S.ACTIVE, None, serving=True), row(2, S.LOADING, None, serving=True)]
    found = label_changes(rows, operating=True, by_label=False)
    assert [(c.uid, c.current) for c in found] == [("uid-1", False), ("uid-2", False)]


def test_a_pod_is_made_without_the_label_whatever_its_template_says() -> None:
    made = pool(routers=[{"name": "gateway", "type": "InferencePool"}])
    made["spec"]["source"]["template"]["metadata"] = {"labels": {labels.SERVING: "true", "app": "x"}}
    pod = build_pod(made, 0, "a-0", public_keys={})
    assert labels.SERVING not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"]["app"] == "x"
    pod["metadata"]["uid"] = "u"
    assert pod_fact(pod, owner_uid="pool-uid").serving is False
    pod["metadata"]["labels"][labels.SERVING] = "true"
    assert pod_fact(pod, owner_uid="pool-uid").serving is True
    assert adopted_fact(pod, 0).serving is False, "labels of adopted pods are never taken away"
    pod["metadata"]["labels"][labels.SERVING] = "no"
    assert pod_fact(pod, owner_uid="pool-uid").serving is False, "no selector of ours finds it"


def test_the_condition_names_the_pod_that_is_meant() -> None:
    (wanted,) = changes([row(0, S.ACTIVE, False)], operating=False)
    body = pod_condition("ns", wanted, "2026-01-01T00:00:00Z")
    assert body["metadata"] == {"name": "a-0-x", "namespace": "ns", "uid": "uid-0"}
    (condition,) = body["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("rlfleet.dev/weights-current", "True")


def test_pods_of_such_pools_bear_the_gate_and_others_do_not() -> None:
    template = {"containers": [{"name": "engine", "image": "e"}], "readinessGates": [{"conditionType": "mine"}]}
    pod = build_pod(pool(routers=READINESS, pod_spec=template), 0, "a-0", public_keys={})
    assert pod["spec"]["readinessGates"] == [{"conditionType": "mine"}, {"conditionType": labels.WEIGHTS_CURRENT}]
    env = {e["name"] for c in pod["spec"]["initContainers"] if c["name"] == GATE for e in c["env"]}
    assert READY_WHEN_PROVEN_ENV in env
    plain = build_pod(pool(), 0, "a-0", public_keys={})
    assert "readinessGates" not in plain["spec"]
    assert all(e["name"] != READY_WHEN_PROVEN_ENV for e in plain["spec"]["initContainers"][-1]["env"])
    # Readiness gates of a pod cannot be changed, so its pod is outdated.
    assert is_outdated(pool(routers=READINESS), template_hash(pool()), "", 0)


@pytest.mark.parametrize(("conditions", "current"), [([], False), (["True"], True), (["False"], False)])
def test_a_pod_s_condition_is_read(conditions: list[str], current: bool) -> None:
    pod = build_pod(pool(routers=READINESS), 0, "a-0", public_keys={})
    pod["metadata"]["uid"] = "u"
    pod["status"] = {"conditions": [{"type": labels.WEIGHTS_CURRENT, "status": s} for s in conditions]}
    assert pod_fact(pod, owner_uid="pool-uid").current is current
    del pod["spec"]["readinessGates"]
    assert pod_fact(pod, owner_uid="pool-uid").current is None
