"""What this process remembers of engines that would not sleep or wake.

Invariant: all of it can be lost at any moment without a wrong action. It paces what would be tried again at once, and
says in status what went wrong the last time; what is done to an engine is decided from observations alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlfleet.api.conditions import Reason
from rlfleet.plan.rounds import Engine

#: Seconds before the same engine is tried a second, third, ... time; the first is immediate.
PAUSE_SECONDS = 1.0
PAUSE_MAX_SECONDS = 60.0


@dataclass(slots=True)
class _Tried:
    pipeline: str
    count: int
    not_before: float
    problem: tuple[Reason, str]


@dataclass(slots=True)
class ElasticMemory:
    """By pod UID."""

    _tried: dict[str, _Tried] = field(default_factory=dict)

    def due(self, engines: Iterable[Engine], now: float) -> tuple[tuple[str, ...], float | None]:
        """The names of those that may be tried now, and the seconds until the next of the others may."""
        due, later = [], []
        for e in engines:
            wait = self._tried[e.pod_uid].not_before - now if e.pod_uid in self._tried else 0.0
            if wait > 0:
                later.append(wait)
            else:
                due.append(e.name)
        return tuple(due), min(later, default=None)

    def failed(self, pipeline: str, pod_uid: str, problem: tuple[Reason, str], now: float) -> None:
        """It was tried and did not get there."""
        known = self._tried.get(pod_uid)
        count = known.count + 1 if known is not None else 1
        pause = min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2 ** min(count - 1, 10))
        self._tried[pod_uid] = _Tried(pipeline, count, now + pause, problem)

    def done(self, pod_uid: str) -> None:
        """It sleeps or is awake, as it should, or is wanted otherwise by now."""
        self._tried.pop(pod_uid, None)

    def problem(self, pod_uid: str) -> tuple[Reason, str] | None:
        """What went wrong the last time; None: nothing is known to be wrong."""
        known = self._tried.get(pod_uid)
        return known.problem if known is not None else None

    def keep_only(self, pipeline: str, pod_uids: Collection[str]) -> None:
        """Forget the engines of this pipeline that need nothing any more."""
        for uid in [u for u, t in self._tried.items() if t.pipeline == pipeline and u not in pod_uids]:
            del self._tried[uid]
