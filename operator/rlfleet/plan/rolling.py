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

from rlfleet.api.conditions import Reason
from rlfleet.plan.budget import Allowance


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
