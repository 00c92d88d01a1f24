"""In which state an engine is, from what was observed of its pod and its gate; and which changes of state make sense.

Invariants:
- an observation that was not made (a silent gate) changes no state and is never read as "closed" or "not routed";
- Active means proven: the gate's own record names the committed bytes, the engine is not paused, every router lists it;
- Offloaded means proven, too: the gate's record says that weights and KV cache are released, and nothing in between;
- one pod lives one life: a change that is not in ``TRANSITIONS`` (an engine that starts again under the same pod)
  is not believed, the engine counts as Quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import EngineState as Process
from rlfleet.api.wire import ErrorReason, GateStatus, OperationState
from rlfleet.plan.adopt import engine_process
from rlfleet.plan.asleep import is_offloaded, is_touched
from rlfleet.plan.endings import Ending, ending_of
from rlfleet.plan.quarantine import quarantine_of
from rlfleet.plan.rounds import Committed
from rlfleet.plan.template import ENGINE, TLS_DIR_ENV, gate_variable

_S = EngineState

#: What may follow in the life of one pod. Polls can miss states in between, so every later stage is reachable.
TRANSITIONS: Final[Mapping[EngineState, frozenset[EngineState]]] = {
    _S.PENDING: frozenset(
        {_S.BOOTING, _S.LOADING, _S.ACTIVE, _S.OFFLOADED, _S.QUARANTINED, _S.DRAINING, _S.FAILED},
    ),
    _S.BOOTING: frozenset({_S.LOADING, _S.ACTIVE, _S.OFFLOADED, _S.QUARANTINED, _S.DRAINING, _S.FAILED}),
    _S.LOADING: frozenset({_S.ACTIVE, _S.OFFLOADED, _S.QUARANTINED, _S.DRAINING, _S.FAILED}),
    _S.ACTIVE: frozenset({_S.LOADING, _S.OFFLOADED, _S.QUARANTINED, _S.DRAINING, _S.FAILED}),
    _S.QUARANTINED: frozenset({_S.LOADING, _S.ACTIVE, _S.OFFLOADED, _S.DRAINING, _S.FAILED}),
    # A drain ends early when the pool is scaled up again before the pod is deleted or the engine sleeps.
    _S.DRAINING: frozenset(
        {_S.PENDING, _S.BOOTING, _S.LOADING, _S.ACTIVE, _S.OFFLOADED, _S.QUARANTINED, _S.FAILED},
    ),
    # Awake again, or woken by half, or to go. It never boots again: that would be another engine process.
    _S.OFFLOADED: frozenset({_S.LOADING, _S.ACTIVE, _S.QUARANTINED, _S.DRAINING, _S.FAILED}),
    _S.FAILED: frozenset(),
}
#: States that silence does not change: the engine was up, and what it holds is not known better.
_UP = frozenset({_S.LOADING, _S.ACTIVE, _S.QUARANTINED, _S.OFFLOADED})


def refuse(before: EngineState, after: EngineState) -> str | None:
    """Why one pod's engine can not have gone from ``before`` to ``after``; None: it can."""
    if before == after or after in TRANSITIONS[before]:
        return None
    if before is _S.FAILED:
        return "the engine had ended"
    return f"went from {before.value} to {after.value} within one pod: its engine was restarted in place"


@dataclass(frozen=True, slots=True)
class PodFact:
    """What planning needs of one pod of a pool. ``index`` is -1 where the label is no number."""

    name: str
    uid: str
    index: int
    created: str = ""
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    ready: bool = False
    scheduled: bool = False
    started: bool = False
    deleting: bool = False
    finished: bool = False
    failure: str = ""
    unexplained: bool = False
    """Its engine ended as if it was asked to, and its status does not say by whom."""
    template_hash: str = ""
    assignment: str = ""
    owned: bool = True
    #: Its condition weights-current; None: the pod has no such readiness gate.
    current: bool | None = None
    serving: bool = False
    """It bears the label that an InferencePool selects."""
    quarantine: str | None = None
    """Why a person keeps it out of service; None: nobody does."""
    withheld: tuple[Reason, str] | None = None
    """Why Dynamo's discovery keeps it out of service; None: it does not."""
    tls: bool = False
    """Its gate serves TLS."""
    process: str = ""
    """Adopted pods: what the kubelet calls the engine's present container, which may restart in place."""

    @property
    def live(self) -> bool:
        """An engine runs or will run in it, and nobody has asked it to go."""
        return not self.finished and not self.deleting


@dataclass(frozen=True, slots=True)
class Derived:
    """The state of one engine, and why it is not Active (empty reason: nothing is wrong)."""

    state: EngineState
    reason: Reason | None = None
    message: str = ""

    @property
    def failure(self) -> str:
        """For status: the reason, then what is known."""
        return f"{self.reason.value}: {self.message}" if self.reason and self.message else (self.reason or "")


@dataclass(frozen=True, slots=True)
class Closed:
    """What closed engines wait for, beside a CatchUp.

    ``awaiting``: why only a Refresh can take them along, or empty. ``exhausted``: processes, as (pod name,
    incarnation), whose catch-up attempts are spent, with the reason of the last failure.
    """

    awaiting: str = ""
    exhausted: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def explain(self, pod: PodFact, gate: GateStatus | None, found: Derived) -> Derived:
        """The same state, with the reason that says what can help."""
        if gate is None or found.reason not in (Reason.CATCH_UP_PENDING, Reason.POISONED, Reason.UNCERTAIN):
            return found
        last = self.exhausted.get((pod.name, gate.incarnation or ""))
        if last is not None:
            what = f"catch-up attempts are spent{f' ({last})' if last else ''}; delete the pod, or sync"
            return Derived(EngineState.QUARANTINED, Reason.CATCH_UP_EXHAUSTED, what)
        if self.awaiting and found.reason is Reason.CATCH_UP_PENDING:
            return Derived(found.state, Reason.AWAITING_ROUND, "closed until the next Refresh takes it along")
        return found


@dataclass(frozen=True, slots=True)
class Sleep:
    """Whether an engine is being put to sleep (no round owns it), and what went wrong the last time with its memory."""

    going: bool = False
    problem: tuple[Reason, str] | None = None


def pod_fact(pod: Mapping[str, Any], *, owner_uid: str) -> PodFact:
    """Read one pod. ``owner_uid``: UID of the pool that should own it."""
    meta, status = pod["metadata"], pod.get("status") or {}
    marks, marked = meta.get("labels") or {}, meta.get("annotations") or {}
    index = marks.get(labels.ENGINE_INDEX, "")
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or []}
    engine: Mapping[str, Any] = next((c for c in status.get("containerStatuses") or [] if c.get("name") == ENGINE), {})
    state = engine.get("state") or {}
    phase = status.get("phase") or "Pending"
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), {})
    # Where the container may restart in place its end is not the pod's.
    for_good = ((pod.get("spec") or {}).get("restartPolicy") or "Never") == "Never"
    finished = phase in ("Failed", "Succeeded") or (for_good and "terminated" in state)
    ending = ending_of(pod, state) if finished else Ending(_waiting(status))
    return PodFact(
        name=meta["name"],
        uid=meta["uid"],
        index=int(index) if index.isascii() and index.isdigit() else -1,
        created=meta.get("creationTimestamp") or "",
        phase=phase,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        ready=conditions.get("Ready") == "True",
        scheduled=conditions.get("PodScheduled") == "True",
        started=bool(engine.get("started")) or "running" in state,
        deleting="deletionTimestamp" in meta,
        finished=finished,
        failure=ending.text,
        unexplained=ending.unexplained,
        template_hash=marks.get(labels.TEMPLATE_HASH, ""),
        assignment=marked.get(labels.DEVICES) or marked.get(labels.SLOT) or "",
        owned=owner.get("uid") == owner_uid,
        current=_current(pod, conditions),
        serving=marks.get(labels.SERVING) == "true",
        quarantine=quarantine_of(pod),
        tls=gate_variable(pod, TLS_DIR_ENV) is not None,
    )


def _current(pod: Mapping[str, Any], conditions: Mapping[Any, Any]) -> bool | None:
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if not any(g.get("conditionType") == labels.WEIGHTS_CURRENT for g in gates):
        return None
    return conditions.get(labels.WEIGHTS_CURRENT) == "True"


def adopted_fact(pod: Mapping[str, Any], index: int) -> PodFact:
    """Read one pod that somebody else makes, as engine ``index`` of the pool that adopts it."""
    fact = pod_fact(pod, owner_uid="")
    # Labels of its pods are their maker's, also one that is spelled like ours.
    return replace(
        fact, index=index, owned=True, template_hash="", assignment="", process=engine_process(pod), serving=False
    )


def _waiting(status: Mapping[str, Any]) -> str:
    """Why a pod does not get on, where kubelet or scheduler say so."""
    for c in status.get("conditions") or []:
        if c.get("type") == "PodScheduled" and c.get("status") == "False":
            return f"not scheduled: {c.get('message') or c.get('reason') or 'no reason given'}"
    for c in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (c.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"container {c.get('name')} waits: {waiting['reason']}"
    return ""


def derive(
    pod: PodFact,
    gate: GateStatus | None,
    *,
    committed: Committed | None,
    routers: frozenset[str],
    draining: bool = False,
    previous: EngineState | None = None,
    closed: Closed = Closed(),
    sleep: Sleep = Sleep(),
) -> Derived:
    """The state of one engine.

    ``gate`` None: it did not answer now. ``routers``: names that the gate should know. ``previous``: the state of the
    same pod at the last observation, None for a new one. ``closed``: what is known of closed engines' prospects.
    ``sleep``: whether the engine is being put to sleep.
    """
    found = closed.explain(pod, gate, _observe(pod, gate, committed, routers, draining, previous, sleep))
    refused = refuse(previous, found.state) if previous is not None else None
    if refused is None:
        return found
    if previous is EngineState.FAILED:
        return Derived(EngineState.FAILED, Reason.POD_FAILED, refused)
    return Derived(EngineState.QUARANTINED, Reason.IDENTITY_MISMATCH, refused)


def _observe(
    pod: PodFact,
    gate: GateStatus | None,
    committed: Committed | None,
    routers: frozenset[str],
    draining: bool,
    previous: EngineState | None,
    sleep: Sleep,
) -> Derived:
    if pod.finished:
        return Derived(EngineState.FAILED, Reason.POD_FAILED, pod.failure)
    if pod.deleting:
        return Derived(EngineState.DRAINING, Reason.TERMINATING, "the pod is being deleted")
    if draining:
        return Derived(EngineState.DRAINING, Reason.SCALING_DOWN, "the engine is not needed any more")
    if gate is None:
        return _silent(pod, previous)
    if gate.startup is not None and gate.startup.reason is ErrorReason.ROUTER_UNREACHABLE:
        return Derived(EngineState.BOOTING, Reason.ROUTER_UNREACHABLE, f"its start waits: {gate.startup.message}"[:500])
    if gate.engine.state is Process.STARTING or gate.incarnation is None:
        return Derived(EngineState.BOOTING if gate.enrolled else _early(pod))
    if gate.engine.state is Process.UNREACHABLE:
        known = previous if previous in _UP else None
        state = known or (EngineState.LOADING if gate.holds or gate.loads else EngineState.BOOTING)
        return Derived(state, Reason.ENGINE_UNREACHABLE, "the engine process does not answer its gate")
    if gate.uncertain:
        return Derived(EngineState.QUARANTINED, Reason.UNCERTAIN, "an operation at the gate has no recorded end")
    if is_touched(gate) or (sleep.going and pod.quarantine is None):
        return _sleeping(gate, sleep)
    if pod.quarantine is not None:
        return Derived(EngineState.QUARANTINED, Reason.QUARANTINE_REQUESTED, pod.quarantine)
    if pod.withheld is not None:
        # One that has never held anything of ours is on its way, however long that takes.
        fresh = gate.holds is None and not gate.loads
        return Derived(EngineState.LOADING if fresh else EngineState.QUARANTINED, *pod.withheld)
    return _serving(gate, committed, routers)


def _sleeping(gate: GateStatus, sleep: Sleep) -> Derived:
    """Its memory is released, or is about to be."""
    if is_offloaded(gate):
        # A wake that was refused before anything was touched leaves the engine asleep, and is no less a trouble.
        return Derived(EngineState.OFFLOADED, *(sleep.problem or ()))
    if sleep.problem is not None:
        return Derived(EngineState.DRAINING, *sleep.problem)
    if gate.releasing:
        return Derived(EngineState.DRAINING, Reason.OFFLOADING, "memory is being released or taken back")
    if gate.released:
        tags = ", ".join(sorted(t.value for t in gate.released))
        return Derived(EngineState.DRAINING, Reason.HALF_RELEASED, f"only {tags} released: it is tried again")
    return Derived(EngineState.DRAINING, Reason.OFFLOADING, "the engine is put to sleep")


def _early(pod: PodFact) -> EngineState:
    return EngineState.BOOTING if pod.started or pod.ip else EngineState.PENDING


def _silent(pod: PodFact, previous: EngineState | None) -> Derived:
    if previous is not None and previous in _UP:
        return Derived(previous, Reason.GATES_UNREACHABLE, "the gate does not answer; last known state")
    if pod.failure:
        return Derived(EngineState.PENDING, Reason.POD_PENDING, pod.failure)
    if pod.ready:
        # Seen for the first time, while its kubelet says that gate and engine are up.
        return Derived(EngineState.BOOTING, Reason.GATES_UNREACHABLE, "the gate does not answer")
    return Derived(_early(pod))


def _not_known(gate: GateStatus, routers: frozenset[str]) -> str:
    """Why nobody can tell whether a proven engine is open."""
    told = sorted(f"router {name}: {why}" for name, why in gate.router_refusals.items() if name in routers)
    return f"whether the engine is open is not known{': ' if told else ''}{told[0] if told else ''}"[:500]


def _serving(gate: GateStatus, committed: Committed | None, routers: frozenset[str]) -> Derived:
    """The engine process answers: is it proven, and is it open?"""
    holds = gate.holds
    whole = (
        committed is not None
        and holds is not None
        and (holds.version, holds.manifest_digest) == (committed.version, committed.manifest_digest)
    )
    if whole:
        if gate.engine.paused is False and all(gate.routed.get(r) is True for r in routers):
            return Derived(EngineState.ACTIVE)
        if gate.engine.paused is None or any(gate.routed.get(r) is None for r in routers):
            return Derived(EngineState.LOADING, Reason.ROUTER_UNREACHABLE, _not_known(gate, routers))
        return Derived(EngineState.LOADING, Reason.ENGINES_CLOSED, "holds the committed version and is closed")
    if any(gate.routed.get(r) for r in routers) and gate.engine.paused is False and committed is not None:
        held = f"version {holds.version}" if holds else "unproven weights"
        return Derived(
            EngineState.QUARANTINED,
            Reason.VERSIONS_DIFFER,
            f"open with {held}, committed is version {committed.version}",
        )
    if committed is None and holds is not None and gate.engine.paused is False:
        return Derived(
            EngineState.LOADING,
            Reason.COMMITTED_UNKNOWN,
            f"serves version {holds.version}, which it has proven; the record of what is committed was lost",
        )
    if gate.loads and gate.loads[-1].state is not OperationState.SUCCEEDED:
        return Derived(
            EngineState.QUARANTINED,
            Reason.POISONED,
            f"a load of version {gate.loads[-1].version} began and its end is not proven",
        )
    if committed is None:
        return Derived(EngineState.LOADING, Reason.NOTHING_COMMITTED, "no version is committed yet")
    return Derived(EngineState.LOADING, Reason.CATCH_UP_PENDING, "closed until it holds the committed version")
