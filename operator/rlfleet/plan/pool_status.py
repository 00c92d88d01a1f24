"""The status of an EnginePool, from the observed engines: counts, versions, a bounded list, conditions.

Invariants:
- its size does not grow with the pool: all engines up to 64, beyond that only those that are not as they should be;
- the same observation gives the same status, so that nothing is written when nothing changed;
- what is not known is said as unknown (an absent ``routed``), never as a no.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rlfleet.api import labels
from rlfleet.api.condition_list import set_condition
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.api.v1alpha1.common import MAX_LISTED_ENGINES
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.plan.adopt import MAX_INDEX
from rlfleet.plan.pool_conditions import conditions_of
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.pool_observed import Observed
from rlfleet.plan.topology import assigned_evidence, identify, report_evidence

#: Reasons that explain a state without being a failure of the engine.
_NORMAL: Final = frozenset(
    {
        Reason.AWAITING_ROUND,
        Reason.CATCH_UP_PENDING,
        Reason.NOTHING_COMMITTED,
        Reason.ENGINES_CLOSED,
        Reason.OFFLOADING,
        Reason.SCALING_DOWN,
        Reason.TERMINATING,
    }
)
_MAX_FAILURE = 256


def ranges(indices: Iterable[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for i in sorted(set(indices)):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def routed(row: Row, routers: frozenset[str]) -> bool | None:
    """Whether every router lists the engine; None: unknown, or there is no router."""
    if not row.answered or row.gate is None or not routers:
        return None
    seen = [row.gate.routed.get(r) for r in routers]
    if any(s is False for s in seen):
        return False
    return None if any(s is None for s in seen) else True


def entry(row: Row, observed: Observed) -> dict[str, Any]:
    """One engine in ``status.engines``."""
    gate = row.gate
    found: dict[str, Any] = {
        "name": row.pod.name,
        # Of a label that a person wrote over: such a pod goes, and no status is refused for it meanwhile.
        "index": min(max(0, row.pod.index), MAX_INDEX),
        "podUID": row.pod.uid,
        "incarnation": gate.incarnation if gate else None,
        "node": row.pod.node or None,
        "gpus": gpus(row),
        "state": row.derived.state.value,
        "version": gate.holds.version if gate and gate.holds else None,
        "fence": gate.fence.generation if gate and gate.fence.generation else None,
        "routed": routed(row, observed.routers),
        "failure": row.derived.failure[:_MAX_FAILURE] if row.derived.reason not in _NORMAL else None,
        "instance": gate.engine.instance if gate else None,
        "loadingSince": row.loading_since,
    }
    return {k: v for k, v in found.items() if v is not None and v != ""}


def gpus(row: Row) -> list[str] | None:
    """UUIDs of an engine's devices, as placement gave them and its gate reports them; None: unknown or in dispute."""
    sources = [
        report_evidence("the gate", row.gate.devices if row.gate else None),
        assigned_evidence(row.pod.assignment),
    ]
    return sorted(d.uuid for d in identify(sources).devices or ()) or None


def build_status(observed: Observed, old: Mapping[str, Any], *, now: str) -> dict[str, Any]:
    """The whole status. ``old``: what is there (for transition times); ``now`` in RFC 3339."""
    rows = sorted(observed.rows, key=lambda r: (r.pod.index, r.pod.created, r.pod.uid))
    counts = Counter(r.derived.state for r in rows)
    playing = {r.pod.index for r in rows if r.derived.state is not EngineState.DRAINING}
    if not observed.adopted:
        counts[EngineState.PENDING] += len(set(range(observed.replicas)) - playing)
    by_version: dict[int, list[int]] = {}
    for row in rows:
        if row.gate and row.gate.holds and row.derived.state is not EngineState.FAILED and row.pod.index >= 0:
            by_version.setdefault(row.gate.holds.version, []).append(row.pod.index)
    listed = rows
    if len(rows) > MAX_LISTED_ENGINES:
        listed = [r for r in rows if r.derived.state is not EngineState.ACTIVE][:MAX_LISTED_ENGINES]
    conditions: Sequence[Mapping[str, Any]] = old.get("conditions") or []
    for type_, status, reason, message in conditions_of(observed, rows, counts):
        conditions = set_condition(conditions, type_, status, reason, message, observed.generation, now)
    built: dict[str, Any] = {
        "observedGeneration": observed.generation,
        "replicas": sum(not r.pod.finished for r in rows),
        "readyReplicas": sum(r.pod.ready for r in rows),
        "selector": observed.selector or f"{labels.POOL}={observed.pool}",
        "counts": {state.value.lower(): counts[state] for state in EngineState},
        "versions": [
            {"version": v, "engines": ranges(by_version[v])}
            for v in sorted(by_version, reverse=True)[:MAX_LISTED_ENGINES]
        ],
        "engines": [entry(r, observed) for r in listed],
        "startFailures": _start_failures(observed) or None,
        "podsRefusedSince": None if observed.refused_since is None else rfc3339(observed.refused_since),
        "templateHash": observed.template_hash,
        "fencing": _fencing(rows, old),
        "admissionGuarantee": "DetectOnly" if observed.adopted else "Enforced",
        "conditions": [dict(c) for c in conditions],
    }
    return {k: v for k, v in built.items() if v is not None}


def _start_failures(observed: Observed) -> list[dict[str, Any]]:
    """The indices that fail most, in order."""
    most = sorted(observed.failures.items(), key=lambda item: (-item[1].count, item[0]))[:MAX_LISTED_ENGINES]
    return [f.row(index) for index, f in sorted(most)]


def _fencing(rows: Sequence[Row], old: Mapping[str, Any]) -> str:
    """Whether every engine was seen to refuse a control call without its key; unknown ones change nothing."""
    seen = [r.gate.engine.guarded if r.gate is not None else None for r in rows]
    if False in seen:
        return "Cooperative"
    return "Enforced" if seen and all(seen) else str(old.get("fencing") or "Cooperative")
