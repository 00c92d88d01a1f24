"""What is still true after a status was lost or set back, or an object was made anew under its name. Pure.

Gates and the sender remember the highest (pipeline UID, operation UID, generation) that they accepted, on their own
disks and in their own memory. RLPipeline.status can be wiped, or come back from a backup; then they know more than it.

Invariants:
- a generation that no operator can have made (more than a day ahead of the apiserver's clock) is evidence of nothing
  but damage: nobody claims above it;
- ``committed`` is believed only as long as nothing contradicts it: after a status was set back, an engine that may
  serve other weights, or does not answer, takes the record away, for no engine may be opened by it any more;
- what serves goes on serving: what is lost is the record, not the proof at the gates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlfleet.api.fencing import MAX_AHEAD_MS
from rlfleet.api.wire import Held, SenderStatus
from rlfleet.plan.rounds import Committed, Engine
from rlfleet.plan.verdicts import at_committed


def is_poisoned(generation: int, *, now_ms: int) -> bool:
    """No honest claim is that far ahead of the apiserver's clock (``now_ms``): gates refuse it, so nothing can act."""
    return generation > now_ms + MAX_AHEAD_MS


def _answering(engines: Iterable[Engine]) -> list[Engine]:
    return [e for e in engines if not e.gone and e.status is not None]


def poisoned_gates(engines: Iterable[Engine], *, now_ms: int) -> tuple[str, ...]:
    """Engines whose gates hold a generation that nobody can claim above (a disk that was restored, or written to)."""
    return tuple(
        e.name
        for e in _answering(engines)
        if e.status is not None and is_poisoned(e.status.fence.generation, now_ms=now_ms)
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """The last claim that gates and the sender remember; generation 0: none of them remembers any."""

    operation: str = ""
    generation: int = 0


def last_shown(engines: Iterable[Engine], sender: SenderStatus | None, *, pipeline: str, now_ms: int) -> Shown:
    """The highest claim of this pipeline (UID) that anybody holds, poisoned ones left out."""
    fences: list[Held] = [e.status.fence for e in _answering(engines) if e.status is not None]
    if sender is not None:
        fences.append(sender.fence)
    honest = [f for f in fences if f.pipeline == pipeline and not is_poisoned(f.generation, now_ms=now_ms)]
    # Enrolments carry no operation: of two equal generations the one that names its operation says more.
    best = max(honest, key=lambda f: (f.generation, f.operation), default=Held())
    return Shown(best.operation, best.generation)


def still_committed(engines: Iterable[Engine], committed: Committed | None) -> bool:
    """Nothing contradicts ``committed``: every live engine answers, and is paused or holds exactly these weights."""
    if committed is None:
        return False
    for e in engines:
        if e.gone or (e.status is None and e.unborn):
            continue
        if e.status is None:
            return False
        if e.status.holds is not None and e.status.engine.paused is not True and not at_committed(e, committed):
            return False
    return True


def unrecorded(engines: Iterable[Engine], *, pipeline: str) -> tuple[str, ...]:
    """Engines that serve proven weights under this pipeline's fence: once nothing is recorded as committed, these say
    that something was, because only a commit ever opens an engine."""
    return tuple(
        sorted(
            e.name
            for e in _answering(engines)
            if e.status is not None
            and e.status.fence.pipeline == pipeline
            and e.status.holds is not None
            and e.status.engine.paused is False
        )
    )


@dataclass(frozen=True, slots=True)
class Stray:
    """Engines whose gates hold the fence of another pipeline, which is gone and had our name.

    ``closed``: they give way to a claim above ``generation``. ``open``: they do not, and what they serve is not ours.
    """

    closed: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    generation: int = 0


def strays(engines: Iterable[Engine], *, pipeline: str, now_ms: int) -> Stray:
    """Sort out the engines that a deleted pipeline left to this one (UID ``pipeline``)."""
    closed, open_, highest = [], [], 0
    for e in _answering(engines):
        assert e.status is not None
        fence = e.status.fence
        if e.leaving or fence.pipeline in ("", pipeline) or is_poisoned(fence.generation, now_ms=now_ms):
            continue
        if e.status.engine.paused is True and all(v is False for v in e.status.routed.values()):
            closed.append(e.name)
            highest = max(highest, fence.generation)
        else:
            open_.append(e.name)
    return Stray(tuple(sorted(closed)), tuple(sorted(open_)), highest)


def is_outlived(*, uid: str, leased: int, shown: Shown) -> bool:
    """A round that is in no slot but was claimed once (its lease's generation, 0: never): its status was set back.

    Others have claimed the engines since, so what it was about to do is over. The exception is the very last claim that
    anybody remembers: then it is the pipeline's status that was lost, and the round goes on.
    """
    return leased > 0 and shown.generation > 0 and shown.operation != uid and shown.generation > leased
