"""Telling that a round ended: counters, its trace, and its line in the ledger.

Invariant: it is told after the end was written, with the object as it was written, so a line never claims what the
apiserver does not have. A successor that finds a round settled writes the line again (``again``): readers take the
first of a round UID. The line has the whole status and stays when the object is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlfleet.plan.summary import ledger_row, summarize

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger("rlfleet.ledger")

#: The ``event`` of a ledger line; stable, so that log stores can be asked for it.
EVENT = "RoundLedger"


def finished(ctx: Context, obj: dict[str, Any], *, again: bool = False) -> None:
    """Tell that this SyncRound, with its terminal status, ended. ``again``: a predecessor may have told it."""
    ended, meta = summarize(obj), obj["metadata"]
    log.info("round %s: %s", meta["name"], ended.outcome, extra={"event": EVENT, **ledger_row(obj)})
    if again:
        return  # counted, if at all, by a process whose counters are gone with it
    ctx.metrics.round_ended(meta["namespace"], obj["spec"]["pipeline"], ended)
    ctx.traces.round_ended(obj)
