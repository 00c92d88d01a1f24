"""The takeover barrier: before any decision everybody has stored our generation, and nothing older runs on.

Invariant (DESIGN section 5): what is decided after the barrier rests on answers that were given under our generation;
whoever gave none is unknown and stays closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.peers import PeerError, Refused
from rlfleet.control.rounds.ledger import FenceLost
from rlfleet.plan.claims import Barrier, Step, barrier_step
from rlfleet.plan.identity import is_poisoned

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor


async def pass_barrier(run: Executor, *, takeover: bool) -> None:
    """Carry out what ``plan.claims.barrier_step`` says until it says that decisions may be made."""
    # A round that was leased before counts as taken over, even where the claim on it was lost with the status.
    needs_round = takeover or bool(run.ledger.round_status.get("lease"))
    at = Barrier(run.ledger.generation, needs_round)
    while (step := barrier_step(at)) is not Step.DECIDE:
        if step is Step.WRITE_ROUND:
            await run.phase(
                str(run.ledger.round_status.get("phase") or "Pending"),
                Reason.OPERATOR_RESTARTED,
                "taken over: asking every engine what it holds",
            )
            at = replace(at, written=True)
        elif step is Step.FENCE:
            await run.fleet.read_pods()
            shown = max(await asyncio.gather(run.fleet.fence(run.caller), _fence_sender(run)))
            at = replace(at, fenced=True, shown=shown)
        elif step is Step.READ_PIPELINE:
            await run.ledger.read_pipeline()
            at = replace(at, fence=int(run.ledger.status.get("fence") or 0))
        elif step is Step.CLAIM_ABOVE:
            # The status was lost, or somebody acted without a claim: only whoever leads may go above that.
            run.ctx.guard.token()
            active = run.ledger.status.get("activeOperation") or {}
            await run.ledger.claim(
                {k: active[k] for k in ("kind", "name", "uid", "committed") if k in active}, above=at.shown
            )
            at = Barrier(run.ledger.generation, needs_round, claims=at.claims + 1)
        elif step is Step.WAIT:
            await _await_in_flight(run)
            at = replace(at, waited=True)
        else:
            await run.ledger.still_ours()  # says who owns the round, and records that we were refused
            raise FenceLost(f"deposed: generation {at.shown} is held, ours was {at.generation}")


async def _fence_sender(run: Executor) -> int:
    if run.sender.peer is None:
        return 0
    try:
        run.sender.status = await run.ctx.peers.sender_fence(run.sender.peer, run.caller)
    except Refused as e:
        held = e.body.held.generation if e.body.held is not None else 0
        if not is_poisoned(held, now_ms=run.ctx.now_ms()):
            return held
        run.sender.status = None
        run.sender.problem = Reason.FENCE_POISONED, f"{e}; restart the trainer"
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
