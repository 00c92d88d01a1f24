"""How weights reach each engine of a round: classification and refusals (DESIGN section 6, [coordinator] 1.4).

Invariants:
- ``Auto`` is the only mode that mixes; ``Broadcast`` never quietly becomes serialized, and nothing is guessed when
  identity is unknown: the round is refused before an engine is touched;
- ``CPUSerialize`` needs no topology and looks at none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import Transport
from rlfleet.plan.topology import Device, Placement, place, shared_devices


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


def _names(engines: list[str], limit: int = 8) -> str:
    shown = ", ".join(engines[:limit])
    return shown if len(engines) <= limit else f"{shown} and {len(engines) - limit} more"


def choose(
    mode: str,
    engines: Mapping[str, frozenset[Device] | None],
    train: frozenset[Device] | None,
    *,
    assert_mixed: bool = False,
) -> dict[str, Choice] | Refusal:
    """Pick a transport for every engine, or refuse with the engines named.

    ``engines``: name -> its devices, None when its identity is unknown. ``train``: the train pool, None when unknown.
    An empty set of engines yields an empty choice in every mode: there is nobody to refuse for.
    """
    if not engines:
        return {}
    if mode == "CPUSerialize":
        return dict.fromkeys(engines, Choice(Transport.SERIALIZED))
    if mode not in ("Broadcast", "Auto"):
        return Refusal(
            Reason.INVALID_SPEC,
            f"spec.transport.mode {mode!r} is not one of CPUSerialize, Broadcast, Auto",
        )
    if train is None:
        return Refusal(
            Reason.TOPOLOGY_UNKNOWN,
            f"transport mode {mode} needs the train pool: set spec.trainer.gpus of the RLPipeline, or use CPUSerialize",
        )
    places = {name: place(devices, train) for name, devices in engines.items()}
    unknown = sorted(name for name, p in places.items() if p is Placement.UNKNOWN)
    if unknown:
        return Refusal(
            Reason.TOPOLOGY_UNKNOWN,
            f"transport mode {mode} needs the devices of every engine, unknown for: {_names(unknown)}; "
            "use placement Pinned in their EnginePool, or CPUSerialize",
        )
    shared = shared_devices(engines)
    why: dict[str, str] = {}
    for name, devices in engines.items():
        if places[name] is Placement.OVERLAP:
            why[name] = "shares devices with the trainer"
        elif name in shared:
            why[name] = f"shares a device with {_names(list(shared[name]))}"
        elif any(d.is_mig for d in devices or ()):
            why[name] = "runs on a MIG slice"
    if mode == "Broadcast":
        if why:
            pool = ", ".join(sorted(f"{d.node}/{d.uuid}" for d in train)[:8])
            return Refusal(
                Reason.ENGINES_ON_TRAIN_DEVICES,
                f"transport mode Broadcast is impossible for {_names(sorted(why))} "
                f"({why[sorted(why)[0]]}); train pool: {pool}. Use Auto or CPUSerialize",
            )
        return dict.fromkeys(engines, Choice(Transport.BROADCAST))
    chosen = {
        name: Choice(Transport.SERIALIZED, why[name]) if name in why else Choice(Transport.BROADCAST)
        for name in engines
    }
    kinds = {c.transport for c in chosen.values()}
    if assert_mixed and len(kinds) < 2:
        only = next(iter(kinds)).value
        return Refusal(
            Reason.MIXED_TRANSPORT_IMPOSSIBLE,
            f"spec.transport.assertMixed is set but every engine would use {only}: "
            "the pool needs at least one engine on the train devices and one off them",
        )
    return chosen
