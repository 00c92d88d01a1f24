"""The PodDisruptionBudget of a pool: what it should say, and what to do about the one that is there. Pure.

Invariants:
- a budget of that name that another object controls, or nobody, is never changed: it is somebody's own;
- nothing is written when what is there says what it should, whatever else others have added to it;
- a budget that Kubernetes could not keep is not made: it would let nobody go, for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api import labels
from rlfleet.plan.adopt import adopts, ended, selector_of
from rlfleet.plan.elastic import wanted_pods
from rlfleet.plan.owners import controlled_by

Obj = dict[str, Any]

API_VERSION: Final = "policy/v1"
#: Engines of our making that may be evicted at the same time where the spec does not say.
DEFAULT_UNAVAILABLE: Final = 1


def uncounted(pool: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of adopted pods for which a budget is asked, but that no controller made.

    Kubernetes counts ``maxUnavailable`` from the scale of the pods' controllers; of pods without one it expects none.
    """
    if not adopts(pool) or pool["spec"].get("disruptionBudget") is None:
        return ()
    bare = (
        str(p["metadata"]["name"])
        for p in pods
        if not ended(p) and not any(o.get("controller") for o in p["metadata"].get("ownerReferences") or [])
    )
    return tuple(sorted(bare))


def wanted_budget(pool: Mapping[str, Any], *, vacated: int = 0, countable: bool = True) -> Obj | None:
    """The pool's budget; None: it has none. A second budget for a pod would make every eviction of it fail, so adopted
    pods get one only where the pool asks for it.

    ``vacated``: engines without a pod because a trainer has their devices; ``countable``: see ``uncounted``.
    """
    asked = pool["spec"].get("disruptionBudget")
    if (asked is None or not countable) and adopts(pool):
        return None
    meta = pool["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": {
                labels.PIPELINE: pool["spec"]["pipeline"],
                labels.POOL: meta["name"],
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
            },
            "ownerReferences": controlled_by("EnginePool", meta),
        },
        "spec": {
            "maxUnavailable": _limit(pool, vacated),
            "selector": {"matchLabels": dict(selector_of(pool))},
            # A pod whose engine does not even start protects nobody by holding up the drain of its node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _limit(pool: Mapping[str, Any], vacated: int) -> int | str:
    """``spec.disruptionBudget.maxUnavailable`` as Kubernetes must be told it.

    It counts from spec.replicas, by the scale subresource. Where spec.active keeps pods from being made, or a trainer
    has the devices of some, those would use the allowance up, and no engine could be evicted: they are added to it.
    """
    asked: int | str | None = (pool["spec"].get("disruptionBudget") or {}).get("maxUnavailable")
    asked = DEFAULT_UNAVAILABLE if asked is None else asked
    if adopts(pool):
        return asked
    replicas = int(pool["spec"].get("replicas", 1))
    wanted = max(0, wanted_pods(pool) - vacated)
    if wanted >= replicas:
        return asked
    count = asked if isinstance(asked, int) else math.ceil(int(asked.rstrip("%")) * wanted / 100)
    return count + replicas - wanted


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """At most one write. ``taken``: an object of that name is not the pool's."""

    create: Obj | None = None
    replace: Obj | None = None
    delete: str = ""
    """UID of the budget that the pool does not want any more."""
    taken: bool = False


def plan_budget(
    pool: Mapping[str, Any], existing: Mapping[str, Any] | None, *, vacated: int = 0, countable: bool = True
) -> BudgetPlan:
    """Compare what is there with what should be."""
    wanted = wanted_budget(pool, vacated=vacated, countable=countable)
    if existing is None:
        return BudgetPlan(create=wanted)
    meta = existing["metadata"]
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), {})
    if owner.get("uid") != pool["metadata"]["uid"]:
        return BudgetPlan(taken=wanted is not None)
    if "deletionTimestamp" in meta:
        return BudgetPlan()
    if wanted is None:
        return BudgetPlan(delete=str(meta["uid"]))
    spec = existing.get("spec") or {}
    if all(spec.get(key) == value for key, value in wanted["spec"].items()) and "minAvailable" not in spec:
        return BudgetPlan()
    return BudgetPlan(replace={**existing, "spec": wanted["spec"]})


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many of these pods (UIDs) a budget lets go now."""

    name: str
    pods: frozenset[str]
    allowed: int


def allowances(budgets: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> tuple[Allowance, ...]:
    """What every budget of the namespace says about these pods, ours among them.

    One whose controller has not looked at its present spec allows nobody. An empty selector means every pod, none at
    all means none. Expressions are not evaluated: a budget that has some counts for every pod that its labels match,
    which is never too few.
    """
    found = []
    listed = list(pods)
    for budget in budgets:
        selector = (budget.get("spec") or {}).get("selector")
        if selector is None:
            continue
        match = selector.get("matchLabels") or {}
        covered = frozenset(
            str(p["metadata"]["uid"]) for p in listed if match.items() <= (p["metadata"].get("labels") or {}).items()
        )
        if covered:
            status = budget.get("status") or {}
            seen = int(status.get("observedGeneration") or 0) >= int(budget["metadata"].get("generation") or 0)
            allowed = int(status.get("disruptionsAllowed") or 0) if seen else 0
            found.append(Allowance(str(budget["metadata"]["name"]), covered, allowed))
    return tuple(found)
