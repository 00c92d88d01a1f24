"""Which pods are created, taken out of routers and deleted; as a table, and against any history of failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.conditions import Reason
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.pool import PodPlan, PoolView, plan_pods, slow_start
from tests.plan.pool_kit import fact


def plan(replicas: int, *pods: PodFact, **view: Any) -> PodPlan:
    return plan_pods(PoolView(name="a", uid="pool-uid", replicas=replicas, pods=pods, **view))


def indices(p: PodPlan) -> list[int]:
    return [c.index for c in p.create]


def test_missing_indices_are_created() -> None:
    assert indices(plan(3, fact(1))) == [0, 2]
    assert plan(0).create == ()
    assert plan(2, may_create=False).create == ()


def test_listed_devices_are_given_away_only_once_an_earlier_pool_of_the_name_is_off_them() -> None:
    waiting = plan(2, slots=2, foreign=1)
    assert waiting.create == ()
    assert [reason for reason, _ in waiting.waits] == [Reason.TERMINATING]
    assert indices(plan(2, slots=2)) == [0, 1]
    assert indices(plan(2, foreign=1)) == [0, 1], "where the scheduler places pods it also counts devices"


def test_names_are_derived_from_what_is_replaced() -> None:
    first, again = plan(1).create[0], plan(1).create[0]
    assert first == again
    dead = fact(0, "u1", finished=True, name=first.name)
    second = plan(1, dead).create[0]
    assert second.replaces == "u1"
    assert second.name != first.name
    assert plan(1, predecessors={0: "u1"}).create[0].name == second.name, "also when the predecessor is gone already"
    assert plan(1, bumps={0: 1}).create[0].name != first.name


def test_surplus_goes_not_ready_first_then_highest_after_leaving_routers_and_draining() -> None:
    pods = [fact(i) for i in range(4)]
    pods[2] = replace(pods[2], ready=False)
    started = plan(1, *pods)
    assert [p.index for p in started.unroute] == [2, 3, 1]
    assert started.delete == ()
    out = frozenset(p.uid for p in pods)
    waiting = plan(1, *pods, unrouted=out)
    assert [d.pod.index for d in waiting.delete] == [2], "a Ready engine finishes its requests"
    done = plan(1, *pods, unrouted=out, drained=out)
    assert [d.pod.index for d in done.delete] == [2, 3, 1]
    assert {d.reason for d in done.delete} == {Reason.SCALING_DOWN}


def test_living_engines_are_left_alone_while_a_round_owns_them() -> None:
    pods = [fact(0), fact(1), fact(2, finished=True)]
    p = plan(1, *pods, may_remove=False, unrouted=frozenset({"uid-2"}), drained=frozenset({"uid-1"}))
    assert [d.pod.index for d in p.delete] == [2], "a dead one is nobody's member"
    assert p.draining == frozenset()
    assert p.waits[0][0] is Reason.ROUND_IN_PROGRESS


def test_failed_pod_is_replaced_at_once_and_kept_for_its_logs_until_then() -> None:
    dead = fact(0, "u1", finished=True, ready=False)
    p = plan(1, dead)
    assert indices(p) == [0]
    assert [u.uid for u in p.unroute] == ["u1"]
    assert plan(1, dead, unrouted=frozenset({"u1"})).delete == ()
    successor = fact(0, "u2", ready=False)
    both = plan(1, dead, successor, unrouted=frozenset({"u1"}))
    assert both.create == ()
    assert [d.pod.uid for d in both.delete] == ["u1"]
    assert plan(1, dead, successor).delete == (), "not before its address left the routers"


def test_failed_pod_is_held_back_after_quick_failures() -> None:
    p = plan(2, fact(0, finished=True), held_back=frozenset({0}))
    assert indices(p) == [1]
    assert p.waits[0][0] is Reason.REPLACING


def test_pod_that_others_delete_is_replaced_at_once_but_not_on_its_devices() -> None:
    going = fact(0, deleting=True)
    assert indices(plan(1, going)) == [0]
    assert [u.uid for u in plan(1, going).unroute] == ["uid-0"]
    assert plan(1, going, slots=4).create == (), "pinned devices are still in use"
    assert indices(plan(1, fact(0, deleting=True, finished=True), slots=4)) == [0]


def test_second_engine_of_an_index_goes() -> None:
    p = plan(1, fact(0, "u1", ready=False), fact(0, "u2"), unrouted=frozenset({"u1", "u2"}))
    assert [d.pod.uid for d in p.delete] == ["u1"]
    assert p.delete[0].reason is Reason.REPLACING


def test_pods_of_another_owner_are_not_ours() -> None:
    p = plan(1, fact(0, owned=False), fact(5, "u5", owned=False))
    assert indices(p) == [0]
    assert p.delete == ()
    assert p.unroute == ()


def test_too_few_devices_limit_the_pool() -> None:
    p = plan(3, slots=2)
    assert indices(p) == [0, 1]
    assert p.waits[0][0] is Reason.NOT_ENOUGH_DEVICES


def test_slow_start() -> None:
    assert slow_start(0) == []
    assert slow_start(70) == [1, 2, 4, 8, 16, 16, 16, 7]


@given(st.integers(0, 2000), st.integers(1, 64))
def test_slow_start_sends_all_and_never_too_many_at_once(count: int, largest: int) -> None:
    sizes = slow_start(count, largest=largest)
    assert sum(sizes) == count
    assert all(0 < s <= largest for s in sizes)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("scale"), st.integers(0, 5)),
        st.tuples(st.sampled_from(["fail", "delete", "vanish", "ready", "duplicate"]), st.integers(0, 5)),
        st.tuples(st.just("round"), st.booleans()),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=40,
)


class World:
    """Pods as a cluster would keep them, with the checks that must hold after every step."""

    def __init__(self) -> None:
        self.pods: dict[str, PodFact] = {}
        self.replicas = 2
        self.round = False
        self.unrouted: set[str] = set()
        self.predecessors: dict[int, str] = {}
        self.made = 0

    def step(self) -> PodPlan:
        view = PoolView(
            name="a",
            uid="pool-uid",
            replicas=self.replicas,
            pods=tuple(self.pods.values()),
            may_remove=not self.round,
            unrouted=frozenset(self.unrouted),
            drained=frozenset(self.unrouted),
            predecessors=dict(self.predecessors),
        )
        found = plan_pods(view)
        assert plan_pods(view) == found
        for action in found.delete:
            pod = self.pods[action.pod.uid]
            assert pod.uid in self.unrouted, "deleted while a router may list it"
            assert pod.finished or not self.round, "a round's member was deleted"
            if action.reason is Reason.POD_FAILED:
                assert pod.finished
        names = {p.name for p in self.pods.values()}
        for c in found.create:
            assert c.name not in names, "two pods of one name"
            assert not any(p.live and p.index == c.index for p in self.pods.values())
            assert c.index < self.replicas
        assert len(indices(found)) == len(set(indices(found)))
        self.unrouted |= {p.uid for p in found.unroute}
        for action in found.delete:
            del self.pods[action.pod.uid]
        for c in found.create:
            self.made += 1
            uid = f"u{self.made}"
            self.pods[uid] = fact(c.index, uid, name=c.name, created=f"{self.made:06}", ready=False)
            self.predecessors[c.index] = uid
        return found

    def event(self, kind: str, argument: int) -> None:
        if kind == "scale":
            self.replicas = argument
        elif kind == "round":
            self.round = bool(argument)
        elif kind == "step":
            self.step()
        elif self.pods:
            uid = sorted(self.pods)[argument % len(self.pods)]
            pod = self.pods[uid]
            if kind == "fail":
                self.pods[uid] = replace(pod, finished=True, ready=False)
            elif kind == "delete":
                self.pods[uid] = replace(pod, deleting=True, ready=False)
            elif kind == "vanish":
                del self.pods[uid]
            elif kind == "ready" and pod.live:
                self.pods[uid] = replace(pod, ready=True)
            elif kind == "duplicate":
                self.made += 1
                twin = f"u{self.made}"
                self.pods[twin] = replace(pod, uid=twin, name=f"twin-{twin}")


@given(STEPS)
def test_whatever_happens_the_pool_comes_to_its_replicas(history: list[tuple[str, int]]) -> None:
    world = World()
    for kind, argument in history:
        world.event(kind, argument)
    world.round = False
    for _ in range(6):
        world.step()
        for uid in [u for u, p in world.pods.items() if p.deleting]:
            del world.pods[uid]
    assert sorted(p.index for p in world.pods.values()) == list(range(world.replicas))
    assert all(p.live for p in world.pods.values())
    last = world.step()
    assert (last.create, last.delete, last.unroute) == ((), (), ())


CLAIMS = ("p.a",) * 20 + ("p.b",) * 4


def test_sharers_of_one_claim_are_scheduled_a_few_at_a_time() -> None:
    assert indices(plan(24, claims=CLAIMS)) == [*range(8), *range(20, 24)], "claims do not wait for each other"
    waiting = [fact(i, scheduled=False, ready=False) for i in range(5)]
    assert indices(plan(24, *waiting, claims=CLAIMS))[:4] == [5, 6, 7, 20]
    bound = [fact(i) for i in range(8)]
    assert indices(plan(20, *bound, claims=CLAIMS)) == list(range(8, 16))
    assert indices(plan(20)) == list(range(20)), "without claims nobody is held up"


def test_engines_without_a_slot_are_not_made_and_none_that_runs_is_taken() -> None:
    short = plan(3, fact(0), fact(2), claims=("p.a", "p.a"))
    assert indices(short) == [1]
    assert short.draining == frozenset()
    assert short.waits == ((Reason.NOT_ENOUGH_DEVICES, "the train blocks have 2 slots, spec.replicas is 3"),)
    nobody = plan(2, fact(0), fact(1), claims=())
    assert (nobody.create, nobody.draining, nobody.unroute) == ((), frozenset(), ()), "the pipeline may be gone"


def test_a_slot_is_given_away_only_once_the_last_pod_is_off_it() -> None:
    assert indices(plan(1, fact(0, deleting=True), claims=("p.a",))) == []
    assert indices(plan(1, fact(0, finished=True), claims=("p.a",))) == [0]
    assert indices(plan(1, fact(0, deleting=True))) == [0], "where the scheduler counts, nobody has to wait"
    assert indices(plan(1, claims=("p.a",), foreign=1)) == []


def test_claims_that_are_missing_are_said() -> None:
    waits = plan(1, claims=("p.a",), may_create=False, missing=("p.a",)).waits
    assert waits == ((Reason.BLOCK_CLAIM_PENDING, "ResourceClaim p.a is not there to use yet"),)
