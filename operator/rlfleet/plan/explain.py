"""What a round to a version would do, engine by engine and why: the words for what triage and freeze decide.

Invariant: nothing is decided here. The verdict is that of ``plan.triage`` and ``plan.freeze``, which the operator
obeys; this says it in full, for the same observation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import EngineState, PauseMode, StagingMode, Transport
from rlfleet.plan.asleep import is_touched
from rlfleet.plan.rounds import Engine, RoundPlan, RoundRef, can_join, is_blocked, is_known, unavailable_limit
from rlfleet.plan.transport import Refusal
from rlfleet.plan.triage import Triage


class Would(StrEnum):
    """What would become of the round."""

    RUN = "WouldRun"
    WAIT = "WouldWait"
    END = "WouldEnd"  # with a verdict of triage, nothing touched
    REFUSE = "WouldBeRefused"  # at Planned, nothing touched


@dataclass(frozen=True, slots=True)
class EngineExplained:
    """One engine's part."""

    engine: str
    pool: str
    joins: bool
    why: str
    transport: str | None = None
    rank_offset: int | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen."""

    would: Would
    reason: str
    message: str
    outcome: str | None = None
    """How it would end without having run."""
    supersedes: tuple[str, ...] = ()
    """Rounds that would end because of it."""
    steps: tuple[str, ...] = ()
    engines: tuple[EngineExplained, ...] = ()
    may_miss: int | None = None
    """How many engines may be missing (maxUnavailable) for it to commit."""
    ordered: str | None = None
    """Name of the round that waits for this already, if there is one: all that is said is said of it."""


def explain(
    ref: RoundRef,
    found: Triage,
    plan: RoundPlan | Refusal | None,
    engines: Iterable[Engine],
    *,
    max_unavailable: int | str,
    mode: PauseMode | None,
    total_bytes: int,
    owner: str | None,
) -> Explanation:
    """Say it. ``plan``: what freeze answered where ``found`` runs ``ref``. ``owner``: what owns the engines now."""
    engines = sorted(engines, key=lambda e: (e.pool, e.index, e.name))
    superseded = tuple(s.round.name for s in found.settle if s.outcome == "Superseded" and s.round.uid != ref.uid)
    end = next((s for s in found.settle if s.round.uid == ref.uid), None)
    if end is not None:
        rows = tuple(_engine(e, None) for e in engines)
        return Explanation(Would.END, end.reason.value, end.message, end.outcome, superseded, engines=rows)
    if found.run is None or found.run.uid != ref.uid:
        reason, message = _wait(found)
        rows = tuple(_engine(e, None) for e in engines)
        return Explanation(Would.WAIT, reason.value, message, None, superseded, engines=rows)
    if plan is None or isinstance(plan, Refusal):
        reason, message = (plan.reason, plan.message) if plan is not None else (Reason.VERSION_NOT_HELD, "")
        rows = tuple(_engine(e, None) for e in engines)
        return Explanation(Would.REFUSE, reason.value, message, "Failed", superseded, engines=rows)
    first = (f"wait until {owner} has left the engines",) if owner else ()
    return Explanation(
        Would.RUN,
        Reason.PLANNED.value,
        f"{len(plan.members)} engines would take version {ref.version}",
        None,
        superseded,
        (*first, *steps(plan, mode=mode, total_bytes=total_bytes)),
        tuple(_engine(e, plan) for e in engines),
        unavailable_limit(max_unavailable, plan.total),
    )


def _wait(found: Triage) -> tuple[Reason, str]:
    if found.why is not None:
        return found.why
    if found.run is not None:
        return Reason.SUPERSEDED, f"round {found.run.name} (version {found.run.version}) goes first"
    return Reason.SENDER_NOT_READY, "the sender does not hold this version yet"


def steps(plan: RoundPlan, *, mode: PauseMode | None, total_bytes: int) -> tuple[str, ...]:
    """The phases, as this plan goes through them."""
    if not plan.members:
        return ("commit at once: no engine is awake",)
    said = [f"freeze {len(plan.members)} members and hold the version at its source"]
    pushed, cast, read = (len(plan.of(t)) for t in (Transport.SERIALIZED, Transport.BROADCAST, Transport.CHECKPOINT))
    if pushed and plan.staging is StagingMode.FULL:
        said.append(f"stage {total_bytes} bytes into the gates of {pushed} engines, which serve meanwhile")
    if read:
        said.append(f"have the gates of {read} engines read and hash the checkpoint, engines serve meanwhile")
    said.append(f"pause them ({mode.value if mode is not None else 'the default of each engine type'}), verified")
    if cast:
        said.append(f"broadcast to {cast} engines in a group of {plan.world_size} ranks")
    if pushed and plan.staging is StagingMode.BUCKET:
        said.append(f"stream buckets to {pushed} engines while they are paused")
    if (pushed and plan.staging is StagingMode.FULL) or read:
        said.append("load what is staged")
    return (*said, "verify checksums, write the version label, read it back", "commit, then resume and route engines")


def _engine(e: Engine, plan: RoundPlan | None) -> EngineExplained:
    member = next((m for m in plan.members if m.pod_uid == e.pod_uid), None) if plan is not None else None
    if member is not None:
        why = member.reason or "its gate answers and its engine is awake"
        return EngineExplained(e.name, e.pool, True, why, member.transport.value, member.rank_offset, member.world_size)
    return EngineExplained(e.name, e.pool, False, _why_not(e))


def _why_not(e: Engine) -> str:
    if e.gone:
        return "its pod has ended"
    if e.leaving:
        return "its pod is being deleted"
    if e.unwanted:
        return "its pool wants fewer engines"
    if e.quarantined:
        return "a person keeps it out of service (rlfleet release)"
    if e.kept_out:
        return f"Dynamo's discovery keeps it out of service ({e.kept_out})"
    if e.resting:
        return "it sleeps, or is to sleep (spec.active, or a demand of the trainer)"
    if e.status is None:
        if e.unborn:
            return "nothing of its pod has run yet"
        return "its gate does not answer, so what it holds is unknown: it counts against maxUnavailable"
    if not e.status.enrolled:
        return "its gate does not know its pipeline yet"
    if e.status.incarnation is None or e.status.engine.state is not EngineState.READY:
        return "its engine process is not up"
    if is_touched(e.status):
        return "its device memory is released: it must be woken first"
    if e.undiscovered:
        return f"nothing is known of it from discovery ({e.undiscovered}): it counts against maxUnavailable"
    if is_blocked(e):
        return "an operation at its gate runs on or has no known end: it counts against maxUnavailable"
    if not (is_known(e.status) or e.status.holds or e.status.loads):
        return "its gate has not learned yet what its engine is (the gate's log says what it asked in vain)"
    if not can_join(e):
        return "its gate still holds the fence of another pipeline"
    return "the round would not get as far as choosing members"
