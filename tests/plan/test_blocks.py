"""Train blocks: claims, slots, what is made and deleted, and what is said when a block moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.v1alpha1 import EnginePool, RLPipeline
from rlfleet.api.v1alpha1.rlpipeline_status import BlockStatus
from rlfleet.plan.blocks import block_rows, build_claim, moves, plan_claims, slot_evidence, slots_of, usable
from rlfleet.plan.dra import Allocation, Given, uses
from rlfleet.plan.topology import Device
from rlfleet.plan.validate import violations
from tests.plan.pool_kit import pool

A = {"name": "a", "deviceClassName": "gpu.example.com", "slots": 2, "devicesPerSlot": 2, "matchAttributes": ["x/root"]}
B = {"name": "b", "deviceClassName": "gpu.example.com", "slots": 1}


def pipeline(*blocks: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": "p", "namespace": "ns", "uid": "p-uid"}
    return {"metadata": meta, "spec": {"trainer": {"blocks": list(blocks)}}}


def existing(body: dict[str, Any], uid: str = "c-uid", **meta: Any) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "uid": uid, **meta}}


def test_a_block_is_one_claim_with_one_request_per_slot_and_the_constraint_over_all() -> None:
    claim = build_claim(pipeline(A), A)
    assert claim["metadata"]["name"] == "p.a"
    assert claim["metadata"]["ownerReferences"][0]["uid"] == "p-uid"
    assert claim["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] is False
    devices = claim["spec"]["devices"]
    assert [r["name"] for r in devices["requests"]] == ["slot-0", "slot-1"]
    assert devices["requests"][1]["exactly"] == {
        "deviceClassName": "gpu.example.com",
        "allocationMode": "ExactCount",
        "count": 2,
    }
    assert devices["constraints"] == [{"matchAttribute": "x/root"}]
    assert "constraints" not in build_claim(pipeline(B), B)["spec"]["devices"]


def test_engines_take_slots_in_the_order_of_the_pools_blocks() -> None:
    claims = pool(placement={"mode": "Claims", "blocks": ["b", "a"]})
    assert [s.text for s in slots_of(claims, pipeline(A, B))] == ["p.b/slot-0", "p.a/slot-0", "p.a/slot-1"]
    assert slots_of(claims, pipeline(A))[0].text == "p.a/slot-0", "a block that does not exist has no slot"
    assert slots_of(claims, None) == []


def test_claims_are_made_once_and_deleted_only_if_they_are_ours() -> None:
    line = pipeline(A, B)
    first = plan_claims(line, [])
    assert [c["metadata"]["name"] for c in first.create] == ["p.a", "p.b"]
    made = [existing(c, f"uid-{i}") for i, c in enumerate(first.create)]
    assert plan_claims(line, made) == plan_claims(pipeline(A, B), reversed(made))
    assert plan_claims(line, made).create == ()
    gone = plan_claims(pipeline(A), made)
    assert (gone.create, gone.delete, gone.taken) == ((), (("p.b", "uid-1"),), ())
    going = [made[0], existing(made[1], "uid-1", deletionTimestamp="now")]
    assert plan_claims(pipeline(A), going).delete == (), "asked once"
    stranger = existing(first.create[0], ownerReferences=[])
    plan = plan_claims(pipeline(A), [stranger])
    assert (plan.create, plan.delete, plan.taken) == ((), (), ("p.a",))
    unrelated = existing(first.create[0], name="theirs", ownerReferences=[])
    assert plan_claims(pipeline(), [unrelated]).delete == ()


def test_a_block_that_was_added_again_with_another_shape_gets_another_claim() -> None:
    old = existing(build_claim(pipeline(A), A))
    assert plan_claims(pipeline({**A, "slots": 3}), [old]).delete == (("p.a", "c-uid"),)
    assert plan_claims(pipeline({**A, "matchAttributes": ["x/root"]}), [old]).delete == ()


def test_a_claim_can_be_used_while_it_is_ours_and_is_to_stay() -> None:
    claim = existing(build_claim(pipeline(A), A))
    assert usable(claim, "p-uid")
    assert not usable(claim, "another")
    assert not usable(None, "p-uid")
    assert not usable(existing(claim, deletionTimestamp="now"), "p-uid")


# ------------------------------------------------------------------------------------------ where they are


def allocation(node: str | None, *uuids: str, owner: str = "p-uid") -> dict[str, Allocation]:
    given = tuple(Given(f"slot-{i}", u, Device(node, u)) for i, u in enumerate(uuids)) if node else None
    return {"p.a": Allocation("p.a", "c-uid", owner, given)}


def rows(found: dict[str, Allocation], old: list[dict[str, Any]], last: str = "r1") -> list[dict[str, Any]]:
    return block_rows(pipeline(A), found, old, last)


HOME = {"name": "a", "claim": "p.a", "claimUID": "c-uid", "node": "n0", "devices": ["g1", "g2"]}


def test_a_block_is_where_its_claim_is_and_a_free_claim_keeps_what_was_known() -> None:
    assert rows({}, []) == []
    assert rows(allocation(None), []) == [{"name": "a", "claim": "p.a", "claimUID": "c-uid"}]
    assert rows(allocation("n0", "g1", "g2"), []) == [HOME]
    swapped = rows(allocation("n0", "g2", "g1"), [])
    assert swapped[0]["devices"] == ["g2", "g1"], "slot by slot"
    assert rows(allocation(None), [HOME]) == [HOME]
    assert rows({}, [HOME]) == [HOME]
    assert rows(allocation("n0", "g1", "g2", owner="another"), []) == [], "somebody else's claim says nothing"


def test_engines_are_found_by_their_slot() -> None:
    line = pipeline(A, B)
    line["status"] = {"blocks": [HOME | {"devices": ["g3", "g4", "g1", "g2"]}, {"name": "b", "claim": "p.b"}]}

    def at(slot: str) -> set[str] | None:
        found = slot_evidence(line, slot)
        return {d.uuid for d in found.devices or ()} if found is not None else None

    assert (at("p.a/slot-0"), at("p.a/slot-1")) == ({"g3", "g4"}, {"g1", "g2"})
    assert at("p.a/slot-9") == set()
    assert at("p.b/slot-0") is None, "not allocated yet"
    assert slot_evidence(None, "p.a/slot-0") is None


def test_a_move_is_on_record_until_another_round_has_ended() -> None:
    moved = rows(allocation("n1", "h1", "h2"), [HOME])
    assert moved[0] | {"movedFrom": "n0/g1, n0/g2", "movedAfter": "r1"} == moved[0]
    assert (moved[0]["node"], moved[0]["devices"]) == ("n1", ["h1", "h2"])
    assert rows(allocation("n1", "h1", "h2"), moved) == moved, "the same round: nobody planned since"
    assert moves(moved).startswith("train block a moved from n0/g1, n0/g2 to n1/h1, n1/h2")
    later = rows(allocation("n1", "h1", "h2"), moved, "r2")
    assert later == [HOME | {"node": "n1", "devices": ["h1", "h2"]}]
    assert moves(later) == ""
    again = rows(allocation("n0", "g1", "g2"), moved)
    assert again[0]["movedFrom"] == "n1/h1, n1/h2"


def test_a_move_between_nodes_with_long_names_is_a_row_that_the_schema_takes() -> None:
    far = HOME | {"node": "n" * 253, "devices": [f"GPU-{i}" for i in range(8)]}
    moved = rows(allocation("n1", "h1", "h2"), [far])
    assert BlockStatus.model_validate(moved[0]).moved_from


def test_the_same_devices_again_are_no_move() -> None:
    assert moves(rows(allocation("n0", "g1", "g2"), rows(allocation(None), [HOME]))) == ""


@given(st.lists(st.sampled_from(["n0", "n1", None]), max_size=8), st.integers(0, 3))
def test_a_move_is_said_exactly_when_devices_differ_from_those_known_last(nodes: list[str | None], last: int) -> None:
    old: list[dict[str, Any]] = []
    known: str | None = None
    for node in nodes:
        now = rows(allocation(node, "g1") if node else allocation(None), old, f"r{last}")
        if node is not None and known is not None and node != known:
            assert now[0]["movedFrom"] == f"{known}/g1"
        known = node or known
        assert now[0].get("node") == known
        old = now


@pytest.mark.parametrize("order", [1, -1])
def test_rows_follow_the_spec(order: int) -> None:
    found = allocation("n0", "g1") | {"p.b": Allocation("p.b", "b-uid", "p-uid", None)}
    line = pipeline(*[A, B][::order])
    assert [r["name"] for r in block_rows(line, found, [], "")] == ["a", "b"][::order]


def test_the_documented_example_fits_together() -> None:
    path = Path(__file__).resolve().parents[2] / "docs/examples/claims.yaml"
    line, engines, trainer = yaml.safe_load_all(path.read_text())
    RLPipeline.from_dict(line)
    EnginePool.from_dict(engines)
    line["spec"]["transport"] = {"mode": "CPUSerialize"}
    assert violations(line, [engines]) == ()
    slots = slots_of(engines, line)
    assert len(slots) == engines["spec"]["replicas"]
    assert {s.claim for s in slots} == {c for c, _ in uses(trainer)}
    assert trainer["metadata"]["labels"] == line["spec"]["weights"]["sender"]["podSelector"]["matchLabels"]
