"""What the pool reconciler remembers between two runs about one pool.

Invariant: all of it can be lost at any moment (an operator restart) without a wrong action: it saves calls, paces
retries, and holds what is not known otherwise of pods that are already gone. Since when engines load, since when
pods can not be made, and how often engines failed to start is taken over from status: no restart refills a patience.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import GateStatus
from rlfleet.control.silence import Silence
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.start_failures import StartFailure, failures_of, one_more

#: Seconds before creating pods is tried again: as long as it has been refused, within these.
CREATE_PAUSE, CREATE_PAUSE_MAX = 0.5, 60.0
#: States that status shows of engines that have served, or may have.
_SERVED = frozenset({EngineState.ACTIVE.value, EngineState.OFFLOADED.value})
#: Phases of a pod that is over, and milliseconds after which its engine's end is told without one of them.
_OVER, _OVER_MS = frozenset({"Failed", "Succeeded"}), 30_000
#: What an engine is shown as while its gate has not answered this process yet, whatever it was before.
_UNHEARD = frozenset({EngineState.PENDING, EngineState.BOOTING})


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
    failures: dict[int, StartFailure] = field(default_factory=dict)
    """Engines of one index that ended, or had to be replaced, without ever having been active."""
    loading_since: dict[str, int] = field(default_factory=dict)
    """Since when a pod's engine has been Loading, in milliseconds since the epoch."""
    ever_active: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    ending: dict[str, int] = field(default_factory=dict)
    """Ends that were not told yet, and since when: the kubelet says why (evicted) only with the pod's last phase."""
    words: dict[str, str] = field(default_factory=dict)
    """Why pods ended that are still there, where only the kubelet's Events say so."""
    swept: set[str] = field(default_factory=set)
    """UIDs whose addresses are looked for in the routers again, now that their pods are gone."""
    processes: dict[str, str] = field(default_factory=dict)
    """Adopted pods: the engine's container as last seen."""
    bumps: dict[int, int] = field(default_factory=dict)
    refused_since: int | None = None
    """Since when not all pods that are owed could be made, in milliseconds since the epoch; None: all could."""
    refused: tuple[Problem, ...] = ()
    """What the apiserver said when that was tried last."""
    refused_generation: int = 0
    """Generation of the pool that was tried: a changed spec is tried at once."""
    create_again: float = 0.0
    """Loop time at which it is tried again."""
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
        status = pool.get("status") or {}
        rows = [r for r in status.get("engines") or () if r.get("podUID")]
        refused = status.get("podsRefusedSince")
        return cls(
            str(pool["metadata"]["uid"]),
            loading_since={str(r["podUID"]): epoch_ms(r["loadingSince"]) for r in rows if "loadingSince" in r},
            failures=failures_of(status),
            ever_active={str(r["podUID"]) for r in rows if r.get("state") in _SERVED},
            refused_since=epoch_ms(refused) if refused else None,
        )

    def see(self, facts: Iterable[PodFact], now_ms: int) -> tuple[list[PodFact], list[PodFact]]:
        """Take in the pods as seen now. Returns (failed, lost: gone without our deleting them), each pod once.

        What failed is counted at once, and told when its pod is over, is gone, or is still there half a minute later:
        the kubelet may say why as late as while the pod is being deleted.
        """
        present = {f.uid: f for f in facts if f.owned}
        failed, lost = [], []
        for uid, old in list(self.facts.items()):
            if uid in present:
                continue
            if old.ip and uid not in self.departures:
                self.departures[uid] = Departure(old)
            if old.live:
                lost.append(old)
                self._replaced(old, now_ms)
            if uid in self.ending:
                failed.append(old)
            self._forget(uid)
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
                    self.ending[fact.uid] = now_ms
                if not fact.deleting and fact.index >= 0:
                    self._count(fact, now_ms)
            elif fact.deleting and fact.uid not in self.departures:
                self._replaced(fact, now_ms)
            since = self.ending.get(fact.uid)
            if since is not None and (fact.phase in _OVER or now_ms - since >= _OVER_MS):
                del self.ending[fact.uid]
                failed.append(fact)
        return failed, lost

    def explained(self, facts: Iterable[PodFact]) -> list[PodFact]:
        """The same pods, with what is known besides of why they ended."""
        return [replace(f, failure=self.words[f.uid]) if f.uid in self.words else f for f in facts]

    def held_back(self, now_ms: int) -> dict[int, float]:
        """Indices whose replacement waits, with the seconds that are left."""
        left = {i: f.left_seconds(now_ms) for i, f in self.failures.items()}
        return {i: seconds for i, seconds in left.items() if seconds > 0}

    def keep_indices(self, wanted: int) -> None:
        """The pool makes this many engines: what is known of further indices is of no use."""
        self.failures = {i: f for i, f in self.failures.items() if i < wanted}

    # ------------------------------------------------------------------------------------------ making pods

    def create_pause(self, generation: int, now: float) -> float:
        """Seconds before creating pods is to be tried again; 0: now."""
        if self.refused_since is None or self.refused_generation != generation:
            return 0.0
        return max(0.0, self.create_again - now)

    def note_refused(
        self, problems: Iterable[Problem], *, generation: int, now: float, now_ms: int, retry_after: float = 0.0
    ) -> None:
        """Not all pods could be made. Each pause is as long as this has lasted, so that the time doubles."""
        if self.refused_since is None:
            self.refused_since = now_ms
        self.refused = tuple(problems)
        self.refused_generation = generation
        lasted = (now_ms - self.refused_since) / 1000
        self.create_again = now + max(retry_after, CREATE_PAUSE, min(lasted, CREATE_PAUSE_MAX))

    def note_made(self) -> None:
        """Every pod that is owed has been made."""
        self.refused_since, self.refused = None, ()

    # ------------------------------------------------------------------------------------------ states

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

    def _count(self, fact: PodFact, now_ms: int) -> None:
        if fact.uid in self.ever_active:
            self.failures.pop(fact.index, None)
            return
        old = self.failures.get(fact.index)
        self.failures[fact.index] = one_more(old, node=fact.node, pod_uid=fact.uid, now_ms=now_ms)

    def _replaced(self, fact: PodFact, now_ms: int) -> None:
        """Somebody else than the pool takes it away. Only what was not proven to be whole is a failure of its start: a
        person who looks into a pod, or moves one that only has not got so far, proves nothing about its node."""
        broken = self.states.get(fact.uid) is EngineState.QUARANTINED and fact.quarantine is None
        if broken and fact.index >= 0 and fact.withheld is None and fact.uid not in self.counted:
            self.counted.add(fact.uid)
            self._count(fact, now_ms)

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
            self.ending,
            self.words,
        ):
            known.pop(uid, None)
        self.silence.heard(uid)
        self.ever_active.discard(uid)
        self.counted.discard(uid)
