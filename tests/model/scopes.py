"""What is explored: several bounded configurations, each of them to the end.

The product of all faults at once is far too large for any machine, so it is cut (tests/model/README.md says how): each
scope lets a few kinds of faults happen, at any moment and in any order, ``total`` of them at most.
"""

from __future__ import annotations

from tests.model.state import BASE, GARBAGE, OPEN, RELEASE, RELEASED, WAKE, Budget, Column, Life, Scope

#: The third engine of three, not in order at the beginning.
JOINER = Column(bytes=BASE, holds=(), label=-9, admit=0, paused=1, routed=0)  # nothing proves what it holds
CLOSED = Column(admit=0, paused=1, routed=0)  # left closed at the committed weights
SLEEPER = Column(rest=1)  # serves, and is to sleep
STRANGE = Column(bytes=9, holds=(0, 9, 9), admit=0, paused=1, routed=0)  # other bytes under the committed version
WEDGED = CLOSED._replace(unsettled=1)  # closed, too, and an order at its gate has no known end
SHARED = Column(life=Life(shared=1))  # serves, on the device that the trainer demands
ASLEEP = SHARED._replace(bytes=GARBAGE, holds=(), memory=RELEASED, admit=0, paused=1, routed=0)  # there, too


def third(column: Column) -> tuple[Column, ...]:
    """Two engines in order and this one."""
    return Column(), Column(), column


def budget(total: int, *, thaw: int = 4, **kinds: int) -> Budget:
    """At most ``total`` faults out of these; an operator that lost the Lease takes ``thaw`` more steps."""
    return Budget(total=total, thaw=thaw, **kinds)


TWO_ROUNDS = ((1, 1), (2, 1))
#: A new trainer process orders the same version, with bytes of its own.
TWO_TRAINERS = ((1, 1), (1, 2))

SCOPES = (
    Scope("two crashes", budget(2, crash=2)),
    Scope("a crash and a message", budget(2, crash=1, lost=1, duplicate=1)),
    Scope("a crash and a delayed message", budget(2, crash=1, delay=1)),
    Scope("lost, duplicated and delayed messages", budget(2, lost=1, duplicate=1, delay=1)),
    Scope("frozen leader", budget(1, thaw=1, rival=1)),
    Scope("long operations", budget(2, slow=1, gate=1, crash=1)),
    Scope("loads that go wrong, one may be missing", budget(2, bad=1, crash=1), max_unavailable=1),
    Scope("engines die", budget(1, kill=1), max_unavailable=1),
    Scope("a silent gate", budget(2, silence=1, crash=1)),
    Scope("a silent gate, one may be missing", budget(1, silence=1), max_unavailable=1),
    Scope("lost status", budget(2, wipe=1, crash=1)),
    Scope("lost status, silent gate", budget(2, wipe=1, silence=1), max_unavailable=1),
    Scope(
        "a gate that takes no orders, one may be missing",
        budget(2, bad=1, crash=1),
        columns=third(WEDGED),
        max_unavailable=1,
    ),
    Scope("two trainers", budget(1, sender=1), versions=TWO_TRAINERS),
    Scope("other bytes under the same version", budget(2, cancel=1, crash=1), columns=third(STRANGE)),
    Scope("a second round", budget(1, slow=1), versions=TWO_ROUNDS, on_failure="Hold"),
    Scope("superseded while holding", budget(1, bad=1), versions=TWO_ROUNDS, on_failure="Hold"),
    Scope("cancelled", budget(2, cancel=1, crash=1)),
    Scope("removed by force", budget(2, remove=1, crash=1)),
    Scope("engines sleep and wake", budget(2, wish=1, crash=1), elastic=True, later=True, columns=(Column(), SLEEPER)),
    Scope(
        "a fleet asleep", budget(1, wish=1, crash=1, silence=1), elastic=True, later=True, columns=(SLEEPER, SLEEPER)
    ),
    Scope("an engine is evicted", budget(2, evict=1, crash=1, bad=1), engines=2, bad_loads=("failed",)),
    Scope("an engine starts again in place", budget(1, restart=1)),
    Scope("a quarantine", budget(2, shut=2, crash=1), engines=2, later=True),
    Scope("a quarantine in a round", budget(2, shut=1, crash=1, cancel=1), engines=2),
    Scope("a trainer's demand", budget(3, demand=2, crash=1), later=True, columns=(Column(), SHARED)),
    Scope(
        "a wake that comes late",
        budget(3, demand=2, delay=1),
        later=True,
        columns=(Column(), ASLEEP),
        grants=((1, 1),),
    ),
    Scope(
        "a demand while holding",
        budget(3, bad=1, demand=1, crash=1),
        columns=(Column(), SHARED),
        bad_loads=("failed",),
        on_failure="Hold",
    ),
    Scope(
        "a grant while holding",
        budget(3, bad=1, demand=1, crash=1, cancel=1),
        columns=(Column(), Column(), ASLEEP._replace(rest=1)),
        bad_loads=("failed",),
        on_failure="Hold",
    ),
    Scope("a late joiner", budget(2, crash=1, lost=1), columns=third(JOINER), max_unavailable=1),
)

#: For `make fault`: more faults at once.
LARGE = (
    Scope(
        "large: long operations of the router",
        budget(2, slow=1, gate=1, kill=1),
        columns=third(CLOSED),
        slow_steps=(OPEN,),
    ),
    Scope(
        "large: a frozen leader puts to sleep",
        budget(1, thaw=2, rival=1),
        elastic=True,
        later=True,
        columns=third(SLEEPER),
    ),
    Scope(
        "large: releases that take their time",
        budget(3, slow=1, gate=1, crash=1, wish=1),
        elastic=True,
        later=True,
        columns=third(SLEEPER),
        slow_steps=(RELEASE, WAKE),
    ),
    Scope(
        "large: a fleet asleep",
        budget(2, wish=1, crash=1, silence=1, delay=1),
        elastic=True,
        later=True,
        columns=(SLEEPER, SLEEPER),
    ),
    Scope("large: frozen leader, three steps", budget(1, thaw=3, rival=1)),
    Scope("large: frozen leader and a message", budget(2, thaw=1, rival=1, delay=1)),
    Scope("large: loads that go wrong, and a message", budget(2, bad=1, crash=1, lost=1)),
    Scope("large: takeovers and messages", budget(3, crash=2, lost=1, duplicate=1, delay=1)),
    Scope("large: frozen leader, five steps", budget(1, thaw=5, rival=1)),
    Scope("large: engines die", budget(2, kill=1, crash=1, delay=1), max_unavailable=1),
    Scope("large: silent gates", budget(2, silence=1, crash=1, delay=1), max_unavailable=1),
    Scope("large: a second round", budget(2, slow=1, crash=1, bad=1), versions=TWO_ROUNDS, on_failure="Hold"),
    Scope("large: lost status", budget(2, wipe=1, silence=1, crash=1, delay=1), max_unavailable=1),
    Scope("large: long operations", budget(3, slow=2, gate=1, crash=1, delay=1)),
    # Not "garbage": with three faults one engine can be the only one of its layout that loaded, and nobody confirms it.
    Scope(
        "large: loads that go wrong",
        budget(3, bad=1, crash=2, lost=1, slow=1),
        max_unavailable=1,
        bad_loads=("failed", "nothing", "unknown"),
    ),
    Scope("large: one of three engines is evicted", budget(2, evict=1, crash=1)),
    Scope("large: an engine starts again in place", budget(2, restart=1, crash=1), engines=2),
    Scope("large: a quarantine", budget(3, shut=2, crash=1), engines=2, later=True),
    Scope("large: a quarantine and messages", budget(2, shut=1, silence=1, delay=1, lost=1), engines=2, later=True),
    Scope(
        "large: demands and messages",
        budget(3, demand=2, crash=1, delay=1, lost=1),
        later=True,
        columns=(Column(), SHARED),
    ),
    Scope(
        "large: a wake that comes late",
        budget(4, demand=2, delay=1, lost=1),
        later=True,
        columns=(Column(), ASLEEP),
        grants=((1, 1),),
    ),
    Scope(
        "large: a demand while holding",
        budget(3, bad=1, demand=2, crash=1),
        versions=TWO_ROUNDS,
        columns=(Column(), SHARED),
        bad_loads=("failed",),
        on_failure="Hold",
    ),
    Scope("large: two trainers", budget(3, sender=1, crash=1, delay=1, slow=1), versions=TWO_TRAINERS),
)

#: From every state of these the end must be reachable without another fault.
ENDING = (
    Scope("takeovers and a lost message", budget(2, crash=1, lost=1)),
    Scope("a load that goes wrong", budget(2, bad=1, crash=1), max_unavailable=1),
    Scope("engines sleep", budget(1, wish=1, crash=1), elastic=True, later=True, columns=(Column(), SLEEPER)),
    Scope("an engine is evicted", budget(1, evict=1, crash=1), engines=2),
    Scope("a quarantine", budget(2, shut=2, crash=1), engines=2, later=True),
    Scope("a trainer's demand", budget(2, demand=1, crash=1), later=True, columns=(Column(), SHARED)),
    Scope(
        "a wake that comes late",
        budget(3, demand=2, delay=1),
        later=True,
        columns=(Column(), ASLEEP),
        grants=((1, 1),),
    ),
    Scope(
        "a demand while holding",
        budget(2, bad=1, demand=1),
        columns=(Column(), SHARED),
        bad_loads=("failed",),
        on_failure="Hold",
    ),
)

#: The same for `make fault`.
ENDING_LARGE = (
    Scope("large: frozen leader", budget(1, thaw=1, rival=1)),
    Scope("large: an engine dies", budget(2, kill=1, crash=1)),
    Scope("large: a lost status", budget(2, wipe=1, crash=1)),
    Scope("large: a gate restarts in a long operation", budget(3, slow=1, gate=1, crash=1)),
    Scope("large: a silent gate", budget(1, silence=1)),
    Scope("large: an engine starts again in place", budget(1, restart=1), engines=2),
    Scope("large: a new trainer", budget(1, sender=1), versions=TWO_TRAINERS),
    Scope("large: cancelled, or removed by force", budget(2, cancel=1, remove=1, crash=1)),
)
