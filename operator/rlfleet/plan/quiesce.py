"""How running requests are held while weights change: which modes an engine can do, and what they cost. Pure.

Invariant: a mode that an engine cannot do is refused before anything is touched, with the engine and the remedy named;
it is never replaced by another one.

Without a mode in the spec each gate takes its engine type's own: Retract on SGLang, Keep on vLLM and Dynamo, so that a
pipeline whose pools are of several types loses no request in any of them. On the latter the two are one: a kept request
loses its cache and is recomputed when it goes on, so a pipeline may also name Retract for all of its engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import PauseMode
from rlfleet.plan.rounds import Engine
from rlfleet.plan.transport import Refusal


def wanted_mode(sync: Mapping[str, Any]) -> PauseMode | None:
    """``spec.sync.quiesce.mode``; None: the default of each engine's type."""
    mode = (sync.get("quiesce") or {}).get("mode")
    return PauseMode(mode) if mode else None


def leaves_routers(mode: PauseMode | None) -> bool:
    """Whether engines are taken out of their routers as well.

    A request that is sent to an engine which drains or aborts would wait there for the whole round, or end.
    """
    return mode in (PauseMode.ABORT, PauseMode.WAIT)


def drain_allowance(sync: Mapping[str, Any]) -> int:
    """Seconds that draining adds to pausedSeconds: engines still work for their requests meanwhile."""
    return int(sync.get("drainSeconds") or 0) if wanted_mode(sync) is PauseMode.WAIT else 0


def refuse_mode(engines: Iterable[Engine], mode: PauseMode | None) -> Refusal | None:
    """Why these engines cannot be paused in this mode; None: they can."""
    for e in engines:
        if e.status is None:
            continue
        pauses = {c for c in e.status.capabilities if c.startswith("Pause/")}
        # A gate that says nothing of pauses is asked: it refuses by itself, before it touches its engine.
        if mode is None or not pauses or f"Pause/{mode.value}" in pauses:
            continue
        kind = e.status.engine.type or "its engine"
        why = (
            "SGLang never flushes a cache that requests keep, so old and new weights would mix in it"
            if mode is PauseMode.KEEP and kind == "SGLang"
            else f"{kind} {e.status.engine.version or ''} can do {', '.join(sorted(p[6:] for p in pauses))}".strip()
        )
        return Refusal(
            Reason.QUIESCE_UNSUPPORTED,
            f"engine {e.name} can not be paused with spec.sync.quiesce.mode {mode.value}: {why}; leave the mode out to "
            "use the default of each engine's type",
        )
    return None
