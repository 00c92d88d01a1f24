"""Which engine pods may receive requests, in pools whose router is the pods' own readiness, or a label of theirs.

Invariants:
- a pod is current only while its engine is Active: it holds the committed version, proven, and is open;
- what is not known changes nothing: an engine that does not answer keeps its last known state, and its condition;
- withdrawals go before admissions, so two versions are never both admitted because of our order of writing;
- a round alone writes nothing: engines that it pauses stay admitted, and requests wait at the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.plan.pool_elastic import Row

#: What an engine is shown as before its gate has answered for the first time.
_EARLY = frozenset({EngineState.PENDING, EngineState.BOOTING})


@dataclass(frozen=True, slots=True)
class Readiness:
    """The condition, or the label, that one pod is to get. ``uid``: of the pod that is meant."""

    name: str
    uid: str
    current: bool
    reason: str
    message: str


def changes(rows: Iterable[Row], *, operating: bool) -> tuple[Readiness, ...]:
    """Conditions that differ from what pods have, withdrawals first. Pods that end or are deleted are left alone.

    ``operating``: an operation of the pipeline runs, so that an engine is closed says nothing yet. One that is closed
    though it holds the committed version is about to be opened, by a round that just began or just ended.
    """
    return _changes(((row, row.pod.current) for row in rows), operating=operating)


def label_changes(rows: Iterable[Row], *, operating: bool, by_label: bool) -> tuple[Readiness, ...]:
    """The same for the label ``rlfleet.dev/serving``. ``by_label``: the pool has a router that goes by it.

    Where none does any more, no pod keeps the label: whoever still selects it would not hear of a withdrawal.
    """
    if by_label:
        return _changes(((row, row.pod.serving) for row in rows), operating=operating)
    left = [row for row in rows if row.pod.serving and row.pod.live]
    reason = Reason.NO_ROUTERS.value
    return tuple(sorted((Readiness(r.pod.name, r.pod.uid, False, reason, "") for r in left), key=lambda r: r.name))


def _changes(rows: Iterable[tuple[Row, bool | None]], *, operating: bool) -> tuple[Readiness, ...]:
    found = []
    for row, current in rows:
        pod, state = row.pod, row.derived.state
        wanted = state is EngineState.ACTIVE
        if not pod.live or current is None or current is wanted:
            continue
        if state is EngineState.LOADING and (operating or row.derived.reason is Reason.ENGINES_CLOSED):
            continue
        if state in _EARLY and row.gate is None and not pod.process:
            # Its gate has not answered this process yet. A container that may restart in place is another matter.
            continue
        reason = (row.derived.reason or (Reason.COMMITTED if wanted else Reason.ENGINES_CLOSED)).value
        message = "" if wanted else (row.derived.message or f"the engine is {state.value}")
        found.append(Readiness(pod.name, pod.uid, wanted, reason, message))
    return tuple(sorted(found, key=lambda r: (r.current, r.name)))
