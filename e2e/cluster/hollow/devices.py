"""Which pod holds which simulated GPU of which node.

A pod that finds too few free devices waits for the pod that is giving them back: the scheduler counts a deleted pod's
GPUs as free as soon as its object is gone, and a forced deletion makes that earlier than the end of its processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]

GPU = "nvidia.com/gpu"


class Devices:
    """The books of all nodes."""

    def __init__(self, devices: Mapping[str, Sequence[str]]) -> None:
        self._free = {node: list(uuids) for node, uuids in devices.items()}
        self._held: dict[str, tuple[str, list[str]]] = {}
        self._returned = asyncio.Event()

    async def take(self, uid: str, spec: Object) -> list[str]:
        """Devices for a pod on its node; waits until there are enough (the caller sets the deadline)."""
        node, wanted = spec["nodeName"], wanted_by_pod(spec)
        while len(self._free[node]) < wanted:
            self._returned.clear()
            await self._returned.wait()
        taken = self._free[node][:wanted]
        self._free[node] = self._free[node][wanted:]
        self._held[uid] = (node, taken)
        return taken

    def give_back(self, uid: str) -> None:
        """Frees what a pod holds; nothing to free is a success."""
        node, taken = self._held.pop(uid, ("", []))
        if taken:
            self._free[node] = sorted([*self._free[node], *taken])
            self._returned.set()


def wanted_by(container: Object) -> int:
    """How many GPUs a container asks for."""
    return int(container.get("resources", {}).get("limits", {}).get(GPU, 0))


def wanted_by_pod(spec: Object) -> int:
    """How many GPUs the pod holds: those of main containers and sidecars, or the largest init container's if more."""
    lasting = sum(wanted_by(c) for c in spec["containers"])
    once = 0
    for container in spec.get("initContainers", []):
        if container.get("restartPolicy") == "Always":
            lasting += wanted_by(container)
        else:
            once = max(once, wanted_by(container))
    return max(lasting, once)


def share(spec: Object, devices: list[str]) -> dict[str, list[str]]:
    """The pod's devices by container name; a container that asks for none is absent."""
    result: dict[str, list[str]] = {}
    given = 0
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        wanted = wanted_by(container)
        if not wanted:
            continue
        if container not in spec["containers"] and container.get("restartPolicy") != "Always":
            # It ends before the others start, so it borrows theirs.
            result[container["name"]] = devices[:wanted]
        else:
            result[container["name"]] = devices[given : given + wanted]
            given += wanted
    return result
