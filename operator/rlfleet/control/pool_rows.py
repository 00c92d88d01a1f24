"""What a pool's reconciler shows of each engine, and which of the leaving ones have no request left.

Invariant: it asks nobody: rows are made of what pods and gates said last, and silence changes no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfleet.api.condition_list import find_condition
from rlfleet.api.conditions import PipelineCondition, Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control import routers
from rlfleet.control.context import Context
from rlfleet.control.pool_elastic import Sleepers
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.rounds.counting import counts_of
from rlfleet.kube.client import Obj
from rlfleet.plan import template
from rlfleet.plan.adopt import adopts
from rlfleet.plan.allowance import ALLOWANCE
from rlfleet.plan.blocks import Slot
from rlfleet.plan.lifecycle import Closed, PodFact, derive
from rlfleet.plan.pool import PodPlan, best, by_index
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.rounds import Committed


def committed_of(pipeline: Mapping[str, Any] | None) -> Committed | None:
    """``RLPipeline.status.committed`` for planning."""
    raw = ((pipeline or {}).get("status") or {}).get("committed")
    return Committed(int(raw["version"]), str(raw["manifestDigest"])) if raw else None


def _closed(pool: Mapping[str, Any], pipeline: Mapping[str, Any] | None) -> Closed:
    """What the pipeline says of closed engines, and whose catch-up attempts are spent."""
    ready = find_condition(((pipeline or {}).get("status") or {}).get("conditions") or [], PipelineCondition.READY)
    awaiting = ready is not None and ready.get("reason") == Reason.AWAITING_ROUND.value
    counts = counts_of([pool])
    return Closed(
        awaiting=str((ready or {}).get("message") or "") if awaiting else "",
        exhausted={(c.engine, c.incarnation): c.reason for c in counts if c.attempts >= ALLOWANCE},
    )


def drained(
    plan: PodPlan,
    pipeline: Obj | None,
    unrouted: frozenset[str],
    found: routers.Resolved,
    memory: PoolMemory,
    now: float,
) -> frozenset[str]:
    """Leaving engines that have no request left, or have had spec.sync.drainSeconds since they left the routers."""
    sync = ((pipeline or {}).get("spec") or {}).get("sync") or {}
    allowance = float(sync.get("drainSeconds", 30))
    result = set()
    for uid in plan.draining:
        if found.endpoints and uid not in unrouted:
            continue
        until = memory.drain_until.setdefault(uid, now + allowance)
        gate = memory.gates.get(uid)
        idle = (
            gate is not None
            and memory.answered.get(uid, False)
            and gate.engine.running == 0
            and gate.engine.waiting == 0
        )
        if idle or now >= until:
            result.add(uid)
    for uid in [u for u in memory.drain_until if u not in plan.draining]:
        del memory.drain_until[uid]
    return frozenset(result)


def rows_of(
    ctx: Context,
    pool: Obj,
    facts: list[PodFact],
    plan: PodPlan,
    pipeline: Obj | None,
    found: routers.Resolved,
    memory: PoolMemory,
    sleep: Sleepers,
    slots: Sequence[Slot],
) -> list[Row]:
    """One row per index, and one per engine that is on its way out."""
    committed = committed_of(pipeline)
    closed = _closed(pool, pipeline)
    rows = []
    texts = [s.text for s in slots]
    made = not adopts(pool)
    for index, pods in by_index(facts).items():
        plays = best(pods)
        for pod in pods:
            if pod is not plays and (pod.finished or pod.live):
                continue
            if memory.note_process(pod):
                note = f"{pod.name}: the engine's container was restarted in place; it is closed until it catches up"
                ctx.events.record(pool, "Warning", Reason.IDENTITY_MISMATCH.value, note, action="Observe")
            gate = memory.gates.get(pod.uid)
            answered = memory.shown(pod.uid)
            derived = derive(
                pod,
                gate if answered else None,
                committed=committed,
                routers=found.names,
                draining=pod.uid in plan.draining,
                previous=memory.states.get(pod.uid),
                closed=closed,
                sleep=sleep.of(pod.uid, ctx.elastic),
            )
            if derived.state is EngineState.QUARANTINED and memory.states.get(pod.uid) not in (None, derived.state):
                ctx.metrics.quarantined((derived.reason or Reason.NOT_PROVEN).value)
            memory.note_state(pod, derived.state, ctx.now_ms())
            outdated = made and pod.live and template.is_outdated(pool, pod.template_hash, pod.assignment, index, texts)
            since = memory.loading_since.get(pod.uid)
            rows.append(Row(pod, derived, gate, answered, outdated, rfc3339(since) if since is not None else ""))
    return rows
