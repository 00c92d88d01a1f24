"""What happened to the members of a round, from evidence only, and what follows (DESIGN section 5).

Invariants:
- unknown is a third verdict: a member is *whole* only with proof, *untouched* only if its gate proves that no load of
  this round began, and everything between is *poisoned*;
- only whole members are ever opened at the target; only untouched members that hold the committed weights resume them;
- nothing is committed while a live engine of the pipeline has not stored this round's fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlfleet.api.wire import GateStatus, LoadRecord, OperationState
from rlfleet.plan.asleep import is_touched
from rlfleet.plan.rounds import Committed, Engine, Member, RoundPlan, unavailable_limit

#: Seconds beyond an operation's deadline after which an engine that proves nothing counts as stuck for good.
STUCK_GRACE_SECONDS = 60.0


class Verdict(StrEnum):
    """What a member is, after the transfer began."""

    WHOLE = "Whole"  # holds the target: loaded, verified, published, read back
    LOADED = "Loaded"  # load ended well, verification or publication is still to be done
    UNTOUCHED = "Untouched"  # its gate proves that no load of this round began
    POISONED = "Poisoned"  # a load began and is not proven whole
    UNKNOWN = "Unknown"  # its gate does not answer
    LOST = "Lost"  # pod gone, or another engine process stands in its place
    DROPPED = "Dropped"  # left on purpose: shrink, template change, eviction


def round_load(status: GateStatus, operation: str) -> LoadRecord | None:
    """This round's load at a gate, if one began."""
    return next((load for load in reversed(status.loads) if load.operation == operation), None)


def verdict(member: Member, engine: Engine | None, *, operation: str, version: int, manifest_digest: str) -> Verdict:
    """Judge one member by what is observed of its engine now; ``engine`` None: no such pod exists any more."""
    if engine is None or engine.gone or engine.pod_uid != member.pod_uid:
        return Verdict.LOST
    if engine.status is None:
        return Verdict.DROPPED if engine.dropped else Verdict.UNKNOWN
    if engine.status.incarnation != member.incarnation:
        return Verdict.LOST
    load = round_load(engine.status, operation)
    if load is None:
        return Verdict.DROPPED if engine.dropped else Verdict.UNTOUCHED
    holds = engine.status.holds
    if load.published and holds is not None and holds.version == version and holds.manifest_digest == manifest_digest:
        return Verdict.WHOLE
    if load.state is OperationState.SUCCEEDED and not engine.status.uncertain:
        return Verdict.LOADED
    # Nobody heals an engine that is to go, so nobody waits for it either.
    return Verdict.DROPPED if engine.dropped else Verdict.POISONED


def at_committed(engine: Engine, committed: Committed | None) -> bool:
    """The gate's own record proves that this engine holds the committed weights."""
    if committed is None or engine.status is None or engine.status.holds is None:
        return False
    holds = engine.status.holds
    return holds.version == committed.version and holds.manifest_digest == committed.manifest_digest


@dataclass(frozen=True, slots=True)
class Evidence:
    """What verification said of one member."""

    engine: str
    layout: str
    digest: str | None
    changed: bool | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Members that agree, members that do not (with why), and the agreed digest per layout."""

    agreed: tuple[str, ...]
    rejected: Mapping[str, str]
    digests: Mapping[str, str]
    unconfirmed: tuple[str, ...] = ()


def agree(
    evidence: Sequence[Evidence],
    *,
    committed: Committed | None,
    manifest_digest: str,
    verify: str,
    agreed_on: Mapping[str, str] | None = None,
    others: Mapping[str, int] | None = None,
) -> Agreement:
    """Compare the engines' own checksums within each layout.

    A checksum that did not move although the bytes differ rejects the member. When members of one layout disagree:
    the committed engine digest decides (if the manifest digest is the committed one), else a strict majority of at
    least three, else none is whole. ``verify`` Off: delivered is enough. A lone member, or one without a usable
    checksum, is "delivered, unconfirmed" and listed so; ``verify`` Required rejects it. ``agreed_on``: digests per
    layout that other members of the round have been found to have already. ``others``: members per layout that have
    loaded nothing yet; while there are any, a lone checksum waits for them. Accepted now it would be what they are
    measured by, and an engine that loaded garbage and said "success" before its operator died would outvote them all.
    """
    if verify == "Off":
        return Agreement(tuple(e.engine for e in evidence), {}, {}, tuple(e.engine for e in evidence))
    agreed: list[str] = []
    rejected: dict[str, str] = {}
    digests: dict[str, str] = {}
    unconfirmed: list[str] = []
    same_bytes = committed is not None and committed.manifest_digest == manifest_digest
    layouts: dict[str, list[Evidence]] = {}
    for e in evidence:
        if e.digest is None:
            agreed.append(e.engine)
            unconfirmed.append(e.engine)
        elif e.changed is False and not same_bytes:
            rejected[e.engine] = "its checksum did not change although the weights differ: nothing was loaded"
        else:
            layouts.setdefault(e.layout, []).append(e)
    for layout, members in layouts.items():
        known = (committed.engine_digests or {}).get(layout) if committed is not None and same_bytes else None
        known = known or (agreed_on or {}).get(layout)
        counts = Counter(e.digest for e in members)
        winner, votes = counts.most_common(1)[0]
        if known is not None:
            winner = known
        elif len(counts) > 1 and (len(members) < 3 or votes * 2 <= len(members)):
            winner = None
        elif len(members) == 1 and (others or {}).get(layout):
            rejected[members[0].engine] = "nothing confirms its checksum yet: others of its layout have loaded nothing"
            continue
        for e in members:
            if winner is not None and e.digest == winner:
                agreed.append(e.engine)
            else:
                rejected[e.engine] = f"its checksum {str(e.digest)[:16]} differs from " + (
                    f"the agreed {winner[:16]}" if winner else "the others' and no majority decides"
                )
        if winner is not None:
            digests[layout] = winner
            if len(members) == 1 and known is None:
                unconfirmed.append(members[0].engine)
    if verify == "Required":
        why = "nothing confirms what it loaded, and spec.sync.verify is Required"
        rejected |= dict.fromkeys(unconfirmed, why)
        agreed = [name for name in agreed if name not in rejected]
        unconfirmed = []
    return Agreement(tuple(agreed), rejected, digests, tuple(unconfirmed))


class Next(StrEnum):
    """What a round does after its transfer."""

    COMMIT = "Commit"
    ABORT = "Abort"  # no member is whole: by the resume rule
    HOLD = "Hold"  # some are whole, too many are missing
    WAIT_FENCE = "WaitFence"  # a live engine has not stored this generation


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision, with the engines it rests on."""

    next: Next
    whole: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unfenced: tuple[str, ...] = ()
    limit: int = 0
    blocked: tuple[str, ...] = ()
    """Engines that could not be members (``RoundPlan.blocked``) and still live: they count as missing, too."""


def conclude(
    plan: RoundPlan,
    verdicts: Mapping[str, Verdict],
    *,
    unfenced: Iterable[str],
    max_unavailable: int | str,
    left_out: Iterable[str] = (),
    blocked: Iterable[str] = (),
) -> Outcome:
    """Commit, hold, or abort. ``blocked``: see ``still_blocked``.

    Lost and Dropped members do not count as unavailable; silent engines of the planning do while they still live:
    they appear in ``unfenced``, or in ``left_out`` where plan.everyone lets the commit go on without them.
    """
    whole = tuple(m.engine for m in plan.members if verdicts[m.engine] is Verdict.WHOLE)
    missing = tuple(
        m.engine for m in plan.members if verdicts[m.engine] not in (Verdict.WHOLE, Verdict.LOST, Verdict.DROPPED)
    )
    open_ones = tuple(sorted(unfenced))
    silent = tuple(name for name in plan.silent if name in {*open_ones, *left_out})
    out = tuple(sorted(blocked))
    limit = unavailable_limit(max_unavailable, plan.total)
    if not whole:
        return Outcome(Next.ABORT, whole, missing, open_ones, limit, out)
    if len(missing) + len(silent) + len(out) > limit:
        return Outcome(Next.HOLD, whole, missing, open_ones, limit, out)
    if open_ones:
        return Outcome(Next.WAIT_FENCE, whole, missing, open_ones, limit, out)
    return Outcome(Next.COMMIT, whole, missing, (), limit, out)


def still_blocked(plan: RoundPlan, engines: Iterable[Engine]) -> tuple[str, ...]:
    """Engines that could not be members of the round and still live: closed, and not at its target, even if healed."""
    return tuple(sorted(e.name for e in engines if e.pod_uid in plan.blocked and not e.gone and not e.dropped))


def unfenced(engines: Iterable[Engine], *, pipeline: str, generation: int) -> tuple[str, ...]:
    """Live engines that have not proven to hold this generation. One that is silent counts: it may still serve.

    A pod of which nothing has ever run does not: an engine starts only behind a gate that was enrolled.
    """
    out = []
    for e in engines:
        if e.gone or (e.unborn and e.status is None):
            continue
        if e.status is None or e.status.fence.pipeline != pipeline or e.status.fence.generation < generation:
            out.append(e.name)
    return tuple(out)


def could_serve(engines: Mapping[str, Engine], verdicts: Mapping[str, Verdict]) -> tuple[str, ...]:
    """Live engines with proven weights that are neither whole at the target nor proven paused.

    They must be paused before the commit, or two versions serve. Engines without proven weights are closed by their
    own gates.
    """
    return tuple(
        sorted(
            name
            for name, e in engines.items()
            if not e.gone
            and e.status is not None
            and e.status.holds is not None
            and e.status.engine.paused is not True
            and verdicts.get(name) is not Verdict.WHOLE
        )
    )


class Entry(StrEnum):
    """Where an executor enters a round that it takes over, after the barrier."""

    PLAN = "Plan"  # nothing was touched: plan anew under this generation
    QUIESCE = "Quiesce"  # members may be paused, no load began
    JUDGE = "Judge"  # loads may have begun: the members' evidence decides
    REFUSED = "Refused"  # refused before its transfer; it holds engines that it inherited
    REOPEN = "Reopen"  # committed: only forward


def enter(phase: str, *, committed: bool, planned: bool, refused: bool = False) -> Entry:
    """Map the durable phase to where the work goes on. The commit in RLPipeline.status beats the round's phase.

    ``refused``: the round was refused and has no plan since; it matters only while it is in Holding.
    """
    if committed:
        return Entry.REOPEN
    if refused and phase == "Holding":
        return Entry.REFUSED
    if not planned or phase in ("", "Pending", "Planned", "Staging"):
        return Entry.PLAN
    if phase == "Quiescing":
        return Entry.QUIESCE
    return Entry.JUDGE


@dataclass(frozen=True, slots=True)
class Reopening:
    """After the commit: who serves the target from now on, and who is taken out of the routers.

    ``dropped``: of those that are closed, the whole members that are to go.
    """

    resume: tuple[str, ...]
    close: tuple[str, ...]
    missing: tuple[str, ...]
    """Members that live and are not whole now: more than ``maxUnavailable`` of them are no success."""
    dropped: tuple[str, ...] = ()


def routed(engine: Engine) -> bool:
    """Some router lists the engine, as far as its gate knows."""
    return engine.status is not None and any(engine.status.routed.values())


def reopening(verdicts: Mapping[str, Verdict], engines: Mapping[str, Engine]) -> Reopening:
    """Only whole members resume; members that are something else, and others that a router lists, are closed.

    A whole member that is to go by now is dropped instead of being reopened.
    """
    whole = [name for name, v in verdicts.items() if v is Verdict.WHOLE]
    dropped = tuple(name for name in whole if name in engines and engines[name].dropped)
    stay = (Verdict.UNTOUCHED, Verdict.POISONED, Verdict.LOADED)
    close = [name for name, v in verdicts.items() if v in stay]
    close += [n for n, v in verdicts.items() if v is Verdict.DROPPED and n in engines and engines[n].status is not None]
    close += [name for name, e in engines.items() if name not in verdicts and routed(e) and not e.gone]
    missing = tuple(n for n, v in verdicts.items() if v not in (Verdict.WHOLE, Verdict.LOST, Verdict.DROPPED))
    return Reopening(tuple(n for n in whole if n not in dropped), (*close, *dropped), missing, dropped)


@dataclass(frozen=True, slots=True)
class AbortPlan:
    """The resume rule: who goes back to serving the committed weights, who stays closed."""

    resume: tuple[str, ...]
    close: tuple[str, ...]


def abort(plan: RoundPlan, engines: Mapping[str, Engine], committed: Committed | None, *, operation: str) -> AbortPlan:
    """Members proven at ``committed`` and untouched by this round resume; all others are taken out of the routers.

    So do engines that are not members but were closed meanwhile: by this round, or inherited from one before it.
    """
    members = {(m.engine, m.pod_uid) for m in plan.members}
    resume: list[str] = [
        name
        for name, e in engines.items()
        if (name, e.pod_uid) not in members
        and not e.gone
        and not e.dropped
        and not e.undiscovered
        and e.status is not None
        and e.status.engine.paused is True
        and not e.status.uncertain
        and at_committed(e, committed)
    ]
    close: list[str] = []
    for m in plan.members:
        e = engines.get(m.engine)
        if e is None or e.gone or e.pod_uid != m.pod_uid:
            continue
        untouched = e.status is not None and round_load(e.status, operation) is None
        # Untouched is not enough: an engine whose loop is stuck in a rendezvous is no healthy one.
        certain = e.status is not None and not e.status.uncertain
        if untouched and certain and not e.dropped and e.incarnation == m.incarnation and at_committed(e, committed):
            resume.append(m.engine)
        else:
            close.append(m.engine)
    return AbortPlan(tuple(resume), tuple(close))


def to_replace(engines: Iterable[Engine], *, on_failure: str) -> tuple[str, ...]:
    """Engines that make room for new ones between rounds (``onFailure: Replace``, pods that we own).

    Poisoned: a load began, and nothing proves what the engine holds now. Stuck: an operation's end has been unknown
    for longer than the grace, and the engine does not prove that it crosses its loop. With ``Hold`` both stay closed,
    and the next round takes them along.
    """
    if on_failure != "Replace":
        return ()
    return tuple(
        e.name
        for e in engines
        if e.owned
        and not e.gone
        and not e.leaving
        and not e.quarantined
        and e.status is not None
        and not e.status.in_flight
        and (_is_poisoned(e.status) or is_stuck(e.status))
    )


def _is_poisoned(status: GateStatus) -> bool:
    # What a sleeping engine once loaded is gone with its memory.
    return not is_touched(status) and status.holds is None and bool(status.loads) and not status.loads[-1].published


def is_stuck(status: GateStatus) -> bool:
    """An operation ended without an answer longer ago than the grace, and nothing has proven the engine idle since."""
    return status.uncertain and status.uncertain_seconds > STUCK_GRACE_SECONDS


def replaceable(engines: Iterable[Engine], names: Container[str], *, on_failure: str) -> tuple[str, ...]:
    """Of these engines the ones that may be replaced: pods that we own, on their feet, with ``onFailure: Replace``.

    With ``Hold`` they stay, and a condition names them.
    """
    if on_failure != "Replace":
        return ()
    return tuple(
        e.name for e in engines if e.name in names and e.owned and not e.gone and not e.leaving and not e.quarantined
    )
