"""Which engines are brought to the committed version between rounds, when, and how often (DESIGN section 5, Catch-up).

Invariants:
- a CatchUp is never in the way of a Refresh: none is opened while one is pending or a publish waits, and one that has
  not begun to load makes room;
- an attempt counts from the moment its engine is about to be touched. A CatchUp that is refused, superseded, cancelled
  or fails before that counts for nobody, but what failed is tried again later and later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlfleet.api.checkpoint import directory
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.common import MAX_LISTED_ENGINES
from rlfleet.api.wire import SenderStatus
from rlfleet.plan.allowance import ALLOWANCE, Count, caught_up, count, spent
from rlfleet.plan.freeze import AS_PUBLISHED, assign
from rlfleet.plan.rounds import Committed, Engine, RoundPlan, RoundRef, can_join, held, layout_of
from rlfleet.plan.topology import Device
from rlfleet.plan.transport import Cut, Refusal
from rlfleet.plan.triage import Settlement
from rlfleet.plan.verdicts import Entry, Verdict, to_replace

#: Most engines of one CatchUp.
BATCH = MAX_LISTED_ENGINES
#: Milliseconds after a failure until the engine is tried again; doubled with each failure, up to the second.
RETRY_MS, MAX_RETRY_MS = 2_000, 300_000


@dataclass(frozen=True, slots=True)
class Failure:
    """A CatchUp that ended without bringing these engines to the committed version, and why."""

    engines: frozenset[str]
    finished_ms: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Transporting:
    """What of the pipeline's spec and the sender's weights decides how bytes travel."""

    mode: str
    backend: str
    train: frozenset[Device] | None
    verify: str
    disputes: tuple[str, ...] = ()
    """What sources say differently of the trainer's devices."""
    cut: Cut = AS_PUBLISHED
    path_template: str | None = None
    """Where checkpoints lie; None: a sender has the weights."""


@dataclass(frozen=True, slots=True)
class CatchUpPlan:
    """What to do about engines that are closed between rounds."""

    open: tuple[Engine, ...] = ()
    """Engines for which a CatchUp is opened now."""
    replace: tuple[str, ...] = ()
    """Pods that make room for new ones."""
    awaiting: str = ""
    """Why engines wait for a Refresh; empty: they do not."""
    trouble: tuple[Reason, str] | None = None
    """What a person should see."""
    again_ms: int | None = None
    """Wall clock at which a failed engine is due again."""


# ------------------------------------------------------------------------------------------------ engines


def needs(e: Engine, committed: Committed | None, pipeline: str) -> bool:
    """The engine is alive, answers, is idle and ours, and is not at what is committed."""
    return committed is not None and _is_able(e, pipeline) and not caught_up(e, committed)


def _is_able(e: Engine, pipeline: str) -> bool:
    """It can take part in a round as it is."""
    return (
        not e.gone
        and not e.dropped
        and can_join(e)
        and not e.undiscovered
        and e.status is not None
        and e.status.pipeline in ("", pipeline)
        and not e.status.in_flight
    )


def choose_members(
    engines: Sequence[Engine],
    *,
    committed: Committed,
    how: Transporting,
    sender: SenderStatus,
    total_bytes: int,
) -> tuple[RoundPlan, Mapping[str, Refusal]]:
    """Members with transports and ranks, and the engines that can not take part with why.

    One that can not must not keep the others closed, so everyone is judged alone first. ``assertMixed`` says what a
    whole fleet must look like, and a CatchUp is none: it does not apply.
    """
    confirmed = frozenset(committed.engine_digests or {})
    path = None if how.path_template is None else directory(how.path_template, committed.version)

    def ask(some: Sequence[Engine], known: frozenset[str]) -> RoundPlan | Refusal:
        return assign(
            some,
            mode=how.mode,
            assert_mixed=False,
            backend=how.backend,
            train=how.train,
            sender=sender,
            total_bytes=total_bytes,
            verify=how.verify,
            path=path,
            confirmed=known,
            disputes=how.disputes,
            cut=how.cut,
        )

    ordered = sorted(engines, key=lambda e: (e.pool, e.name))
    refused: dict[str, Refusal] = {}
    for e in ordered:
        alone = ask([e], confirmed | {layout_of(e)})
        if isinstance(alone, Refusal):
            refused[e.name] = alone
    left = [e for e in ordered if e.name not in refused]
    for layout in sorted({layout_of(e) for e in left} - confirmed):
        # Without a committed digest of its layout it takes two to compare.
        peers = [e for e in left if layout_of(e) == layout]
        together = ask(peers, confirmed)
        if isinstance(together, Refusal):
            refused |= {e.name: together for e in peers}
    left = [e for e in left if e.name not in refused]
    plan = ask(left, confirmed)
    if isinstance(plan, Refusal):
        return RoundPlan((), 1), refused | {e.name: plan for e in left}
    return plan, refused


# ------------------------------------------------------------------------------------------------ between rounds


def retry_ms(failures: Iterable[Failure], engine: str) -> int:
    """Wall clock before which the engine is not tried again."""
    mine = [f for f in failures if engine in f.engines]
    if not mine:
        return 0
    return max(f.finished_ms for f in mine) + min(MAX_RETRY_MS, RETRY_MS << min(len(mine) - 1, 20))


def plan_catch_up(
    engines: Sequence[Engine],
    *,
    pipeline: str,
    committed: Committed | None,
    sender: SenderStatus | None,
    sender_problem: tuple[Reason, str] | None,
    counts: Sequence[Count],
    failures: Sequence[Failure],
    how: Transporting,
    on_failure: str,
    now_ms: int,
    refresh_waits: bool = False,
) -> CatchUpPlan:
    """What to do between rounds; ``failures``: ended CatchUps of the committed bytes that are still recorded.

    ``refresh_waits``: a Refresh is there that can not start yet. It takes along whoever can take part, so nobody is
    caught up or given up before; who can not take part is replaced all the same.
    """
    if refresh_waits:
        found = plan_catch_up(
            engines,
            pipeline=pipeline,
            committed=committed,
            sender=sender,
            sender_problem=sender_problem,
            counts=counts,
            failures=failures,
            how=how,
            on_failure=on_failure,
            now_ms=now_ms,
        )
        able = {e.name for e in engines if _is_able(e, pipeline)}
        return replace(found, open=(), replace=tuple(n for n in found.replace if n not in able))
    may_replace = on_failure == "Replace"
    poisoned = to_replace(engines, on_failure=on_failure)
    if committed is None:
        # There is nothing to catch up to, so nothing to heal them with either.
        return CatchUpPlan(replace=poisoned)
    closed = [e for e in engines if needs(e, committed, pipeline)]
    names = {e.name for e in closed}
    # What can not even take part in a round is not healed by one.
    drop = tuple(n for n in poisoned if n not in names)
    if not closed:
        return CatchUpPlan(replace=drop)
    given_up = [e for e in closed if spent(counts, e)]
    rest = [e for e in closed if not spent(counts, e)]
    drop += tuple(e.name for e in given_up if e.owned and may_replace)
    kept = [e for e in given_up if e.name not in drop]
    trouble = _exhausted(kept, counts) if kept else None
    slot = held(sender, committed.version, committed.manifest_digest) if sender is not None else None
    if sender is None or slot is None:
        if sender is not None or (sender_problem is not None and sender_problem[0] is Reason.SENDER_ABSENT):
            # The bytes that could heal it are not there: a new pod is at least an engine that answers.
            drop += tuple(e.name for e in rest if e.name in poisoned)
        awaiting = _awaiting(closed, committed, sender, sender_problem)
        return CatchUpPlan(replace=drop, awaiting=awaiting, trouble=trouble)
    due = [e for e in rest if retry_ms(failures, e.name) <= now_ms]
    later = [retry_ms(failures, e.name) for e in rest if e not in due]
    again = min(later, default=None)
    plan, refused = choose_members(due, committed=committed, how=how, sender=sender, total_bytes=slot.total_bytes)
    if trouble is None and refused:
        name, refusal = next(iter(sorted(refused.items())))
        trouble = refusal.reason, f"{name} can not catch up: {refusal.message}"
    if trouble is None:
        trouble = _failing(rest, failures)
    able = {m.engine for m in plan.members}
    chosen: tuple[Engine, ...] = ()
    if not sender.publish_waiting:
        chosen = tuple(_with_room([e for e in due if e.name in able], engines, counts, committed))
    return CatchUpPlan(open=chosen, replace=drop, trouble=trouble, again_ms=again)


def _with_room(
    due: Sequence[Engine], engines: Sequence[Engine], counts: Sequence[Count], committed: Committed
) -> list[Engine]:
    """At most a batch, and of each pool no more than its list of counts has room for."""
    present = {e.name: e for e in engines}
    accepted: set[str] = set()
    for pool in {e.pool for e in due}:
        of_pool = [c for c in counts if (known := present.get(c.engine)) is not None and known.pool == pool]
        mine = [e for e in due if e.pool == pool][:BATCH]
        _, fit = count(of_pool, mine, round_uid="", version=committed.version, present=present, committed=committed)
        accepted |= fit
    return [e for e in due if e.name in accepted][:BATCH]


def _names(engines: Sequence[Engine]) -> str:
    some = ", ".join(e.name for e in engines[:4])
    return some + (f" and {len(engines) - 4} more" if len(engines) > 4 else "")


def _exhausted(kept: Sequence[Engine], counts: Iterable[Count]) -> tuple[Reason, str]:
    counts = tuple(counts)
    last = next((c.reason for c in counts if (c.engine, c.incarnation) == (kept[0].name, kept[0].incarnation)), "")
    tail = f" (the last of {kept[0].name}: {last})" if last else ""
    return (
        Reason.CATCH_UP_EXHAUSTED,
        f"{_names(kept)}: {ALLOWANCE} catch-up attempts failed{tail}; delete these pods, "
        "or sync: the next Refresh takes them along",
    )


def _failing(rest: Sequence[Engine], failures: Sequence[Failure]) -> tuple[Reason, str] | None:
    names = {e.name for e in rest}
    mine = [f for f in failures if f.engines & names]
    if not mine:
        return None
    last = max(mine, key=lambda f: f.finished_ms)
    return Reason.CATCH_UP_FAILED, f"{', '.join(sorted(last.engines & names)[:4])}: {last.reason.value}: {last.message}"


def _awaiting(
    closed: Sequence[Engine],
    committed: Committed,
    sender: SenderStatus | None,
    problem: tuple[Reason, str] | None,
) -> str:
    if sender is None:
        what = problem[1] if problem is not None else "the sender does not answer"
        why = f"version {committed.version} can not be had: {what}"
    else:
        newest = f"its newest is version {sender.cache.version}" if sender.cache is not None else "it holds nothing"
        why = f"the sender does not hold the committed version {committed.version} any more ({newest})"
    return f"{_names(closed)} closed: {why}; sync a version that the sender holds, the next Refresh takes them along"


# ------------------------------------------------------------------------------------------------ unclaimed rounds


def triage_catch_ups(
    rounds: Iterable[RoundRef],
    *,
    refresh: RoundRef | None,
    committed: Committed | None,
    sender: SenderStatus | None,
) -> tuple[tuple[Settlement, ...], RoundRef | None]:
    """The unclaimed CatchUps that end, and the one that runs. ``refresh``: the Refresh that runs now."""
    settle: list[Settlement] = []
    run: RoundRef | None = None
    for r in sorted(rounds, key=lambda r: (r.created_ms, r.name)):
        end = _end(r, refresh, committed, sender)
        if end is not None:
            settle.append(end)
        elif run is None:
            run = r
    return tuple(settle), run


def _end(
    r: RoundRef, refresh: RoundRef | None, committed: Committed | None, sender: SenderStatus | None
) -> Settlement | None:
    if r.cancel or r.deleting:
        return Settlement(r, "Cancelled", Reason.CANCELLED, "cancelled before anything was touched")
    if refresh is not None:
        return Settlement(r, "Superseded", Reason.SUPERSEDED, absorbed_by(refresh))
    if sender is not None and r.sender_incarnation != sender.incarnation:
        why = f"the sender is {sender.incarnation} now, this round was made by {r.sender_incarnation}"
        return Settlement(r, "Superseded", Reason.SENDER_INCARNATION_GONE, why)
    return outdated(r, committed)


def absorbed_by(refresh: RoundRef) -> str:
    """Why a CatchUp ends for a Refresh."""
    return f"superseded by {refresh.name} (version {refresh.version}), which takes these engines along"


def outdated(r: RoundRef, committed: Committed | None) -> Settlement | None:
    """How a CatchUp ends that would bring something else than what is committed; None: it would not."""
    if committed is None:
        why = f"no version is committed, so there is nothing to catch up to; sync version {r.version} instead"
        return Settlement(r, "Failed", Reason.NOTHING_COMMITTED, why)
    if (r.version, r.manifest_digest) == (committed.version, committed.manifest_digest):
        return None
    have = f"version {committed.version} ({committed.manifest_digest}) is committed"
    if r.version < committed.version:
        return Settlement(r, "Superseded", Reason.SUPERSEDED, f"it was for version {r.version}, by now {have}")
    why = f"spec.version and spec.manifestDigest name version {r.version} ({r.manifest_digest}), but {have}"
    return Settlement(r, "Failed", Reason.COMMITTED_MISMATCH, why)


def enter_catch_up(phase: str, *, planned: bool) -> Entry:
    """Where a CatchUp that is taken over goes on. Before Transferring no load began, so it is planned anew."""
    return Entry.JUDGE if planned and phase == "Transferring" else Entry.PLAN


# ------------------------------------------------------------------------------------------------ the end


def left_closed(verdicts: Mapping[str, Verdict], stuck: Iterable[str]) -> frozenset[str]:
    """Members that live on and did not get there: not proven whole, or not opened."""
    out = {e for e, v in verdicts.items() if v not in (Verdict.WHOLE, Verdict.LOST, Verdict.DROPPED)}
    return frozenset(out | {e for e in stuck if verdicts.get(e) is Verdict.WHOLE})
