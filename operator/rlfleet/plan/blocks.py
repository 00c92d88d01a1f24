"""Train blocks: their ResourceClaims, the slots that engines take, and where each block is (DESIGN section 6).

Invariants:
- a block is one claim with one request per slot, so the scheduler places all of it on one node or nothing of it;
- the claim's name follows from pipeline and block alone, so that trainer and engines can be written before it exists;
- a claim of that name that the pipeline does not control is never used, changed or deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api import labels
from rlfleet.plan.dra import Allocation, claim_name
from rlfleet.plan.owners import controlled_by
from rlfleet.plan.topology import Device, Evidence, device_names

Obj = Mapping[str, Any]

#: Characters of ``status.blocks[].movedFrom``; names of nodes may be long.
MAX_MOVED = 1024


@dataclass(frozen=True, slots=True)
class Slot:
    """Placement Claims: the ResourceClaim and the request of one engine."""

    claim: str
    request: str

    @property
    def text(self) -> str:
        """As it stands in the pod's annotation."""
        return f"{self.claim}/{self.request}"


def blocks_of(pipeline: Obj) -> dict[str, Obj]:
    """``spec.trainer.blocks`` by name."""
    return {str(b["name"]): b for b in (pipeline["spec"].get("trainer") or {}).get("blocks") or []}


def request_name(slot: int) -> str:
    """Name of a slot's request in its claim."""
    return f"slot-{slot}"


def slots_of(pool: Obj, pipeline: Obj | None) -> list[Slot]:
    """Placement Claims: who gets which slot, by engine index. Blocks that do not exist have none."""
    known = blocks_of(pipeline) if pipeline is not None else {}
    name = str(pool["spec"].get("pipeline"))
    return [
        Slot(claim_name(name, block), request_name(i))
        for block in (pool["spec"].get("placement") or {}).get("blocks") or []
        if block in known
        for i in range(int(known[block]["slots"]))
    ]


# ------------------------------------------------------------------------------------------------ claims


def build_claim(pipeline: Obj, block: Obj) -> dict[str, Any]:
    """The ResourceClaim of a block."""
    meta = pipeline["metadata"]
    request = {
        "deviceClassName": block["deviceClassName"],
        "allocationMode": "ExactCount",
        "count": int(block.get("devicesPerSlot") or 1),
    }
    devices: dict[str, Any] = {
        "requests": [{"name": request_name(i), "exactly": dict(request)} for i in range(int(block["slots"]))]
    }
    # A constraint that names no request holds for all of them together.
    constraints = [{"matchAttribute": attribute} for attribute in block.get("matchAttributes") or []]
    if constraints:
        devices["constraints"] = constraints
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": claim_name(meta["name"], str(block["name"])),
            "namespace": meta["namespace"],
            "labels": {labels.PIPELINE: meta["name"], labels.MANAGED_BY: labels.MANAGED_BY_VALUE},
            "annotations": {labels.BLOCK_HASH: block_hash(block)},
            # Pods that are not ours may hold the claim: a foreground deletion must not wait for them.
            "ownerReferences": controlled_by("RLPipeline", meta, blocks=False),
        },
        "spec": {"devices": devices},
    }


def block_hash(block: Obj) -> str:
    """What of a block its claim is made of. A block that was removed and added again may differ."""
    shape = {
        "class": block["deviceClassName"],
        "slots": int(block["slots"]),
        "devices": int(block.get("devicesPerSlot") or 1),
        "match": sorted(block.get("matchAttributes") or []),
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """What to do about claims. ``delete``: (name, UID). ``taken``: names of blocks' claims that are somebody else's."""

    create: tuple[dict[str, Any], ...] = ()
    delete: tuple[tuple[str, str], ...] = ()
    taken: tuple[str, ...] = ()


def plan_claims(pipeline: Obj, claims: Iterable[Obj]) -> ClaimPlan:
    """Claims to make and to delete. ``claims``: those of the namespace that exist."""
    uid = pipeline["metadata"]["uid"]
    wanted = {claim_name(pipeline["metadata"]["name"], n): b for n, b in blocks_of(pipeline).items()}
    known = {c["metadata"]["name"]: c for c in claims}
    delete, taken = [], []
    for name, claim in known.items():
        mine = controller_of(claim) == uid
        if not mine and name in wanted:
            taken.append(name)
        elif mine and not claim["metadata"].get("deletionTimestamp"):
            told = (claim["metadata"].get("annotations") or {}).get(labels.BLOCK_HASH)
            if name not in wanted or told != block_hash(wanted[name]):
                delete.append((str(name), str(claim["metadata"]["uid"])))
    return ClaimPlan(
        create=tuple(build_claim(pipeline, block) for name, block in wanted.items() if name not in known),
        delete=tuple(sorted(delete)),
        taken=tuple(sorted(taken)),
    )


def controller_of(obj: Obj) -> str:
    """UID of the object's controller, or empty."""
    owners = obj["metadata"].get("ownerReferences") or []
    return next((str(o.get("uid") or "") for o in owners if o.get("controller")), "")


def usable(claim: Obj | None, pipeline_uid: str) -> bool:
    """Pods may be made that use the claim: it exists, is the pipeline's, and is to stay."""
    return claim is not None and controller_of(claim) == pipeline_uid and not claim["metadata"].get("deletionTimestamp")


# ------------------------------------------------------------------------------------------------ where they are


def block_rows(
    pipeline: Obj, found: Mapping[str, Allocation], old: Sequence[Obj], last_round: str
) -> list[dict[str, Any]]:
    """``status.blocks``. A claim that is free keeps what was known of it, so that a move is noticed.

    A move stays on record until a round has ended that did not end before it: from then on every plan knew of it.
    """
    before = {str(row["name"]): row for row in old}
    rows = []
    for name in blocks_of(pipeline):
        claim = claim_name(pipeline["metadata"]["name"], name)
        allocation = found.get(claim)
        if allocation is None or allocation.owner != pipeline["metadata"]["uid"]:
            if name in before:
                rows.append(dict(before[name]))
            continue
        row: dict[str, Any] = {"name": name, "claim": claim, "claimUID": allocation.uid}
        last = before.get(name, {})
        known = {k: last[k] for k in ("node", "devices") if k in last}
        devices = [(_slot_of(g.request), g.device) for g in allocation.given or ()]
        if devices and all(d for _, d in devices):
            now = sorted((slot, d.uuid, d.node) for slot, d in devices if d is not None)
            place = {"node": now[0][2], "devices": [uuid for _, uuid, _ in now]}
            if known and known != place:
                was = frozenset(Device(str(known["node"]), uuid) for uuid in known["devices"])
                row |= place | {"movedFrom": device_names(was)[:MAX_MOVED], "movedAfter": last_round}
                rows.append(row)
                continue
            known = place
        row |= known
        if last.get("movedFrom") and last.get("movedAfter", "") == last_round:
            row |= {"movedFrom": last["movedFrom"], "movedAfter": last.get("movedAfter", "")}
        rows.append(row)
    return rows


def _slot_of(request: str) -> int:
    """The slot of a request's name (or of a subrequest's)."""
    number = request.partition("/")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def slot_evidence(pipeline: Obj | None, slot: str) -> Evidence | None:
    """Where ``status.blocks`` says that a slot (``Slot.text``) is; None: it says nothing."""
    claim, _, request = slot.rpartition("/")
    for row in ((pipeline or {}).get("status") or {}).get("blocks") or []:
        block = blocks_of(pipeline).get(str(row["name"])) if pipeline is not None else None
        if row["claim"] != claim or block is None or not row.get("devices"):
            continue
        size = int(block.get("devicesPerSlot") or 1)
        start = _slot_of(request) * size
        found = frozenset(Device(str(row["node"]), str(uuid)) for uuid in row["devices"][start : start + size])
        return Evidence(f"ResourceClaim {claim}", found or None)
    return None


def moves(rows: Iterable[Obj]) -> str:
    """What moved, for the condition and the Event; empty: nothing."""
    return "; ".join(
        f"train block {r['name']} moved from {r['movedFrom']} to "
        f"{device_names(frozenset(Device(str(r['node']), uuid) for uuid in r['devices']))}: all pods that used it had "
        "ended. The next round is planned for the new devices"
        for r in rows
        if r.get("movedFrom")
    )
