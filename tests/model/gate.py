"""One engine, its gate and its router entry as functions over a Column. The rules are the gate's own.

Which call is allowed is decided by ``api.fencing.admit`` and ``gate.rules``, the functions that the gate itself calls;
here is only what they act on: what the engine does then, and what is written down before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlfleet.api import fencing, wire
from rlfleet.api.fencing import Fence
from rlfleet.gate import rules, tags
from rlfleet.gate.errors import GateError
from rlfleet.gate.tags import MemoryRecord, TagState
from tests.model.state import (
    CLOSE,
    DONE,
    FAILED,
    GARBAGE,
    HERE,
    LOAD,
    NONE,
    OPEN,
    PAUSE,
    PROCESS,
    PUBLISH,
    RELEASE,
    RELEASED,
    RELEASING,
    RESUME,
    RUNNING,
    STEPS,
    VERIFY,
    WAKE,
    WAKING,
    Answer,
    Column,
)

#: Messages: kind, round, generation, pod, attempt, version, bytes. Kinds 0..8 are STEPS.
FENCE, STAGE = 9, 10
Message = tuple[int, int, int, int, int, int, int]
PIPELINE = "p"

#: Caches of everything that depends on functions under test; a mutation empties them.
CACHES: list[Callable[[], None]] = []


def cached(function: Any) -> Any:
    """Remember results for good, until a mutation empties all such memories."""
    wrapped = lru_cache(maxsize=None)(function)
    CACHES.append(wrapped.cache_clear)
    return wrapped


def forget() -> None:
    """Empty all caches: the functions under test have changed."""
    for clear in CACHES:
        clear()


def digest(content: int) -> str:
    """The manifest digest of bytes."""
    return f"sha256:{content:064x}"


@cached
def holds_record(holds: Answer) -> wire.HoldsRecord | None:
    """The gate's proof as its own type."""
    if not holds:
        return None
    version, content, found = holds
    return wire.HoldsRecord(version=version, manifest_digest=digest(content), engine_digest=f"e{found}")


@cached
def load_record(load: Answer) -> wire.LoadRecord | None:
    """The gate's load record as its own type."""
    if not load:
        return None
    operation, version, content, state, verified, published = load
    return wire.LoadRecord(
        operation=f"r{operation}",
        version=version,
        manifest_digest=digest(content),
        state=_STATES[state],
        verified=bool(verified),
        published=bool(published),
        engine_digest=None,
    )


_STATES = {
    RUNNING: wire.OperationState.RUNNING,
    DONE: wire.OperationState.SUCCEEDED,
    FAILED: wire.OperationState.FAILED,
    NONE: wire.OperationState.UNKNOWN,
}


# ------------------------------------------------------------------------------------------------ what it says


@cached
def status(c: Column) -> tuple[Column, Answer]:
    """The gate's answer to a status call; looking at the label may take a proof away."""
    c = observe(c)
    admits = bool(c.admit) if c.pend < 0 or c.pend == PAUSE else False
    paused = rules.proven_paused(None if c.life.booting else admits, bool(c.paused))
    return c, (
        c.identity,
        c.fence,
        {None: 2, True: 1, False: 0}[paused],
        c.holds,
        c.load,
        int(c.current >= 0),
        int(c.unsettled > 0 or (c.current < 0 and c.memory in (RELEASING, WAKING))),
        c.staged,
        c.routed,
        c.log,
        c.memory,
        c.life.told,
        c.life.booting,
    )


def observe(c: Column) -> Column:
    """Compare the engine's label with the proof (not while an order runs)."""
    if c.holds and c.current < 0 and not c.life.booting:
        record = holds_record(c.holds)
        assert record is not None
        if rules.voids_proof(str(c.label), record):
            return c._replace(holds=())
    return c


@cached
def gate_status(said: Answer) -> wire.GateStatus:
    """An answer of ``status`` as the type that the planner takes."""
    identity, fence, paused, holds, load, busy, uncertain, staged, routed, log, memory, told, booting = said
    record = load_record(load)
    return wire.GateStatus(
        protocol_version=1,
        capabilities=("Serialized", "Checksum", "Offload"),
        pod_uid=f"pod-{identity % PROCESS}",
        incarnation=f"i{identity}",
        engine_process=f"c{told}",
        enrolled=True,
        pipeline=PIPELINE,
        fence=wire.Held(pipeline=PIPELINE if fence[0] else "", operation=f"r{fence[1]}", generation=fence[0]),
        engine=wire.EngineReport(
            state=wire.EngineState.UNREACHABLE if booting else wire.EngineState.READY,
            paused={2: None, 1: True, 0: False}[paused],
            world_size=1,
            layout="L",
        ),
        holds=holds_record(holds),
        loads=(record,) if record else (),
        in_flight="x" if busy else None,
        uncertain=bool(uncertain),
        staged=None
        if not staged
        else wire.StagedReport(
            operation=f"r{staged[0]}",
            transport=wire.Transport.SERIALIZED,
            version=0,
            manifest_digest=digest(staged[1]),
            manifest_received=True,
            complete=True,
        ),
        staging_capacity_bytes=1000,
        routed={"router": bool(routed)},
        released=(wire.MemoryTag.WEIGHTS, wire.MemoryTag.KV_CACHE) if memory == RELEASED else (),
        releasing=memory in (RELEASING, WAKING),
        attempts={f"r{fence[1]}/{STEPS[i]}": n >> 2 for i, n in enumerate(log) if n},
    )


# ------------------------------------------------------------------------------------------------ calls


@cached
def admitted(c_fence: tuple[int, int], operation: int, generation: int) -> bool:
    """The gate's fence lets the call through (``api.fencing.admit``)."""
    held = Fence(PIPELINE, f"r{c_fence[1]}", c_fence[0]) if c_fence[0] else Fence()
    asked = Fence(PIPELINE, f"r{operation}", generation)
    return fencing.admit(held, asked, now_ms=0, closed=False) is fencing.Admission.ACCEPT


@cached
def deliver(c: Column, m: Message, how: str = "well", slow: bool = False) -> tuple[Column, Answer]:
    """One request arrives: the column afterwards, and the answer.

    Answers: ("ok",), ("no",) for a refusal or a recorded failure, ("held", generation) for a 412, ("busy",),
    ("running",), ("status", ...). ``how``: how a load goes; ``slow``: the effect comes later.
    """
    kind, operation, generation, pod, _attempt, _version, content = m
    if kind == FENCE and pod % PROCESS != c.pod:
        return c, ("no",)  # the token's audience is another pod
    if kind != FENCE:
        try:
            rules.for_this_process(f"i{pod}", f"i{c.identity}")
        except GateError:
            return c, ("no",)
    if not admitted(c.fence, operation, generation):
        return c, ("held", c.fence[0])
    if c.fence != (generation, operation):
        same = c.fence[1] == operation
        # Attempts are counted per operation; another one's ids can never be asked for again under this fence.
        c = c._replace(fence=(generation, operation), log=c.log if same else (0,) * 9)
    if kind == FENCE:
        c, said = status(c)
        return c, ("status", said)
    if kind == STAGE:
        try:
            rules.nothing_unsettled("Prepare", _RECORDS[c.unsettled])
            rules.nothing_runs(None if c.current < 0 else _record(STEPS[c.current]))
        except GateError as e:
            return c, ("busy",) if e.reason is wire.ErrorReason.BUSY else ("no",)
        return c._replace(staged=(operation, content)), ("ok", 0)
    return _start(c, m, how, slow)


def _start(c: Column, m: Message, how: str, slow: bool) -> tuple[Column, Answer]:
    kind, operation, _generation, _, attempt, version, content = m
    known = c.log[kind]
    if attempt <= known >> 2:
        state = known & 3 if attempt == known >> 2 else FAILED
        return c, {RUNNING: ("running",), DONE: ("ok", c.bytes if kind == VERIFY else 0), FAILED: ("no",)}[state]
    try:
        rules.nothing_unsettled(STEPS[kind], _RECORDS[c.unsettled])
    except GateError:
        return c, ("no",)
    try:
        rules.nothing_runs(None if c.current < 0 else _record(STEPS[c.current]))
    except GateError:
        return c, ("busy",)
    if c.life.booting and kind not in (OPEN, CLOSE):
        return logged(c, kind, attempt, FAILED), ("no",)  # nobody answers the gate
    try:
        tags.memory_is_here(STEPS[kind], memory_record(c.memory))
        c = _check(c, kind, operation, version, content)
    except GateError:
        return c, ("no",)
    if kind == PAUSE and c.pend >= 0 and c.unsettled & 1:
        c = finish(c)  # it is proven idle, so what it was asked before has its effect first
    left, left_bytes = c.pend, c.pend_bytes
    c = _begin(c, kind, operation, version, content)
    c = logged(c, kind, attempt, RUNNING)._replace(current=kind, pend=kind, pend_bytes=content if kind == LOAD else -1)
    if slow:
        return c, ("running",)
    c = finish(c, how)
    if left >= 0:
        c = c._replace(pend=left, pend_bytes=left_bytes)
    if c.log[kind] & 3 != DONE:
        return c, ("no",)
    return c, ("ok", c.bytes if kind == VERIFY else 0)


@cached
def _record(kind: str) -> wire.OperationRecord:
    return wire.OperationRecord(
        id="x", kind=kind, operation="r", generation=0, attempt=1, state=wire.OperationState.RUNNING, started_ms=0
    )


_RECORDS = {0: (), 1: (_record("Load"),), 2: (_record("Open"),), 3: (_record("Load"), _record("Open"))}


@cached
def _order(kind: Any, version: int, content: int) -> Any:
    return kind(version=version, manifest_digest=digest(content))


def logged(c: Column, kind: int, attempt: int, state: int) -> Column:
    """With an order's attempt in this state."""
    log = list(c.log)
    log[kind] = attempt * 4 + state
    return c._replace(log=tuple(log))


def _check(c: Column, kind: int, operation: int, version: int, content: int) -> Column:
    """What refuses an order before it is logged; GateError."""
    if kind == LOAD:
        if c.staged != (operation, content):
            raise GateError(wire.ErrorReason.NOT_STAGED, "")
        rules.may_load(rules.proven_paused(bool(c.admit), bool(c.paused)))
    elif kind == VERIFY:
        rules.may_verify(_latest(c), _order(wire.VerifyOrder, version, content))
    elif kind == PUBLISH:
        rules.may_publish(_latest(c), _order(wire.PublishOrder, version, content))
    elif kind == RESUME:
        c = observe(c)
        rules.may_resume(holds_record(c.holds), _order(wire.ResumeOrder, version, content))
    elif kind == OPEN:
        c = observe(c)
        rules.may_open(holds_record(c.holds))
        if not c.admit or c.life.booting:
            raise GateError(wire.ErrorReason.NOT_PROVEN, "")
    elif kind == RELEASE:
        tags.nothing_in_between(memory_record(c.memory))
        requests = int(c.admit)  # one that admits requests may run some
        paused = rules.proven_paused(bool(c.admit), bool(c.paused))
        listed = {"router": bool(c.routed)}
        tags.may_release(paused=paused, running=requests, waiting=0, routed=listed, late_add=bool(c.adding))
    elif kind == WAKE:
        tags.nothing_in_between(memory_record(c.memory))
        if not rules.proven_paused(bool(c.admit), bool(c.paused)):
            raise GateError(wire.ErrorReason.NOT_PROVEN, "")
    return c


@cached
def memory_record(memory: int) -> MemoryRecord:
    """What the gate has written down of the engine's memory, as its own type."""
    state = {RELEASING: TagState.RELEASING, RELEASED: TagState.RELEASED, WAKING: TagState.WAKING}.get(memory)
    return MemoryRecord({wire.MemoryTag.WEIGHTS: state} if state else {})


def _latest(c: Column) -> wire.LoadRecord | None:
    record = load_record(c.load)
    return record.model_copy(update={"released": True}) if record is not None and c.voided else record


def _begin(c: Column, kind: int, operation: int, version: int, content: int) -> Column:
    """What is durable before the engine or a router is touched."""
    if kind == LOAD:
        proven = c.holds[1] if c.holds else -1
        return c._replace(
            load=(operation, version, content, RUNNING, 0, 0),
            before=(c.bytes, proven),
            holds=(),
            bytes=GARBAGE,
            voided=0,
        )
    if kind == RESUME:
        return c._replace(paused=0)
    if kind == OPEN:
        return c._replace(adding=1, late=1)
    if kind == RELEASE and c.memory == HERE:
        return c._replace(memory=RELEASING, holds=(), voided=1)
    if kind == WAKE and c.memory == RELEASED:
        return c._replace(memory=WAKING)
    return c


# ------------------------------------------------------------------------------------------------ effects


@cached
def finish(c: Column, how: str = "well") -> Column:
    """The engine (or the router) carries out what it was asked; a gate that still waits for it records the end."""
    kind, waits, content = c.pend, c.current == c.pend, c.pend_bytes
    c = c._replace(pend=-1, pend_bytes=-1, current=-1 if waits else c.current)
    done = DONE
    if kind == LOAD:
        c, done = _loaded(c, how, waits, content)
    elif kind == PAUSE:
        c = paused(c)
    elif kind == RESUME:
        c = c._replace(admit=1)
    elif kind == VERIFY:
        c, done = _verified(c)
    elif kind == PUBLISH:
        operation, version, content, state, verified, _ = c.load
        record = (operation, version, content, state, verified, 1)
        c = c._replace(label=version, holds=(version, content, c.bytes), load=record)
    elif kind == OPEN:
        c = c._replace(routed=1, late=0, adding=0)
    elif kind in (RELEASE, WAKE):
        # What was in it is gone. A gate that died meanwhile does not learn that it was done.
        c = c._replace(bytes=GARBAGE if c.memory != HERE else c.bytes)
        if waits:
            c = c._replace(memory=RELEASED if kind == RELEASE else HERE)
    elif kind == CLOSE:
        c = c._replace(routed=0)
        if rules.quiet_enough(pending=bool(c.adding), quiet_seconds=0.0, needed_seconds=5.0):
            c = c._replace(adding=0)
        else:
            c = c._replace(late=0, adding=0)  # it waits until no addition can come any more, removing what comes
        c = c._replace(unsettled=c.unsettled & 1)
    return logged(c, kind, c.log[kind] >> 2, done) if waits else c


def _loaded(c: Column, how: str, waits: bool, content: int) -> tuple[Column, int]:
    c = c._replace(bytes={"well": content, "nothing": c.before[0]}.get(how, GARBAGE))
    if not waits:
        return c, FAILED  # the gate restarted: nobody is there to hear how it ended
    operation, version, content, _state, verified, published = c.load
    if how == "unknown":
        c = c._replace(unsettled=c.unsettled | 1, load=(operation, version, content, NONE, 0, 0))
        return c, FAILED
    ended = FAILED if how == "failed" else DONE
    return c._replace(load=(operation, version, content, ended, verified, published)), ended


def paused(c: Column) -> Column:
    """A pause is verified; the engine is proven idle then, so engine orders without an end are settled."""
    return c._replace(admit=0, paused=1, unsettled=c.unsettled & 2, life=c.life._replace(fresh=0))


def _verified(c: Column) -> tuple[Column, int]:
    operation, version, content, state, _, published = c.load
    before, proven = c.before
    changed = rules.has_changed(
        f"e{before}",
        f"e{c.bytes}",
        proven=digest(proven) if proven >= 0 else None,
        manifest_digest=digest(content),
    )
    if changed is False:
        return c, FAILED
    return c._replace(load=(operation, version, content, state, 1, published)), DONE
