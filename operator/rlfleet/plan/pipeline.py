"""Status of a pipeline from what is observed: counts and conditions. Pure.

Invariant: Ready is True only if every engine that should serve is proven at the committed version, runs, and is open;
an engine that does not answer makes it Unknown at best, never True.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api.condition_list import set_condition
from rlfleet.api.conditions import ConditionStatus, PipelineCondition, Reason
from rlfleet.api.wire import PROTOCOL_VERSION, SenderStatus
from rlfleet.plan.asleep import is_offloaded
from rlfleet.plan.checkpoint import is_shelf
from rlfleet.plan.rounds import Committed, Engine
from rlfleet.plan.verdicts import at_committed


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Engines of a pipeline, counted. ``closed``: answer, but do not serve the committed version."""

    total: int
    active: int
    closed: tuple[str, ...]
    silent: tuple[str, ...]
    unrecorded: tuple[str, ...] = ()
    """Nothing is recorded as committed, and these serve proven weights all the same."""
    asleep: int = 0
    """Engines that sleep because they are to."""

    @property
    def counts(self) -> dict[str, int]:
        """``status.engines``."""
        return {"total": self.total, "active": self.active, "asleep": self.asleep}


def count(engines: Sequence[Engine], committed: Committed | None) -> FleetFacts:
    """Count engines: active means proven at ``committed``, not paused, and listed by every router of its pool."""
    live = [e for e in engines if not e.gone and not e.dropped]
    active, closed, silent = 0, [], []
    for e in live:
        if e.status is None:
            silent.append(e.name)
        elif (
            at_committed(e, committed)
            and e.status.engine.paused is False
            and not e.status.uncertain
            and all(v is True for v in e.status.routed.values())
        ):
            active += 1
        else:
            closed.append(e.name)
    asleep = sum(e.resting and not e.gone and is_offloaded(e.status) for e in engines)
    return FleetFacts(len(live), active, tuple(sorted(closed)), tuple(sorted(silent)), asleep=asleep)


def sender_ready(sender: SenderStatus | None, problem: tuple[Reason, str] | None) -> tuple[bool, Reason, str]:
    """The SenderReady condition: found, answering, of our protocol, and holding complete weights."""
    if sender is None:
        reason, message = problem or (Reason.SENDER_UNREACHABLE, "the sender does not answer")
        return False, reason, message
    if sender.protocol_version < PROTOCOL_VERSION:
        return (
            False,
            Reason.SENDER_TOO_OLD,
            f"the sender speaks protocol {sender.protocol_version}, {PROTOCOL_VERSION} is needed: "
            "update rlfleet in the trainer",
        )
    if is_shelf(sender):
        return True, Reason.CHECKPOINT_SOURCE, "weights come from the checkpoints that rounds name; there is no sender"
    if sender.cache is None:
        return False, Reason.SENDER_NOT_READY, "the sender has published nothing yet"
    if sender.cache.nan_tensors:
        return (
            True,
            Reason.NAN_WEIGHTS,
            f"version {sender.cache.version} has NaN in {_some(sender.cache.nan_tensors)}: legal, but hardly meant",
        )
    return True, Reason.SENDER_READY, "the sender holds complete weights"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unrecorded(facts: FleetFacts) -> str:
    return (
        f"status.committed was lost. {len(facts.unrecorded)} engines go on serving the weights that they have proven "
        f"({_some(facts.unrecorded)}); none that is closed is opened. Sync again: the next round commits anew"
    )


def conditions(
    existing: Sequence[Mapping[str, Any]],
    *,
    facts: FleetFacts,
    committed: Committed | None,
    sender: SenderStatus | None,
    sender_problem: tuple[Reason, str] | None,
    working: tuple[Reason, str] | None,
    trouble: tuple[Reason, str] | None,
    topology: tuple[bool | None, Reason, str],
    generation: int,
    now: str,
    awaiting: str = "",
) -> list[dict[str, Any]]:
    """All conditions of an RLPipeline. ``working``: what runs or waits now; ``trouble``: what a person should see;
    ``awaiting``: why closed engines can only be taken along by the next Refresh (empty: a CatchUp can help them).
    """
    out: Sequence[Mapping[str, Any]] = existing

    def put(kind: PipelineCondition, value: bool | None, reason: Reason, message: str) -> None:
        nonlocal out
        out = set_condition(out, kind, ConditionStatus.of(value), reason, message, generation, now)

    if trouble is not None and trouble[0] is Reason.ROUTING_DEGRADED and facts.active == facts.total:
        trouble = None  # the version is committed, and what could not be reopened has been mended since
    ready, reason, message = sender_ready(sender, sender_problem)
    put(PipelineCondition.SENDER_READY, ready, reason, message)
    put(PipelineCondition.TOPOLOGY_VALID, *topology)
    if working is not None:
        put(PipelineCondition.PROGRESSING, True, *working)
    else:
        put(PipelineCondition.PROGRESSING, False, Reason.IDLE, "no round runs")
    if facts.unrecorded:
        put(PipelineCondition.READY, False, Reason.COMMITTED_UNKNOWN, _unrecorded(facts))
    elif committed is None:
        put(
            PipelineCondition.READY, False, Reason.NOTHING_COMMITTED, "no version is committed yet: sync the base first"
        )
    elif facts.total == 0 and facts.asleep:
        put(
            PipelineCondition.READY,
            True,
            Reason.ENGINES_OFFLOADED,
            f"{facts.asleep} engines sleep, none is to be awake",
        )
    elif facts.total == 0:
        put(PipelineCondition.READY, True, Reason.NO_ENGINES, "there are no engines")
    elif facts.active == facts.total:
        put(
            PipelineCondition.READY,
            True,
            Reason.ALL_ENGINES_ACTIVE,
            f"{facts.total} engines serve version {committed.version}",
        )
    elif facts.silent and not facts.closed:
        put(
            PipelineCondition.READY,
            None,
            Reason.GATES_UNREACHABLE,
            f"{len(facts.silent)} gates do not answer: {_some(facts.silent)}",
        )
    elif facts.closed and awaiting:
        put(PipelineCondition.READY, False, Reason.AWAITING_ROUND, awaiting)
    else:
        put(
            PipelineCondition.READY,
            False,
            Reason.ENGINES_NOT_ACTIVE,
            f"{facts.active} of {facts.total} engines serve version {committed.version}; closed: "
            f"{_some(facts.closed) or 'none'}; silent: {_some(facts.silent) or 'none'}",
        )
    if trouble is not None:
        put(PipelineCondition.DEGRADED, True, *trouble)
    elif facts.unrecorded:
        put(PipelineCondition.DEGRADED, True, Reason.COMMITTED_UNKNOWN, _unrecorded(facts))
    elif facts.silent:
        put(
            PipelineCondition.DEGRADED,
            True,
            Reason.GATES_UNREACHABLE,
            f"gates do not answer: {_some(facts.silent)}",
        )
    else:
        put(PipelineCondition.DEGRADED, False, Reason.AS_EXPECTED, "nothing is wrong")
    return [dict(c) for c in out]
