"""Conditions of an EnginePool about sleeping engines: StuckLoading, ResidualMemoryHigh, HeterogeneousStates.

Invariants:
- each message names engines or devices and what a person can do; it holds no figure that changes by itself, so that
  nothing is written while nothing changes;
- memory that nobody can read is Unknown, never low; memory of devices that a trainer has been granted is the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlfleet.api.conditions import ConditionStatus, PoolCondition, Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import GateStatus
from rlfleet.plan.elastic import DEFAULT_RESIDUAL_GIB, GIB
from rlfleet.plan.lifecycle import Derived, PodFact
from rlfleet.plan.memory_gate import readings
from rlfleet.plan.topology import Device

Verdict = tuple[PoolCondition, ConditionStatus, Reason, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine as shown. ``gate`` is its last known status, ``answered`` whether that is of this observation."""

    pod: PodFact
    derived: Derived
    gate: GateStatus | None = None
    answered: bool = False
    outdated: bool = False
    loading_since: str = ""
    """Since when it has been Loading, in RFC 3339; empty: it is something else."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """What these conditions need beside the rows."""

    residual_bytes: int = int(DEFAULT_RESIDUAL_GIB * GIB)
    """spec.residualMemoryGiB in bytes."""
    granted: frozenset[Device] = frozenset()
    """Devices that a trainer may use now."""
    stuck: frozenset[str] = frozenset()
    """UIDs of pods that have been Loading for longer than ``patience_seconds``."""
    patience_seconds: int = 0


def elastic_conditions(rows: Sequence[Row], elastic: Elastic) -> Iterable[Verdict]:
    """The three conditions."""
    yield _stuck(rows, elastic)
    yield _residual(rows, elastic)
    yield _heterogeneous(rows)


def _stuck(rows: Sequence[Row], elastic: Elastic) -> Verdict:
    type_ = PoolCondition.STUCK_LOADING
    stuck = [r for r in rows if r.derived.state is EngineState.LOADING and r.pod.uid in elastic.stuck]
    if not stuck:
        return type_, ConditionStatus.FALSE, Reason.LOADING_NORMALLY, ""
    why = stuck[0].derived.failure or "closed"
    message = (
        f"{_names(stuck)}: awake and closed for more than {elastic.patience_seconds} s, holding device memory ({why}). "
        "Sync again; or lower spec.active to put it to sleep; or delete its pod"
    )
    return type_, ConditionStatus.TRUE, Reason.STUCK_LOADING, message


def _residual(rows: Sequence[Row], elastic: Elastic) -> Verdict:
    type_ = PoolCondition.RESIDUAL_MEMORY_HIGH
    asleep = [r for r in rows if r.derived.state is EngineState.OFFLOADED and r.gate is not None and r.answered]
    if not asleep:
        return type_, ConditionStatus.FALSE, Reason.RESIDUAL_MEMORY_LOW, "no engine sleeps"
    blind = [r for r in asleep if r.gate is not None and r.gate.devices.memory is None]
    memory = readings(r.gate.devices for r in asleep if r.gate is not None)
    # An engine that is awake on the same device uses it rightly.
    awake = {
        Device(r.gate.devices.node, uuid)
        for r in rows
        if r.gate is not None and r.derived.state is not EngineState.OFFLOADED
        for uuid in r.gate.devices.uuids
    }
    high = sorted(
        d for d, m in memory.items() if m.used_bytes > elastic.residual_bytes and d not in elastic.granted | awake
    )
    limit = f"{elastic.residual_bytes / GIB:.4g} GiB"
    if high:
        device = high[0]
        others = memory[device].others
        tail = f"; others there: {', '.join(others[:4])}" if others else ""
        more = f" and {len(high) - 1} more devices" if len(high) > 1 else ""
        message = (
            f"{device.node}/{device.uuid}{more}: more than {limit} in use although its engines sleep{tail}. End what "
            "else uses it, or delete the engine's pod; raise spec.residualMemoryGiB only if that much is meant to stay"
        )
        return type_, ConditionStatus.TRUE, Reason.RESIDUAL_MEMORY_HIGH, message
    if blind:
        problem = blind[0].gate.devices.problem if blind[0].gate is not None else ""
        message = f"{_names(blind)}: memory of their devices can not be read{f': {problem}' if problem else ''}"
        return type_, ConditionStatus.UNKNOWN, Reason.MEMORY_UNREADABLE, message
    return type_, ConditionStatus.FALSE, Reason.RESIDUAL_MEMORY_LOW, f"at most {limit} in use where engines sleep"


def _heterogeneous(rows: Sequence[Row]) -> Verdict:
    type_ = PoolCondition.HETEROGENEOUS_STATES
    mixed = [
        r
        for r in rows
        if r.derived.state is EngineState.DRAINING
        and r.gate is not None
        and r.gate.released
        and r.derived.reason is not Reason.OFFLOADING
    ]
    if not mixed:
        return type_, ConditionStatus.FALSE, Reason.STATES_AGREE, ""
    first = mixed[0].gate
    tags = ", ".join(sorted(t.value for t in first.released)) if first is not None else ""
    message = (
        f"{_names(mixed)}: only {tags} is released, so it neither sleeps nor serves ({mixed[0].derived.message}). "
        "It is tried again; delete its pod if that does not help"
    )
    return type_, ConditionStatus.TRUE, Reason.HALF_RELEASED, message


def _names(rows: Sequence[Row]) -> str:
    some = ", ".join(r.pod.name for r in rows[:4])
    return some + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
