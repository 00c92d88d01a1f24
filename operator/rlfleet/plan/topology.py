"""Which physical devices engines and trainer use, and whether they meet.

Invariant: the identity of a device is (node, UUID), everywhere: classification of transports, and later the memory
gate and placement, use the functions here and no other mapping (DESIGN section 6). What is not known is Unknown,
never "disjoint".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One physical GPU (or MIG slice): the node's name and the device's UUID."""

    node: str
    uuid: str

    @property
    def is_mig(self) -> bool:
        """A slice of a GPU: NVIDIA gives slices UUIDs that start with ``MIG-``."""
        return self.uuid.startswith("MIG-")


class Placement(StrEnum):
    """Where one engine stands relative to the train pool."""

    DISJOINT = "Disjoint"
    OVERLAP = "Overlap"
    UNKNOWN = "Unknown"


def train_devices(gpus: Iterable[Mapping[str, object]] | None) -> frozenset[Device] | None:
    """The train pool from ``RLPipeline.spec.trainer.gpus``; None when nothing is declared (unknown)."""
    if not gpus:
        return None
    found: set[Device] = set()
    for entry in gpus:
        devices = entry.get("devices")
        if isinstance(devices, (list, tuple)):
            found.update(Device(str(entry.get("node", "")), str(uuid)) for uuid in devices)
    return frozenset(found) or None


def place(engine: frozenset[Device] | None, train: frozenset[Device] | None) -> Placement:
    """Compare one engine's devices with the train pool; either side unknown makes the answer unknown."""
    if not engine or not train:
        return Placement.UNKNOWN
    return Placement.OVERLAP if engine & train else Placement.DISJOINT


def shared_devices(engines: Mapping[str, frozenset[Device] | None]) -> dict[str, tuple[str, ...]]:
    """Engines that share a device with another engine: name -> the others' names.

    Two ranks on one device can never be in one collective group.
    """
    users: dict[Device, list[str]] = {}
    for name, devices in engines.items():
        for device in devices or ():
            users.setdefault(device, []).append(name)
    out: dict[str, set[str]] = {}
    for names in users.values():
        for name in names:
            if len(names) > 1:
                out.setdefault(name, set()).update(n for n in names if n != name)
    return {name: tuple(sorted(others)) for name, others in out.items()}
