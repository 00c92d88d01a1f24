"""What a pool's reconciler knows of sleeping: which of its engines are to sleep, and what its conditions need.

Invariant: it decides nothing of its own. Who sleeps is plan.elastic.wish over the pods as observed, as for the
pipeline, which alone puts engines to sleep; while a round owns the engines the wish only waits, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.v1alpha1.rlpipeline_status import OperationKind
from rlfleet.control.elastic.memory import ElasticMemory
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.plan.asleep import is_offloaded
from rlfleet.plan.blocks import slot_evidence
from rlfleet.plan.demand import grants_of, held_devices
from rlfleet.plan.elastic import ceiling, last_asleep, wish
from rlfleet.plan.lifecycle import PodFact, Sleep
from rlfleet.plan.pool_elastic import Elastic
from rlfleet.plan.rounds import Engine
from rlfleet.plan.template import is_claims, is_pinned
from rlfleet.plan.topology import assigned_evidence


@dataclass(frozen=True, slots=True)
class Sleepers:
    """Which pods' engines are to sleep, as the pool sees it now."""

    resting: frozenset[str] = frozenset()
    """UIDs of their pods."""
    deferred: bool = False
    """A round owns the engines: nobody is put to sleep before it has ended."""
    awake: int = 0
    """How many engines are to be awake."""
    unmoved: frozenset[str] = field(default_factory=frozenset)
    """UIDs of those that are to sleep and are not known to."""

    def of(self, uid: str, memory: ElasticMemory) -> Sleep:
        """What to say of one engine."""
        return Sleep(going=uid in self.resting and not self.deferred, problem=memory.problem(uid))

    @property
    def waits(self) -> tuple[tuple[Reason, str], ...]:
        """What Progressing says of a shrink that waits for a round."""
        if not self.deferred or not self.unmoved:
            return ()
        return (
            (Reason.ROUND_IN_PROGRESS, f"{len(self.unmoved)} engines go to sleep when the running round has ended"),
        )


def sleepers(
    pool: Mapping[str, Any],
    pipeline: Mapping[str, Any] | None,
    facts: Iterable[PodFact],
    going: frozenset[str],
    memory: PoolMemory,
) -> Sleepers:
    """``going``: UIDs of pods that are being removed."""
    status = (pipeline or {}).get("status") or {}
    name = pool["metadata"]["name"]
    spec = ceiling(pool)
    engines = [
        Engine(
            name=f.uid,
            pool=name,
            pod_uid=f.uid,
            url="",
            status=memory.gates.get(f.uid) if memory.shown(f.uid) else None,
            gone=f.finished,
            leaving=f.deleting,
            unwanted=f.uid in going,
            index=f.index,
            assigned=assigned_evidence(f.assignment) if f.assignment and is_pinned(pool) else None,
            claimed=slot_evidence(pipeline, f.assignment) if f.assignment and is_claims(pool) else None,
        )
        for f in facts
    ]
    live = [e for e in engines if not e.gone and not e.leaving]
    known = last_asleep(pool) | {u for u, s in memory.states.items() if s is EngineState.OFFLOADED}
    found = wish(engines, {name: spec}, held=held_devices(grants_of(status)), last_asleep=known)
    active = status.get("activeOperation") or {}
    return Sleepers(
        resting=found.resting,
        deferred=bool(active) and active.get("kind") != OperationKind.OFFLOAD.value,
        awake=min(spec.active, max(0, (spec.replicas if spec.owes else len(live)) - len(found.resting))),
        unmoved=frozenset(e.name for e in engines if e.name in found.resting and not is_offloaded(e.status)),
    )


def facts_for_conditions(
    pool: Mapping[str, Any], pipeline: Mapping[str, Any] | None, memory: PoolMemory, now_ms: int
) -> Elastic:
    """What StuckLoading and ResidualMemoryHigh are judged by."""
    status = (pipeline or {}).get("status") or {}
    deadlines = (((pipeline or {}).get("spec") or {}).get("sync") or {}).get("deadlines") or {}
    patience = int(deadlines.get("stagingSeconds", 600)) + int(deadlines.get("pausedSeconds", 150))
    stuck = {u for u, since in memory.loading_since.items() if now_ms - since > patience * 1000}
    return Elastic(
        residual_bytes=ceiling(pool).residual_bytes,
        granted=held_devices(g for g in grants_of(status) if g.granted),
        # Before anything is committed engines wait for the first round, however long that takes.
        stuck=frozenset(stuck) if status.get("committed") else frozenset(),
        patience_seconds=patience,
    )
