"""The end of our objects: what a deletion still waits for, and when it stops waiting. Pure.

Invariants:
- a finalizer of ours never holds an object longer than ``CEILING_SECONDS``, whatever it waits for;
- an engine counts as closed only if its own gate said, under the final claim, that it is paused and in no router; an
  engine that does not answer is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api import labels
from rlfleet.api.timestamps import epoch_ms
from rlfleet.api.wire import EngineState
from rlfleet.plan.rounds import TERMINAL, Engine

#: Seconds from an object's deletionTimestamp after which our finalizer goes in any case.
CEILING_SECONDS: Final = 300
#: Our finalizer on each kind, by the plural of the kind.
FINALIZERS: Final[Mapping[str, str]] = {
    "rlpipelines": labels.PIPELINE_FINALIZER,
    "enginepools": labels.POOL_FINALIZER,
    "syncrounds": labels.ROUND_FINALIZER,
}
#: Kinds of work in the slot that are SyncRounds.
_ROUNDS: Final = frozenset({"Refresh", "CatchUp"})


def is_deleting(obj: Mapping[str, Any]) -> bool:
    """Somebody has asked for the object's end."""
    return "deletionTimestamp" in obj["metadata"]


def holds_up(obj: Mapping[str, Any], finalizer: str) -> bool:
    """The object is being deleted and waits for this finalizer."""
    return is_deleting(obj) and finalizer in (obj["metadata"].get("finalizers") or [])


def seconds_left(obj: Mapping[str, Any], *, now_ms: int) -> float:
    """Seconds until the ceiling of an object that is being deleted; 0 once it is reached.

    ``now_ms``: the apiserver's clock, which also wrote the deletionTimestamp.
    """
    passed = (now_ms - epoch_ms(obj["metadata"]["deletionTimestamp"])) / 1000
    return max(0.0, CEILING_SECONDS - passed)


def overdue(obj: Mapping[str, Any], finalizer: str, *, now_ms: int) -> bool:
    """Our finalizer has held the object for as long as it ever may: it goes now."""
    return holds_up(obj, finalizer) and seconds_left(obj, now_ms=now_ms) <= 0


def uses_engines(active: Mapping[str, Any] | None) -> bool:
    """A round owns the slot. Other work there takes engines out of service anyway, or can be done without them."""
    return active is not None and active.get("kind") in _ROUNDS


def pool_waits_for(active: Mapping[str, Any] | None, pods: Sequence[str], routers: Sequence[str]) -> str:
    """What a pool that is being deleted waits for, in words; empty: nothing.

    A round that may use its engines ends first: an engine that is taken out of a transfer under way can cost the whole
    round. Other work in the slot does not hold a pool up. ``routers``: what went wrong at routers.
    """
    if pods and uses_engines(active):
        assert active is not None
        return f"waits for round {active['name']}, which may use its engines"
    if routers:
        return f"waits for its engines to leave the routers: {routers[0]}"[:900]
    if pods:
        return f"waits for {len(pods)} pods to end: {', '.join(sorted(pods)[:4])}"
    return ""


def belongs(round_: Mapping[str, Any], *, pipeline: str) -> bool:
    """The round is not one of an earlier pipeline of the same name. ``pipeline``: UID of the present one."""
    owners = round_["metadata"].get("ownerReferences") or []
    return not any(o.get("kind") == "RLPipeline" and o.get("uid") != pipeline for o in owners)


@dataclass(frozen=True, slots=True)
class StillOpen:
    """An engine that may serve, and what is known of it. ``answers``: its gate can be given orders."""

    engine: str
    why: str
    answers: bool


def still_open(engines: Iterable[Engine], *, pipeline: str) -> tuple[StillOpen, ...]:
    """Engines of a pipeline that is going (UID ``pipeline``) that are not proven closed.

    Not counted: pods that are gone, pods of which nothing ever ran, and engines whose gates belong to another pipeline
    of the same name, which is none of ours to close.
    """
    found = []
    for e in sorted(engines, key=lambda e: e.name):
        if e.gone or (e.status is None and e.unborn):
            continue
        if e.status is None:
            found.append(StillOpen(e.name, e.refusal or "its gate does not answer", False))
        elif e.status.fence.pipeline in ("", pipeline) and (why := _open(e)):
            found.append(StillOpen(e.name, why, True))
    return tuple(found)


def _open(e: Engine) -> str:
    """Why the engine does not count as closed; empty when it does."""
    assert e.status is not None
    if e.status.in_flight:
        return "an operation runs"
    listed = sorted(name for name, seen in e.status.routed.items() if seen is not False)
    if listed:
        return f"router {', '.join(listed)} lists it, or does not say"
    if e.status.engine.paused is True:
        return ""
    if e.status.holds is None and e.status.engine.state is not EngineState.READY:
        return ""  # it has never served, and its gate pauses it as soon as it is up
    return "it is not paused" if e.status.engine.paused is False else "whether it is paused is not known"


def waits_for(
    rounds: Iterable[Mapping[str, Any]], active: Mapping[str, Any] | None, engines: Iterable[StillOpen]
) -> str:
    """What a pipeline that is being deleted waits for, in words; empty: nothing of ours."""
    if active and uses_engines(active):
        phase = next(
            (
                str((r.get("status") or {}).get("phase") or "Pending")
                for r in rounds
                if r["metadata"]["uid"] == active["uid"]
            ),
            "",
        )
        return f"waits for round {active['name']} to be settled" + (f" (it is in {phase})" if phase else "")
    unsettled = sorted(r["metadata"]["name"] for r in rounds if (r.get("status") or {}).get("phase") not in TERMINAL)
    if unsettled:
        return f"waits for rounds to be settled: {', '.join(unsettled[:4])}"
    left = list(engines)
    if left:
        names = "; ".join(f"{o.engine}: {o.why}" for o in left[:4])
        return f"waits for {len(left)} engines to be closed: {names}"[:900]
    return ""
