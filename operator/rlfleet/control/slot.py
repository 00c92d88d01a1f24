"""Taking the slot of a pipeline for work outside rounds: repair of engines, recovery of identity, deletion.

Invariants (DESIGN section 5, Fence and One owner):
- the fence is raised, and every gate is told, before the first order: whoever led before can change nothing any more;
- what was ordered before that has ended, or has had the time that it may take, before anything is decided;
- nobody claims above a generation that no operator can have made: a gate that shows one is left out, not believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlfleet.control.peers import Caller
from rlfleet.control.rounds.barrier import pass_barrier
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import Ledger

if TYPE_CHECKING:
    from rlfleet.control.context import Context

Obj = dict[str, Any]


def own_work(ledger: Ledger, kind: str) -> Obj:
    """An operation whose UID is the pipeline's own: work that no round and no repair asked for."""
    return {"kind": kind, "name": ledger.name, "uid": ledger.uid, "committed": False}


def paused_budget(ctx: Context, ledger: Ledger) -> float:
    """Loop time until which work outside rounds may last: it keeps engines from serving no longer than a round may."""
    return ctx.clock.monotonic() + float(ledger.spec["sync"]["deadlines"]["pausedSeconds"])


async def take_slot(
    ledger: Ledger,
    fleet: Fleet,
    operation: Obj,
    *,
    deadline: Callable[[], float],
    above: int = 0,
    extra: Obj | None = None,
) -> Caller:
    """Claim the slot for ``operation`` (kind, name, uid, committed) and pass the barrier.

    ``deadline``: loop time until which operations of somebody before us are waited for. ``above``: the highest
    generation that was shown; ``extra``: status that is written with the claim.
    """
    ledger.round = None
    await ledger.claim(operation, above=above, extra=extra)
    return await keep_slot(ledger, fleet, operation, deadline=deadline)


async def keep_slot(ledger: Ledger, fleet: Fleet, operation: Obj, *, deadline: Callable[[], float]) -> Caller:
    """Pass the barrier once more under the claim that we hold: gates that have come or come back are told, too.

    There is no round whose status could carry the generation. The sender is left alone: nothing outside rounds asks it
    for weights.
    """

    def caller() -> Caller:
        return Caller(ledger.uid, str(operation["uid"]), ledger.generation)

    async def fence() -> int:
        await fleet.read_pods()
        return await fleet.fence(caller())

    await pass_barrier(
        ledger,
        fence=fence,
        claim_above=lambda shown: ledger.claim(operation, above=shown),
        wait=lambda: fleet.await_in_flight(deadline),
    )
    return caller()
