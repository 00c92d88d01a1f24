"""Adopted pods: whose they are, under which index, and what is decided differently for them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.plan.adopt import Adopted, adopted, believed, engine_process, indices, is_home
from rlfleet.plan.drops import is_unwanted
from rlfleet.plan.elastic import ceiling, wish
from rlfleet.plan.endings import disruption_of
from rlfleet.plan.holding import on_failure_of
from rlfleet.plan.lifecycle import adopted_fact, pod_fact
from rlfleet.plan.pool import PoolView, plan_pods
from rlfleet.plan.repair import Act, needs
from rlfleet.plan.rounds import Committed, can_join
from tests.plan.pool_kit import fact, pool
from tests.plan.rounds_kit import DIGEST_A, engine, gate


def adopting(name: str, created: str = "2026-01-01T00:00:00Z", **labels: str) -> dict[str, Any]:
    made = pool(source={"adopt": {"selector": {"matchLabels": labels}}}, name=name)
    made["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": created}
    return made


def pod(name: str, *, gated: bool = True, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "namespace": "ns", "labels": labels},
        "spec": {
            "restartPolicy": "Always",
            "initContainers": [{"name": "gate"}] if gated else [],
            "containers": [{"name": "engine"}],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [{"name": "engine", "containerID": "c1", "state": {"running": {}}}],
        },
    }


def names(pods: Any) -> list[str]:
    return [p["metadata"]["name"] for p in pods]


def test_pods_are_engines_by_label_namespace_and_gate() -> None:
    mine = adopting("a", app="x")
    elsewhere = pod("far", app="x")
    elsewhere["metadata"]["namespace"] = "other"
    found = adopted(mine, [mine], [pod("b", app="x"), pod("c", app="y"), elsewhere, pod("d", gated=False, app="x")])
    assert names(found.pods) == ["b"]
    assert found.gateless == ("d",)


def test_of_two_pools_the_older_one_has_the_pod_and_both_know() -> None:
    old, young = adopting("old", app="x"), adopting("young", "2026-01-02T00:00:00Z", tier="t")
    both, one = pod("both", app="x", tier="t"), pod("one", tier="t")
    first, second = (adopted(p, [old, young], [both, one]) for p in (old, young))
    assert (names(first.pods), names(second.pods)) == (["both"], ["one"])
    assert first.contested == (("both", "young", True),)
    assert second.contested == (("both", "old", False),)


def test_pods_of_a_pool_and_pods_that_no_round_can_name_are_not_adopted() -> None:
    mine = adopting("a", app="x")
    made, long = pod("made", app="x"), pod("n" * 64, app="x")
    made["metadata"]["ownerReferences"] = [
        {"controller": True, "kind": "EnginePool", "apiVersion": "rlfleet.dev/v1alpha1", "name": "maker"}
    ]
    found = adopted(mine, [mine], [made, long])
    assert found.pods == ()
    assert found.contested == (("made", "maker", False),)
    assert found.misnamed == ("n" * 64,)


def controlled(made: dict[str, Any], phase: str = "Running") -> dict[str, Any]:
    """The pod as a controller made it."""
    made["metadata"]["ownerReferences"] = [
        {"controller": True, "kind": "ReplicaSet", "apiVersion": "apps/v1", "name": "rs", "uid": "rs"}
    ]
    made["status"]["phase"] = phase
    return made


def test_a_finished_pod_of_a_controller_is_no_engine_and_takes_no_place() -> None:
    mine = adopting("a", app="x")
    pods = [
        controlled(pod("rs-evicted", app="x"), "Failed"),
        controlled(pod("rs-done", app="x"), "Succeeded"),
        controlled(pod("rs-alive", app="x")),
    ]
    found = adopted(mine, [mine], pods)
    assert names(found.pods) == ["rs-alive"]
    assert names(found.ended) == ["rs-done", "rs-evicted"], "their addresses are still to leave the routers"
    assert indices(found.pods) == {"uid-rs-alive": 0}


def test_a_finished_pod_that_a_person_made_stays_an_engine() -> None:
    mine = adopting("a", app="x")
    over = pod("one", app="x")
    over["status"]["phase"] = "Failed"
    found = adopted(mine, [mine], [over])
    assert (names(found.pods), found.ended) == (["one"], ())
    assert adopted_fact(found.pods[0], 0).finished


def test_of_finished_pods_nothing_is_wrong() -> None:
    old, young = adopting("old", app="x"), adopting("young", "2026-01-02T00:00:00Z", tier="t")
    both = controlled(pod("both", app="x", tier="t"), "Failed")
    bare = pod("bare", gated=False, app="x")
    bare["status"]["phase"] = "Succeeded"
    made = controlled(pod("made", app="x"), "Failed")
    made["metadata"]["ownerReferences"][0] |= {"kind": "EnginePool", "apiVersion": "rlfleet.dev/v1alpha1"}
    long = controlled(pod("n" * 64, app="x"), "Failed")
    first, second = (adopted(p, [old, young], [both, bare, made, long]) for p in (old, young))
    assert (first.contested, first.gateless, first.misnamed) == ((), (), ())
    assert (names(first.ended), second) == (["both"], Adopted()), "the older pool takes it out of its routers"


def test_an_index_is_the_makers_number_or_a_free_place_by_age() -> None:
    numbered, odd = pod("s-4"), pod("by-hand")
    labelled = pod("lws", **{"leaderworkerset.sigs.k8s.io/group-index": "1"})
    assert indices([odd, labelled, numbered]) == {"uid-s-4": 4, "uid-lws": 1, "uid-by-hand": 0}
    twins = [pod("a-1"), pod("b-1")]
    assert sorted(indices(twins).values()) == [0, 1]


@given(st.lists(st.sampled_from([f"{s}-{i}" for s in "ab" for i in range(4)] + ["x", "y"]), unique=True), st.randoms())
def test_indices_are_unique_and_do_not_depend_on_the_order(which: list[str], random: Any) -> None:
    pods = [pod(n) for n in which]
    found = indices(pods)
    assert len(set(found.values())) == len(pods)
    random.shuffle(pods)
    assert indices(pods) == found


def test_a_pod_is_at_home_where_it_was_made_or_is_adopted() -> None:
    mine = adopting("a", app="x")
    assert is_home(mine, pod("one", app="x"))
    assert not is_home(mine, pod("one", app="y"))
    assert not is_home(mine, pod("one", gated=False, app="x"))
    made = controlled(pod("made", app="x"))
    made["metadata"]["ownerReferences"][0] |= {
        "kind": "EnginePool",
        "apiVersion": "rlfleet.dev/v1alpha1",
        "name": "maker",
    }
    assert not is_home(mine, made)
    assert is_home(pool(name="maker"), made)


def test_a_container_that_ended_is_the_end_only_where_it_never_restarts() -> None:
    ended = pod("a", app="x")
    ended["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1}}
    assert not adopted_fact(ended, 3).finished
    assert adopted_fact(ended, 3).index == 3
    ended["spec"]["restartPolicy"] = "Never"
    assert adopted_fact(ended, 3).finished
    assert pod_fact(ended, owner_uid="x").finished


def test_the_engines_container_is_its_process() -> None:
    one = pod("a")
    assert engine_process(one) == "c1"
    one["spec"]["containers"] = [{"name": "ray-worker"}]
    one["status"]["containerStatuses"] = [{"name": "ray-worker", "containerID": "c2"}]
    assert engine_process(one) == "c2"
    one["status"] = {}
    assert engine_process(one) == ""


def test_a_gate_is_believed_only_of_the_process_that_is_there() -> None:
    told = gate(holds=(1, DIGEST_A), engine_process="c1")
    assert believed(told, "c1") == told
    for there in ("c2", ""):
        doubted = believed(told, there)
        assert (doubted.incarnation, doubted.holds) == (None, None)
        assert not can_join(engine("e", doubted))
        assert doubted.fence == told.fence, "the fence is the gate's own"
    assert believed(gate(holds=(1, DIGEST_A)), "c1").holds is None, "it was not told yet whom it stands beside"


def test_nothing_is_created_or_deleted_whatever_the_spec_says() -> None:
    gone = fact(1, finished=True)
    plan = plan_pods(PoolView(name="a", uid="u", replicas=0, pods=(fact(0), gone, fact(7)), adopted=True))
    assert (plan.create, plan.delete, plan.draining) == ((), (), frozenset())
    assert [p.uid for p in plan.unroute] == [gone.uid]


def test_as_many_are_wanted_as_there_are_up_to_active() -> None:
    mine = adopting("a", app="x")
    engines = [engine(f"e{i}", gate(), pool="a", index=i, owned=False) for i in range(3)]
    everyone = wish(engines, {"a": ceiling(mine)})
    assert (everyone.resting, everyone.owed) == (frozenset(), 0)
    mine["spec"]["active"] = 1
    assert wish(engines, {"a": ceiling(mine)}).resting == {"e1", "e2"}
    assert not is_unwanted(pod("e9", **{"rlfleet.dev/engine-index": "9"}), mine), "a label of ours is nothing here"
    mine["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert is_unwanted(pod("e9"), mine)


def test_engines_of_a_pool_that_goes_are_closed_where_nobody_deletes_their_pods() -> None:
    committed = Committed(1, DIGEST_A)
    serving = gate(holds=(1, DIGEST_A), paused=False, routed={"r": True})
    closed = gate(holds=(1, DIGEST_A), paused=True, routed={"r": False})

    def acts(status: Any, *, owned: bool) -> list[Act]:
        one = engine("e", status, unwanted=True, owned=owned)
        return [n.act for n in needs([one], committed, pipeline="p")]

    assert acts(serving, owned=True) == [], "its pool drains it and deletes its pod"
    assert acts(serving, owned=False) == [Act.CLOSE]
    assert acts(closed, owned=False) == []


def test_where_only_adopted_pods_are_missing_a_person_is_asked() -> None:
    engines = {"a": engine("a", owned=False), "b": engine("b"), "c": engine("c", owned=False, gone=True)}
    assert on_failure_of(["a", "b"], engines, asked="Replace")[0] == "Replace"
    held, why = on_failure_of(["a", "c"], engines, asked="Replace")
    assert held == "Hold"
    assert "a: nobody but its maker" in why
    assert on_failure_of(["a"], engines, asked="Hold") == ("Hold", "onFailure is Hold")
    assert on_failure_of([], engines, asked="Replace")[0] == "Replace"


def test_a_disruption_is_read_from_the_pods_condition() -> None:
    one = pod("a")
    assert disruption_of(one) == ""
    one["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}
    ]
    assert disruption_of(one) == "PreemptionByScheduler: preempted"
    one["status"]["conditions"][0]["status"] = "False"
    assert disruption_of(one) == ""
