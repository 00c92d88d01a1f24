"""Room between rounds: a round that could start waits, so that a starved rolling update takes a step. Pure.

Invariants:
- since when a round waits, and until when at the latest, is recorded before it waits, by the apiserver's clock: whoever
  takes over finds both there, and no restart or change of a spec makes the wait longer;
- a room that was not used is followed by none for several times its length, so an update that can not go on costs
  rounds a bounded share of the time;
- none is made where only a round brings back the engines without which no other one may be taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfleet.api import labels
from rlfleet.api.condition_list import find_condition
from rlfleet.api.conditions import ConditionStatus, PoolCondition
from rlfleet.api.timestamps import epoch_ms, rfc3339
from rlfleet.plan.catchup import needs
from rlfleet.plan.quarantine import quarantine_of
from rlfleet.plan.rolling import is_rolling, rolling_limit
from rlfleet.plan.rounds import Committed, Engine

#: Milliseconds without a step after which rounds that follow each other at once let a rolling update through.
STARVED_MS = 60_000
#: Least milliseconds of a room, beside the drain of an engine: to see that nobody owns the engines, and to evict.
ROOM_MS = 10_000
#: A room that was not used is followed by none for so many times its length: an update that can not go on (a budget, an
#: engine out of service) must not hold up every round.
UNUSED = 5


@dataclass(frozen=True, slots=True)
class Room:
    """The last room that was made: ``RLPipeline.status.updateRoom``. Milliseconds since the epoch, whole seconds."""

    since_ms: int
    """When a round began to wait."""
    until_ms: int
    """When it starts at the latest."""

    @staticmethod
    def of(status: Mapping[str, Any]) -> Room | None:
        """As the pipeline's status has it; None: none is recorded."""
        row = status.get("updateRoom")
        return None if row is None else Room(epoch_ms(row["since"]), epoch_ms(row["until"]))

    def row(self) -> dict[str, str]:
        """For the pipeline's status."""
        return {"since": rfc3339(self.since_ms), "until": rfc3339(self.until_ms)}

    def lasts(self, now_ms: int) -> bool:
        """It has begun and is not over. One that begins in the future was dated by a clock that was set back since."""
        return self.since_ms <= now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class Update:
    """A rolling update under way. Times in milliseconds since the epoch."""

    pool: str
    since_ms: int
    """Since when there are pods of an earlier template."""
    step_ms: int
    """When the pool's youngest pod was made."""
    moving: bool
    """Pods are missing or on their way out: a step is being taken."""
    stuck: bool = False
    """So many engines lack the committed version that no step is possible before a round has brought some of them
    back. Those that repair brings back do not count: it goes on while a round waits."""


def update_of(
    pool: Mapping[str, Any],
    pods: Iterable[Mapping[str, Any]],
    *,
    wanted: int,
    engines: Sequence[Engine] = (),
    committed: Committed | None = None,
    pipeline: str = "",
) -> Update | None:
    """What the pool's status, its pods (``wanted`` of them) and ``engines`` say of its rolling update; None: there is
    none. ``pipeline``: its UID."""
    outdated = find_condition((pool.get("status") or {}).get("conditions") or [], PoolCondition.TEMPLATE_OUTDATED)
    if not is_rolling(pool) or outdated is None or outdated.get("status") != ConditionStatus.TRUE.value:
        return None
    there = list(pods)
    current = (pool.get("status") or {}).get("templateHash")
    old = [p for p in there if (p["metadata"].get("labels") or {}).get(labels.TEMPLATE_HASH) != current]
    if old and all(quarantine_of(p) is not None for p in old):
        return None  # they stay for whoever looks into them, however long that takes
    staying = [p for p in there if "deletionTimestamp" not in p["metadata"]]
    made = [epoch_ms(p["metadata"]["creationTimestamp"]) for p in there if p["metadata"].get("creationTimestamp")]
    behind = {e.name for e in engines if needs(e, committed, pipeline)}
    return Update(
        pool=str(pool["metadata"]["name"]),
        since_ms=epoch_ms(outdated["lastTransitionTime"]),
        step_ms=max(made, default=0),
        moving=len(staying) < wanted or len(staying) < len(there),
        # An engine of the earlier template that is out of service goes first, and costs nothing.
        stuck=len(behind) >= rolling_limit(pool, wanted) and all(p["metadata"]["name"] not in behind for p in old),
    )


def makes_room(
    updates: Iterable[Update], *, last: Room | None, now_ms: int, drain_seconds: float
) -> tuple[Room | None, str]:
    """Whether a round that could start now waits, so that a rolling update takes a step: (the room, name of the pool).

    ``last``: the room that is recorded; another one is to be recorded before the round waits. No pool: the round
    starts. A step takes as long as an engine drains, and a round waits no longer than that.
    """
    listed = list(updates)
    starved = [u for u in listed if not u.moving and not u.stuck and now_ms - max(u.since_ms, u.step_ms) >= STARVED_MS]
    if not starved:
        return last, ""
    if last is not None:
        if last.lasts(now_ms):
            return last, starved[0].pool
        used = any(u.step_ms >= last.since_ms for u in listed)
        length = last.until_ms - last.since_ms
        if not used and now_ms - last.since_ms < (1 + UNUSED) * length:
            return last, ""
    since = now_ms // 1000 * 1000
    return Room(since, since + ROOM_MS + round(drain_seconds) * 1000), starved[0].pool
