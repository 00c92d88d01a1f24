"""Hollow Node objects: registered once, kept alive by leases, posted Ready again whenever they read otherwise.

A renewed Lease alone does not bring a node back that the controller manager has marked Unknown: like a kubelet, the
status has to be posted again.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from e2e.cluster.hollow.addresses import AddressBlock
from e2e.cluster.hollow.api import MERGE, STRATEGIC_MERGE, Api, ApiError, Object
from e2e.cluster.hollow.timestamps import now, now_micro

GPUS_PER_NODE = 8
GPUS_PER_ROOT = 4
#: DRA driver of the simulated GPUs, and the name of their DeviceClass.
DRIVER = "gpu.hollow.rlfleet.dev"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NODES_PER_RACK = 4
RACKS_PER_ZONE = 2
ALLOCATABLE = {"cpu": "192", "memory": "2000Gi", "ephemeral-storage": "2000Gi", "pods": "250", "nvidia.com/gpu": "8"}
_LEASE_SECONDS = 40
_RENEW_SECONDS = 10
_RESOURCES = "/apis/resource.k8s.io/v1"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

log = logging.getLogger("hollow.nodes")


class Nodes:
    """The nodes of one hollow kubelet: ``hollow-000`` and so on."""

    def __init__(self, api: Api, count: int, addresses: AddressBlock) -> None:
        self._api = api
        self.addresses = {f"hollow-{number:03d}": addresses.node(number) for number in range(count)}

    @staticmethod
    def devices(node: str) -> list[str]:
        """The UUIDs of a node's simulated GPUs."""
        return [f"GPU-{node}-{number:02d}" for number in range(GPUS_PER_NODE)]

    async def register(self) -> None:
        """Creates all nodes, their leases, and what the DRA driver of each tells of its GPUs.

        The GPUs are those of the extended resource as well. The scheduler keeps these two books apart, as on real
        nodes, so a test uses one of them on a node.
        """
        await self._api.request("POST", f"{_RESOURCES}/deviceclasses", _device_class())
        await asyncio.gather(*(self._register(n, name) for n, name in enumerate(self.addresses)))

    async def _publish(self, name: str) -> None:
        await self._api.request("POST", f"{_RESOURCES}/resourceslices", resource_slice(name))

    async def renew(self) -> None:
        """Renews the leases for ever."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            renewal = {"spec": {"renewTime": now_micro()}}
            results = await asyncio.gather(
                *(
                    self._api.request("PATCH", f"{_LEASES}/{name}", renewal, content_type=MERGE)
                    for name in self.addresses
                ),
                return_exceptions=True,
            )
            for problem in (r for r in results if isinstance(r, BaseException)):
                if not isinstance(problem, ApiError | aiohttp.ClientError | OSError | TimeoutError):
                    raise problem
                log.info("lease: %r", problem)

    async def watch(self) -> None:
        """Posts Ready again for every node that does not read Ready, for ever."""
        async for event, node in self._api.follow("/api/v1/nodes"):
            name = node["metadata"]["name"]
            if event != "PUT" or name not in self.addresses:
                continue
            conditions = node.get("status", {}).get("conditions", [])
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                continue
            log.info("node %s does not read Ready: posting again", name)
            try:
                await self._api.request(
                    "PATCH",
                    f"/api/v1/nodes/{name}/status",
                    {"status": {"conditions": _conditions()}},
                    content_type=STRATEGIC_MERGE,
                )
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                # The watch delivers the node again when the controller manager next touches it; a lease renewal that
                # succeeds meanwhile keeps that from taking long.
                log.info("node %s: %r", name, error)

    async def _register(self, number: int, name: str) -> None:
        rack = number // NODES_PER_RACK
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "labels": {
                    "kubernetes.io/hostname": name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                    "topology.kubernetes.io/region": "hollow",
                    "topology.kubernetes.io/zone": f"zone-{rack // RACKS_PER_ZONE}",
                    "topology.rlfleet.dev/rack": f"rack-{rack}",
                },
            },
            "spec": {"providerID": f"hollow://{name}"},
            "status": {
                "capacity": ALLOCATABLE,
                "allocatable": ALLOCATABLE,
                "addresses": [
                    {"type": "InternalIP", "address": self.addresses[name]},
                    {"type": "Hostname", "address": name},
                ],
                "nodeInfo": {
                    "kubeletVersion": "v1.34.4",
                    "architecture": "amd64",
                    "operatingSystem": "linux",
                    "osImage": "hollow",
                    "containerRuntimeVersion": "hollow://1",
                    "bootID": "",
                    "kernelVersion": "",
                    "kubeProxyVersion": "",
                    "machineID": "",
                    "systemUUID": "",
                },
                "conditions": _conditions(),
            },
        }
        await self._api.request("POST", "/api/v1/nodes", node)
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": _LEASE_SECONDS, "renewTime": now_micro()},
        }
        await self._api.request("POST", _LEASES, lease)
        await self._publish(name)


def device_name(index: int) -> str:
    """How a node's DRA driver calls a GPU."""
    return f"gpu-{index}"


def resource_slice(node: str) -> Object:
    """What the DRA driver of a node tells of its GPUs: two PCIe roots with four each."""
    devices = [
        {
            "name": device_name(index),
            "attributes": {
                "uuid": {"string": uuid},
                "index": {"int": index},
                PCIE_ROOT: {"string": f"pci0000:{index // GPUS_PER_ROOT:02x}"},
            },
            "capacity": {"memory": {"value": "141Gi"}},
        }
        for index, uuid in enumerate(Nodes.devices(node))
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-gpu"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def _device_class() -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
    }


def _conditions() -> list[Object]:
    at = now()
    pressures = [
        ("MemoryPressure", "KubeletHasSufficientMemory"),
        ("DiskPressure", "KubeletHasNoDiskPressure"),
        ("PIDPressure", "KubeletHasSufficientPID"),
    ]
    result: list[Object] = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "hollow"}]
    result += [{"type": kind, "status": "False", "reason": reason, "message": "hollow"} for kind, reason in pressures]
    return [{**condition, "lastHeartbeatTime": at, "lastTransitionTime": at} for condition in result]
