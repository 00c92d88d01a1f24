"""Which engines sleep and which are awake, and what to do about it between rounds (DESIGN section 7).

Who goes first, a rule of three lines that looks at nothing else:
- an engine that lies on a demanded device sleeps, whatever ``spec.active`` says; a demand wakes nobody instead of it;
- of the others in a pool the first ``spec.active`` are awake, those that are awake now before those that sleep (nobody
  is moved without need), and among equals the lowest index first;
- so the awake engine with the highest index goes to sleep first, and the sleeper with the lowest index wakes first.

Invariants:
- the rule rests on what a round does not change (index, released memory, devices), so it says the same all through one;
- silence is no sleep: an engine whose gate does not answer counts as awake, unless it was last seen asleep;
- all shrinks of a plan are done before any engine is woken, and none is woken before the sender has weights for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import EngineState
from rlfleet.plan.adopt import adopts
from rlfleet.plan.asleep import is_offloaded, is_touched
from rlfleet.plan.rounds import Engine
from rlfleet.plan.template import assignments, is_pinned
from rlfleet.plan.topology import Device

GIB = 2**30
DEFAULT_RESIDUAL_GIB = 13.0
#: More engines than a pool can have.
MAX_REPLICAS = 1_000_000
#: Capability of a gate whose engine can release its memory.
OFFLOAD = "Offload"
#: Most engines that are put to sleep or woken under one claim.
BATCH = 64


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a pool's spec says about sleeping."""

    replicas: int
    active: int
    offloads: bool
    """spec.shrink is Offload, or follows from the placement."""
    residual_bytes: int
    owes: bool = True
    """Engines that have no pod are missing. Of adopted pods there are as many as somebody makes."""
    devices: frozenset[Device] = frozenset()
    """Placement Pinned: the devices that it gives to engines."""


def shrinks_by_delete(pool: Mapping[str, Any]) -> bool:
    """``spec.shrink``: Delete, also where it is absent and the scheduler owns the GPUs."""
    spec = pool["spec"]
    if adopts(pool):
        return False
    by_placement = "Delete" if (spec.get("placement") or {}).get("mode", "Scheduler") == "Scheduler" else "Offload"
    return str(spec.get("shrink") or by_placement) == "Delete"


def keeps_devices(pool: Mapping[str, Any]) -> bool:
    """No demand can free its devices: the scheduler placed its engines, and gives a deleted one's GPU to anybody."""
    return shrinks_by_delete(pool) and (pool["spec"].get("placement") or {}).get("mode", "Scheduler") == "Scheduler"


def wanted_pods(pool: Mapping[str, Any]) -> int:
    """How many engines should have a pod by our making: with shrink Delete the ceiling is one of pods."""
    if adopts(pool):
        return 0
    replicas = int(pool["spec"].get("replicas", 1))
    active = pool["spec"].get("active")
    return min(replicas, int(active)) if active is not None and shrinks_by_delete(pool) else replicas


def on_devices(pool: Mapping[str, Any], held: frozenset[Device]) -> frozenset[int]:
    """Indices of the engines whose devices are, or may be, among these.

    Placement Pinned lists who gets which. With Claims all engines share a trainer's devices, and which slot lies where
    is only told by pods that are there: any of them may. The scheduler gives a device to one pod only.
    """
    if not held:
        return frozenset()
    if (pool["spec"].get("placement") or {}).get("mode") == "Claims":
        return frozenset(range(wanted_pods(pool)))
    if not is_pinned(pool):
        return frozenset()
    slots = enumerate(assignments(pool))
    return frozenset(i for i, a in slots if any(Device(a.node, uuid) in held for uuid in a.devices))


def ceiling(pool: Mapping[str, Any]) -> Ceiling:
    """Read it from the pool."""
    spec = pool["spec"]
    replicas = wanted_pods(pool)
    active = spec.get("active")
    gib = float(spec.get("residualMemoryGiB") or DEFAULT_RESIDUAL_GIB)
    pinned = assignments(pool) if is_pinned(pool) else []
    most = MAX_REPLICAS if adopts(pool) else replicas
    return Ceiling(
        replicas=replicas,
        active=most if active is None else min(most, int(active)),
        owes=not adopts(pool),
        offloads=not shrinks_by_delete(pool),
        residual_bytes=int(gib * GIB),
        devices=frozenset(Device(a.node, uuid) for a in pinned for uuid in a.devices),
    )


def last_asleep(pool: Mapping[str, Any]) -> frozenset[str]:
    """UIDs of the pods that the pool's status shows as Offloaded; for silent gates there is nothing else to go by."""
    rows = (pool.get("status") or {}).get("engines") or ()
    return frozenset(str(r["podUID"]) for r in rows if r.get("state") == "Offloaded" and r.get("podUID"))


def last_draining(pool: Mapping[str, Any]) -> frozenset[str]:
    """UIDs of the pods that the pool's status shows as Draining: it takes them away, and out of the routers first."""
    rows = (pool.get("status") or {}).get("engines") or ()
    return frozenset(str(r["podUID"]) for r in rows if r.get("state") == "Draining" and r.get("podUID"))


# ------------------------------------------------------------------------------------------------ who


def _present(e: Engine) -> bool:
    return not e.gone and not e.leaving and not e.unwanted


def _sleeps(e: Engine, last_asleep: frozenset[str]) -> bool:
    if e.status is None:
        return e.pod_uid in last_asleep
    return is_touched(e.status)


def lies_on(e: Engine, held: frozenset[Device]) -> bool:
    """The engine is known to use one of these devices."""
    return bool(held) and bool((e.devices or frozenset()) & held)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the specs and the demands want of the engines that are there."""

    resting: frozenset[str] = frozenset()
    """Names of engines that are to sleep, whether they do or not."""
    owed: int = 0
    """Engines that are to be awake and have no pod yet."""


def wish(
    engines: Iterable[Engine],
    pools: Mapping[str, Ceiling],
    *,
    held: frozenset[Device] = frozenset(),
    last_asleep: frozenset[str] = frozenset(),
) -> Wish:
    """Who is to sleep. ``held``: demanded devices; ``last_asleep``: UIDs of pods that status last showed Offloaded."""
    resting: set[str] = set()
    owed = 0
    by_pool: dict[str, list[Engine]] = {name: [] for name in pools}
    for e in engines:
        if e.pool in by_pool and _present(e):
            by_pool[e.pool].append(e)
    for name, members in by_pool.items():
        pool = pools[name]
        ordered = sorted(members, key=lambda e: (_sleeps(e, last_asleep), e.index, e.name))
        awake = {e.name for e in ordered[: pool.active]}
        owed += max(0, pool.active - len(ordered)) if pool.owes else 0
        if not pool.offloads:
            continue  # its engines go by losing their pods
        resting.update(e.name for e in ordered if e.name not in awake or lies_on(e, held))
    return Wish(frozenset(resting), owed)


def in_the_way(engines: Iterable[Engine]) -> tuple[str, ...]:
    """Who keeps a round that nobody can join from committing: engines neither proven asleep nor gone.

    One that keeps silent may serve, so it is in the way; a whole fleet asleep is legal, a partition is not.
    """
    return tuple(sorted(e.name for e in engines if not e.gone and not is_offloaded(e.status)))


def awaited(engines: Sequence[Engine], *, pods: int) -> int:
    """Engines that a round may have to wait for; ``pods``: how many the pools want.

    Those that are on their way out or to sleep count until they are gone or asleep: a round with nobody in it waits.
    """
    live = [e for e in engines if not e.gone]
    return max(pods, len(live)) - sum(is_offloaded(e.status) for e in live)


# ------------------------------------------------------------------------------------------------ what


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What to do now. At most one of ``shrink`` and ``wake`` is not empty."""

    shrink: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()
    waits: tuple[Reason, str] | None = None
    """What is going on or waited for; None: nothing is to be done."""
    trouble: tuple[Reason, str] | None = None
    """Engines that can not be put to sleep as they are."""


def idle_and_ours(e: Engine, pipeline: str) -> bool:
    """Its gate answers, belongs to us, and nothing runs there whose end is not known."""
    s = e.status
    return (
        s is not None
        and s.enrolled
        and s.pipeline in ("", pipeline)
        and s.incarnation is not None
        and s.engine.state is EngineState.READY
        and s.in_flight is None
        and not s.uncertain
    )


def plan_elastic(
    engines: Sequence[Engine], *, pipeline: str, cache_ready: bool, behind: Collection[str] = ()
) -> ElasticPlan:
    """What sleeps or wakes next, from engines as observed (``resting`` as ``wish`` has it).

    ``behind``: names of sleepers for whom a claim is made, too, that they refuse an order of the one before
    (plan.memory_gate.to_fence).
    """
    present = sorted((e for e in engines if _present(e)), key=lambda e: (e.pool, e.index, e.name))
    shrinking = [
        e
        for e in present
        if e.resting and (not is_offloaded(e.status) or e.name in behind) and not (e.unborn and e.status is None)
    ]
    unable = [e for e in shrinking if e.status is not None and not _can_offload(e)]
    trouble = None
    if unable:
        trouble = (
            Reason.UNSUPPORTED,
            f"{_names(unable)} can not release their memory (an engine without its memory saver answers 200 and frees "
            "nothing): start them with it, or set spec.shrink: Delete",
        )
    shrinking = [e for e in shrinking if e not in unable]
    waking = [e for e in present if not e.resting and is_touched(e.status)]
    due = tuple(e.name for e in reversed(shrinking) if idle_and_ours(e, pipeline))[:BATCH]
    if shrinking:
        tail = f"; {_names(waking)} are woken when that is done" if waking else ""
        return ElasticPlan(
            shrink=due, waits=(Reason.OFFLOADING, f"{_names(shrinking)} go to sleep{tail}"), trouble=trouble
        )
    if not waking:
        return ElasticPlan(trouble=trouble)
    if not cache_ready:
        why = (
            f"{_names(waking)} are not woken before the sender has complete weights: they would hold memory for nothing"
        )
        return ElasticPlan(waits=(Reason.SENDER_NOT_READY, why), trouble=trouble)
    ready = tuple(e.name for e in waking if idle_and_ours(e, pipeline))[:BATCH]
    return ElasticPlan(wake=ready, waits=(Reason.WAKING, f"{_names(waking)} wake"), trouble=trouble)


def unmoved(e: Engine) -> bool:
    """The engine is not, or not known to be, what it is to be: asleep or awake."""
    if e.status is None:
        return True
    return not is_offloaded(e.status) if e.resting else is_touched(e.status)


def _can_offload(e: Engine) -> bool:
    """Before the gate has met its engine nobody knows what that can do."""
    return e.status is None or e.status.incarnation is None or OFFLOAD in e.status.capabilities


def busy(e: Engine) -> bool | None:
    """Whether requests run or wait in the engine; None: its gate can not tell."""
    if e.status is None or e.status.engine.running is None or e.status.engine.waiting is None:
        return None
    return e.status.engine.running + e.status.engine.waiting > 0


def limits_of(engines: Iterable[Engine], pools: Mapping[str, Ceiling]) -> dict[Device, int]:
    """Bytes that may be in use on each device: the smallest that a pool with an engine there says."""
    found: dict[Device, int] = {}
    for e in engines:
        pool = pools.get(e.pool)
        if pool is None:
            continue
        for device in e.devices or ():
            found[device] = min(found.get(device, pool.residual_bytes), pool.residual_bytes)
    return found


def _names(engines: Sequence[Engine]) -> str:
    some = ", ".join(e.name for e in engines[:4])
    return some + (f" and {len(engines) - 4} more" if len(engines) > 4 else "")
