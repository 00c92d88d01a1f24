"""Which pods of a pool to create, to take out of routers and to delete. Pure: observed pods in, actions out.

Invariants:
- there is at most one engine per index that is meant to live; a second one goes;
- a pod is never deleted before its address is in no router, and an engine that serves is drained before that;
- while a round or repair owns the engines (``may_remove`` false) no living pod is touched: the wish waits;
- a name is derived from what it replaces, so a create whose answer was lost finds its own pod again, and a
  replacement never bears the name of what it replaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rlfleet.api import naming
from rlfleet.api.conditions import Reason
from rlfleet.plan.lifecycle import PodFact

#: Pods of one ResourceClaim that wait for the scheduler at the same time: it adds each to the claim, one after another.
SHARERS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the plan is made of."""

    name: str
    uid: str
    replicas: int
    pods: tuple[PodFact, ...]
    slots: int | None = None
    """Placement Pinned: how many engines the listed devices are enough for."""
    claims: tuple[str, ...] | None = None
    """Placement Claims: the ResourceClaim of each engine, by index. Engines without one are not made, and those that
    run stay: a block that the pipeline lost, or a pipeline that is gone for a moment, takes nobody's engine."""
    missing: tuple[str, ...] = ()
    """ResourceClaims that the engines need and that do not exist yet."""
    foreign: int = 0
    """Pods of an earlier pool of this name that still run."""
    may_create: bool = True
    may_remove: bool = True
    unrouted: frozenset[str] = frozenset()
    """UIDs of pods whose address was read back to be in no router."""
    drained: frozenset[str] = frozenset()
    """UIDs of pods that have no request left, or have used up the time for it."""
    demanded: frozenset[int] = frozenset()
    """Indices whose devices a trainer demands: no pod is made for them meanwhile."""
    vacate: frozenset[int] = frozenset()
    """Those of them whose pods are to go, because the pool shrinks by deletion."""
    outdated: frozenset[str] = frozenset()
    """UIDs of living pods that are replaced now because their template changed (plan.rolling)."""
    adopted: bool = False
    """Somebody else makes and deletes the pods: only the addresses of those that ended are looked after."""
    held_back: frozenset[int] = frozenset()
    """Indices whose last engines failed quickly: the next one waits."""
    predecessors: Mapping[int, str] = field(default_factory=dict)
    """UID of the last pod known of an index, for indices whose pod is gone."""
    bumps: Mapping[int, int] = field(default_factory=dict)
    """How often the derived name of an index turned out to be somebody else's."""

    @property
    def exclusive(self) -> bool:
        """An engine's devices are given to its pod by index: the next one must wait until the last one is off them."""
        return self.slots is not None or self.claims is not None


@dataclass(frozen=True, slots=True)
class Create:
    """Make a pod; ``replaces`` is the UID of the pod before it, empty for the first."""

    index: int
    name: str
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a pod, and why."""

    pod: PodFact
    reason: Reason


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The actions, and what could not be done yet."""

    create: tuple[Create, ...] = ()
    unroute: tuple[PodFact, ...] = ()
    delete: tuple[Delete, ...] = ()
    draining: frozenset[str] = frozenset()
    waits: tuple[tuple[Reason, str], ...] = ()
    owed: int = 0
    """Pods that are missing, made now or later."""


def best(pods: Iterable[PodFact]) -> PodFact | None:
    """The pod that plays an index: living before finished, Ready before not, then the oldest, then by UID."""
    return min(pods, key=lambda p: (not p.live, not p.ready, p.created, p.uid), default=None)


def by_index(pods: Iterable[PodFact]) -> dict[int, list[PodFact]]:
    """Owned pods by engine index."""
    result: dict[int, list[PodFact]] = {}
    for pod in pods:
        if pod.owned:
            result.setdefault(pod.index, []).append(pod)
    return result


def plan_pods(view: PoolView) -> PodPlan:
    """Decide. Actions may be executed in any order: each is safe by itself."""
    if view.adopted:
        going = (p for p in view.pods if p.deleting or p.finished)
        return PodPlan(unroute=tuple(p for p in going if p.ip and p.uid not in view.unrouted))
    wanted = view.replicas if view.slots is None else min(view.replicas, view.slots)
    indexed = by_index(view.pods)
    waits: list[tuple[Reason, str]] = []
    if wanted < view.replicas:
        waits.append(
            (
                Reason.NOT_ENOUGH_DEVICES,
                f"spec.placement.devices is enough for {view.slots} engines, spec.replicas is {view.replicas}",
            )
        )
    if view.missing:
        waits.append((Reason.BLOCK_CLAIM_PENDING, f"ResourceClaim {', '.join(view.missing)} is not there to use yet"))
    room = wanted if view.claims is None else min(wanted, len(view.claims))
    if room < wanted:
        waits.append(
            (Reason.NOT_ENOUGH_DEVICES, f"the train blocks have {room} slots, spec.replicas is {view.replicas}")
        )
    create = [c for i in range(room) if (c := _creation(view, i, indexed.get(i, []))) is not None]
    owed = len(create)
    kept_out = [c for c in create if c.index in view.demanded]
    if kept_out:
        waits.append(
            (Reason.DEVICES_HELD, f"{len(kept_out)} engines are made when a trainer has released their devices")
        )
        create = [c for c in create if c.index not in view.demanded]
    later = [c for c in create if c.index in view.held_back]
    if later and view.may_create:
        waits.append((Reason.REPLACING, f"{len(later)} failed engines are replaced after a pause"))
    create = [c for c in create if c.index not in view.held_back] if view.may_create else []
    if create and view.foreign and view.exclusive:
        # Listed devices are given to a pod without asking the scheduler: nobody else keeps two pods off one device.
        waits.append(
            (Reason.TERMINATING, f"{view.foreign} pods of a deleted pool of this name may still use the listed devices")
        )
        create = []

    create = _few_at_a_time(create, view)

    surplus: list[Delete] = []
    ended: list[PodFact] = []
    for index, pods in indexed.items():
        keep = best(p for p in pods if p.live)
        for pod in pods:
            if pod.deleting or pod.finished:
                ended.append(pod)
            elif not 0 <= index < wanted or index in view.vacate:
                surplus.append(Delete(pod, Reason.SCALING_DOWN))
            elif pod is not keep:
                surplus.append(Delete(pod, Reason.REPLACING))
            elif pod.uid in view.outdated:
                surplus.append(Delete(pod, Reason.UPDATING))
    surplus.sort(key=lambda d: (d.pod.ready, -d.pod.index, d.pod.uid))
    if surplus and not view.may_remove:
        waits.append((Reason.ROUND_IN_PROGRESS, f"{len(surplus)} engines are removed when the running round has ended"))
        surplus = []

    leaving = [*ended, *(d.pod for d in surplus)]
    unroute = tuple(p for p in leaving if p.ip and p.uid not in view.unrouted)
    delete = [d for d in surplus if _unrouted(view, d.pod) and (not d.pod.ready or d.pod.uid in view.drained)]
    for pod in ended:
        # A failed pod stays for its logs until another plays its part.
        replaced = not 0 <= pod.index < wanted or any(p.live for p in indexed[pod.index])
        if not pod.deleting and replaced and _unrouted(view, pod):
            delete.append(Delete(pod, Reason.POD_FAILED))
    return PodPlan(
        create=tuple(create),
        unroute=unroute,
        delete=tuple(delete),
        draining=frozenset(d.pod.uid for d in surplus),
        waits=tuple(waits),
        owed=owed,
    )


def _few_at_a_time(create: list[Create], view: PoolView) -> list[Create]:
    """Sharers of one claim that are scheduled at the same time get in each other's way, and back off for long."""
    if view.claims is None:
        return create
    waiting = Counter(
        view.claims[p.index] for p in view.pods if p.live and not p.scheduled and 0 <= p.index < len(view.claims)
    )
    now = []
    for one in create:
        claim = view.claims[one.index]
        if waiting[claim] < SHARERS_AT_ONCE:
            waiting[claim] += 1
            now.append(one)
    return now


def _unrouted(view: PoolView, pod: PodFact) -> bool:
    return not pod.ip or pod.uid in view.unrouted


def _creation(view: PoolView, index: int, pods: list[PodFact]) -> Create | None:
    if any(p.live for p in pods):
        return None
    if view.exclusive and any(not p.finished for p in pods):
        return None  # still on the devices that its successor gets
    last = max(pods, key=lambda p: (p.created, p.uid), default=None)
    before = last.uid if last is not None else view.predecessors.get(index, "")
    salt = "/".join([view.uid, before, str(view.bumps.get(index, 0))])
    return Create(index, naming.pod_name(view.name, index, salt), before)


def slow_start(count: int, *, largest: int = 16) -> list[int]:
    """Sizes of the batches in which ``count`` creates are sent: 1, 2, 4, ... so that an error costs few calls."""
    sizes = []
    size = 1
    while count > 0:
        sizes.append(min(size, count, largest))
        count -= sizes[-1]
        size *= 2
    return sizes
