"""Triage of a pipeline's unclaimed rounds, from what was observed last: the arguments that ``plan.triage`` is given.

Invariant: the operator and a dry run ask through here, so they can not be told different things.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.plan.elastic import awaited
from rlfleet.plan.rounds import Engine, RoundRef, can_join
from rlfleet.plan.triage import Triage, triage

if TYPE_CHECKING:
    from rlfleet.control.context import Context


def triage_now(
    ctx: Context,
    ledger: Ledger,
    sender: SenderLink,
    engines: Iterable[Engine],
    rounds: Iterable[RoundRef],
    *,
    expected: int,
    blocked: tuple[Reason, str] | None,
    replaced: frozenset[str] = frozenset(),
) -> Triage:
    """Sort ``rounds``. ``engines`` in ``replaced`` take part in nothing; ``blocked``: why nothing may be claimed."""
    engines = list(engines)
    live = [e for e in engines if not e.gone and not e.dropped and e.name not in replaced]
    return triage(
        rounds,
        committed=ledger.committed,
        sender=None if blocked else sender.status,
        sender_problem=blocked or sender.problem,
        now_ms=ctx.now_ms(),
        pending_ms=int(ledger.spec["sync"]["deadlines"]["pendingSeconds"]) * 1000,
        joinable=sum(can_join(e) for e in live),
        expected=awaited(engines, pods=expected),
    )
