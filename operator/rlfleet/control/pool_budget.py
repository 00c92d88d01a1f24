"""A pool's PodDisruptionBudget, and replacing pods of an earlier template within it.

Invariants:
- the budget is written only when it says something else than it should: created, replaced under its resourceVersion,
  deleted under its UID; one that is not the pool's is left alone and named;
- pods that a rolling update replaces go by the Eviction API, so no budget, whoever made it, is ever overrun.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODDISRUPTIONBUDGETS
from rlfleet.plan import template
from rlfleet.plan.budget import Allowance, allowances, plan_budget, uncounted
from rlfleet.plan.elastic import wanted_pods
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.rolling import Candidate, Rolling, is_rolling, plan_rolling, rolling_limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rlfleet.control.context import Context
    from rlfleet.control.pool_memory import PoolMemory
    from rlfleet.kube.client import Obj
    from rlfleet.plan.lifecycle import PodFact

log = logging.getLogger(__name__)

#: A budget that somebody changed or deleted is put right after so many polls of an idle pool at the latest.
POLLS = 6
_SERVES = frozenset({EngineState.ACTIVE, EngineState.OFFLOADED})


async def ensure_budget(
    ctx: Context, pool: Obj, facts: Sequence[PodFact], memory: PoolMemory, *, vacated: int
) -> tuple[Problem, ...]:
    """Look at the budget when something has changed and now and then, and make it what it should be.

    ``vacated``: engines without a pod because a trainer has their devices.
    """
    meta, now = pool["metadata"], ctx.clock.monotonic()
    bare = uncounted(pool, (p for f in facts if (p := ctx.pods.by_uid(f.uid)) is not None))
    about = (meta.get("generation"), vacated, bare)
    known = memory.budget
    if known is not None and known[0] == about and now < known[1]:
        return memory.budget_problems
    kube = ctx.kube.at(Priority.SCALE, field_manager=labels.POOL_MANAGER)
    namespace, name, timeout = meta["namespace"], meta["name"], ctx.settings.api_timeout
    try:
        try:
            existing: Obj | None = await kube.get(PODDISRUPTIONBUDGETS, namespace, name, timeout=timeout)
        except NotFound:
            existing = None
        plan = plan_budget(pool, existing, vacated=vacated, countable=not bare)
        if plan.create is not None:
            await kube.create(PODDISRUPTIONBUDGETS, namespace, plan.create, timeout=timeout)
        elif plan.replace is not None:
            await kube.replace(PODDISRUPTIONBUDGETS, namespace, name, plan.replace, timeout=timeout)
        elif plan.delete:
            await kube.delete(PODDISRUPTIONBUDGETS, namespace, name, uid=plan.delete, timeout=timeout)
    except (AlreadyExists, Conflict, NotFound):
        return memory.budget_problems  # somebody was faster: the next look tells
    except (Forbidden, Invalid) as e:
        # Engines without a budget are better than no engines.
        ending = isinstance(e, Forbidden) and e.namespace_terminating
        memory.budget_problems = () if ending else (Problem(Reason.BUDGET_FAILED, f"no budget: {e.message[:500]}"),)
        memory.budget = (about, now + POLLS * ctx.settings.poll_seconds)
        return memory.budget_problems
    if plan.create or plan.replace or plan.delete:
        ctx.metrics.write(PODDISRUPTIONBUDGETS.plural)
    memory.budget = (about, now + POLLS * ctx.settings.poll_seconds)
    taken = f"PodDisruptionBudget {name} is not this pool's, so its engines have none; delete it, or rename the pool"
    memory.budget_problems = (Problem(Reason.BUDGET_NAME_TAKEN, taken),) if plan.taken else ()
    if bare:
        text = (
            f"pod {', '.join(bare[:4])}: no controller made it, so Kubernetes can not count maxUnavailable and would "
            "let no engine go; leave spec.disruptionBudget out, and make a PodDisruptionBudget with minAvailable"
        )
        memory.budget_problems = (Problem(Reason.BUDGET_FAILED, text),)
    return memory.budget_problems


def serves(fact: PodFact, memory: PoolMemory) -> bool | None:
    """Whether the pod's engine serves, or sleeps on purpose; None: not known yet."""
    state = memory.states.get(fact.uid)
    # A Ready pod whose gate has not answered this process yet is shown as booting; it may well serve.
    if state is None or (fact.ready and fact.uid not in memory.gates):
        return None
    return state in _SERVES


async def rolling(
    ctx: Context,
    pool: Obj,
    facts: Sequence[PodFact],
    memory: PoolMemory,
    slots: Sequence[str],
    *,
    owned: bool,
    demanded: frozenset[int],
    obstacle: Callable[[], Awaitable[str]],
) -> Rolling:
    """Which pods of an earlier template are replaced now.

    ``owned``: a round or other work owns the engines; ``demanded``: indices whose devices a trainer has; ``obstacle``:
    tells why no pod of the pool can be made, asked only where one would be replaced.
    """
    if not is_rolling(pool):
        return Rolling()
    wanted = wanted_pods(pool)
    pods = [
        Candidate(
            uid=f.uid,
            index=f.index,
            outdated=template.is_outdated(pool, f.template_hash, f.assignment, f.index, slots),
            serves=serves(f, memory),
            kept=f.quarantine is not None,
            held=f.index in demanded,
        )
        for f in facts
        if f.live
    ]
    budgets: tuple[Allowance, ...] = ()
    if not owned and any(p.outdated for p in pods):
        listed = await ctx.kube.at(Priority.SCALE).list(
            PODDISRUPTIONBUDGETS, pool["metadata"]["namespace"], timeout=ctx.settings.api_timeout
        )
        known = [pod for f in facts if (pod := ctx.pods.by_uid(f.uid)) is not None]
        budgets = allowances(listed.items, known)
    limit = rolling_limit(pool, wanted)
    found = plan_rolling(pods, wanted=wanted, limit=limit, budgets=budgets, owned=owned)
    if not found.replace:
        return found
    return plan_rolling(pods, wanted=wanted, limit=limit, budgets=budgets, obstacle=await obstacle())
