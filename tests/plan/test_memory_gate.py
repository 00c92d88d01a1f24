"""The gate before a train step: shut unless everything about the demanded devices is proven."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority
from rlfleet.api.v1alpha1.rlpipeline_status import Grant as GrantModel
from rlfleet.plan.demand import MAX_MESSAGE, Demand, Grant, grants_of, held_devices, while_held
from rlfleet.plan.elastic import GIB, keeps_devices
from rlfleet.plan.memory_gate import decide_grants, readings, to_fence
from rlfleet.plan.rounds import Engine
from rlfleet.plan.topology import Device, assigned_evidence
from tests.plan.elastic_kit import NODE, asleep, awake, devices, silent

D0, D1, D2 = (Device(NODE, f"GPU-{i}") for i in range(3))


def demand(*on: Device, cluster: str = "actor", step: int = 1, **how: Any) -> Demand:
    return Demand(cluster, how.pop("priority", DemandPriority.ACTOR_TRAINING), step, frozenset(on or (D0,)))


def decide(engines: list[Engine], *demands: Demand, before: tuple[Grant, ...] = (), **how: Any) -> tuple[Grant, ...]:
    reports = [e.status.devices for e in engines if e.status is not None]
    return decide_grants(
        demands or (demand(),),
        before,
        engines=engines,
        shared=how.pop("shared", frozenset()),
        limits=how.pop("limits", {}),
        default_limit=13 * GIB,
        memory=readings([*reports, *how.pop("reports", ())]),
        keepers=how.pop("keepers", frozenset()),
        generation=how.pop("generation", 0),
    )


#: A pod that was made before the demand was recorded, and boots on the device whenever its image has come.
PIN = assigned_evidence(f"{NODE}/GPU-0")
HIGH = devices("GPU-0", used=20, others=("python", "ray::worker"))


@pytest.mark.parametrize(
    ("engines", "reason", "named"),
    [
        ([asleep(0)], Reason.GRANTED, ""),
        ([asleep(0), awake(1)], Reason.GRANTED, ""),  # not on the demanded device
        ([], Reason.GRANTED, ""),  # no engine uses it
        ([awake(0)], Reason.ENGINES_AWAKE, "a-0"),
        ([awake(0, gone=True)], Reason.GRANTED, ""),
        ([asleep(0, tags=(wire.MemoryTag.WEIGHTS,))], Reason.ENGINES_AWAKE, "a-0"),
        ([asleep(0, gate={"releasing": True})], Reason.ENGINES_AWAKE, "a-0"),
        ([asleep(0), silent(1)], Reason.TOPOLOGY_UNKNOWN, "a-1"),  # it may lie anywhere
        ([asleep(0), silent(1, gone=True)], Reason.GRANTED, ""),
        ([asleep(0), silent(1, unborn=True)], Reason.GRANTED, ""),
        ([silent(0, unborn=True, assigned=PIN)], Reason.ENGINES_AWAKE, "a-0 has run yet: delete its pod"),
        ([silent(0, unborn=True, claimed=PIN)], Reason.ENGINES_AWAKE, "a-0"),
        ([silent(0, unborn=True, assigned=PIN, gone=True)], Reason.GRANTED, ""),
        ([asleep(0), awake(1, devices=devices())], Reason.TOPOLOGY_UNKNOWN, "a-1"),
        ([asleep(0, devices=devices("GPU-0"))], Reason.MEMORY_UNREADABLE, "n0/GPU-0"),
        ([asleep(0, devices=HIGH)], Reason.RESIDUAL_MEMORY_HIGH, "python (pid 100), ray::worker (pid 101)"),
        ([asleep(0, devices=devices("GPU-0", used=13))], Reason.GRANTED, ""),
    ],
)
def test_each_thing_that_keeps_it_shut(engines: list[Engine], reason: Reason, named: str) -> None:
    (grant,) = decide(engines)
    assert grant.reason is reason, grant
    assert grant.granted == (reason is Reason.GRANTED)
    assert named in grant.message


def test_a_sleeper_that_would_still_obey_a_wake_keeps_it_shut_until_it_is_told_of_a_higher_generation() -> None:
    here, other = asleep(0, gate={"fence": 6}), asleep(1, gate={"fence": 6})
    (grant,) = decide([here, other], generation=7)
    assert (grant.granted, grant.reason) == (False, Reason.ENGINES_AWAKE)
    assert grant.message.startswith("a-0 are asleep, but must refuse a wake")
    assert to_fence([grant], [here, other], generation=7) == {"a-0"}, "the other lies on no device that is waited for"
    assert decide([here], generation=6)[0].granted
    # What is granted stays so, and nobody is told anything for it.
    before = decide([here], generation=6)
    assert decide([here], before=before, generation=7) == before
    assert to_fence(before, [here], generation=7) == frozenset()
    assert to_fence([grant], [replace(here, gone=True)], generation=7) == frozenset()


def test_of_two_readers_the_higher_figure_counts() -> None:
    trainer = devices("GPU-0", used=30)
    assert decide([asleep(0)], reports=[trainer])[0].reason is Reason.RESIDUAL_MEMORY_HIGH
    assert decide([asleep(0)], reports=[devices("GPU-0", used=1)])[0].granted


def test_the_trainer_can_read_what_no_gate_can() -> None:
    blind = asleep(0, devices=devices("GPU-0"))
    assert decide([blind], reports=[devices("GPU-0", used=3)])[0].granted
    elsewhere = devices("GPU-0", used=3, node="n7")
    assert not decide([blind], reports=[elsewhere])[0].granted, "a UUID on another node is another device"


def test_placement_makes_a_device_shared_even_while_its_engine_is_gone() -> None:
    assert decide([], shared=frozenset({D0}))[0].reason is Reason.MEMORY_UNREADABLE
    assert decide([], shared=frozenset({D0}), reports=[devices("GPU-0", used=3)])[0].granted


def test_limits_are_of_the_pool_whose_engine_lies_there() -> None:
    assert decide([asleep(0)], limits={D0: GIB})[0].reason is Reason.RESIDUAL_MEMORY_HIGH
    assert "1.0 GiB" in decide([asleep(0)], limits={D0: GIB})[0].message


def test_devices_that_the_scheduler_gives_to_anybody_are_refused_with_the_remedy() -> None:
    (grant,) = decide([awake(0), awake(1, pool="b")], keepers=frozenset({"a"}))
    assert (grant.granted, grant.reason) == (False, Reason.UNSUPPORTED)
    assert "a-0 can give no device up" in grant.message
    assert "spec.shrink: Offload" in grant.message
    assert decide([awake(0)], keepers=frozenset({"b"}))[0].reason is Reason.ENGINES_AWAKE
    assert decide([asleep(0)], keepers=frozenset({"a"}))[0].granted, "whoever sleeps all the same has given it up"
    assert decide([awake(0)], demand(D1), keepers=frozenset({"a"}))[0].granted, "no engine lies there"


@pytest.mark.parametrize(
    ("spec", "keeps"),
    [
        ({}, True),
        ({"placement": {"mode": "Scheduler"}, "shrink": "Delete"}, True),
        ({"shrink": "Offload"}, False),
        ({"placement": {"mode": "Pinned"}, "shrink": "Delete"}, False),  # its pods go for a demand
        ({"placement": {"mode": "Pinned"}}, False),
        ({"placement": {"mode": "Claims"}}, False),
    ],
)
def test_which_pools_give_no_device_up(spec: dict[str, Any], keeps: bool) -> None:
    assert keeps_devices({"spec": spec}) is keeps


def test_a_round_that_holds_engines_is_what_a_demand_waits_for() -> None:
    waiting, shut, granted = decide(
        [awake(0), asleep(1, devices=devices("GPU-1")), asleep(2)],
        *(demand(d, cluster=c) for d, c in ((D0, "a"), (D1, "b"), (D2, "c"))),
    )
    found = while_held((waiting, shut, granted), "p-0123456789abcdef0123")
    assert found[0].reason is Reason.HOLDING
    assert "p-0123456789abcdef0123" in found[0].message
    assert len(found[0].message) <= MAX_MESSAGE, "nothing of it is cut off in status"
    assert found[1:] == (shut, granted), "what else stands in the way, and what is free already, is said as ever"


def test_a_grant_stands_until_it_is_withdrawn_or_for_another_step() -> None:
    first = decide([asleep(0)])
    full = asleep(0, devices=devices("GPU-0", used=70))  # the trainer works
    assert decide([full], before=first) == first
    assert not decide([full], demand(step=2), before=first)[0].granted
    assert decide_grants((), first, engines=[full], shared=frozenset(), limits={}, default_limit=GIB, memory={}) == ()


def test_no_part_of_a_trainer_takes_devices_from_another() -> None:
    critic = demand(cluster="critic", priority=DemandPriority.CRITIC_TRAINING)
    first, second = decide([asleep(0)], critic, demand())
    assert (first.demand.cluster, first.granted) == ("actor", True), "by priority, not by order of arrival"
    assert (second.granted, second.reason) == (False, Reason.DEVICES_HELD)
    # Who has them keeps them, even from a higher priority.
    held = decide([asleep(0)], critic)
    again = decide([asleep(0)], critic, demand(), before=held)
    assert {g.demand.cluster: g.granted for g in again} == {"actor": False, "critic": True}


def test_grants_read_back_as_they_were_written() -> None:
    found = decide([awake(0)], demand(D0, Device("n1", "GPU-0"), D1))
    rows = [GrantModel.model_validate(g.row()).to_dict() for g in found]
    assert grants_of({"grants": rows}) == found
    assert held_devices(found) == {D0, D1, Device("n1", "GPU-0")}
    assert grants_of({}) == ()


KINDS = st.sampled_from(["awake", "asleep", "half", "blind", "high", "silent", "gone", "unknown"])


def made(kind: str, index: int) -> Engine:
    return {
        "awake": lambda: awake(index),
        "asleep": lambda: asleep(index),
        "half": lambda: asleep(index, tags=(wire.MemoryTag.KV_CACHE,)),
        "blind": lambda: asleep(index, devices=devices(f"GPU-{index}")),
        "high": lambda: asleep(index, devices=devices(f"GPU-{index}", used=40)),
        "silent": lambda: silent(index),
        "gone": lambda: silent(index, gone=True),
        "unknown": lambda: awake(index, devices=devices()),
    }[kind]()


@given(kinds=st.lists(KINDS, max_size=5), on=st.sets(st.integers(0, 4), min_size=1))
def test_it_opens_only_on_proof(kinds: list[str], on: set[int]) -> None:
    engines = [made(kind, i) for i, kind in enumerate(kinds)]
    (grant,) = decide(engines, demand(*(Device(NODE, f"GPU-{i}") for i in on)))
    there = [k for i, k in enumerate(kinds) if i in on]
    proven = all(k in ("asleep", "gone") for k in there) and not {"silent", "unknown"} & set(kinds)
    assert grant.granted == proven
    assert grant.granted or grant.message, "a refusal names what stands in its way"
