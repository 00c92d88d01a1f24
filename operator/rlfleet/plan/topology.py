"""Which physical devices engines and trainer use, and whether they meet.

Invariants:
- the identity of a device is (node, UUID), everywhere: classification of transports, the memory gate and placement
  use the functions here and no other mapping (DESIGN section 6);
- several sources may tell of the same devices. The first that knows is believed, in the order claims, gate, sender,
  spec; but two that contradict each other leave the devices unknown and say so, whichever of them comes first;
- what is not known is Unknown, never "disjoint".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlfleet.api.wire import DeviceReport

#: Most devices of one pod, and what names of nodes and devices look like: what is believed of them goes into status,
#: whose schema takes no others.
MAX_DEVICES = 64
_NODE = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


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


# ------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one source tells of somebody's devices. ``source``: its name as messages show it.

    ``devices`` None: it does not know, and ``why`` may say why. ``part``: it may know only some of them (a sender sees
    the devices of its own node), so that only a device that others do not know contradicts them.
    """

    source: str
    devices: frozenset[Device] | None
    part: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody's devices as all sources together tell them. ``devices`` None: unknown.

    ``source``: which one is believed, or empty. ``conflict``: the two sources that contradict each other, with the
    devices of each, or empty. ``why``: why nothing is known, where a source says so.
    """

    devices: frozenset[Device] | None = None
    source: str = ""
    conflict: str = ""
    why: str = ""


def identify(sources: Sequence[Evidence]) -> Identity:
    """One identity from what several sources tell, the most trusted first.

    A source that knows the whole is believed before one that knows a part, whatever their order; the order decides
    among equals. The first contradiction makes the devices unknown.
    """
    known = [s for s in sources if s.devices]
    if not known:
        return Identity(why="; ".join(f"{s.source}: {s.why}" for s in sources if s.why))
    whole = [s for s in known if not s.part]
    believed = (whole or known)[0]
    for other in known:
        if _contradicts(other, believed):
            return Identity(conflict=f"{_told(believed)}, but {_told(other)}")
    return Identity(believed.devices, believed.source)


def _contradicts(other: Evidence, believed: Evidence) -> bool:
    mine, theirs = believed.devices or frozenset(), other.devices or frozenset()
    if believed.part:
        # Two parts may lie on two nodes. On one node each has seen what there is.
        nodes = {d.node for d in mine} & {d.node for d in theirs}
        return {d for d in mine if d.node in nodes} != {d for d in theirs if d.node in nodes}
    return not theirs <= mine if other.part else theirs != mine


def _told(evidence: Evidence) -> str:
    return f"{evidence.source} says {device_names(evidence.devices or ())}"


def device_names(devices: Iterable[Device], limit: int = 8) -> str:
    """``node/uuid`` of devices for a message, sorted; at most ``limit`` of them."""
    names = sorted(f"{d.node}/{d.uuid}" for d in devices)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def report_evidence(source: str, report: DeviceReport | None, *, part: bool = False) -> Evidence:
    """What a gate or a sender reports of itself."""
    if report is None:
        return Evidence(source, None, part)
    if report.source == "Unknown" or not report.uuids or not report.node:
        return Evidence(source, None, part, report.problem)
    odd = [f"{uuid[:64]!r} names no device" for uuid in report.uuids if not _DEVICE.fullmatch(uuid)]
    if not _NODE.fullmatch(report.node):
        odd.append(f"{report.node[:64]!r} names no node")
    if len(report.uuids) > MAX_DEVICES:
        odd.append(f"{len(report.uuids)} devices are more than a pod can have")
    if odd:
        return Evidence(source, None, part, odd[0])
    return Evidence(source, frozenset(Device(report.node, uuid) for uuid in report.uuids), part)


def assigned_evidence(text: str) -> Evidence:
    """What placement Pinned gave an engine, from its pod's annotation ``<node>/<uuid>,<uuid>``."""
    node, _, uuids = text.partition("/")
    devices = frozenset(Device(node, uuid) for uuid in uuids.split(",") if uuid)
    return Evidence("spec.placement.devices", devices or None)


def spec_evidence(gpus: Iterable[Mapping[str, object]] | None) -> Evidence:
    """The train pool as ``RLPipeline.spec.trainer.gpus`` declares it."""
    return Evidence("spec.trainer.gpus", train_devices(gpus))


def train_devices(gpus: Iterable[Mapping[str, object]] | None) -> frozenset[Device] | None:
    """Devices of a list of nodes with devices; None when nothing is declared (unknown)."""
    if not gpus:
        return None
    found: set[Device] = set()
    for entry in gpus:
        devices = entry.get("devices")
        if isinstance(devices, (list, tuple)):
            found.update(Device(str(entry.get("node", "")), str(uuid)) for uuid in devices)
    return frozenset(found) or None


# ------------------------------------------------------------------------------------------------ comparing


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
