"""Engines that are kept out of service: by a person, with an annotation on their pods (api.labels.QUARANTINE), or
because their Dynamo frontend does not list them as it should.

Invariants:
- a quarantined engine is a member of no round and is never resumed or routed; its pod stays for whoever looks into it;
- it stays fenced and counts as "may still serve" until it is proven closed, as any other engine does;
- one whose gate is silent, or whose operation has no known end, is left as it is and looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.plan.asleep import is_touched
from rlfleet.plan.drops import is_closed
from rlfleet.plan.elastic import BATCH, idle_and_ours
from rlfleet.plan.rounds import Engine


def quarantine_of(pod: Mapping[str, Any]) -> str | None:
    """Why a person keeps the pod's engine out of service; None: nobody does."""
    text = (pod["metadata"].get("annotations") or {}).get(labels.QUARANTINE)
    if text is None:
        return None
    return str(text).strip()[: labels.MAX_QUARANTINE_REASON] or "no reason given"


def to_close(e: Engine) -> bool:
    """It is kept out of service, awake, and not proven closed."""
    return e.shut and not e.gone and not e.leaving and not e.unborn and not is_touched(e.status) and not is_closed(e)


def plan_quarantine(engines: Iterable[Engine], *, pipeline: str) -> tuple[str, ...]:
    """Names of the engines that are closed now, by one claim."""
    due = [e for e in engines if to_close(e) and not e.unwanted and idle_and_ours(e, pipeline)]
    return tuple(e.name for e in sorted(due, key=lambda e: (e.pool, e.index, e.name)))[:BATCH]


def why_shut(engines: Sequence[Engine]) -> tuple[Reason, str]:
    """What is said of engines while they are closed: at least one."""
    names = ", ".join(e.name for e in engines[:4])
    asked = [e for e in engines if e.quarantined]
    if asked:
        return Reason.QUARANTINE_REQUESTED, f"{names} closed: a person keeps them out of service"
    reason, _, why = engines[0].kept_out.partition(": ")
    return Reason.parse(reason), f"{names} closed: {why}"
