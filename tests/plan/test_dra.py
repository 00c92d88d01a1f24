"""Pods, ResourceClaims and ResourceSlices joined to physical devices."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.plan.dra import (
    allocation_of,
    block_claims,
    block_evidence,
    claim_evidence,
    claim_name,
    device_table,
    node_of,
    uses,
)
from rlfleet.plan.topology import Device

DRIVER = "gpu.example.com"


def resource_slice(
    node: str, devices: dict[str, str], *, generation: int = 1, qualified: bool = False
) -> dict[str, Any]:
    name = f"{DRIVER}/uuid" if qualified else "uuid"
    return {
        "metadata": {"name": f"{node}-{generation}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [{"name": d, "attributes": {name: {"string": u}} if u else {}} for d, u in devices.items()],
        },
    }


def claim(name: str, node: str, *results: tuple[str, str], owner: str = "p-uid") -> dict[str, Any]:
    allocation = {
        "devices": {"results": [{"request": r, "driver": DRIVER, "pool": node, "device": d} for r, d in results]},
        "nodeSelector": {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        },
    }
    return {
        "metadata": {"name": name, "uid": f"{name}-uid", "ownerReferences": [{"controller": True, "uid": owner}]},
        "status": {"allocation": allocation} if results else {},
    }


SLICES = [resource_slice("n0", {"gpu-0": "GPU-a", "gpu-1": "GPU-b"}), resource_slice("n1", {"gpu-0": "GPU-c"})]
TABLE = device_table(SLICES)
BLOCK = claim("p.a", "n0", ("slot-0", "gpu-0"), ("slot-1", "gpu-1"))


def pod(**containers: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "spec": {
            "resourceClaims": [
                {"name": "devices", "resourceClaimName": "p.a"},
                {"name": "own", "resourceClaimTemplateName": "t"},
            ],
            "containers": [{"name": n, "resources": {"claims": c}} for n, c in containers.items()],
        },
        "status": {"resourceClaimStatuses": [{"name": "own", "resourceClaimName": "own-x7"}]},
    }


def test_an_engine_has_the_devices_of_its_own_request() -> None:
    joined = {"p.a": allocation_of(BLOCK, TABLE)}
    engine = uses(pod(engine=[{"name": "devices", "request": "slot-1"}], other=[{"name": "devices"}]), "engine")
    found = claim_evidence(engine, joined)
    assert found is not None
    assert found.devices == frozenset({Device("n0", "GPU-b")})
    assert found.source == "ResourceClaim p.a"


def test_a_trainer_has_the_whole_claim_of_every_container() -> None:
    own = claim("own-x7", "n1", ("gpus", "gpu-0"))
    joined = {"p.a": allocation_of(BLOCK, TABLE), "own-x7": allocation_of(own, TABLE)}
    wanted = uses(pod(a=[{"name": "devices"}], b=[{"name": "own"}]))
    found = claim_evidence(wanted, joined, part=True)
    assert found is not None
    assert {d.uuid for d in found.devices or ()} == {"GPU-a", "GPU-b", "GPU-c"}
    assert found.part


def test_subrequests_belong_to_their_request() -> None:
    joined = {"p.a": allocation_of(claim("p.a", "n0", ("slot-1/big", "gpu-1"), ("slot-10", "gpu-0")), TABLE)}
    found = claim_evidence([("p.a", "slot-1")], joined)
    assert found is not None
    assert found.devices == frozenset({Device("n0", "GPU-b")})


@pytest.mark.parametrize(
    ("claims", "table", "why"),
    [
        ([], TABLE, "p.a does not exist"),
        ([claim("p.a", "n0")], TABLE, "p.a is not allocated yet"),
        ([BLOCK], {}, "no ResourceSlice tells node and UUID of gpu.example.com/n0/gpu-0"),
        (
            [BLOCK],
            device_table([resource_slice("n0", {"gpu-0": "", "gpu-1": "GPU-b"})]),
            "no ResourceSlice tells node and UUID of gpu.example.com/n0/gpu-0",
        ),
    ],
)
def test_what_cannot_be_joined_whole_is_unknown_and_says_why(claims: list[Any], table: Any, why: str) -> None:
    found = claim_evidence([("p.a", "")], {c["metadata"]["name"]: allocation_of(c, table) for c in claims})
    assert found is not None
    assert found.devices is None
    assert found.why == why


def test_a_pod_without_claims_says_nothing() -> None:
    assert claim_evidence(uses({"spec": {"containers": [{"name": "engine"}]}}, "engine"), {}) is None
    assert uses(pod(engine=[]), "engine") == ()


def test_a_claim_of_a_template_that_is_not_made_yet_is_unknown() -> None:
    early = pod(engine=[{"name": "own"}])
    early["status"] = {}
    found = claim_evidence(uses(early, "engine"), {})
    assert found is not None
    assert found.why == "a claim of a template does not exist"


def test_slices_of_an_older_generation_do_not_count() -> None:
    table = device_table(
        [resource_slice("n0", {"gpu-0": "GPU-old"}), resource_slice("n0", {"gpu-0": "GPU-new"}, generation=2)]
    )
    assert table == {(DRIVER, "n0", "gpu-0"): Device("n0", "GPU-new")}
    table = device_table([resource_slice("n0", {"gpu-0": "GPU-old"}), resource_slice("n0", {}, generation=2)])
    assert not table


def test_uuids_may_be_qualified_by_their_driver() -> None:
    table = device_table([resource_slice("n0", {"gpu-0": "GPU-a"}, qualified=True)])
    assert table[DRIVER, "n0", "gpu-0"] == Device("n0", "GPU-a")


def test_the_node_of_a_claim_is_the_only_one_that_it_names() -> None:
    assert node_of(BLOCK) == "n0"
    assert node_of(claim("p.a", "n0")) == ""
    both = claim("p.a", "n0", ("r", "gpu-0"))
    both["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"] = ["n0", "n1"]
    assert node_of(both) == ""


def test_a_block_is_the_pipelines_own_claim_and_nobody_elses() -> None:
    spec = {"trainer": {"blocks": [{"name": "a"}, {"name": "b"}]}}
    assert block_claims("p", spec) == (("p.a", ""), ("p.b", ""))
    assert block_claims("p", {}) == ()
    assert claim_name("a-b", "c") != claim_name("a", "b-c")
    joined = {"p.a": allocation_of(BLOCK, TABLE)}
    mine = block_evidence([("p.a", "")], joined, owner="p-uid")
    assert mine is not None
    assert len(mine.devices or ()) == 2
    taken = block_evidence([("p.a", "")], joined, owner="another")
    assert taken is not None
    assert taken.devices is None
