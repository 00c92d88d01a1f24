"""The gate before a train step on devices that engines use too (DESIGN section 6, [coordinator] 1.8).

Invariants:
- it opens only on proof: every engine that lies on a demanded device is Offloaded (its gate says so now, and refuses a
  wake of whoever was at work before, which may still be on its way) or gone, and
  memory in use on the whole device was read and is within the limit. An engine whose devices are not known may lie on
  any of them, and memory that nobody can read is not free: both keep it shut;
- a refusal names what stands in the way: engines, devices, and processes of others where the driver tells them;
- a grant stands until its demand is withdrawn or is for another step: from then on the trainer itself uses the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import DeviceReport
from rlfleet.plan.asleep import is_offloaded
from rlfleet.plan.demand import MAX_GRANTS, Demand, Grant
from rlfleet.plan.rounds import Engine
from rlfleet.plan.topology import Device

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Reading:
    """Whole-device memory as somebody read it; ``others``: processes that are not the reader's engine."""

    used_bytes: int
    others: tuple[str, ...] = ()


def readings(reports: Iterable[DeviceReport]) -> dict[Device, Reading]:
    """What gates (and the trainer) read; of two readers of one device the higher figure counts."""
    found: dict[Device, Reading] = {}
    for report in reports:
        for uuid, memory in (report.memory or {}).items():
            device = Device(report.node, uuid)
            others = tuple(f"{p.name or 'a process'} (pid {p.pid})" for p in report.processes if p.uuid == uuid)
            before = found.get(device)
            if before is None or memory.used_bytes > before.used_bytes:
                found[device] = Reading(memory.used_bytes, others or (before.others if before else ()))
    return found


def decide_grants(
    demands: Iterable[Demand],
    before: Sequence[Grant],
    *,
    engines: Sequence[Engine],
    shared: frozenset[Device],
    limits: Mapping[Device, int],
    default_limit: int,
    memory: Mapping[Device, Reading],
    keepers: frozenset[str] = frozenset(),
    generation: int = 0,
) -> tuple[Grant, ...]:
    """The grants of these demands now, in the order in which they are served.

    ``shared``: devices that placement gives to engines beside those on which engines are seen. ``limits``: bytes that
    may be in use on a device. ``keepers``: pools whose engines give no device up for a demand. ``generation``: the
    pipeline's fence, which gates of sleepers must have stored; 0: nothing was ever claimed. A demand that nobody has
    any more leaves no grant: that is how devices are given back.
    """
    standing = {g.demand: g for g in before if g.granted}
    out: list[Grant] = []
    ordered = sorted({d.cluster: d for d in demands}.values(), key=lambda d: d.order)[:MAX_GRANTS]
    # Who has devices keeps them, whoever else comes.
    taken = {d: g.demand.cluster for g in standing.values() if g.demand in ordered for d in g.demand.devices}
    for demand in ordered:
        known = standing.get(demand)
        if known is not None:
            out.append(known)
            continue
        grant = _held_by_another(demand, taken) or check(
            demand,
            engines=engines,
            shared=shared,
            limits=limits,
            default_limit=default_limit,
            memory=memory,
            keepers=keepers,
            generation=generation,
        )
        if grant.granted:
            taken |= dict.fromkeys(demand.devices, demand.cluster)
        out.append(grant)
    return tuple(out)


def _held_by_another(demand: Demand, taken: Mapping[Device, str]) -> Grant | None:
    mine = {d: c for d in sorted(demand.devices) if (c := taken.get(d)) is not None and c != demand.cluster}
    if not mine:
        return None
    device, cluster = next(iter(mine.items()))
    return Grant(demand, False, Reason.DEVICES_HELD, f"{_name(device)} is granted to {cluster}: release it first")


def check(
    demand: Demand,
    *,
    engines: Sequence[Engine],
    shared: frozenset[Device],
    limits: Mapping[Device, int],
    default_limit: int,
    memory: Mapping[Device, Reading],
    keepers: frozenset[str] = frozenset(),
    generation: int = 0,
) -> Grant:
    """The memory gate for one demand: granted, or the first thing that stands in its way."""
    if not demand.devices:
        what = "the train pool is not known: set spec.trainer.gpus of the RLPipeline, or devices in the request"
        return Grant(demand, False, Reason.TOPOLOGY_UNKNOWN, what)
    live = [e for e in engines if not e.gone]
    waiting = {e.name for e in live if e.unborn and e.status is None}
    # A pod of which nothing has run yet, and whose devices nobody knows, is given one by the scheduler that is free.
    unknown = sorted(e.name for e in live if e.devices is None and not is_offloaded(e.status) and e.name not in waiting)
    if unknown:
        what = f"devices of {_some(unknown)} are not known, so they may lie on the demanded ones"
        return Grant(demand, False, Reason.TOPOLOGY_UNKNOWN, what)
    there = [e for e in live if e.devices is not None and e.devices & demand.devices]
    awake = sorted(e.name for e in there if not is_offloaded(e.status))
    kept = sorted(e.name for e in there if e.name in awake and e.pool in keepers)
    if kept:
        what = (
            f"{_some(kept)} can give no device up: its pool shrinks by deletion, and the scheduler gives a free GPU to "
            "anybody. Set spec.shrink: Offload there, or use placement Claims or Pinned"
        )
        return Grant(demand, False, Reason.UNSUPPORTED, what)
    if awake:
        what = f"{_some(awake)} must be Offloaded or gone first"
        if stuck := [n for n in awake if n in waiting]:
            # It starts whenever its node is ready for it, and takes the memory that the trainer was given.
            what += f"; nothing of {stuck[0]} has run yet: delete its pod if it can not start"
        return Grant(demand, False, Reason.ENGINES_AWAKE, what)
    behind = sorted(e.name for e in there if is_behind(e, generation))
    if behind:
        what = f"{_some(behind)} are asleep, but must refuse a wake that may still be on its way to them first"
        return Grant(demand, False, Reason.ENGINES_AWAKE, what)
    # A device that no engine uses is the trainer's alone: what lies in its memory is the trainer's business.
    concerned = sorted(demand.devices & (shared | {d for e in there for d in e.devices or ()}))
    blind = [d for d in concerned if d not in memory]
    if blind:
        what = f"memory of {_some([_name(d) for d in blind])} can not be read: the gate needs the driver's library"
        return Grant(demand, False, Reason.MEMORY_UNREADABLE, what)
    for device in concerned:
        limit = limits.get(device, default_limit)
        reading = memory[device]
        if reading.used_bytes > limit:
            return Grant(demand, False, Reason.RESIDUAL_MEMORY_HIGH, too_much(device, reading, limit))
    return Grant(demand, True, Reason.GRANTED)


def is_behind(e: Engine, generation: int) -> bool:
    """It sleeps, but its gate has not stored this generation, so it would still obey an order of the one before."""
    return not e.gone and is_offloaded(e.status) and e.status is not None and e.status.fence.generation < generation


def to_fence(grants: Iterable[Grant], engines: Iterable[Engine], *, generation: int) -> frozenset[str]:
    """Names of sleepers that keep a demand waiting until they are told of ``generation``: a claim tells every gate."""
    waiting = frozenset(d for g in grants if not g.granted for d in g.demand.devices)
    return frozenset(e.name for e in engines if (e.devices or frozenset()) & waiting and is_behind(e, generation))


def too_much(device: Device, reading: Reading, limit: int) -> str:
    """``n0/GPU-1 has 20.0 GiB in use, 13.0 GiB may be; others there: ...``."""
    text = f"{_name(device)} has {reading.used_bytes / GIB:.1f} GiB in use, {limit / GIB:.1f} GiB may be"
    return f"{text}; others there: {_some(reading.others)}" if reading.others else text


def _name(device: Device) -> str:
    return f"{device.node}/{device.uuid}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
