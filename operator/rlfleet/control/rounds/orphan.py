"""A claim whose round object is gone: deleted by force, or lost with a restored cluster.

Invariant (DESIGN section 5, One owner): its takeover takes all live engines as members, applies the resume rule and
frees the slot. It never commits anything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller
from rlfleet.control.rounds.fleet import Fleet, ok
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.plan.verdicts import at_committed

if TYPE_CHECKING:
    from rlfleet.control.context import Context

#: Seconds for engines to end what runs, resume and be routed.
SECONDS = 60.0


class StatusOf(Protocol):
    """Makes the pipeline's status from an observed fleet (control.pipeline.PipelineView)."""

    def bind(self, fleet: Fleet) -> Any:
        """Look at this fleet."""

    def __call__(self, *, trouble: tuple[Reason, str] | None) -> dict[str, Any]:
        """The status fields."""


async def settle_orphan(ctx: Context, ledger: Ledger, view: StatusOf) -> None:
    """Raise the fence, wait for what runs, resume what is proven at ``committed``, close the rest, free the slot."""
    active = ledger.status["activeOperation"]
    uid, name = str(active["uid"]), str(active["name"])
    await ledger.claim({"kind": "Repair", "name": name, "uid": uid, "committed": bool(active.get("committed"))})
    caller = Caller(ledger.uid, uid, ledger.generation)
    fleet = Fleet(ctx, ledger.namespace, ledger.name, ledger.uid)
    await fleet.read_pods()
    await fleet.fence(caller)
    deadline = ctx.clock.monotonic() + SECONDS
    while ctx.clock.monotonic() < deadline and any(e.status and e.status.in_flight for e in fleet.engines.values()):
        await asyncio.sleep(0.2)
        await fleet.poll()
    committed = ledger.committed
    live = [n for n in fleet.live() if fleet.engines[n].status is not None]
    resume = [n for n in live if at_committed(fleet.engines[n], committed)]
    close = [n for n in live if n not in resume]
    orders: dict[str, Any] = {}
    if committed is not None:
        order = wire.ResumeOrder(version=committed.version, manifest_digest=committed.manifest_digest)
        orders = dict.fromkeys(resume, order)
    resumed, _ = await asyncio.gather(
        fleet.run(caller, "ResumeOrphan", orders, deadline=deadline),
        fleet.run(caller, "Close", dict.fromkeys(close, wire.CloseOrder()), deadline=deadline),
    )
    await fleet.poll()
    unrouted = [
        n
        for n, r in resumed.items()
        if ok(r)
        and (status := fleet.engines[n].status) is not None
        and any(v is not True for v in status.routed.values())
    ]
    await fleet.run(caller, "Open", dict.fromkeys(unrouted, wire.OpenOrder()), deadline=deadline)
    await fleet.poll()
    view.bind(fleet)
    trouble = (Reason.ROUND_GONE, f"round {name} vanished while it was claimed; {len(close)} engines stay closed")
    await ledger.write_pipeline({"activeOperation": None, **view(trouble=trouble)})
