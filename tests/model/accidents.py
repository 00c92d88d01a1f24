"""What befalls an engine and its gate without an order: restarts, replacement, what a router or a kubelet does late.

Which of it voids what is decided by ``gate.rules``, as in ``tests.model.gate``.
"""

from __future__ import annotations

from rlfleet.gate import rules
from tests.model import gate
from tests.model.state import BASE, CLOSE, FAILED, HERE, LOAD, NONE, OPEN, RELEASING, STEPS, WAKING, Column, Life


def restart_gate(c: Column) -> Column:
    """The gate process dies and starts again: its record stays; what ran has no known end, and may still happen."""
    if c.current < 0:
        return c
    kind = c.current
    _state, settled = rules.after_restart(STEPS[kind], in_between=c.memory in (RELEASING, WAKING))
    unsettled = c.unsettled
    if not settled:
        unsettled |= 2 if STEPS[kind] in rules.ROUTING_KINDS else 1
    load = c.load
    if kind == LOAD:
        load = (*load[:3], NONE, 0, 0)
    c = c._replace(current=-1, unsettled=unsettled, load=load, pend=-1 if kind == OPEN else c.pend)
    return gate.logged(c, kind, c.log[kind] >> 2, FAILED)


def restart_engine(c: Column) -> Column:
    """The engine of an adopted pod ends, and its kubelet starts another process; the gate goes on beside it.

    What the engine was asked is gone with it, and its gate knows no end of that. Its routers still list it.
    """
    life = c.life._replace(process=c.life.process + 1, booting=1, fresh=0)
    if c.pend not in (OPEN, CLOSE):
        if c.current >= 0:
            load = (*c.load[:3], NONE, 0, 0) if c.current == LOAD else c.load
            c = gate.logged(c, c.current, c.log[c.current] >> 2, FAILED)
            c = c._replace(current=-1, unsettled=c.unsettled | 1, load=load)
        c = c._replace(pend=-1, pend_bytes=-1)
    return c._replace(admit=0, bytes=BASE, label=-9, life=life)


def is_up(c: Column) -> Column:
    """The new process answers, and takes requests up: nobody has told it anything yet."""
    listed = int(bool(c.routed or c.late))
    return c._replace(admit=1, life=c.life._replace(booting=0, fresh=listed))


def told(c: Column) -> Column:
    """The operator tells the gate what the kubelet calls the engine's container (``AdmissionControl.enroll``)."""
    life = c.life
    if not rules.is_another_process(f"c{life.told}", f"c{life.shown}"):
        return c._replace(life=life._replace(told=life.shown))
    return c._replace(
        paused=0,
        holds=(),
        load=(),
        before=(-1, -1),
        unsettled=0,
        memory=HERE,
        voided=0,
        life=life._replace(told=life.shown, about=life.shown),
    )


def late_addition(c: Column) -> Column:
    """The router carries out an addition that was asked for earlier."""
    return c._replace(routed=1, late=0)


def replaced(c: Column, pod: int) -> Column:
    """The pool puts a new pod at this address: a fresh engine with base weights behind a fresh gate.

    The start-up promise: the engine starts only when no router lists the address and none can list it any more.
    """
    hasty = rules.quiet_enough(pending=True, quiet_seconds=0.0, needed_seconds=5.0)
    fresh = Column(
        pod=pod, admit=1, bytes=BASE, label=-9, holds=(), routed=c.routed if hasty else 0, late=c.late if hasty else 0
    )
    life = Life(shared=c.life.shared)
    return fresh._replace(
        rest=c.rest, life=life, member=c.member, views=c.views, todo=c.todo, result=c.result, wire=c.wire
    )


def close(c: Column) -> Column:
    """The gate pauses its engine on its own account."""
    return gate.paused(c)


def closes_unproven(c: Column) -> bool:
    """The gate closes an engine whose weights nothing proves, unless an order runs or is unsettled."""
    return bool(
        c.alive
        and c.up
        and c.memory == HERE
        and not c.life.booting
        and not c.holds
        and c.admit
        and c.current < 0
        and not c.unsettled
        and c.pend < 0
    )
