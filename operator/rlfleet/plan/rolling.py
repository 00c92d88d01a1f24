"""Which pods of an earlier template are replaced next (``updateStrategy: RollingUpdate``). Pure.

Invariants:
- engines that serve are taken only while fewer than ``limit`` engines are out of service, whatever the reason, and only
  as many as every PodDisruptionBudget lets go; so a template that does not start stops its own rollout;
- one that is out of service already costs nothing, and goes first; an engine on its way out stays chosen;
- a pod in quarantine stays for whoever looks into it, whatever its template, and counts as out of service;
- nobody is taken while it is not known of every engine whether it serves (an operator that has just started), or while
  nothing could be made in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api import labels
from rlfleet.api.conditions import ConditionStatus, PoolCondition, Reason, find_condition
from rlfleet.api.timestamps import epoch_ms
from rlfleet.plan.budget import Allowance
from rlfleet.plan.quarantine import quarantine_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """One living engine pod of the pool."""

    uid: str
    index: int
    outdated: bool
    serves: bool | None
    """It serves, or sleeps on purpose; None: not known yet."""
    kept: bool = False
    """A person keeps it out of service and looks into it: its pod stays."""
    held: bool = False
    """A trainer has its devices: nothing is made in its place before it gives them back."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """The pods to replace now, and what is going on."""

    replace: frozenset[str] = frozenset()
    outdated: int = 0
    waits: tuple[tuple[Reason, str], ...] = ()


def is_rolling(pool: Mapping[str, Any]) -> bool:
    """``spec.updateStrategy.type`` is RollingUpdate."""
    return (pool["spec"].get("updateStrategy") or {}).get("type") == "RollingUpdate"


def rolling_limit(pool: Mapping[str, Any], wanted: int) -> int:
    """``spec.updateStrategy.maxUnavailable`` as a count of ``wanted`` engines; at least 1, or nothing would move."""
    value = (pool["spec"].get("updateStrategy") or {}).get("maxUnavailable")
    if value is None:
        return 1
    if isinstance(value, int):
        return max(1, value)
    return max(1, math.ceil(int(str(value).rstrip("%")) * wanted / 100))


def plan_rolling(
    pods: Iterable[Candidate],
    *,
    wanted: int,
    limit: int,
    budgets: Sequence[Allowance] = (),
    owned: bool = False,
    obstacle: str = "",
) -> Rolling:
    """Choose. ``wanted``: engines that there should be; ``owned``: a round or other work owns the engines;
    ``obstacle``: why no pod of the pool can be made now."""
    live = [p for p in pods if 0 <= p.index < wanted]
    old = sorted((p for p in live if p.outdated), key=lambda p: (-p.index, p.uid))
    if not old:
        return Rolling()
    said = f"{len(old)} pods of an earlier template are replaced, {limit} at a time"
    if kept := sum(p.kept for p in old):
        said += f"; {kept} of them are in quarantine, which keeps the pod"
    if owned:
        why = f"{len(old)} pods of an earlier template are replaced when the running round or repair has ended"
        return Rolling(outdated=len(old), waits=((Reason.ROUND_IN_PROGRESS, why),))
    if obstacle:
        said += f"; none is taken away while no other can be made: {obstacle}"
    if obstacle or any(p.serves is None for p in live):
        return Rolling(outdated=len(old), waits=((Reason.UPDATING, said),))
    # Two pods of one index are one engine.
    out = wanted - len({p.index for p in live if p.serves})
    free = [p for p in old if not p.kept and not p.held]
    chosen = [p for p in free if not p.serves]
    left = {b.name: b.allowed for b in budgets}
    refused = ""
    for p in (p for p in free if p.serves):
        if out >= limit:
            break
        empty = [b.name for b in budgets if p.uid in b.pods and left[b.name] <= 0]
        if empty:
            refused = empty[0]
            continue
        for b in budgets:
            if p.uid in b.pods:
                left[b.name] -= 1
        chosen.append(p)
        out += 1
    if not chosen and refused:
        said += f"; PodDisruptionBudget {refused} lets none go now"
    elif not chosen:
        said += f"; {out} engines are out of service now"
    return Rolling(frozenset(p.uid for p in chosen), len(old), ((Reason.UPDATING, said),))


# ------------------------------------------------------------------------------------------ room between rounds

#: Milliseconds without a step after which rounds that follow each other at once let a rolling update through.
STARVED_MS = 60_000
#: Least milliseconds of such a room, beside the drain of an engine: to see that nobody owns the engines, and to evict.
ROOM_MS = 10_000
#: A room that was not used is followed by none for so many times its length: an update that can not go on (a budget, an
#: engine out of service) must not hold up every round.
UNUSED = 5


@dataclass(frozen=True, slots=True)
class Update:
    """A rolling update under way. Times in milliseconds since the epoch."""

    pool: str
    since_ms: int
    """Since when there are pods of an earlier template."""
    step_ms: int
    """When the pool's youngest pod was made."""
    moving: bool
    """Pods are missing or on their way out: a step is being taken."""


def update_of(pool: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], *, wanted: int) -> Update | None:
    """What the pool's status and its pods (``wanted`` of them) say of its rolling update; None: there is none."""
    outdated = find_condition((pool.get("status") or {}).get("conditions") or [], PoolCondition.TEMPLATE_OUTDATED)
    if not is_rolling(pool) or outdated is None or outdated.get("status") != ConditionStatus.TRUE.value:
        return None
    there = list(pods)
    current = (pool.get("status") or {}).get("templateHash")
    old = [p for p in there if (p["metadata"].get("labels") or {}).get(labels.TEMPLATE_HASH) != current]
    if old and all(quarantine_of(p) is not None for p in old):
        return None  # they stay for whoever looks into them, however long that takes
    staying = [p for p in there if "deletionTimestamp" not in p["metadata"]]
    made = [epoch_ms(p["metadata"]["creationTimestamp"]) for p in there if p["metadata"].get("creationTimestamp")]
    return Update(
        pool=str(pool["metadata"]["name"]),
        since_ms=epoch_ms(outdated["lastTransitionTime"]),
        step_ms=max(made, default=0),
        moving=len(staying) < wanted or len(staying) < len(there),
    )


def makes_room(
    updates: Iterable[Update], *, opened_ms: int | None, now_ms: int, drain_seconds: float
) -> tuple[int | None, str]:
    """Whether a round that could start now waits, so that a rolling update takes a step: (since when, pool).

    ``opened_ms``: since when the last round waited for that. No pool: the round starts, and what comes first is to be
    handed in the next time. A step takes as long as an engine drains, and a round waits no longer than that.
    """
    listed = list(updates)
    starved = [u for u in listed if not u.moving and now_ms - max(u.since_ms, u.step_ms) >= STARVED_MS]
    if not starved:
        return opened_ms, ""
    length = ROOM_MS + round(drain_seconds * 1000)
    if opened_ms is not None and now_ms - opened_ms < length:
        return opened_ms, starved[0].pool
    used = opened_ms is None or any(u.step_ms >= opened_ms for u in listed)
    if used or opened_ms is None or now_ms - opened_ms >= (1 + UNUSED) * length:
        return now_ms, starved[0].pool
    return opened_ms, ""
