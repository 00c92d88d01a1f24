"""Work of a pipeline on its engines that no round asked for, in the pipeline's own name.

Invariant: the same as for a round. One conditional write claims the slot and raises the fence, every gate that can be
reached stores it before an order is given, and whoever shows a higher generation is claimed above, unless that
generation is one that no operator can have made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlfleet.control.peers import Caller
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import FenceLost, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlfleet.control.context import Context

#: Claims tried when gates show higher generations than the pipeline's status.
CLAIM_TRIES = 5


class Outside:
    """One claim whose operation is the pipeline itself (its UID)."""

    def __init__(self, ctx: Context, ledger: Ledger, *, kind: str) -> None:
        self.ctx = ctx
        self.ledger = ledger
        self.fleet = Fleet(ctx, ledger.namespace, ledger.name, ledger.uid)
        self._operation = {"kind": kind, "name": ledger.name, "uid": ledger.uid, "committed": False}

    @property
    def caller(self) -> Caller:
        """The fence that every call carries."""
        return Caller(self.ledger.uid, self.ledger.uid, self.ledger.generation)

    async def claim(self, *, above: int = 0, extra: dict[str, Any] | None = None) -> None:
        """Take the slot, above every generation that was shown."""
        await self.ledger.claim(self._operation, above=above, extra=extra)

    async def fence_everybody(self) -> None:
        """Have every gate store this claim's generation and say how it is; FenceLost when we are deposed."""
        for _ in range(CLAIM_TRIES):
            await self.fleet.read_pods()
            above = await self.fleet.fence(self.caller)
            if above < self.ledger.generation:
                return
            await self.ledger.still_ours()
            await self.claim(above=above)
        raise FenceLost("gates keep showing higher generations than the pipeline's status")

    def paused(self, name: str) -> bool:
        """The engine's gate has just said that it is paused."""
        status = self.fleet.engines[name].status
        return status is not None and status.engine.paused is True

    async def order(self, step: str, names: Iterable[str], order: Any, *, deadline: float) -> None:
        """Give some engines an order; what came of it is read from the gates afterwards, never from the answer."""
        orders = dict.fromkeys(names, order)
        if orders:
            await self.fleet.run(self.caller, step, orders, deadline=deadline, again=True)
