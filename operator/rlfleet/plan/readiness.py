"""Which engine pods may receive requests, in pools whose router is the pods' own readiness.

Invariants:
- a pod is current only while its engine is Active: it holds the committed version, proven, and is open;
- what is not known changes nothing: an engine that does not answer keeps its last known state, and its condition;
- withdrawals go before admissions, so two versions are never both admitted because of our order of writing;
- a round alone writes nothing: while it pauses engines their state does not change, and requests wait at the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.plan.pool_elastic import Row


@dataclass(frozen=True, slots=True)
class Readiness:
    """The condition that one pod is to get. ``uid``: of the pod that is meant."""

    name: str
    uid: str
    current: bool
    reason: str
    message: str


def changes(rows: Iterable[Row]) -> tuple[Readiness, ...]:
    """Conditions that differ from what pods have, withdrawals first. Pods that end or are deleted are left alone."""
    found = []
    for row in rows:
        pod, state = row.pod, row.derived.state
        wanted = state is EngineState.ACTIVE
        if not pod.live or pod.current is None or pod.current is wanted:
            continue
        reason = (row.derived.reason or (Reason.COMMITTED if wanted else Reason.ENGINES_CLOSED)).value
        message = "" if wanted else (row.derived.message or f"the engine is {state.value}")
        found.append(Readiness(pod.name, pod.uid, wanted, reason, message))
    return tuple(sorted(found, key=lambda r: (r.current, r.name)))
