"""What is told about engines that ended without our doing: why, and in which pods.

Invariant: who has to look at a pool at night reads who ended its engines. What a pod's status keeps to itself is asked
for once, when its end is told, and only where the engine ended as if somebody had wanted it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rlfleet.api import naming
from rlfleet.api.conditions import Reason
from rlfleet.control.context import Context
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.kube.client import Obj
from rlfleet.kube.errors import ApiError
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import EVENTS
from rlfleet.plan.endings import EVICTED, evictions
from rlfleet.plan.lifecycle import PodFact

log = logging.getLogger(__name__)


async def explain(ctx: Context, pool: Obj, failed: Sequence[PodFact], memory: PoolMemory) -> list[PodFact]:
    """The same pods with the kubelet's words, where their status lacks them; remembered of those that are still there.

    The kubelet records its Event before it stops the first container. Without an answer the status' own text stays.
    """
    asked = {f.uid for f in failed if f.unexplained}
    if not asked:
        return list(failed)
    try:
        # One call, however many ended: of one eviction there are few Events, of a namespace there may be many pods.
        listed = await ctx.kube.at(Priority.SCALE).list(
            EVENTS,
            pool["metadata"]["namespace"],
            field_selector=f"reason={EVICTED},regarding.kind=Pod",
            timeout=ctx.settings.api_timeout,
        )
    except ApiError as e:
        log.warning("pool %s: why engines ended could not be asked for: %s", pool["metadata"]["name"], e)
        return list(failed)
    words = {uid: text for uid, text in evictions(listed.items).items() if uid in asked}
    memory.words.update({uid: text for uid, text in words.items() if uid in memory.facts})
    return [replace(f, failure=words[f.uid]) if f.uid in words else f for f in failed]


def report(ctx: Context, pool: Obj, failed: Sequence[PodFact], lost: Sequence[PodFact]) -> None:
    """One Event for what failed and one for what vanished, however many there are."""
    name = pool["metadata"]["name"]
    for reason, pods, word in ((Reason.POD_FAILED, failed, "failed"), (Reason.POD_LOST, lost, "vanished")):
        if pods:
            first = pods[0]
            more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
            why = f": {first.failure}" if first.failure else ""
            who = f"{naming.engine_name(name, first.index)} ({first.name})" if first.index >= 0 else first.name
            note = f"{who}{more} {word}{why}"
            ctx.events.record(pool, "Warning", reason.value, note, action="ReplacePods")
