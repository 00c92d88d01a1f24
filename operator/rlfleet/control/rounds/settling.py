"""Ending a round that nobody drives: its terminal status, our finalizer off it, and the ledger.

Invariant: such a round is written as it was read (no claim covers it), so it is settled at most once.
"""

from __future__ import annotations

from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.syncround_status import AttemptOp
from rlfleet.control.rounds.finished import finished
from rlfleet.control.rounds.ledger import Ledger
from rlfleet.control.rounds.outcome import settled

Obj = dict[str, Any]


async def end_round(
    ledger: Ledger,
    obj: Obj,
    *,
    outcome: str,
    reason: Reason,
    message: str,
    stage: str | None = None,
    committed: bool | None = None,
) -> None:
    """Settle this round through ``ledger``, which looks at it from then on. ``stage``, ``committed``: see ``settled``.

    RoundGone: it was deleted by force. FenceLost: somebody moved it since it was read.
    """
    ledger.round = obj
    status = settled(
        obj,
        outcome=outcome,
        stage=stage,
        reason=reason,
        message=message,
        committed=committed,
        now_ms=ledger.ctx.now_ms(),
    )
    await ledger.write_round(status, op=AttemptOp.SETTLE, what=outcome)
    finished(ledger.ctx, ledger.round)
    await ledger.set_finalizer(False)
