"""Dropping engines that are to go from a round that owns them: close them, then remove their pods.

Invariant: a pod is removed here only when its engine is proven closed (plan.drops.removable), under its UID; whatever
can not be closed is left to its pool, or to the fence that the commit waits for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.control.rounds.ledger import API_SECONDS
from rlfleet.kube.errors import ApiError, Conflict, NotFound
from rlfleet.kube.resources import PODS
from rlfleet.plan.drops import removable, to_close

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor

log = logging.getLogger(__name__)

#: Seconds for requests of a dropped engine to end, while others are paused for the round.
DRAIN_SECONDS = 5.0
#: Seconds to close it, after that.
CLOSE_SECONDS = 15.0


async def drop_unwanted(run: Executor) -> None:
    """Close every engine that is to go or to sleep: out of the routers, drained for a moment, paused."""
    fleet = run.fleet
    names = [n for n, e in fleet.engines.items() if to_close(e)]
    if not names:
        return
    drain = min(DRAIN_SECONDS, float(run.ledger.spec["sync"]["drainSeconds"]))
    deadline = run.ctx.clock.monotonic() + drain + CLOSE_SECONDS
    await fleet.run(run.caller, "Close", dict.fromkeys(names, wire.CloseOrder()), deadline=deadline, again=True)
    order = wire.PauseOrder(mode=wire.PauseMode.WAIT, drain_seconds=drain)
    await fleet.run(run.caller, "Pause", dict.fromkeys(names, order), deadline=deadline, again=True)
    await fleet.poll(names)


async def remove_dropped(run: Executor) -> None:
    """Delete the pods of engines that are to go and are closed."""
    for name, e in sorted(run.fleet.engines.items()):
        if not removable(e):
            continue
        try:
            await run.ledger.kube.delete(PODS, run.ledger.namespace, name, uid=e.pod_uid, timeout=API_SECONDS)
        except (NotFound, Conflict):
            continue
        except ApiError as error:
            # Its pool removes it when nobody owns the engines.
            log.warning("dropped engine not removed", extra={"pod": name, "why": str(error)})
            continue
        run.ctx.pods.note_delete(run.ledger.namespace, name, e.pod_uid)
        log.info("dropped and removed", extra={"pod": name, "roundUID": run.round_uid})
