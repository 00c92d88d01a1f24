"""The conditions of an EnginePool: what is said of its engines together.

Invariant: what is not known is said as unknown (condition status Unknown), never as a no; the same observation gives
the same conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rlfleet.api import naming
from rlfleet.api.conditions import ConditionStatus, PoolCondition, Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import PROTOCOL_VERSION
from rlfleet.plan.pool_elastic import Row, Verdict, elastic_conditions
from rlfleet.plan.pool_observed import Observed, Problem
from rlfleet.plan.start_failures import keep_failing

#: Reasons of engines that drain to sleep.
_SLEEPY: Final = frozenset(
    {Reason.OFFLOADING, Reason.HALF_RELEASED, Reason.ENGINES_BUSY, Reason.OFFLOAD_FAILED, Reason.WAKE_FAILED}
)
_SILENT: Final = frozenset({Reason.GATES_UNREACHABLE, Reason.ENGINE_UNREACHABLE})
_NO_PIPELINE: Final = (
    "spec.pipeline names no RLPipeline in this namespace: create it, or delete this pool. Engines that a deleted "
    "pipeline left behind are closed and stay so until then"
)
_DELETING: Final = (
    "its RLPipeline is being deleted: engines are closed and none are made. Create the pipeline again when it is gone, "
    "or delete this pool"
)


def conditions_of(o: Observed, rows: Sequence[Row], counts: Mapping[EngineState, int]) -> Iterable[Verdict]:
    """All conditions. ``counts``: engines by state, those without a pod included."""
    yield _ready(o, rows, counts)
    yield _progressing(o, rows, counts)
    yield _consistent(o, rows)
    yield _admission(o, rows)
    yield _degraded(o, rows)
    yield from elastic_conditions(rows, o.elastic)
    if o.adopted:
        return
    outdated = sum(r.outdated for r in rows)
    if outdated:
        what = "they are replaced, as spec.updateStrategy says" if o.rolling else "delete them to update"
        message = f"{outdated} of {len(rows)} pods were made from an earlier template; {what}"
        yield PoolCondition.TEMPLATE_OUTDATED, ConditionStatus.TRUE, Reason.TEMPLATE_CHANGED, message
    else:
        yield PoolCondition.TEMPLATE_OUTDATED, ConditionStatus.FALSE, Reason.TEMPLATE_CURRENT, ""


def _ready(o: Observed, rows: Sequence[Row], counts: Mapping[EngineState, int]) -> Verdict:
    type_ = PoolCondition.READY
    if not o.pipeline_found:
        return type_, ConditionStatus.FALSE, Reason.PIPELINE_NOT_FOUND, "spec.pipeline names no RLPipeline here"
    if o.pipeline_deleting:
        return type_, ConditionStatus.FALSE, Reason.PIPELINE_DELETING, _DELETING
    invalid = next((p for p in o.problems if p.stops), None)
    if invalid is not None:
        return type_, ConditionStatus.FALSE, invalid.reason, invalid.message
    active = counts[EngineState.ACTIVE]
    silent = sum(r.derived.state is EngineState.ACTIVE and not r.answered for r in rows)
    wanted = o.replicas if o.awake is None else o.awake
    asleep = counts[EngineState.OFFLOADED]
    text = f"{active} of {wanted} engines are active" + (f", {asleep} sleep" if asleep else "")
    if o.adopted and o.replicas == 0:
        message = f"no pod with a gate carries the labels of spec.source.{o.source}.selector ({o.selector})"
        return type_, ConditionStatus.FALSE, Reason.NO_ENGINES, message
    if o.replicas == 0:
        return type_, ConditionStatus.TRUE, Reason.NO_ENGINES, "spec.replicas is 0"
    if wanted == 0:
        return type_, ConditionStatus.TRUE, Reason.ENGINES_OFFLOADED, f"no engine is to be awake, {asleep} sleep"
    if active >= wanted:
        if o.unknown is not None:
            return type_, ConditionStatus.UNKNOWN, o.unknown.reason, o.unknown.message
        if silent:
            return type_, ConditionStatus.UNKNOWN, Reason.GATES_UNREACHABLE, f"{silent} gates do not answer"
        return type_, ConditionStatus.TRUE, Reason.ALL_ENGINES_ACTIVE, text
    waiting = [r.derived.reason for r in rows if r.derived.state is EngineState.LOADING]
    for reason in (Reason.NOTHING_COMMITTED, Reason.AWAITING_ROUND, Reason.CATCH_UP_PENDING, Reason.COMMITTED_UNKNOWN):
        if waiting and all(w is reason for w in waiting) and len(waiting) + active == wanted:
            return type_, ConditionStatus.FALSE, reason, f"{text}; {reason.meaning}"
    return type_, ConditionStatus.FALSE, Reason.ENGINES_NOT_ACTIVE, text


def _progressing(o: Observed, rows: Sequence[Row], counts: Mapping[EngineState, int]) -> Verdict:
    type_ = PoolCondition.PROGRESSING
    yes, no = ConditionStatus.TRUE, ConditionStatus.FALSE
    for reason, message in o.waits:
        return type_, yes, reason, message
    if o.pipeline_deleting:
        return type_, no, Reason.PIPELINE_DELETING, _DELETING
    going = [r for r in rows if r.derived.state is EngineState.DRAINING]
    if going and all(r.derived.reason in _SLEEPY for r in going):
        return type_, yes, Reason.OFFLOADING, f"{len(going)} engines go to sleep"
    if going:
        return type_, yes, Reason.SCALING_DOWN, f"{len(going)} engines are going"
    if counts[EngineState.FAILED]:
        return type_, yes, Reason.REPLACING, f"{counts[EngineState.FAILED]} engines are being replaced"
    starting = counts[EngineState.PENDING] + counts[EngineState.BOOTING]
    if starting and o.pipeline_found and not o.problems:
        return type_, yes, Reason.SCALING_UP, f"{starting} engines are starting"
    return type_, no, Reason.IDLE, ""


def _open(row: Row, routers: frozenset[str]) -> bool:
    """Whether requests can reach the engine, as far as is known: not paused, and listed by some router."""
    gate = row.gate
    if gate is None or not row.answered or gate.engine.paused is not False:
        return False
    return not routers or any(gate.routed.get(r) for r in routers)


def _unrecorded(row: Row) -> bool:
    """It serves what it has proven, although no record says any more what is committed."""
    return row.derived.reason is Reason.COMMITTED_UNKNOWN


def _consistent(o: Observed, rows: Sequence[Row]) -> Verdict:
    type_ = PoolCondition.VERSION_CONSISTENT
    if not o.pipeline_found and rows:
        # Nobody asks gates in the name of a pipeline that is not there: what engines do is not known.
        return type_, ConditionStatus.UNKNOWN, Reason.PIPELINE_NOT_FOUND, "without their pipeline no gate is asked"
    held = {
        (r.gate.holds.version, r.gate.holds.manifest_digest) if r.gate and r.gate.holds else None
        for r in rows
        if (r.derived.state in (EngineState.ACTIVE, EngineState.QUARANTINED) or _unrecorded(r)) and _open(r, o.routers)
    }
    silent = sum(not r.answered and r.derived.state is EngineState.ACTIVE for r in rows)
    if len(held) > 1:
        names = sorted("unproven" if h is None else str(h[0]) for h in held)
        return type_, ConditionStatus.FALSE, Reason.VERSIONS_DIFFER, f"open engines hold versions {', '.join(names)}"
    if silent:
        return type_, ConditionStatus.UNKNOWN, Reason.GATES_UNREACHABLE, f"{silent} gates do not answer"
    if not held:
        return type_, ConditionStatus.TRUE, Reason.ENGINES_CLOSED, "no engine is open"
    only = next(iter(held))
    if only is None:
        return type_, ConditionStatus.FALSE, Reason.VERSIONS_DIFFER, "open engines hold unproven weights"
    return type_, ConditionStatus.TRUE, Reason.VERSIONS_AGREE, f"version {only[0]}"


def _admission(o: Observed, rows: Sequence[Row]) -> Verdict:
    type_ = PoolCondition.ADMISSION_OPEN
    if not o.pipeline_found and rows:
        message = "without their pipeline no gate is asked: engines that were open may still serve"
        return type_, ConditionStatus.UNKNOWN, Reason.PIPELINE_NOT_FOUND, message
    active = [r for r in rows if r.derived.state is EngineState.ACTIVE or (_unrecorded(r) and _open(r, o.routers))]
    shunned = _shunned(o, active)
    if shunned and len(shunned) == len(active) and all(_by_all(r, o.routers) for r in shunned):
        return type_, ConditionStatus.FALSE, Reason.ENGINES_SHUNNED, _shunning(shunned)
    if any(r.answered for r in active):
        reason = Reason.ENGINES_OPEN if o.routers else Reason.NO_ROUTERS
        return type_, ConditionStatus.TRUE, reason, ""
    if active:
        return type_, ConditionStatus.UNKNOWN, Reason.GATES_UNREACHABLE, "no gate of an active engine answers"
    reason = Reason.NO_ENGINES if not rows else Reason.ENGINES_CLOSED
    return type_, ConditionStatus.FALSE, reason, "no engine accepts requests"


def _shunned(o: Observed, rows: Iterable[Row]) -> list[Row]:
    """Engines that serve, and that a router lists and sends no requests."""
    return [r for r in rows if r.answered and r.gate is not None and o.routers & r.gate.shunned.keys()]


def _by_all(row: Row, routers: frozenset[str]) -> bool:
    return row.gate is not None and routers <= row.gate.shunned.keys()


def _shunning(shunned: Sequence[Row]) -> str:
    first = shunned[0]
    assert first.gate is not None
    router, why = min(first.gate.shunned.items())
    return f"{len(shunned)} engines, among them {first.pod.name}: router {router} sends it no requests: {why}"


def _degraded(o: Observed, rows: Sequence[Row]) -> Verdict:
    type_ = PoolCondition.DEGRADED
    problems = list(o.problems)
    if not o.pipeline_found:
        problems.append(Problem(Reason.PIPELINE_NOT_FOUND, _NO_PIPELINE))
    if o.pipeline_deleting:
        problems.insert(0, Problem(Reason.PIPELINE_DELETING, _DELETING))
    spent = [r for r in rows if r.derived.reason is Reason.CATCH_UP_EXHAUSTED]
    withheld = [r for r in rows if r.pod.withheld is not None and r.derived.reason is r.pod.withheld[0]]
    shut = [r for r in rows if r.derived.state is EngineState.QUARANTINED]
    quarantined = [r for r in shut if r not in spent and r not in withheld]
    # What a person has to do comes first; a pod in quarantine by a person waits for that person.
    asked = Reason.QUARANTINE_REQUESTED
    helpless = [r for r in quarantined + spent if r.derived.reason is not asked] if o.adopted and o.replaces else []
    if helpless:
        names = ", ".join(r.pod.name for r in helpless[:4])
        text = (
            f"{names}: spec.sync.onFailure is Replace, but nobody but its maker replaces an adopted pod: delete it, or "
            "sync"
        )
        problems.append(Problem(Reason.NOT_REPLACED, text))
    outdated = [r.pod.name for r in rows if r.gate is not None and r.gate.protocol_version < PROTOCOL_VERSION]
    if outdated:
        text = (
            f"{len(outdated)} engines, among them {outdated[0]}, have gates of a release that this operator can not "
            "order about: set spec.gate.image to this release's, and delete their pods"
        )
        problems.append(Problem(Reason.GATE_TOO_OLD, text))
    if failing := keep_failing(o.failures):
        problems.append(Problem(Reason.ENGINES_KEEP_FAILING, failing))
    if spent:
        text = f"{len(spent)} engines, among them {spent[0].pod.name}: {spent[0].derived.message}"
        problems.append(Problem(Reason.CATCH_UP_EXHAUSTED, text))
    if withheld:
        first = withheld[0]
        assert first.derived.reason is not None
        text = f"{len(withheld)} engines, among them {first.pod.name}: {first.derived.message}"
        problems.append(Problem(first.derived.reason, text))
    if quarantined:
        first = quarantined[0]
        name = first.pod.name if o.adopted else naming.engine_name(o.pool, first.pod.index)
        problems.append(
            Problem(
                Reason.ENGINES_QUARANTINED, f"{len(quarantined)} engines, among them {name}: {first.derived.failure}"
            )
        )
    refused = [r for r in rows if r.gate is not None and r.gate.engine.refused is not None]
    if refused:
        gate = refused[0].gate
        assert gate is not None
        text = f"{len(refused)} engines take no weights, among them {refused[0].pod.name}: {gate.engine.refused}"
        problems.append(Problem(Reason.UNSUPPORTED, text[:1000]))
    sleepless = [r for r in rows if r.derived.reason in _SLEEPY - {Reason.OFFLOADING}]
    if sleepless:
        first = sleepless[0]
        assert first.derived.reason is not None
        text = f"{len(sleepless)} engines, among them {first.pod.name}: {first.derived.message}"
        problems.append(Problem(first.derived.reason, text))
    failed = [r for r in rows if r.derived.state is EngineState.FAILED]
    if failed:
        problems.append(
            Problem(
                Reason.POD_FAILED, f"{len(failed)} pods, among them {failed[0].pod.name}: {failed[0].derived.message}"
            )
        )
    pending = [r for r in rows if r.derived.reason is Reason.POD_PENDING]
    if pending:
        problems.append(Problem(Reason.POD_PENDING, f"{pending[0].pod.name}: {pending[0].derived.message}"))
    kept = [r for r in rows if r.derived.reason is Reason.ROUTER_UNREACHABLE]
    if kept and all(p.reason is not Reason.ROUTER_UNREACHABLE for p in problems):
        problems.append(Problem(Reason.ROUTER_UNREACHABLE, f"{kept[0].pod.name}: {kept[0].derived.message}"))
    shunned = _shunned(o, (r for r in rows if r.derived.state is EngineState.ACTIVE))
    if shunned:
        problems.append(Problem(Reason.ENGINES_SHUNNED, _shunning(shunned)))
    silent = [r for r in rows if r.derived.reason in _SILENT]
    if silent:
        reason = silent[0].derived.reason
        assert reason is not None
        problems.append(Problem(reason, f"{len(silent)} engines, among them {silent[0].pod.name}"))
    if not problems:
        return type_, ConditionStatus.FALSE, Reason.AS_EXPECTED, ""
    text = "; ".join(p.message for p in problems)
    return type_, ConditionStatus.TRUE, problems[0].reason, text
