"""Engines that are to go, by a shrink or with their pool, seen from a round that owns them (DESIGN 5, One owner).

Invariant: a wish is read from the pool's spec, live; a round drops whom it concerns before weights move, or closes it
instead of reopening it, and then removes its pod (one that is to sleep keeps it, and is put to sleep after the round),
so that rounds that follow each other at once never starve a shrink.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfleet.api import labels
from rlfleet.plan import template
from rlfleet.plan.adopt import adopts
from rlfleet.plan.elastic import on_devices, shrinks_by_delete, wanted_pods
from rlfleet.plan.rounds import Engine
from rlfleet.plan.topology import Device


def is_unwanted(
    pod: Mapping[str, Any], pool: Mapping[str, Any] | None, *, held: frozenset[Device] = frozenset()
) -> bool:
    """The pod's index is beyond what its pool wants, or the pool goes. ``pool`` None: it is gone, with all its pods.

    ``held``: devices that a trainer demands; a pool that shrinks by deletion leaves them.
    """
    if pool is None or "deletionTimestamp" in pool["metadata"]:
        return True
    if adopts(pool):
        return False
    try:
        index = int((pod["metadata"].get("labels") or {}).get(labels.ENGINE_INDEX, ""))
    except ValueError:
        return False  # a label that somebody wrote over says nothing about the pool's wish
    wanted = wanted_pods(pool)
    if template.is_pinned(pool):
        wanted = min(wanted, len(template.assignments(pool)))
    return index >= wanted or (shrinks_by_delete(pool) and index in on_devices(pool, held))


def is_closed(e: Engine) -> bool:
    """Proven closed: paused, nothing in flight, and read back to be in no router."""
    return (
        e.status is not None
        and not e.status.in_flight
        and e.status.engine.paused is True
        and all(v is False for v in e.status.routed.values())
    )


def to_close(e: Engine) -> bool:
    """A round that owns it closes it: it is to go, to sleep or to be out of service, and is not proven closed."""
    unwelcome = e.unwanted or e.resting or e.shut
    return unwelcome and not e.gone and not e.leaving and e.status is not None and not is_closed(e)


def removable(e: Engine) -> bool:
    """A round that owns it may delete the pod of an unwanted engine: it is proven closed, and ours.

    Closed, so no request is lost that was not given up before.
    """
    return e.unwanted and e.owned and not e.gone and not e.leaving and is_closed(e)
