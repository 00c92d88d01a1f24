"""Transports of random fleets, and every refusal of theirs with its words.

The validator below is written from the rules of DESIGN section 6 alone: it shares nothing with the planner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.syncround_status import RoundPlan as PlannedRow
from rlfleet.api.wire import StagingMode, Transport
from rlfleet.control.rounds.plan_record import plan_of, plan_row
from rlfleet.plan.rounds import Engine, RoundPlan
from rlfleet.plan.topology import Device
from rlfleet.plan.transport import MIB, Choice, Cut, Refusal, choose
from tests.plan import rounds_kit
from tests.plan.rounds_kit import engine, gate

Devices = frozenset[Device]
MODES = ["CPUSerialize", "Broadcast", "Auto"]
TRAIN = frozenset({Device("n0", "GPU-0"), Device("n0", "GPU-1")})

one_device = st.builds(
    Device, st.sampled_from(["n0", "n1"]), st.sampled_from([*(f"GPU-{i}" for i in range(6)), "MIG-a", "MIG-b"])
)
devices = st.frozensets(one_device, max_size=3)


@dataclass(frozen=True)
class Slot:
    """One engine of a random fleet: its devices (None: unknown) and ranks."""

    devices: Devices | None
    ranks: int


fleets = st.dictionaries(
    st.from_regex(r"[a-f][0-9]", fullmatch=True),
    st.builds(Slot, st.none() | devices, st.integers(1, 3)),
    max_size=8,
)


def asked(
    mode: str, fleet: dict[str, Slot], train: Devices | None, assert_mixed: bool = False
) -> dict[str, Choice] | Refusal:
    targets = {name: slot.devices for name, slot in fleet.items()}
    ranks = {name: slot.ranks for name, slot in fleet.items()}
    return choose(mode, targets, train, assert_mixed=assert_mixed, ranks=ranks)


def transports(choice: dict[str, Choice]) -> dict[str, Transport]:
    return {name: c.transport for name, c in choice.items()}


# ------------------------------------------------------------------------------------------ the validator


def faults(
    mode: str, fleet: dict[str, Slot], train: Devices | None, members: dict[str, tuple[str, int | None]]
) -> list[str]:
    """What is wrong with an accepted plan: member -> (transport, first rank)."""
    found: list[str] = []
    if set(members) != set(fleet):
        found.append("not every engine got a transport, or one got two")
    group = [name for name, (how, _) in members.items() if how == "Broadcast"]
    if mode == "CPUSerialize" and group:
        found.append("CPUSerialize broadcasts")
    if mode == "Broadcast" and len(group) != len(fleet):
        found.append("Broadcast was downgraded")
    physical: Counter[tuple[str, str]] = Counter((d.node, d.uuid) for d in train or ()) if group else Counter()
    for name in group:
        for d in fleet[name].devices or ():
            physical[d.node, d.uuid] += 1
        if not fleet[name].devices:
            found.append(f"{name} broadcasts from nowhere known")
        elif fleet[name].ranks > len(fleet[name].devices or ()):
            found.append(f"{name} has two ranks on one device")
    if any(n > 1 for n in physical.values()):
        found.append("one physical GPU twice in the group")
    if any(uuid.startswith("MIG-") for _, uuid in physical):
        found.append("a slice of a GPU in the group")
    if group and not train:
        found.append("a group with an unknown sender")
    if mode == "Auto":
        for name, (how, _) in members.items():
            others = [s.devices or frozenset() for n, s in fleet.items() if n != name]
            mine = fleet[name].devices or frozenset()
            free = not mine & (train or frozenset()) and not any(mine & o for o in others)
            slices = any(d.uuid.startswith("MIG-") for d in (*mine, *(train or ())))
            if how == "Serialized" and free and not slices and fleet[name].ranks <= len(mine):
                found.append(f"{name} could broadcast")
    taken = [
        rank
        for name in group
        if (first := members[name][1]) is not None
        for rank in range(first, first + fleet[name].ranks)
    ]
    if sorted([0, *taken]) != list(range(1 + sum(fleet[name].ranks for name in group))):
        found.append(f"ranks {sorted(taken)} are no permutation")
    if any(rank is not None for name, (how, rank) in members.items() if how == "Serialized"):
        found.append("a serialized engine has a rank")
    return found


def frozen(mode: str, fleet: dict[str, Slot], train: Devices | None, **changes: Any) -> RoundPlan | Refusal:
    engines: list[Engine] = []
    for name, slot in fleet.items():
        nodes = {d.node for d in slot.devices or ()}
        report = wire.EngineReport(state=wire.EngineState.READY, world_size=slot.ranks, layout="L", version="1")
        status = gate(
            engine=report, node=min(nodes, default="n0"), devices=tuple(sorted(d.uuid for d in slot.devices or ()))
        )
        engines.append(engine(name, status))
    return rounds_kit.frozen(engines, **{"mode": mode, "train": train, **changes})


def on_one_node(fleet: dict[str, Slot]) -> dict[str, Slot]:
    """A gate reports the devices of its own node only."""
    out = {}
    for name, slot in fleet.items():
        node = min((d.node for d in slot.devices or ()), default="n0")
        here = frozenset(d for d in slot.devices or () if d.node == node)
        out[name] = Slot(here or None, slot.ranks)
    return out


# ------------------------------------------------------------------------------------------ properties


@given(st.sampled_from(MODES), fleets, st.none() | devices)
def test_classification_is_total(mode: str, fleet: dict[str, Slot], train: Devices | None) -> None:
    """Everyone gets exactly one transport, or nobody any and the reason is a word of the closed list."""
    choice = asked(mode, fleet, train)
    if isinstance(choice, Refusal):
        assert choice.reason in (Reason.TOPOLOGY_UNKNOWN, Reason.ENGINES_ON_TRAIN_DEVICES)
        assert choice.message
    else:
        assert set(choice) == set(fleet)


@given(st.sampled_from(MODES), fleets, st.none() | devices, st.randoms(use_true_random=False))
def test_classification_does_not_depend_on_any_order(
    mode: str, fleet: dict[str, Slot], train: Devices | None, random: Any
) -> None:
    names = list(fleet)
    random.shuffle(names)

    def reordered(devices: Devices | None) -> Devices | None:
        if devices is None:
            return None
        ordered = sorted(devices)
        random.shuffle(ordered)
        return frozenset(ordered)

    shuffled = {name: Slot(reordered(fleet[name].devices), fleet[name].ranks) for name in names}
    one, other = asked(mode, fleet, train), asked(mode, shuffled, reordered(train))
    assert one == other


@given(fleets, devices, one_device)
def test_another_train_device_never_turns_serialized_into_broadcast(
    fleet: dict[str, Slot], train: Devices, more: Device
) -> None:
    for mode in MODES:
        before, after = asked(mode, fleet, train or None), asked(mode, fleet, train | {more})
        if isinstance(before, Refusal) or isinstance(after, Refusal):
            # A broadcast that was refused with known devices stays refused.
            stays = isinstance(before, Refusal) and before.reason is Reason.ENGINES_ON_TRAIN_DEVICES
            assert not stays or isinstance(after, Refusal)
            continue
        serialized = {n for n, t in transports(before).items() if t is Transport.SERIALIZED}
        assert serialized <= {n for n, t in transports(after).items() if t is Transport.SERIALIZED}


@given(st.sampled_from(MODES), fleets, st.none() | devices)
def test_whatever_is_accepted_passes_the_validator(mode: str, fleet: dict[str, Slot], train: Devices | None) -> None:
    fleet = on_one_node(fleet)
    plan = frozen(mode, fleet, train or None)
    if isinstance(plan, Refusal):
        assert mode != "CPUSerialize"
        return
    members = {m.engine: (m.transport.value, m.rank_offset) for m in plan.members}
    assert faults(mode, fleet, train or None, members) == []
    # Prefix sums, in the order of the members.
    rank = 1
    for m in plan.members:
        assert m.world_size == fleet[m.engine].ranks
        if m.transport is Transport.BROADCAST:
            assert m.rank_offset == rank
            rank += m.world_size
    assert plan.world_size == rank


@given(fleets, devices)
def test_strict_broadcast_is_refused_exactly_when_auto_would_serialize(fleet: dict[str, Slot], train: Devices) -> None:
    auto, strict = asked("Auto", fleet, train or None), asked("Broadcast", fleet, train or None)
    if isinstance(auto, Refusal):
        assert isinstance(strict, Refusal)
        assert (strict.reason, "Broadcast" in strict.message) == (auto.reason, True)
    elif Transport.SERIALIZED in transports(auto).values():
        assert isinstance(strict, Refusal)
        assert strict.reason is Reason.ENGINES_ON_TRAIN_DEVICES
    else:
        assert strict == auto


@given(fleets, st.none() | devices)
def test_serialized_rounds_look_at_no_topology(fleet: dict[str, Slot], train: Devices | None) -> None:
    choice = asked("CPUSerialize", fleet, train)
    assert choice == dict.fromkeys(fleet, Choice(Transport.SERIALIZED))


def test_the_validator_finds_what_it_is_for() -> None:
    two = {"a": Slot(frozenset({Device("n1", "GPU-5")}), 1), "b": Slot(frozenset({Device("n0", "GPU-0")}), 1)}
    assert faults("Auto", two, TRAIN, {"a": ("Broadcast", 1), "b": ("Serialized", None)}) == []
    for mode, wrong, what in [
        ("Auto", {"a": ("Broadcast", 1), "b": ("Broadcast", 2)}, "one physical GPU twice in the group"),
        ("Auto", {"a": ("Broadcast", 2), "b": ("Serialized", None)}, "ranks [2] are no permutation"),
        ("Auto", {"a": ("Serialized", None), "b": ("Serialized", None)}, "a could broadcast"),
        ("Broadcast", {"a": ("Broadcast", 1), "b": ("Serialized", None)}, "Broadcast was downgraded"),
        ("Auto", {"a": ("Broadcast", 1)}, "not every engine got a transport, or one got two"),
        ("CPUSerialize", {"a": ("Broadcast", 1), "b": ("Serialized", None)}, "CPUSerialize broadcasts"),
    ]:
        assert what in faults(mode, two, TRAIN, wrong)


# ------------------------------------------------------------------------------------------ words of refusals

ON, OFF = frozenset({Device("n0", "GPU-1")}), frozenset({Device("n1", "GPU-7")})
SLICE = frozenset({Device("n1", "MIG-7")})


@pytest.mark.parametrize(
    ("mode", "engines", "train", "more", "reason", "message"),
    [
        (
            "brodcast",
            {"a": OFF},
            TRAIN,
            {},
            Reason.INVALID_SPEC,
            "spec.transport.mode 'brodcast' is not one of CPUSerialize, Broadcast, Auto",
        ),
        ("auto", {}, TRAIN, {}, Reason.INVALID_SPEC, "spec.transport.mode 'auto' is not one of"),
        (
            "Broadcast",
            {"a": OFF},
            TRAIN,
            {"assert_mixed": True},
            Reason.INVALID_SPEC,
            "spec.transport.assertMixed needs mode Auto: Broadcast never mixes transports. Use Auto, or leave it out",
        ),
        ("CPUSerialize", {}, None, {"assert_mixed": True}, Reason.INVALID_SPEC, "assertMixed needs mode Auto"),
        (
            "Auto",
            {"a": OFF},
            None,
            {},
            Reason.TOPOLOGY_UNKNOWN,
            "transport mode Auto needs the train pool: set spec.trainer.gpus of the RLPipeline, or use CPUSerialize",
        ),
        (
            "Broadcast",
            {"b": None, "a": frozenset(), "c": OFF},
            TRAIN,
            {},
            Reason.TOPOLOGY_UNKNOWN,
            "transport mode Broadcast needs the devices of every engine, unknown for: a, b; use placement Pinned in "
            "their EnginePool, or CPUSerialize",
        ),
        (
            "Broadcast",
            {"b": ON, "a": OFF},
            TRAIN,
            {},
            Reason.ENGINES_ON_TRAIN_DEVICES,
            "transport mode Broadcast is impossible for b (shares devices with the trainer); train pool: n0/GPU-0, "
            "n0/GPU-1. Use Auto or CPUSerialize",
        ),
        (
            "Broadcast",
            {"a": OFF, "b": OFF},
            TRAIN,
            {},
            Reason.ENGINES_ON_TRAIN_DEVICES,
            "for a, b (shares a device with b)",
        ),
        ("Broadcast", {"a": SLICE}, TRAIN, {}, Reason.ENGINES_ON_TRAIN_DEVICES, "for a (runs on a MIG slice)"),
        (
            "Broadcast",
            {"a": OFF},
            TRAIN,
            {"ranks": {"a": 2}},
            Reason.ENGINES_ON_TRAIN_DEVICES,
            "for a (has 2 ranks on 1 devices)",
        ),
        (
            "Broadcast",
            {"a": OFF},
            SLICE,
            {},
            Reason.ENGINES_ON_TRAIN_DEVICES,
            "for a (the trainer runs on a MIG slice)",
        ),
        (
            "Auto",
            {"a": OFF},
            TRAIN,
            {"assert_mixed": True},
            Reason.MIXED_TRANSPORT_IMPOSSIBLE,
            "spec.transport.assertMixed is set but every engine would use Broadcast: the pool needs at least one "
            "engine on the train devices and one off them. Add it, or leave assertMixed out",
        ),
        (
            "Auto",
            {"a": ON},
            TRAIN,
            {"assert_mixed": True},
            Reason.MIXED_TRANSPORT_IMPOSSIBLE,
            "every engine would use Serialized",
        ),
        (
            "Auto",
            {"a": ON},
            TRAIN,
            {"assert_mixed": True, "fleet": {"asleep": None}},
            Reason.MIXED_TRANSPORT_IMPOSSIBLE,
            "every engine would use Serialized",
        ),
    ],
)
def test_refusals_say_what_and_what_to_do(
    mode: str,
    engines: dict[str, Devices | None],
    train: Devices | None,
    more: dict[str, Any],
    reason: Reason,
    message: str,
) -> None:
    refusal = choose(mode, engines, train, **more)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is reason
    assert message in refusal.message


def test_a_subset_that_keeps_off_the_train_devices_is_accepted_by_strict_broadcast() -> None:
    assert choose("Broadcast", {"off": OFF}, TRAIN, fleet={"on": ON, "off": OFF}) == {
        "off": Choice(Transport.BROADCAST)
    }


def test_assert_mixed_is_about_the_whole_fleet_not_the_targets() -> None:
    """An engine that sleeps takes no part in a round, and still the fleet is one that mixes."""
    choice = choose("Auto", {"off": OFF}, TRAIN, assert_mixed=True, fleet={"on": ON, "off": OFF})
    assert choice == {"off": Choice(Transport.BROADCAST)}
    silent = engine("quiet")
    on = engine("on", gate(devices=("GPU-1",)))
    off = engine("off", gate(devices=("GPU-7",), incarnation=None))  # has not met its engine: no member
    mixed: dict[str, Any] = {"mode": "Auto", "assert_mixed": True, "train": TRAIN, "max_unavailable": 1}
    plan = rounds_kit.frozen([on, off, silent], **mixed)
    assert isinstance(plan, RoundPlan)
    assert [(m.engine, m.transport.value) for m in plan.members] == [("on", "Serialized")]
    alone = rounds_kit.frozen([on, silent], **mixed)
    assert isinstance(alone, Refusal)
    assert alone.reason is Reason.MIXED_TRANSPORT_IMPOSSIBLE


def test_the_plan_says_why_an_engine_is_serialized() -> None:
    fleet = {
        "a": Slot(ON, 1),
        "b": Slot(SLICE, 1),
        "c": Slot(OFF, 2),
        "d": Slot(frozenset({Device("n1", "GPU-9")}), 1),
    }
    plan = frozen("Auto", fleet, TRAIN)
    assert isinstance(plan, RoundPlan)
    assert {m.engine: m.reason for m in plan.members} == {
        "a": "shares devices with the trainer",
        "b": "runs on a MIG slice",
        "c": "has 2 ranks on 1 devices",
        "d": "",
    }
    assert {m.reason for m in frozen("CPUSerialize", fleet, None).members} == {""}  # type: ignore[union-attr]


def test_many_engines_on_one_device_are_planned_with_words_that_the_schema_takes() -> None:
    """A plan that the apiserver refuses would be made again for ever, and the round never end."""
    names = [f"{'rollout-' * 6}{i}-1a2b3c4d5e" for i in range(10)]
    plan = frozen("Auto", dict.fromkeys(names, Slot(frozenset({Device("n1", "GPU-9")}), 1)), TRAIN)
    assert isinstance(plan, RoundPlan)
    found = PlannedRow.model_validate(plan_row(plan))
    assert {m.reason for m in found.members} == {m.reason for m in plan.members}, "not cut in the middle of a word"
    assert "and 6 more" in str(found.members[0].reason)
    longer = replace(plan, members=tuple(replace(m, reason="x" * 999) for m in plan.members))
    PlannedRow.model_validate(plan_row(longer))


# ------------------------------------------------------------------------------------------ staging

FULL, BUCKET = StagingMode.FULL, StagingMode.BUCKET


@pytest.mark.parametrize(
    ("cut", "total", "capacity", "message"),
    [
        (Cut(), 1000, 1000, None),
        (
            Cut(),
            1001,
            1000,
            "1001 bytes do not fit into the staging volume of e (1000 bytes usable); raise spec.gate.stagingMiB and "
            "the gate's memory limit, or use spec.transport.staging Bucket",
        ),
        (Cut(BUCKET, 1, ("w", 10)), 5 * MIB, MIB, None),
        (Cut(BUCKET, 8, ("w", 10)), 1000, 1000, None),  # smaller than one bucket
        (
            Cut(BUCKET, 2, ("w", 10)),
            5 * MIB,
            MIB,
            "a bucket of 2097152 bytes does not fit into the staging volume of e (1048576 bytes usable); lower "
            "spec.transport.bucketMiB, or raise spec.gate.stagingMiB and the gate's memory limit",
        ),
        (
            Cut(BUCKET, 1, ("model.embed", 3 * MIB)),
            5 * MIB,
            2 * MIB,
            "tensor 'model.embed' has 3145728 bytes and travels by itself, more than the staging volume of e holds "
            "(2097152 bytes usable); raise spec.gate.stagingMiB and the gate's memory limit",
        ),
        (Cut(BUCKET, 0, ("w", 10)), 1001, 1000, "a bucket of 1001 bytes does not fit"),
    ],
)
def test_what_does_not_fit_the_memory_volume_is_refused_before_anything_is_touched(
    cut: Cut, total: int, capacity: int, message: str | None
) -> None:
    refusal = cut.refuse("e", total, capacity)
    if message is None:
        assert refusal is None
        return
    assert refusal is not None
    assert refusal.reason is Reason.STAGING_TOO_LARGE
    assert message in refusal.message


def test_a_plan_freezes_how_its_bytes_are_cut() -> None:
    fleet = {"a": Slot(ON, 1), "d": Slot(frozenset({Device("n1", "GPU-9")}), 1)}
    plan = frozen("Auto", fleet, TRAIN, cut=Cut(BUCKET, 1, ("w", 10)), total_bytes=10**9)
    assert isinstance(plan, Refusal)  # the reference gate reports 10,000 bytes
    plan = frozen("Auto", fleet, TRAIN, cut=Cut(BUCKET, 1, ("w", 10)), total_bytes=9_999)
    assert isinstance(plan, RoundPlan)
    assert (plan.staging, plan.bucket_mib) == (BUCKET, 1)
    serialized, broadcast = plan.members
    assert (plan.streams(serialized), plan.needs_sender(serialized)) == (True, True)
    assert (plan.streams(broadcast), plan.needs_sender(broadcast)) == (False, True)
    full = frozen("Auto", fleet, TRAIN)
    assert isinstance(full, RoundPlan)
    assert [full.needs_sender(m) for m in full.members] == [False, True]
    written = {"plan": plan_row(plan)}
    assert plan_of(written) == plan
    PlannedRow.model_validate(written["plan"])
