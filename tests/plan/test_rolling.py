"""Rolling updates: which pods of an earlier template are replaced next, and against any mixture of pods and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.conditions import Reason
from rlfleet.plan.budget import Allowance, allowances, plan_budget, uncounted, wanted_budget
from rlfleet.plan.pool import PoolView, plan_pods
from rlfleet.plan.rolling import (
    Candidate,
    plan_rolling,
    rolling_limit,
)
from tests.plan.pool_kit import fact, pool


def pods(*marks: str) -> list[Candidate]:
    """By index: ``O`` old and serving, ``o`` old and not, ``N`` and ``n`` new, ``?`` old and unknown, ``-`` none."""
    return [
        Candidate(f"uid-{i}", i, m in "Oo?", None if m == "?" else m.isupper()) for i, m in enumerate(marks) if m != "-"
    ]


def chosen(marks: str, *, limit: int = 1, **more: Any) -> list[int]:
    found = plan_rolling(pods(*marks), wanted=len(marks), limit=limit, **more)
    return sorted(int(uid.split("-")[1]) for uid in found.replace)


@pytest.mark.parametrize(
    ("marks", "limit", "expected"),
    [
        ("NNN", 1, []),
        ("OOO", 1, [2]),
        ("OOO", 2, [1, 2]),
        ("OON", 1, [1]),
        ("OOn", 1, []),
        ("OO-", 1, []),
        ("Oo-", 1, [1]),
        ("oOO", 1, [0]),
        ("oOO", 2, [0, 2]),
        ("O?O", 3, []),
        ("ooo", 1, [0, 1, 2]),
    ],
)
def test_who_is_replaced_next(marks: str, limit: int, expected: list[int]) -> None:
    assert chosen(marks, limit=limit) == expected


def test_a_pod_in_quarantine_stays_and_counts_as_out_of_service() -> None:
    held = [replace(p, kept=True, serves=False) if p.index == 2 else p for p in pods(*"OOO")]
    found = plan_rolling(held, wanted=3, limit=1)
    assert found.replace == frozenset()
    assert "1 of them are in quarantine" in found.waits[0][1]
    assert plan_rolling(held, wanted=3, limit=2).replace == {"uid-1"}
    # Not closed yet: its pod stays all the same.
    open_one = [replace(p, kept=True) if p.index == 2 else p for p in pods(*"OOO")]
    assert plan_rolling(open_one, wanted=3, limit=1).replace == {"uid-1"}


def test_while_others_own_the_engines_the_wish_waits_and_says_so() -> None:
    found = plan_rolling(pods(*"OO"), wanted=2, limit=1, owned=True)
    assert found.replace == frozenset()
    assert [reason for reason, _ in found.waits] == [Reason.ROUND_IN_PROGRESS]
    assert plan_rolling(pods(*"NN"), wanted=2, limit=1, owned=True).waits == ()


def test_nobody_is_taken_while_nothing_can_be_made_in_its_place() -> None:
    found = plan_rolling(pods(*"oOO"), wanted=3, limit=2, obstacle="quota")
    assert found.replace == frozenset()
    assert found.waits[0][0] is Reason.UPDATING
    assert "quota" in found.waits[0][1]
    # A trainer has the devices of these: what is made in their place would have none.
    held = [replace(p, held=p.index != 0) for p in pods(*"OoO")]
    assert plan_rolling(held, wanted=3, limit=3).replace == {"uid-0"}


def test_every_budget_is_kept_and_the_one_that_refuses_is_named() -> None:
    every = frozenset({"uid-0", "uid-1", "uid-2"})
    assert chosen("OOO", limit=3, budgets=[Allowance("a", every, 2)]) == [1, 2]
    assert chosen("OOO", limit=3, budgets=[Allowance("a", every, 2), Allowance("b", frozenset({"uid-2"}), 0)]) == [0, 1]
    found = plan_rolling(pods(*"OOO"), wanted=3, limit=3, budgets=[Allowance("a", every, 0)])
    assert found.replace == frozenset()
    assert "PodDisruptionBudget a" in found.waits[0][1]


@given(
    st.lists(st.sampled_from("OoNn-?"), min_size=1, max_size=12),
    st.integers(1, 12),
    st.lists(st.tuples(st.sets(st.integers(0, 11)), st.integers(0, 4)), max_size=3),
    st.booleans(),
)
def test_never_more_out_of_service_than_allowed(
    marks: list[str], limit: int, budgets: list[tuple[set[int], int]], owned: bool
) -> None:
    found = pods(*marks)
    allowed = [Allowance(f"b{n}", frozenset(f"uid-{i}" for i in who), k) for n, (who, k) in enumerate(budgets)]
    plan = plan_rolling(found, wanted=len(marks), limit=limit, budgets=allowed, owned=owned)
    picked = [p for p in found if p.uid in plan.replace]
    assert all(p.outdated for p in picked)
    taken = [p for p in picked if p.serves]
    out = len(marks) - sum(p.serves is True for p in found)
    assert len(taken) <= max(0, limit - out)
    for b in allowed:
        assert sum(p.uid in b.pods for p in taken) <= b.allowed
    if owned or "?" in marks:
        assert not picked
    elif not taken and "O" in marks and out < limit:
        assert all(any(p.uid in b.pods and b.allowed == 0 for b in allowed) for p in found if p.outdated and p.serves)


@given(st.lists(st.sampled_from("OoNn"), min_size=1, max_size=8), st.integers(1, 8))
def test_it_comes_to_an_end(marks: list[str], limit: int) -> None:
    """Whoever is chosen goes and comes back new; whoever is new and not serving comes to serve."""
    for _ in range(4 * len(marks)):
        picked = set(chosen("".join(marks), limit=limit))
        marks = ["n" if i in picked else "N" if m == "n" else m for i, m in enumerate(marks)]
    assert set(marks) == {"N"}


def test_limits() -> None:
    def limit(value: object) -> int:
        return rolling_limit(pool(updateStrategy={"type": "RollingUpdate", "maxUnavailable": value}), 8)

    assert [limit(v) for v in (None, 0, 3, "0%", "25%", "30%")] == [1, 1, 3, 1, 2, 3]


def test_a_chosen_pod_leaves_the_routers_and_drains_before_it_goes() -> None:
    old = (fact(0), fact(1))
    view = {"name": "a", "uid": "pool-uid", "replicas": 2, "pods": old, "outdated": frozenset({"uid-1"})}
    first = plan_pods(PoolView(**view))
    assert [p.uid for p in first.unroute] == ["uid-1"]
    assert (first.delete, first.draining) == ((), frozenset({"uid-1"}))
    then = plan_pods(PoolView(**view, unrouted=frozenset({"uid-1"}), drained=frozenset({"uid-1"})))
    assert [(d.pod.uid, d.reason) for d in then.delete] == [("uid-1", Reason.UPDATING)]
    assert then.create == ()


# ------------------------------------------------------------------------------------------ budgets


def test_a_pool_has_a_budget_and_writes_it_only_when_it_says_something_else() -> None:
    mine = pool()
    body = plan_budget(mine, None).create
    assert body is not None
    assert body["spec"]["maxUnavailable"] == 1
    assert body["spec"]["selector"] == {"matchLabels": {"rlfleet.dev/pool": "a"}}
    there = body | {"metadata": body["metadata"] | {"uid": "u", "resourceVersion": "5"}}
    same = plan_budget(mine, there)
    assert (same.create, same.replace, same.delete, same.taken) == (None, None, "", False)
    other = plan_budget(pool(disruptionBudget={"maxUnavailable": "50%"}), there).replace
    assert other is not None
    assert other["spec"]["maxUnavailable"] == "50%"
    assert other["metadata"]["resourceVersion"] == "5"
    assert plan_budget(mine, there | {"spec": {"minAvailable": 1}}).replace is not None


def test_pods_that_spec_active_keeps_from_being_made_use_no_allowance_up() -> None:
    """Kubernetes counts from spec.replicas: 8 - 4 pods are there, and of these the asked number may be evicted."""

    def told(**spec: Any) -> Any:
        body = wanted_budget(pool(replicas=8, **spec))
        assert body is not None
        return body["spec"]["maxUnavailable"]

    assert told(active=4) == 5
    assert told(active=4, disruptionBudget={"maxUnavailable": 0}) == 4
    assert told(active=4, disruptionBudget={"maxUnavailable": "30%"}) == 6
    assert (told(), told(active=8), told(active=9)) == (1, 1, 1)
    assert told(disruptionBudget={"maxUnavailable": "30%"}) == "30%"
    # With Offload the others have pods, which sleep.
    assert told(active=4, shrink="Offload") == 1


def test_pods_that_are_not_made_because_a_trainer_has_their_devices_use_no_allowance_up() -> None:
    mine = pool(replicas=4, disruptionBudget={"maxUnavailable": "50%"})
    there = plan_budget(mine, None).create
    assert there is not None
    there["metadata"] |= {"uid": "u"}
    found = plan_budget(mine, there, vacated=2).replace
    assert found is not None
    assert found["spec"]["maxUnavailable"] == 3, "half of the two that are there, and the two that are not"
    assert plan_budget(mine, there).replace is None


def test_adopted_pods_that_nobody_controls_get_no_budget_that_kubernetes_can_not_keep() -> None:
    source = {"adopt": {"selector": {"matchLabels": {"app": "x"}}}}
    asking = pool(source=source, disruptionBudget={"maxUnavailable": 1})
    bare: dict[str, Any] = {"metadata": {"name": "bare"}}
    kept = {"metadata": {"name": "kept", "ownerReferences": [{"controller": True}]}}
    over = {"metadata": {"name": "over"}, "status": {"phase": "Failed"}}
    assert uncounted(asking, [bare, kept, over]) == ("bare",)
    assert uncounted(asking, [kept]) == ()
    assert uncounted(pool(source=source), [bare]) == (), "it asks for none"
    assert uncounted(pool(), [bare]) == (), "made by the pool, which has a scale"
    assert plan_budget(asking, None, countable=False) == plan_budget(pool(source=source), None)
    there = wanted_budget(asking)
    assert there is not None
    there["metadata"] |= {"uid": "u"}
    assert plan_budget(asking, there, countable=False).delete == "u"


def test_a_budget_without_a_selector_is_for_nobody_and_an_empty_one_for_everybody() -> None:
    pod = {"metadata": {"uid": "u", "labels": {"app": "x"}}}
    budget: dict[str, Any] = {"metadata": {"name": "b"}, "spec": {}, "status": {}}
    assert allowances([budget], [pod]) == ()
    budget["spec"]["selector"] = None
    assert allowances([budget], [pod]) == ()
    budget["spec"]["selector"] = {}
    assert [a.pods for a in allowances([budget], [pod])] == [frozenset({"u"})]


def test_a_budget_of_somebody_else_is_left_alone() -> None:
    found = plan_budget(pool(), {"metadata": {"name": "a", "uid": "u"}, "spec": {"minAvailable": 1}})
    assert (found.create, found.replace, found.delete, found.taken) == (None, None, "", True)


def test_adopted_pods_get_a_budget_only_where_it_is_asked_for() -> None:
    source = {"adopt": {"selector": {"matchLabels": {"app": "x"}}}}
    adopting = pool(source=source)
    assert wanted_budget(adopting) is None
    asked = wanted_budget(pool(source=source, disruptionBudget={"maxUnavailable": 2}))
    assert asked is not None
    assert asked["spec"]["selector"] == {"matchLabels": {"app": "x"}}
    there = asked | {"metadata": asked["metadata"] | {"uid": "u"}}
    assert plan_budget(adopting, there).delete == "u"


def test_a_budget_that_was_not_looked_at_yet_allows_nobody() -> None:
    pod = {"metadata": {"uid": "u", "labels": {"app": "x"}}}
    budget: dict[str, Any] = {
        "metadata": {"name": "b", "generation": 2},
        "spec": {"selector": {"matchLabels": {"app": "x"}}},
        "status": {"observedGeneration": 1, "disruptionsAllowed": 3},
    }
    assert [a.allowed for a in allowances([budget], [pod])] == [0]
    budget["status"]["observedGeneration"] = 2
    assert [(a.allowed, a.pods) for a in allowances([budget], [pod])] == [(3, frozenset({"u"}))]
    budget["spec"]["selector"]["matchLabels"] = {"app": "y"}
    assert allowances([budget], [pod]) == ()
