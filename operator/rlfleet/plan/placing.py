"""Where an engine's pod may run and which devices it gets: pins, slots of train blocks, nodes, pack domain.

Invariant: what the user's template requires stays required. Terms of a node affinity are alternatives, so each of them
gets our rule; other affinities are added to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from rlfleet.api import labels
from rlfleet.plan.blocks import Slot
from rlfleet.plan.template import DEVICE_CLAIM, ENGINE, GATE, Assignment, InvalidPool, is_claims

Obj = dict[str, Any]


def place_pod(
    spec: Obj, pool: Mapping[str, Any], index: int, *, assignment: Assignment | None, slots: Sequence[Slot]
) -> dict[str, str]:
    """Write the placement of engine ``index`` into a pod's spec; the annotations that tell of it. Raises InvalidPool.

    ``assignment``: placement Pinned; ``slots``: placement Claims, by engine index.
    """
    placement = pool["spec"].get("placement") or {}
    nodes = [assignment.node] if assignment is not None else placement.get("nodes")
    if nodes:
        _require_nodes(spec, nodes)
    if placement.get("packDomain"):
        _pack(spec, pool["metadata"]["name"], placement["packDomain"])
    if assignment is not None:
        return {labels.DEVICES: assignment.text}
    if not is_claims(pool):
        return {}
    if index >= len(slots):
        raise InvalidPool(f"spec.placement.blocks have {len(slots)} slots, none for index {index}")
    _claim(spec, slots[index])
    return {labels.SLOT: slots[index].text}


def _claim(spec: Obj, slot: Slot) -> None:
    spec["resourceClaims"] = [
        *(spec.get("resourceClaims") or []),
        {"name": DEVICE_CLAIM, "resourceClaimName": slot.claim},
    ]
    # The gate reads the memory of the very devices that its engine has.
    for container in [*spec["containers"], *spec["initContainers"]]:
        if container["name"] in (ENGINE, GATE):
            resources = container["resources"] = dict(container.get("resources") or {})
            resources["claims"] = [
                *(resources.get("claims") or []),
                {"name": DEVICE_CLAIM, "request": slot.request},
            ]


def _require_nodes(spec: Obj, nodes: Sequence[str]) -> None:
    rule = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    of_node = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    required = dict(of_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), copy.deepcopy(rule)]} for term in terms
    ]
    of_node["requiredDuringSchedulingIgnoredDuringExecution"] = required


def _pack(spec: Obj, pool: str, domain: str) -> None:
    """All pods of the pool in one domain; the scheduler lets the first one, which follows nobody, go anywhere."""
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    of_pods = affinity["podAffinity"] = dict(affinity.get("podAffinity") or {})
    of_pods["requiredDuringSchedulingIgnoredDuringExecution"] = [
        *(of_pods.get("requiredDuringSchedulingIgnoredDuringExecution") or []),
        {"labelSelector": {"matchLabels": {labels.POOL: pool}}, "topologyKey": domain},
    ]
