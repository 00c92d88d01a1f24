"""How weights reach each engine of a round: classification and refusals (DESIGN section 6, [coordinator] 1.4).

Invariants:
- ``Auto`` is the only mode that mixes; ``Broadcast`` never quietly becomes serialized, and nothing is guessed when
  identity is unknown: the round is refused before an engine is touched;
- ``CPUSerialize`` needs no topology and looks at none;
- a collective group never holds one physical GPU twice: not the trainer's, not one that two engines or two ranks
  share, and no slice of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import StagingMode, Transport
from rlfleet.plan import checkpoint
from rlfleet.plan.topology import Device, Placement, place, shared_devices

MIB = 2**20
#: Words of ``spec.transport.mode``. Another word is refused: no default stands in for a typo.
MODES = ("CPUSerialize", "Broadcast", "Auto")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A round can not be carried out: a reason of the closed list and a message with the remedy."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport of one engine, and why where it is not obvious."""

    transport: Transport
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """How weights are cut for their way, and how serialized ones pass a gate's memory.

    ``bucket_mib`` 0: in the buckets that they were published in. ``largest``: name and bytes of the largest tensor.
    """

    staging: StagingMode = StagingMode.FULL
    bucket_mib: int = 0
    largest: tuple[str, int] = ("", 0)

    @property
    def bucket_bytes(self) -> int | None:
        """For the sender: the largest bucket; None: as published."""
        return self.bucket_mib * MIB or None

    def refuse(self, engine: str, total_bytes: int, capacity: int) -> Refusal | None:
        """Whether serialized weights fit through the memory volume of this engine's gate, ``capacity`` bytes usable.

        The capacity that a gate reports is the smaller of stagingMiB and what its container's memory limit leaves.
        """
        if self.staging is StagingMode.FULL:
            if total_bytes <= capacity:
                return None
            return Refusal(
                Reason.STAGING_TOO_LARGE,
                f"{total_bytes} bytes do not fit into the staging volume of {engine} ({capacity} bytes usable); raise "
                "spec.gate.stagingMiB and the gate's memory limit, or use spec.transport.staging Bucket",
            )
        name, largest = self.largest
        if largest > capacity:
            return Refusal(
                Reason.STAGING_TOO_LARGE,
                f"tensor {name!r} has {largest} bytes and travels by itself, more than the staging volume of {engine} "
                f"holds ({capacity} bytes usable); raise spec.gate.stagingMiB and the gate's memory limit",
            )
        bucket = min(total_bytes, self.bucket_bytes or total_bytes)
        if bucket > capacity:
            return Refusal(
                Reason.STAGING_TOO_LARGE,
                f"a bucket of {bucket} bytes does not fit into the staging volume of {engine} ({capacity} bytes "
                "usable); lower spec.transport.bucketMiB, or raise spec.gate.stagingMiB and the gate's memory limit",
            )
        return None


def _names(engines: list[str], limit: int = 8) -> str:
    shown = ", ".join(engines[:limit])
    return shown if len(engines) <= limit else f"{shown} and {len(engines) - limit} more"


def choose(
    mode: str,
    engines: Mapping[str, frozenset[Device] | None],
    train: frozenset[Device] | None,
    *,
    assert_mixed: bool = False,
    fleet: Mapping[str, frozenset[Device] | None] | None = None,
    ranks: Mapping[str, int] | None = None,
    disputes: Sequence[str] = (),
) -> dict[str, Choice] | Refusal:
    """Pick a transport for every engine, or refuse with the engines named.

    ``engines``: the targets, name -> devices, None when its identity is unknown. ``train``: the train pool, None when
    unknown. ``ranks``: how many ranks an engine takes in a group, where that is known. ``fleet``: all engines of the
    pipeline, which is what ``assert_mixed`` is about (None: the targets are all); one of unknown identity that is no
    target counts for neither class. ``disputes``: where sources of device identity contradict each other.
    An empty set of targets yields an empty choice in every mode, and no topology is looked at: there is nobody to
    refuse for.
    """
    if mode == checkpoint.MODE:
        return dict.fromkeys(engines, Choice(Transport.CHECKPOINT))
    if mode not in MODES:
        return Refusal(Reason.INVALID_SPEC, f"spec.transport.mode {mode!r} is not one of {', '.join(MODES)}")
    if assert_mixed and mode != "Auto":
        return Refusal(
            Reason.INVALID_SPEC,
            f"spec.transport.assertMixed needs mode Auto: {mode} never mixes transports. Use Auto, or leave it out",
        )
    if not engines:
        return {}
    if mode == "CPUSerialize":
        return dict.fromkeys(engines, Choice(Transport.SERIALIZED))
    if disputes:
        return Refusal(
            Reason.DEVICE_SOURCES_DISAGREE,
            f"transport mode {mode} needs devices that all sources agree on: {'; '.join(disputes)}. Correct the one "
            "that is wrong, or use CPUSerialize",
        )
    if train is None:
        return Refusal(
            Reason.TOPOLOGY_UNKNOWN,
            f"transport mode {mode} needs the train pool: set spec.trainer.gpus of the RLPipeline, or use CPUSerialize",
        )
    unknown = sorted(name for name, devices in engines.items() if place(devices, train) is Placement.UNKNOWN)
    if unknown:
        return Refusal(
            Reason.TOPOLOGY_UNKNOWN,
            f"transport mode {mode} needs the devices of every engine, unknown for: {_names(unknown)}; "
            "use placement Pinned in their EnginePool, or CPUSerialize",
        )
    why = _kept_out(engines, train, ranks or {})
    if mode == "Broadcast":
        if why:
            pool = ", ".join(sorted(f"{d.node}/{d.uuid}" for d in train)[:8])
            return Refusal(
                Reason.ENGINES_ON_TRAIN_DEVICES,
                f"transport mode Broadcast is impossible for {_names(sorted(why))} "
                f"({why[sorted(why)[0]]}); train pool: {pool}. Use Auto or CPUSerialize",
            )
        return dict.fromkeys(engines, Choice(Transport.BROADCAST))
    if assert_mixed:
        refusal = _mixes(engines if fleet is None else {**fleet, **engines}, train, ranks or {})
        if refusal is not None:
            return refusal
    return {
        name: Choice(Transport.SERIALIZED, why[name]) if name in why else Choice(Transport.BROADCAST)
        for name in engines
    }


def _kept_out(
    engines: Mapping[str, frozenset[Device] | None], train: frozenset[Device], ranks: Mapping[str, int]
) -> dict[str, str]:
    """Engines that can be in no broadcast group, with why. A group holds every physical GPU at most once."""
    shared = shared_devices(engines)
    why: dict[str, str] = {}
    for name, devices in engines.items():
        if place(devices, train) is Placement.OVERLAP:
            why[name] = "shares devices with the trainer"
        elif name in shared:
            why[name] = f"shares a device with {_names(list(shared[name]), limit=3)}"  # a word on each member
        elif any(d.is_mig for d in devices or ()):
            why[name] = "runs on a MIG slice"
        elif ranks.get(name, 1) > len(devices or ()):
            why[name] = f"has {ranks[name]} ranks on {len(devices or ())} devices"
        elif any(d.is_mig for d in train):
            # The sender is a rank too, and nobody but the trainer knows on which of its devices.
            why[name] = "the trainer runs on a MIG slice"
    return why


def _mixes(
    fleet: Mapping[str, frozenset[Device] | None], train: frozenset[Device], ranks: Mapping[str, int]
) -> Refusal | None:
    """``assertMixed``: a fleet that can not mix is refused, so that a test of mixing never passes without any."""
    known = {name: devices for name, devices in fleet.items() if devices}
    out = _kept_out(known, train, ranks)
    if out and len(out) < len(known):
        return None
    only = Transport.SERIALIZED if out else Transport.BROADCAST
    return Refusal(
        Reason.MIXED_TRANSPORT_IMPOSSIBLE,
        f"spec.transport.assertMixed is set but every engine would use {only.value}: "
        "the pool needs at least one engine on the train devices and one off them. Add it, or leave assertMixed out",
    )
