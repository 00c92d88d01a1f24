"""The takeover barrier: before any decision everybody has stored our generation, and nothing older runs on.

Invariant (DESIGN section 5): what is decided after the barrier rests on answers that were given under our generation;
whoever gave none is unknown and stays closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.peers import PeerError, Refused
from rlfleet.control.rounds.ledger import FenceLost

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor

#: Claims tried when gates show higher generations than the pipeline's status (a lost or restored status).
CLAIM_TRIES = 5


async def pass_barrier(run: Executor, *, takeover: bool) -> None:
    """The takeover barrier: our generation at round, sender and every gate; then operations in flight end.

    A gate or sender that refuses us names a generation that is not below ours. Either we are deposed (the pipeline's
    fence is above ours), or the pipeline's status was lost (the fence is ours): then claim above what was shown.
    """
    for _ in range(CLAIM_TRIES):
        if takeover:
            await run.phase(
                str(run.ledger.round_status.get("phase") or "Pending"),
                Reason.OPERATOR_RESTARTED,
                "taken over: asking every engine what it holds",
            )
        await run.fleet.read_pods()
        above, sender_above = await asyncio.gather(run.fleet.fence(run.caller), _fence_sender(run))
        above = max(above, sender_above)
        if above < run.ledger.generation:
            break
        await run.ledger.read_pipeline()
        active = run.ledger.status.get("activeOperation") or {}
        if int(run.ledger.status.get("fence") or 0) != run.ledger.generation:
            raise FenceLost(f"deposed: gates hold generation {above}")
        await run.ledger.claim({k: active[k] for k in ("kind", "name", "uid", "committed") if k in active}, above=above)
    else:
        raise FenceLost("gates keep showing higher generations than the pipeline's status")
    await _await_in_flight(run)


async def _fence_sender(run: Executor) -> int:
    if run.sender.peer is None:
        return 0
    try:
        run.sender.status = await run.ctx.peers.sender_fence(run.sender.peer, run.caller)
    except Refused as e:
        return e.body.held.generation if e.body.held is not None else 0
    except PeerError as e:
        run.sender.status = None
        run.sender.problem = Reason.SENDER_UNREACHABLE, str(e)
    return 0


async def _await_in_flight(run: Executor) -> None:
    """Operations that somebody before us started end by themselves; wait for that, then read the gates again."""
    busy = {n: e.status.in_flight for n, e in run.fleet.engines.items() if e.status and e.status.in_flight}
    if not busy:
        return
    deadline = run.deadline("pausedSeconds", "pausedAt")
    left = set(busy)
    while left and run.ctx.clock.monotonic() < deadline:
        await run.fleet.poll(left)
        left = {n for n in left if (e := run.fleet.engines.get(n)) is not None and e.status and e.status.in_flight}
        if left:
            await asyncio.sleep(0.2)
    await run.fleet.poll(list(busy))
