"""Members, transports and refusals of a round: everything is decided before an engine is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.wire import PauseMode, StagingMode, Transport
from rlfleet.plan.quiesce import drain_allowance, leaves_routers, wanted_mode
from rlfleet.plan.rounds import RoundPlan, unavailable_limit
from rlfleet.plan.topology import Device, train_devices
from rlfleet.plan.transport import Cut, Refusal, choose
from tests.plan.rounds_kit import engine, frozen, gate

TRAIN = frozenset({Device("n0", "GPU-0"), Device("n0", "GPU-1")})


def members(result: RoundPlan | Refusal) -> list[tuple[str, str, int | None]]:
    assert isinstance(result, RoundPlan)
    return [(m.engine, m.transport.value, m.rank_offset) for m in result.members]


def test_every_live_engine_whose_gate_answers_is_a_member() -> None:
    engines = [
        engine("a", gate()),
        engine("gone", gate(), gone=True),
        engine("leaving", gate(), leaving=True),
        engine("booting", gate(incarnation=None)),
        engine("b", gate()),
    ]
    assert members(frozen(engines)) == [("a", "Serialized", None), ("b", "Serialized", None)]


def test_an_engine_of_which_its_gate_knows_nothing_yet_is_not_asked_and_refuses_nobody() -> None:
    met = wire.EngineReport(state=wire.EngineState.READY, type="SGLang")
    new = engine("new", gate(engine=met, capabilities=(), holds=None, loads=()))
    assert members(frozen([engine("a", gate()), new])) == [("a", "Serialized", None)]
    # With weights in it, it may serve: a gate that was restarted must not make a round go on without it.
    serving = engine("serving", gate(engine=met, capabilities=(), holds=(1, "d")))
    assert isinstance(frozen([engine("a", gate()), serving]), Refusal)


def test_an_engine_that_takes_no_weights_is_refused_in_the_words_of_its_gate() -> None:
    report = wire.EngineReport(state=wire.EngineState.READY, type="SGLang", refused="SGLang 9.9 is not known")
    found = frozen([engine("a", gate()), engine("b", gate(engine=report))])
    assert isinstance(found, Refusal)
    assert (found.reason, found.message) == (Reason.UNSUPPORTED, "engine b: SGLang 9.9 is not known")


PAUSES = ("Serialized", "Broadcast", "Checksum", "Pause/Abort", "Pause/Wait")


def pausing(kind: str, *more: str) -> wire.GateStatus:
    report = wire.EngineReport(state=wire.EngineState.READY, type=kind, layout=kind, world_size=1, version="1")
    return gate(engine=report, capabilities=(*PAUSES, *more))


@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        (None, None),  # each gate takes its own type's way
        (PauseMode.ABORT, None),
        (PauseMode.WAIT, None),
        (PauseMode.KEEP, "engine s can not be paused with spec.sync.quiesce.mode Keep: SGLang never flushes"),
        (PauseMode.RETRACT, "engine v can not be paused with spec.sync.quiesce.mode Retract: VLLM 1 can do Abort"),
    ],
)
def test_a_pause_that_an_engine_cannot_do_is_refused_before_anything_is_touched(
    mode: PauseMode | None, refused: str | None
) -> None:
    engines = [engine("s", pausing("SGLang", "Pause/Retract")), engine("v", pausing("VLLM", "Pause/Keep"))]
    result = frozen(engines, quiesce=mode)
    if refused is None:
        assert len(members(result)) == 2
        return
    assert isinstance(result, Refusal)
    assert result.reason is Reason.QUIESCE_UNSUPPORTED
    assert result.message.startswith(refused)
    assert "leave the mode out" in result.message


def test_draining_has_time_of_its_own_and_leaves_the_routers() -> None:
    def sync(mode: str | None) -> dict[str, Any]:
        return {"drainSeconds": 30, "quiesce": {"mode": mode} if mode else {}}

    assert [wanted_mode(sync(m)) for m in (None, "Wait")] == [None, PauseMode.WAIT]
    assert [drain_allowance(sync(m)) for m in (None, "Retract", "Keep", "Abort", "Wait")] == [0, 0, 0, 0, 30]
    assert [leaves_routers(m) for m in (None, *PauseMode)] == [False, False, False, True, True]


def test_ranks_are_prefix_sums_of_each_members_own_world_size() -> None:
    def sized(n: int, first: int) -> wire.GateStatus:
        report = wire.EngineReport(state=wire.EngineState.READY, world_size=n, layout="L")
        return gate(engine=report, devices=tuple(f"GPU-{100 + first + i}" for i in range(n)))

    engines = [engine("a", sized(2, 0)), engine("b", sized(1, 10)), engine("c", sized(4, 20))]
    result = frozen(engines, mode="Broadcast", train=TRAIN)
    assert members(result) == [("a", "Broadcast", 1), ("b", "Broadcast", 3), ("c", "Broadcast", 4)]
    assert isinstance(result, RoundPlan)
    assert result.world_size == 8


def test_auto_mixes_by_where_engines_stand() -> None:
    engines = [engine("on", gate(devices=("GPU-1",))), engine("off", gate(devices=("GPU-7",)))]
    result = frozen(engines, mode="Auto", train=TRAIN, assert_mixed=True)
    assert members(result) == [("off", "Broadcast", 1), ("on", "Serialized", None)]


@pytest.mark.parametrize(
    ("engines", "changes", "reason", "words"),
    [
        (["silent", "silent", "ok"], {}, Reason.GATES_UNREACHABLE, "2 of 3 gates do not answer or refuse (e0, e1)"),
        (["old"], {}, Reason.GATE_TOO_OLD, "e0 speaks protocol 0"),
        (["ok"], {"mode": "Broadcast"}, Reason.TOPOLOGY_UNKNOWN, "set spec.trainer.gpus"),
        (["ok"], {"mode": "Auto", "train": TRAIN}, Reason.TOPOLOGY_UNKNOWN, "unknown for: e0"),
        (["train"], {"mode": "Broadcast", "train": TRAIN}, Reason.ENGINES_ON_TRAIN_DEVICES, "train pool: n0/GPU-0"),
        (
            ["free"],
            {"mode": "Auto", "train": TRAIN, "assert_mixed": True},
            Reason.MIXED_TRANSPORT_IMPOSSIBLE,
            "every engine would use Broadcast",
        ),
        (["ok"], {"total_bytes": 10_001}, Reason.STAGING_TOO_LARGE, "10001 bytes do not fit"),
        (["ok"], {"verify": "Required"}, Reason.VERIFY_UNSUPPORTED, "e0 is the only one of its layout"),
        (["plain"], {"verify": "Required"}, Reason.VERIFY_UNSUPPORTED, "e0 has no usable checksum"),
        (
            ["free"],
            {"mode": "Broadcast", "train": TRAIN, "backend": "nccl"},
            Reason.SENDER_TOO_OLD,
            "Broadcast/nccl",
        ),
        (["ok"], {"mode": "brodcast"}, Reason.INVALID_SPEC, "'brodcast' is not one of"),
    ],
)
def test_refusals_name_the_reason_and_the_remedy(
    engines: list[str], changes: dict[str, Any], reason: Reason, words: str
) -> None:
    kinds = {
        "ok": gate(),
        "silent": None,
        "old": gate(protocol_version=0),
        "train": gate(devices=("GPU-0",)),
        "free": gate(devices=("GPU-9",)),
        "plain": gate(capabilities=("Serialized", "Broadcast")),
    }
    result = frozen([engine(f"e{i}", kinds[k]) for i, k in enumerate(engines)], **changes)
    assert isinstance(result, Refusal)
    assert result.reason is reason
    assert words in result.message


def test_an_engine_that_takes_only_whole_weights_is_not_fed_bucket_by_bucket() -> None:
    whole = gate(capabilities=("Serialized", "Checksum"))
    refusal = frozen([engine("a", gate()), engine("b", whole)], cut=Cut(StagingMode.BUCKET, 1, ("w", 10)))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.UNSUPPORTED
    assert "engine b" in refusal.message
    assert "spec.transport.staging Full" in refusal.message
    assert isinstance(frozen([engine("b", whole)]), RoundPlan)


def test_a_silent_gate_within_the_limit_is_left_out_and_remembered() -> None:
    result = frozen([engine("a", gate()), engine("b", gate()), engine("quiet")])
    assert isinstance(result, RoundPlan)
    assert [m.engine for m in result.members] == ["a", "b"]
    assert result.silent == ("quiet",)


BLOCKED: dict[str, dict[str, Any]] = {
    "it hangs in a rendezvous": {"uncertain": True, "wedged": True},
    "an operation has no known end": {"uncertain": True},
    "operation op-7 runs on": {"in_flight": "op-7"},
}


@pytest.mark.parametrize("how", list(BLOCKED))
def test_an_engine_whose_gate_takes_no_orders_is_left_out_within_the_limit_and_remembered(how: str) -> None:
    engines = [engine("a", gate()), engine("b", gate(**BLOCKED[how])), engine("c", gate())]
    result = frozen(engines)
    assert [m[0] for m in members(result)] == ["a", "c"]
    assert isinstance(result, RoundPlan)
    assert (result.silent, result.blocked, result.total) == ((), ("uid-b",), 3)
    assert frozen([e for e in engines if e.name != "b"]) == RoundPlan(result.members, 1), "whoever is gone is no matter"


@pytest.mark.parametrize("how", list(BLOCKED))
@pytest.mark.parametrize(
    ("engines", "limit"),
    [
        (["ok", "ok", "blocked"], "0%"),
        (["ok", "blocked", "blocked"], 1),
        (["ok", "blocked", "silent"], 1),  # both kinds are one allowance
        (["blocked"], 1),  # nobody is left
    ],
)
def test_more_than_may_be_unavailable_are_refused_by_name(how: str, engines: list[str], limit: int | str) -> None:
    kinds: dict[str, wire.GateStatus | None] = {"ok": gate(), "blocked": gate(**BLOCKED[how]), "silent": None}
    result = frozen([engine(f"e{i}", kinds[k]) for i, k in enumerate(engines)], max_unavailable=limit)
    assert isinstance(result, Refusal)
    assert result.reason is Reason.UNCERTAIN
    assert all(f"e{i}: {how}" in result.message for i, k in enumerate(engines) if k == "blocked")
    assert "delete these pods" in result.message
    assert ("1 do not answer" in result.message) is ("silent" in engines)


def test_ranks_of_a_group_leave_nobody_out_in_the_middle() -> None:
    free = [engine(f"e{i}", gate(devices=(f"GPU-{i + 2}",), uncertain=i == 1)) for i in range(3)]
    result = frozen(free, mode="Broadcast", train=TRAIN)
    assert isinstance(result, RoundPlan)
    assert [(m.engine, m.rank_offset) for m in result.members] == [("e0", 1), ("e2", 2)]
    assert result.world_size == 3


def test_no_engine_is_an_empty_plan_in_every_mode() -> None:
    for mode in ("CPUSerialize", "Broadcast", "Auto"):
        assert frozen([], mode=mode, train=TRAIN) == RoundPlan((), 1)


def test_mig_slices_and_shared_devices_never_join_a_group() -> None:
    engines = {
        "mig": frozenset({Device("n1", "MIG-7")}),
        "x": frozenset({Device("n1", "GPU-3")}),
        "y": frozenset({Device("n1", "GPU-3")}),
        "free": frozenset({Device("n1", "GPU-4")}),
    }
    auto = choose("Auto", engines, TRAIN)
    assert isinstance(auto, dict)
    assert {n: c.transport.value for n, c in auto.items()} == {
        "mig": "Serialized",
        "x": "Serialized",
        "y": "Serialized",
        "free": "Broadcast",
    }
    strict = choose("Broadcast", engines, TRAIN)
    assert isinstance(strict, Refusal)
    assert "mig, x, y" in strict.message


def test_the_same_uuid_on_another_node_is_another_device() -> None:
    elsewhere = {"a": frozenset({Device("n9", "GPU-0")})}
    choice = choose("Broadcast", elsewhere, TRAIN)
    assert isinstance(choice, dict)
    assert choice["a"].transport is Transport.BROADCAST


def test_train_devices_come_from_the_spec_or_are_unknown() -> None:
    assert train_devices([{"node": "n0", "devices": ["GPU-0", "GPU-1"]}]) == TRAIN
    assert train_devices([]) is None
    assert train_devices(None) is None


devices = st.frozensets(st.builds(Device, st.sampled_from(["n0", "n1"]), st.sampled_from(["GPU-0", "GPU-1", "MIG-2"])))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.none() | devices, max_size=6), st.none() | devices)
def test_a_broadcast_group_never_holds_a_train_device_or_one_device_twice(
    engines: dict[str, frozenset[Device] | None], train: frozenset[Device] | None
) -> None:
    for mode in ("Auto", "Broadcast"):
        choice = choose(mode, engines, train or None)
        if isinstance(choice, Refusal):
            continue
        group = [n for n, c in choice.items() if c.transport is Transport.BROADCAST]
        used = [d for n in group for d in engines[n] or ()]
        assert len(used) == len(set(used))
        assert not set(used) & (train or frozenset())
        assert set(choice) == set(engines)
        assert mode == "Auto" or len(group) == len(engines)


@pytest.mark.parametrize(
    ("limit", "total", "count"),
    [("10%", 4, 1), ("10%", 64, 7), ("0%", 10, 0), (2, 3, 2), ("100%", 3, 3), ("10%", 0, 0)],
)
def test_max_unavailable_is_rounded_up(limit: int | str, total: int, count: int) -> None:
    assert unavailable_limit(limit, total) == count
