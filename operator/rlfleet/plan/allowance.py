"""How often one engine process may be tried to be brought to the committed version (DESIGN section 5, Catch-up).

Invariants:
- attempts of one engine process only add up, whatever went wrong and whoever counts; a round counts once;
- a count is forgotten with its process, once the process was proven by another round after its latest attempt (it has
  come through a Refresh since, whatever became of it afterwards), or when it was put to sleep after that one
  had succeeded: what it does not hold any more was taken from it;
- the list of a pool is bounded: engines that are well make room first, and who finds no room is not tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import MAX_COUNTED
from rlfleet.plan.rounds import Committed, Engine, layout_of
from rlfleet.plan.verdicts import at_committed

#: Attempts of one engine process before it is given up.
ALLOWANCE = 3


@dataclass(frozen=True, slots=True)
class Count:
    """One entry of ``EnginePool.status.catchUp``: attempts on one engine process."""

    engine: str
    incarnation: str
    version: int
    attempts: int
    round: str
    reason: str = ""


def caught_up(e: Engine, committed: Committed | None) -> bool:
    """The gate proves the committed bytes, and the engine digest that its layout is known to reach with them."""
    if committed is None or e.status is None or e.status.holds is None or not at_committed(e, committed):
        return False
    known = (committed.engine_digests or {}).get(layout_of(e))
    found = e.status.holds.engine_digest
    return known is None or found is None or found == known


def slept_since(c: Count, e: Engine) -> bool:
    """The gate proves that the latest attempt ended well, and that the engine was put to sleep after it."""
    return e.status is not None and any(
        load.operation == c.round and load.published and load.released for load in e.status.loads
    )


def whole_since(c: Count, e: Engine) -> bool:
    """The gate proves, or has on record, a version above that of the latest attempt: a Refresh brought it. Or a load
    after that of the attempt, of whatever version, was proven: the fleet may have been rolled back.

    What is committed now says nothing of that: the next version may have been committed, without this engine, before
    anybody counted again.
    """
    if e.status is None:
        return False
    held = e.status.holds
    above = held is not None and held.version > c.version
    tried = [i for i, load in enumerate(e.status.loads) if load.operation == c.round]
    return above or any(
        load.published and (load.version > c.version or (bool(tried) and i > tried[-1]))
        for i, load in enumerate(e.status.loads)
    )


def attempts(counts: Iterable[Count], e: Engine) -> int:
    """Attempts on this engine process so far, those that are to be forgotten left out."""
    mine = [c for c in counts if (c.engine, c.incarnation) == (e.name, e.incarnation)]
    return sum(c.attempts for c in mine if not (slept_since(c, e) or whole_since(c, e)))


def spent(counts: Iterable[Count], e: Engine) -> bool:
    """The allowance of this engine process is used up."""
    return attempts(counts, e) >= ALLOWANCE


def count(
    counts: Iterable[Count],
    members: Sequence[Engine],
    *,
    round_uid: str,
    version: int,
    present: Mapping[str, Engine],
    committed: Committed,
) -> tuple[tuple[Count, ...], frozenset[str]]:
    """One pool's counts with one attempt more for each member, and the members that the list has room for.

    ``present``: the pool's engines that are not gone. A member that this round has counted already stays as it is, so
    a repeated write counts nothing twice.
    """
    kept = {(c.engine, c.incarnation): c for c in counts if not _forgotten(c, present, committed)}
    wanted = {(e.name, e.incarnation) for e in members}
    room = MAX_COUNTED - len(wanted - kept.keys())
    for key in _evictable(kept, wanted, present, committed):
        if len(kept) <= room:
            break
        del kept[key]
    accepted: set[str] = set()
    for e in members:
        key = (e.name, e.incarnation)
        old = kept.get(key)
        if old is None and len(kept) >= MAX_COUNTED:
            continue
        accepted.add(e.name)
        if old is None:
            kept[key] = Count(e.name, e.incarnation, version, 1, round_uid)
        elif old.round != round_uid:
            kept[key] = Count(e.name, e.incarnation, version, old.attempts + 1, round_uid)
    return tuple(kept[key] for key in sorted(kept)), frozenset(accepted)


def _forgotten(c: Count, present: Mapping[str, Engine], committed: Committed) -> bool:
    e = present.get(c.engine)
    if e is None or e.gone:
        return True
    if e.incarnation and e.incarnation != c.incarnation:
        return True
    return slept_since(c, e) or whole_since(c, e) or (committed.version != c.version and caught_up(e, committed))


def _evictable(
    kept: Mapping[tuple[str, str], Count],
    wanted: Iterable[tuple[str, str]],
    present: Mapping[str, Engine],
    committed: Committed,
) -> list[tuple[str, str]]:
    """Counts of engines that are well, those with the fewest attempts first."""
    wanted = set(wanted)
    well = [k for k, c in kept.items() if k not in wanted and caught_up(present[c.engine], committed)]
    return sorted(well, key=lambda k: (kept[k].attempts, k))


def note(counts: Iterable[Count], reasons: Mapping[str, Reason], *, round_uid: str) -> tuple[Count, ...]:
    """The same counts, with why the attempts of this round failed."""
    return tuple(
        replace(c, reason=reasons[c.engine].value) if c.round == round_uid and c.engine in reasons else c
        for c in counts
    )
