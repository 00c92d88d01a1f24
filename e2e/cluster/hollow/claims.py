"""The DRA part of a hollow kubelet: which simulated GPUs a pod's ResourceClaims give to which of its containers.

Like a kubelet it starts no container before every claim of the pod is allocated on this node and reserved for this very
pod; like a driver it hands a container the devices of the requests that the container names, and no others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from e2e.cluster.hollow.nodes import DRIVER, Nodes, device_name

Object = dict[str, Any]
# Name of a ResourceClaim -> the object, or None.
FetchClaim = Callable[[str], Awaitable[Object | None]]


class NotPrepared(Exception):
    """A claim cannot be used by the pod (yet); the message says why."""


async def prepare(pod: Object, fetch: FetchClaim) -> dict[str, list[str]]:
    """UUIDs by container name, for containers that use claims. Raises NotPrepared."""
    results: dict[str, list[Object]] = {}
    made = {s["name"]: s.get("resourceClaimName") for s in pod.get("status", {}).get("resourceClaimStatuses", [])}
    for entry in pod["spec"].get("resourceClaims", []):
        name = entry.get("resourceClaimName") or made.get(entry["name"])
        claim = await fetch(name) if name else None
        if claim is None:
            raise NotPrepared(f"claim {name or entry['name']} does not exist")
        status = claim.get("status", {})
        if not any(r["uid"] == pod["metadata"]["uid"] for r in status.get("reservedFor", [])):
            raise NotPrepared(f"claim {name} is not reserved for this pod")
        results[entry["name"]] = [r for r in status["allocation"]["devices"]["results"] if r["driver"] == DRIVER]
    uuids = {device_name(i): uuid for i, uuid in enumerate(Nodes.devices(pod["spec"]["nodeName"]))}
    given: dict[str, list[str]] = {}
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        uses = container.get("resources", {}).get("claims", [])
        if uses:
            given[container["name"]] = [
                uuids[result["device"]]
                for use in uses
                for result in results[use["name"]]
                if not use.get("request") or result["request"].partition("/")[0] == use["request"]
            ]
    return given
