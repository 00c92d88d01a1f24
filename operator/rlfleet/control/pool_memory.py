"""What the pool reconciler remembers between two runs about one pool.

Invariant: all of it can be lost at any moment (an operator restart) without a wrong action: it saves calls, paces
retries, and holds what is not known otherwise of pods that are already gone. Since when engines load is taken over from
status, so that no restart refills a patience.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import GateStatus
from rlfleet.control.silence import Silence
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.pool_status import Problem

#: Seconds before the second, third, ... replacement of an engine that never became active; the first is immediate.
FAILURE_PAUSE = 5.0
FAILURE_PAUSE_MAX = 300.0
#: What an engine is shown as while its gate has not answered this process yet, whatever it was before.
_UNHEARD = frozenset({EngineState.PENDING, EngineState.BOOTING})


@dataclass(slots=True)
class Failures:
    """Engines of one index that ended without ever being active."""

    count: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class Departure:
    """An address that must leave the routers, and from which ones it has been read back to be gone."""

    pod: PodFact
    done: set[str] = field(default_factory=set)
    fence: int = -1


@dataclass(slots=True)
class PoolMemory:
    """Of one pool (by UID)."""

    uid: str
    gates: dict[str, GateStatus] = field(default_factory=dict)
    answered: dict[str, bool] = field(default_factory=dict)
    silence: Silence = field(default_factory=Silence)
    refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, EngineState] = field(default_factory=dict)
    facts: dict[str, PodFact] = field(default_factory=dict)
    departures: dict[str, Departure] = field(default_factory=dict)
    drain_until: dict[str, float] = field(default_factory=dict)
    predecessors: dict[int, str] = field(default_factory=dict)
    failures: dict[int, Failures] = field(default_factory=dict)
    loading_since: dict[str, int] = field(default_factory=dict)
    """Since when a pod's engine has been Loading, in milliseconds since the epoch."""
    ever_active: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    swept: set[str] = field(default_factory=set)
    """UIDs whose addresses are looked for in the routers again, now that their pods are gone."""
    processes: dict[str, str] = field(default_factory=dict)
    """Adopted pods: the engine's container as last seen."""
    bumps: dict[int, int] = field(default_factory=dict)
    create_failures: int = 0
    namespace_ending: bool = False
    """The apiserver makes no pods any more, because it is deleting the namespace; that is final."""
    status_at: float | None = None
    budget: tuple[object, float] | None = None
    """What the PodDisruptionBudget was made from when it was looked at, and until when that holds."""
    budget_problems: tuple[Problem, ...] = ()
    """What was wrong with it."""

    @classmethod
    def of(cls, pool: Mapping[str, Any]) -> Self:
        """A new memory, with what the pool's status knows of the time before."""
        rows = (pool.get("status") or {}).get("engines") or ()
        since = {str(r["podUID"]): epoch_ms(r["loadingSince"]) for r in rows if r.get("podUID") and "loadingSince" in r}
        return cls(str(pool["metadata"]["uid"]), loading_since=since)

    def see(self, facts: Iterable[PodFact], now: float) -> tuple[list[PodFact], list[PodFact]]:
        """Take in the pods as seen now. Returns (newly failed, newly lost: gone without our deleting them)."""
        present = {f.uid: f for f in facts if f.owned}
        lost = []
        for uid, old in list(self.facts.items()):
            if uid in present:
                continue
            if old.ip and uid not in self.departures:
                self.departures[uid] = Departure(old)
            if old.live:
                lost.append(old)
            self._forget(uid)
        failed = []
        for fact in present.values():
            met = fact.uid in self.facts
            self.facts[fact.uid] = fact
            if fact.index >= 0:
                before = self.facts.get(self.predecessors.get(fact.index, ""))
                if before is None or (before.created, before.uid) <= (fact.created, fact.uid):
                    self.predecessors[fact.index] = fact.uid
            if fact.finished and fact.uid not in self.counted:
                self.counted.add(fact.uid)
                # Without an index it is no engine any more: its end is news only where it was one just now.
                if not fact.deleting and (fact.index >= 0 or met):
                    failed.append(fact)
                if not fact.deleting and fact.index >= 0:
                    self._count(fact, now)
        return failed, lost

    def held_back(self, now: float) -> dict[int, float]:
        """Indices whose replacement waits, with the seconds that are left."""
        return {i: f.not_before - now for i, f in self.failures.items() if f.not_before > now}

    def shown(self, uid: str) -> bool:
        """Whether status shows what the gate said last: it answered, or has only just stopped to."""
        return self.answered.get(uid, False) or (
            uid in self.gates and uid not in self.refusals and not self.silence.lasts(uid)
        )

    def note_process(self, fact: PodFact) -> bool:
        """Whether the engine's container was restarted in place since it was last seen: then its life begins anew."""
        before = self.processes.get(fact.uid, "")
        if not fact.process or fact.process == before:
            return False
        self.processes[fact.uid] = fact.process
        if before:
            self.states.pop(fact.uid, None)
        return bool(before)

    def note_state(self, fact: PodFact, state: EngineState, now_ms: int) -> None:
        """Remember the state that was derived for a pod."""
        self.states[fact.uid] = state
        if state is EngineState.LOADING:
            self.loading_since.setdefault(fact.uid, now_ms)
        elif state not in _UNHEARD:
            self.loading_since.pop(fact.uid, None)
        if state is EngineState.ACTIVE:
            self.ever_active.add(fact.uid)
            self.failures.pop(fact.index, None)

    def _count(self, fact: PodFact, now: float) -> None:
        if fact.uid in self.ever_active:
            self.failures.pop(fact.index, None)
            return
        entry = self.failures.setdefault(fact.index, Failures())
        entry.count += 1
        if entry.count > 1:
            entry.not_before = now + min(FAILURE_PAUSE_MAX, FAILURE_PAUSE * 2 ** min(entry.count - 2, 10))

    def _forget(self, uid: str) -> None:
        self.facts.pop(uid, None)
        for known in (
            self.gates,
            self.answered,
            self.refusals,
            self.states,
            self.drain_until,
            self.loading_since,
            self.processes,
        ):
            known.pop(uid, None)
        self.silence.heard(uid)
        self.ever_active.discard(uid)
        self.counted.discard(uid)
