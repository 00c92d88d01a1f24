"""What the repair pass decides: engines between rounds, rounds that no claim names, and which history may go."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.plan.repair import (
    Act,
    Need,
    RoundFacts,
    abandoned,
    evidence,
    needs,
    sweep,
)
from rlfleet.plan.rounds import Committed, Engine
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, engine, gate, load

COMMITTED = Committed(5, DIGEST_A)
AT = (5, DIGEST_A)


def acts(*engines: Engine, committed: Committed | None = COMMITTED) -> dict[str, Act]:
    return {n.engine: n.act for n in needs(engines, committed, pipeline="p")}


@pytest.mark.parametrize(
    ("status", "act"),
    [
        # proven at what is committed
        ({"holds": AT}, None),
        ({"holds": AT, "routed": {"r": True}}, None),
        ({"holds": AT, "paused": True}, Act.RESUME),
        ({"holds": AT, "paused": None}, Act.RESUME),
        ({"holds": AT, "routed": {"r": False}}, Act.OPEN),
        ({"holds": AT, "routed": {"r": None}}, None),  # a router that does not answer is unknown, not empty
        ({"holds": AT, "paused": True, "routed": {"r": False}}, Act.RESUME),
        # proven at something else
        ({"holds": (4, DIGEST_A)}, Act.CLOSE),
        ({"holds": (5, DIGEST_B)}, Act.CLOSE),  # a version number identifies nothing
        ({"holds": (4, DIGEST_A), "paused": None}, Act.CLOSE),
        ({"holds": (4, DIGEST_A), "paused": True}, None),
        ({"holds": (4, DIGEST_A), "paused": True, "routed": {"r": True}}, Act.CLOSE),
        # proven at nothing: its gate pauses it, its entries are ours
        ({"paused": True}, None),
        ({"paused": False}, None),
        ({"paused": True, "routed": {"r": True, "s": False}}, Act.CLOSE),
        # not to be judged
        ({"holds": AT, "paused": True, "in_flight": "op"}, None),
        ({"holds": AT, "paused": True, "enrolled": False}, None),
        ({"holds": AT, "paused": True, "incarnation": None}, None),
        ({"holds": AT, "paused": True, "pipeline": "other"}, None),
        ({"holds": AT, "paused": True, "pipeline": "p"}, Act.RESUME),
        # an operation without a known end comes first
        ({"holds": AT, "uncertain": True}, Act.SETTLE),
        ({"holds": (4, DIGEST_A), "uncertain": True, "routed": {"r": True}}, Act.SETTLE),
    ],
)
def test_one_engine(status: dict[str, Any], act: Act | None) -> None:
    assert acts(engine("e", gate(**status))) == ({"e": act} if act else {})


def test_a_state_that_passes_is_doubtful() -> None:
    found = needs([engine("e", gate(holds=AT, paused=None))], COMMITTED, pipeline="p")
    assert found == (Need("e", "uid-e", "i1", Act.RESUME, doubtful=True),)
    assert not needs([engine("e", gate(holds=AT, paused=True))], COMMITTED, pipeline="p")[0].doubtful


@pytest.mark.parametrize("change", [{"gone": True}, {"leaving": True}])
def test_pods_on_their_way_out_are_left_alone(change: dict[str, bool]) -> None:
    assert acts(engine("e", gate(holds=AT, paused=True), **change)) == {}


def test_silence_is_no_evidence() -> None:
    assert acts(engine("e", None)) == {}
    lost = wire.EngineReport(state=wire.EngineState.UNREACHABLE)
    assert acts(engine("e", gate(holds=AT, engine=lost))) == {}


def test_what_a_pool_takes_out_of_service_is_never_opened() -> None:
    wrong, good = gate(holds=(4, DIGEST_A)), gate(holds=AT, paused=True, routed={"r": False})
    uncertain = gate(uncertain=True)
    found = acts(*(engine(n, s, unwanted=True) for n, s in (("a", good), ("b", wrong), ("c", uncertain))))
    assert found == {"b": Act.CLOSE}


def test_what_a_rolling_update_drains_is_not_routed_again_but_closed_and_resumed_like_any_other() -> None:
    def of(**status: Any) -> dict[str, Act]:
        return acts(engine("e", gate(**status), draining=True))

    assert of(holds=AT, routed={"r": False}) == {}
    assert of(holds=(4, DIGEST_A)) == {"e": Act.CLOSE}
    assert of(holds=AT, paused=True, routed={"r": False}) == {"e": Act.RESUME}, "it ends the requests that it has"


def test_without_a_commit_nothing_is_opened_and_proof_is_not_doubted() -> None:
    for holds, paused in itertools.product([None, AT], [True, False, None]):
        status = gate(holds=holds, paused=paused)
        assert acts(engine("e", status), committed=None) == {}
    assert acts(engine("e", gate(routed={"r": True})), committed=None) == {"e": Act.CLOSE}


def test_only_proof_opens() -> None:
    """Over all combinations: whoever is resumed or routed holds what is committed, and is certain and still."""
    holds = [None, AT, (4, DIGEST_A), (5, DIGEST_B)]
    flags = [True, False]
    seen = set()
    for h, paused, listed, uncertain, flight in itertools.product(holds, [*flags, None], [*flags, None], flags, flags):
        status = gate(
            holds=h, paused=paused, routed={"r": listed}, uncertain=uncertain, in_flight="x" if flight else None
        )
        act = acts(engine("e", status)).get("e")
        seen.add(act)
        if act in (Act.RESUME, Act.OPEN):
            assert h == AT
            assert not uncertain
        if flight:
            assert act is None
        if h not in (None, AT) and not flight and not uncertain and (paused is not True or listed):
            assert act is Act.CLOSE
    assert seen == {None, *Act}


# ------------------------------------------------------------------------------------------------ abandoned rounds


def facts(name: str, phase: str = "Succeeded", **changes: Any) -> RoundFacts:
    fields: dict[str, Any] = {"uid": f"uid-{name}", "version": 5, "planned": True, "generation": 10, "created_ms": 1}
    return RoundFacts(name=name, phase=phase, **{**fields, **changes})


@pytest.mark.parametrize("phase", ["Quiescing", "Transferring", "Holding", "Committed"])
def test_a_round_in_mid_air_goes_on(phase: str) -> None:
    left = abandoned([facts("a", phase)], COMMITTED)
    assert left.resume is not None
    assert left.resume.name == "a"
    assert left.settle == ()


@pytest.mark.parametrize("phase", ["Pending", "Planned", "Staging", "Succeeded", "Failed"])
def test_a_round_that_touched_nothing_is_not_abandoned(phase: str) -> None:
    assert abandoned([facts("a", phase)], None) == abandoned([], None)


@pytest.mark.parametrize(
    "round_",
    [
        facts("a", "Transferring", planned=False),  # whom it touched is not known any more
        facts("a", "Transferring", version=4),  # it would take the fleet back
    ],
)
def test_a_round_that_can_not_go_on_is_settled(round_: RoundFacts) -> None:
    left = abandoned([round_], COMMITTED)
    assert left.resume is None
    assert [r.name for r, _ in left.settle] == ["a"]


def test_a_rollback_in_mid_air_goes_on() -> None:
    left = abandoned([facts("a", "Transferring", version=4, allow_rollback=True)], COMMITTED)
    assert left.resume is not None


def test_the_one_that_moved_last_goes_on() -> None:
    left = abandoned([facts("new", "Quiescing", generation=20), facts("old", "Holding", generation=19)], None)
    assert left.resume is not None
    assert left.resume.name == "new"
    assert [r.name for r, _ in left.settle] == ["old"]


# ------------------------------------------------------------------------------------------------ sweep


def swept(
    rounds: list[RoundFacts], engines: list[Engine] | None = None, *, ttl: int = 100, limit: int = 20, **changes: Any
) -> list[str]:
    keep = evidence(engines or [])
    gone = sweep(rounds, keep, now_ms=1000, ttl_ms=ttl, limit=limit, last=changes.get("last"))
    return sorted(r.name for r in gone)


def ended(name: str, *, at: int = 0, **changes: Any) -> RoundFacts:
    return facts(name, changes.pop("phase", "Succeeded"), finished_ms=at, **{"generation": 1, **changes})


def test_old_rounds_go_and_young_ones_stay() -> None:
    assert swept([ended("old", at=900), ended("young", at=901), ended("top", generation=9)]) == ["old"]


def test_the_oldest_go_beyond_the_limit() -> None:
    rounds = [ended(f"r{i}", at=1000, created_ms=i, generation=i) for i in range(5)]
    assert swept(rounds, limit=3) == ["r0", "r1"]
    assert swept(rounds, limit=5) == []


def test_the_highest_fence_and_the_last_round_stay() -> None:
    rounds = [ended("a", generation=7), ended("b", generation=3), ended("c", generation=2)]
    assert swept(rounds, last="b", limit=1) == ["c"]


def test_a_round_that_runs_stays() -> None:
    assert swept([ended("a", phase="Holding", generation=0), ended("top", generation=9)], limit=1) == []
    assert swept([ended("a", deleting=True), ended("top", generation=9)], limit=1) == []


@pytest.mark.parametrize(
    ("status", "needed"),
    [
        ({"loads": (load("uid-a", published=True),), "holds": AT}, False),
        ({"loads": (load("uid-a", published=True),)}, True),  # what it proved was disproved since
        ({"loads": (load("uid-a"),)}, True),
        ({"loads": (load("uid-a", state=wire.OperationState.UNKNOWN),), "uncertain": True}, True),
        ({"loads": (load("uid-a", published=True),), "holds": AT, "uncertain": True}, True),
        ({"loads": (load("uid-a"), load("uid-b", published=True)), "holds": AT}, False),
        ({}, False),
    ],
)
def test_the_only_evidence_of_an_engine_stays(status: dict[str, Any], needed: bool) -> None:
    rounds = [ended("a"), ended("top", generation=9)]
    assert swept(rounds, [engine("e", gate(**status))]) == ([] if needed else ["a"])


def test_rounds_of_an_engine_that_can_not_be_asked_stay() -> None:
    rounds = [ended("a", members=frozenset({"uid-e"})), ended("b"), ended("top", generation=9)]
    assert swept(rounds, [engine("e", None)]) == ["b"]
    assert swept(rounds, [engine("e", None, gone=True)]) == ["a", "b"]
    assert swept(rounds, [engine("e", gate(holds=AT))]) == ["a", "b"]


def test_catch_ups_do_not_push_out_the_rounds_of_the_trainer() -> None:
    refreshes = [ended(f"r{i}", at=1000, created_ms=i, generation=i + 1) for i in range(3)]
    catch_ups = [ended(f"c{i}", at=1000, created_ms=100 + i, generation=100 + i, kind="CatchUp") for i in range(3)]
    assert swept([*refreshes, *catch_ups], limit=2) == ["c0", "r0"]
