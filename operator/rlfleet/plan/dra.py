"""Which devices a pod got through ResourceClaims: pods, claims and ResourceSlices (resource.k8s.io/v1) joined.

Invariants:
- a claim names drivers, pools and devices, never a UUID: only a ResourceSlice says which physical device that is, and
  only those of the newest generation of their pool count. What cannot be joined is unknown, with the reason;
- a pod's claims are read through the pod itself, so a claim that nobody uses says nothing about anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.plan.template import DEVICE_CLAIM, ENGINE
from rlfleet.plan.topology import Device, Evidence

Obj = Mapping[str, Any]

#: Attribute of a device that names its UUID, unqualified (in the driver's own domain) or qualified.
UUID_ATTRIBUTE: Final = "uuid"


@dataclass(frozen=True, slots=True)
class Given:
    """One allocated device, as a claim names it. ``device`` None: no ResourceSlice tells its UUID."""

    request: str
    name: str
    device: Device | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one ResourceClaim was given. ``given`` None: nothing yet."""

    claim: str
    uid: str
    owner: str
    """UID of the object that controls the claim, or empty."""
    given: tuple[Given, ...] | None
    why: str = ""

    def of(self, request: str = "") -> tuple[Given, ...]:
        """The devices of one request, or of the whole claim for an empty one."""
        return tuple(g for g in self.given or () if not request or g.request.partition("/")[0] == request)


DeviceKey = tuple[str, str, str]


def results_of(claim: Obj) -> list[Mapping[str, Any]] | None:
    """The allocated devices of a claim; None: it is not allocated."""
    allocation = (claim.get("status") or {}).get("allocation")
    if not allocation:
        return None
    return list((allocation.get("devices") or {}).get("results") or [])


def node_of(claim: Obj) -> str:
    """The one node on which an allocated claim can be used; empty where it does not name exactly one."""
    selector = ((claim.get("status") or {}).get("allocation") or {}).get("nodeSelector") or {}
    terms = selector.get("nodeSelectorTerms") or []
    names = [
        value
        for term in terms
        for field in term.get("matchFields") or []
        if field.get("key") == "metadata.name" and field.get("operator") == "In"
        for value in field.get("values") or []
    ]
    return str(names[0]) if len(names) == len(terms) == 1 else ""


def device_table(slices: Iterable[Obj]) -> dict[DeviceKey, Device]:
    """(driver, pool, device) -> physical device, from ResourceSlices; devices without node or UUID are left out."""
    slices = list(slices)
    newest: dict[tuple[str, str], int] = {}
    for one in slices:
        key, generation = _pool(one)
        newest[key] = max(newest.get(key, generation), generation)
    table: dict[DeviceKey, Device] = {}
    for one in slices:
        key, generation = _pool(one)
        if generation < newest[key]:
            continue
        spec = one["spec"]
        for device in spec.get("devices") or []:
            node = str(spec.get("nodeName") or device.get("nodeName") or "")
            uuid = _uuid(device, key[0])
            if node and uuid:
                table[(*key, str(device["name"]))] = Device(node, uuid)
    return table


def _pool(one: Obj) -> tuple[tuple[str, str], int]:
    spec = one["spec"]
    pool = spec.get("pool") or {}
    return (str(spec.get("driver") or ""), str(pool.get("name") or "")), int(pool.get("generation") or 0)


def _uuid(device: Obj, driver: str) -> str:
    attributes = device.get("attributes") or {}
    for name in (UUID_ATTRIBUTE, f"{driver}/{UUID_ATTRIBUTE}"):
        value = (attributes.get(name) or {}).get("string")
        if value:
            return str(value)
    return ""


def allocation_of(claim: Obj, table: Mapping[DeviceKey, Device], why: str = "") -> Allocation:
    """Join one claim with what ResourceSlices say. ``why``: why there is no table, where there is none."""
    meta = claim["metadata"]
    results = results_of(claim)
    given = None
    if results is not None:
        given = tuple(
            Given(
                str(r.get("request") or ""),
                f"{r.get('driver')}/{r.get('pool')}/{r.get('device')}",
                table.get((str(r.get("driver")), str(r.get("pool")), str(r.get("device")))),
            )
            for r in results
        )
    owner: Obj = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), {})
    return Allocation(str(meta["name"]), str(meta["uid"]), str(owner.get("uid") or ""), given, why)


# ------------------------------------------------------------------------------------------------ pods


def claims_of_pod(pod: Obj) -> dict[str, str]:
    """How a pod calls its claims -> names of the ResourceClaims (empty: one of a template, not made yet)."""
    made = {
        s["name"]: s.get("resourceClaimName") or ""
        for s in (pod.get("status") or {}).get("resourceClaimStatuses") or []
    }
    return {
        c["name"]: str(c.get("resourceClaimName") or made.get(c["name"]) or "")
        for c in (pod.get("spec") or {}).get("resourceClaims") or []
    }


def uses(pod: Obj, container: str = "") -> tuple[tuple[str, str], ...]:
    """(ResourceClaim, request) that a container of the pod uses, or any of them where no name is given."""
    names = claims_of_pod(pod)
    spec = pod.get("spec") or {}
    found = {
        (names.get(use["name"], ""), str(use.get("request") or ""))
        for c in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
        if not container or c["name"] == container
        for use in (c.get("resources") or {}).get("claims") or []
    }
    return tuple(sorted(found))


def engine_uses(pod: Obj) -> tuple[tuple[str, str], ...]:
    """(ResourceClaim, request) of an engine's GPUs. In a Claims pool only the slot: others may be no GPUs at all."""
    slot = [
        (str(c.get("resourceClaimName") or ""), str(use.get("request") or ""))
        for c in (pod.get("spec") or {}).get("resourceClaims") or []
        if c["name"] == DEVICE_CLAIM
        for container in pod["spec"]["containers"]
        if container["name"] == ENGINE
        for use in (container.get("resources") or {}).get("claims") or []
        if use["name"] == DEVICE_CLAIM
    ]
    return tuple(slot) or uses(pod, ENGINE)


def claim_evidence(
    wanted: Sequence[tuple[str, str]], claims: Mapping[str, Allocation], *, part: bool = False
) -> Evidence | None:
    """The devices behind (ResourceClaim, request) pairs; None where there are none. All of them or unknown."""
    if not wanted:
        return None
    names = sorted({name or "(not made yet)" for name, _ in wanted})
    source = f"ResourceClaim {', '.join(names)}"
    devices: set[Device] = set()
    for name, request in wanted:
        found = claims.get(name)
        if found is None:
            return Evidence(source, None, part, f"{name or 'a claim of a template'} does not exist")
        if found.given is None:
            return Evidence(source, None, part, found.why or f"{name} is not allocated yet")
        for given in found.of(request):
            if given.device is None:
                problem = found.why or f"no ResourceSlice tells node and UUID of {given.name}"
                return Evidence(source, None, part, problem)
            devices.add(given.device)
    return Evidence(source, frozenset(devices) or None, part)


# ------------------------------------------------------------------------------------------------ train blocks


def claim_name(pipeline: str, block: str) -> str:
    """Name of a train block's ResourceClaim. A dot joins: neither name has one, so no two pairs make the same name."""
    return f"{pipeline}.{block}"


def block_claims(pipeline: str, spec: Obj) -> tuple[tuple[str, str], ...]:
    """(ResourceClaim, whole of it) of every train block of an RLPipeline's spec."""
    blocks = (spec.get("trainer") or {}).get("blocks") or []
    return tuple((claim_name(pipeline, str(b["name"])), "") for b in blocks)


def block_evidence(
    wanted: Sequence[tuple[str, str]], claims: Mapping[str, Allocation], *, owner: str
) -> Evidence | None:
    """The devices of train blocks; a claim of the right name that is not the pipeline's own says nothing of them."""
    return claim_evidence(wanted, {n: a for n, a in claims.items() if a.owner == owner or not a.uid})
