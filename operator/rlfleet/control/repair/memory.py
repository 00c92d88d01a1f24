"""What the repair pass remembers between two reconciles of one pipeline.

Invariant: all of it can be lost at any moment without a wrong action. It paces what would be tried again at once, and
has passing states looked at twice; what may be done to an engine is decided from observations alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlfleet.api.wire import GateStatus
from rlfleet.control.silence import Silence
from rlfleet.plan.repair import Need
from rlfleet.plan.rounds import Engine

#: Seconds before the same engine is repaired a second, third, ... time; the first is immediate.
PAUSE_SECONDS = 1.0
PAUSE_MAX_SECONDS = 60.0
#: An engine that needed nothing for this long starts from the beginning.
FORGET_SECONDS = 600.0
#: Seconds that a state must last which a health check can cause in passing.
DOUBT_SECONDS = 2.0


@dataclass(slots=True)
class _Known:
    repairs: int = 0
    not_before: float = 0.0
    last: float = 0.0
    problem: str = ""


@dataclass(slots=True)
class RepairMemory:
    """Of one pipeline, by its UID."""

    uid: str
    _known: dict[tuple[str, str], _Known] = field(default_factory=dict)
    _doubts: dict[tuple[str, str], float] = field(default_factory=dict)
    _silence: Silence = field(default_factory=Silence)
    _seen: dict[str, GateStatus] = field(default_factory=dict)
    _put_off: dict[str, float] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------ rules

    def put_off(self, rule: str, until: float) -> None:
        """The apiserver wants to be asked later: the rule rests until then, and the others do not."""
        self._put_off[rule] = until

    def rests(self, rule: str, now: float) -> bool:
        """Whether the rule was put off and its time has not come."""
        return now < self._put_off.get(rule, now)

    # ------------------------------------------------------------------------------------------ pace

    def due(self, needs: Iterable[Need], now: float) -> tuple[tuple[Need, ...], float | None]:
        """The needs that are to be seen to now, and the seconds until the next of the others is."""
        due: list[Need] = []
        later: list[float] = []
        doubts: dict[tuple[str, str], float] = {}
        for need in needs:
            key = (need.pod_uid, need.incarnation)
            wait = 0.0
            if need.doubtful:
                doubts[key] = self._doubts.get(key, now)
                wait = DOUBT_SECONDS - (now - doubts[key])
            known = self._known.get(key)
            if known is not None:
                wait = max(wait, known.not_before - now)
            if wait > 0:
                later.append(wait)
            else:
                due.append(need)
        self._doubts = doubts
        return tuple(due), min(later, default=None)

    def repaired(self, needs: Iterable[Need], problems: Mapping[str, str], now: float) -> None:
        """These were seen to; ``problems``: engine -> what went wrong."""
        for need in needs:
            known = self._known.setdefault((need.pod_uid, need.incarnation), _Known())
            if now - known.last > FORGET_SECONDS:
                known.repairs = 0
            known.repairs += 1
            known.last = now
            known.not_before = now + min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2 ** min(known.repairs - 1, 10))
            known.problem = problems.get(need.engine, "")

    def problems(self, needs: Iterable[Need]) -> dict[str, str]:
        """Engines that were tried and still need the same, with what went wrong."""
        found = {}
        for need in needs:
            known = self._known.get((need.pod_uid, need.incarnation))
            if known is not None and known.problem:
                found[need.engine] = known.problem
        return found

    # ------------------------------------------------------------------------------------------ silence

    def observed(self, engines: Iterable[Engine], now: float) -> None:
        """Take in one look at all engines; what is gone is forgotten."""
        present = set()
        for e in engines:
            present.add(e.pod_uid)
            if e.status is not None:
                self._seen[e.pod_uid] = e.status
                self._silence.heard(e.pod_uid)
            else:
                self._silence.missed(e.pod_uid, now)
        self._silence.keep_only(present)
        self._seen = {u: v for u, v in self._seen.items() if u in present}
        for key in [k for k, v in self._known.items() if k[0] not in present or now - v.last > FORGET_SECONDS]:
            del self._known[key]

    def believed(self, engines: Iterable[Engine]) -> list[Engine]:
        """The engines for status: one that has only just fallen silent is shown as it was last seen."""
        return [
            replace(e, status=self._seen.get(e.pod_uid))
            if e.status is None and not self._silence.lasts(e.pod_uid)
            else e
            for e in engines
        ]


@dataclass(slots=True)
class RepairMemories:
    """By pipeline; one that was deleted and created anew starts from nothing."""

    _by_name: dict[tuple[str, str], RepairMemory] = field(default_factory=dict)

    def of(self, namespace: str, name: str, uid: str) -> RepairMemory:
        """The memory of this pipeline."""
        known = self._by_name.get((namespace, name))
        if known is None or known.uid != uid:
            known = self._by_name[namespace, name] = RepairMemory(uid)
        return known

    def forget(self, namespace: str, name: str) -> None:
        """The pipeline is gone."""
        self._by_name.pop((namespace, name), None)
