"""The takeover barrier: before any decision everybody has stored our generation, and nothing older runs on.

Invariant (DESIGN section 5): what is decided after the barrier rests on answers that were given under our generation;
whoever gave none is unknown and stays closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.peers import PeerError, Refused
from rlfleet.control.rounds.ledger import FenceLost, Ledger
from rlfleet.plan.claims import Barrier, Step, barrier_step
from rlfleet.plan.identity import is_poisoned

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor


async def pass_barrier(
    ledger: Ledger,
    *,
    fence: Callable[[], Awaitable[int]],
    claim_above: Callable[[int], Awaitable[None]],
    wait: Callable[[], Awaitable[None]],
    write_round: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Carry out what ``plan.claims.barrier_step`` says until it says that decisions may be made.

    ``fence``: raise the fence at everybody, and say the highest generation that refused us (0: nobody did);
    ``claim_above``: claim anew, above a generation; ``wait``: for operations that somebody before us started;
    ``write_round``: our generation into the status of a round that was claimed before (None: there is none).
    """
    at = Barrier(ledger.generation, needs_round=write_round is not None)
    while (step := barrier_step(at)) is not Step.DECIDE:
        if step is Step.WRITE_ROUND:
            assert write_round is not None
            await write_round()
            at = replace(at, written=True)
        elif step is Step.FENCE:
            at = replace(at, fenced=True, shown=await fence())
        elif step is Step.READ_PIPELINE:
            await ledger.read_pipeline()
            at = replace(at, fence=int(ledger.status.get("fence") or 0))
        elif step is Step.CLAIM_ABOVE:
            # The status was lost, or somebody acted without a claim: only whoever leads may go above that.
            ledger.ctx.guard.token()
            await claim_above(at.shown)
            at = Barrier(ledger.generation, at.needs_round, claims=at.claims + 1)
        elif step is Step.WAIT:
            await wait()
            at = replace(at, waited=True)
        else:
            await ledger.still_ours()  # says who owns it, and records that we were refused
            raise FenceLost(f"deposed: generation {at.shown} is held, ours was {at.generation}")


async def take_over_round(run: Executor, *, takeover: bool) -> None:
    """Pass the barrier for a round, with its status and its sender.

    A round that was leased before counts as taken over, even where the claim on it was lost with the status.
    """

    async def write_round() -> None:
        await run.phase(
            str(run.ledger.round_status.get("phase") or "Pending"),
            Reason.OPERATOR_RESTARTED,
            "taken over: asking every engine what it holds",
        )

    async def fence() -> int:
        await run.fleet.read_pods()
        return max(await asyncio.gather(run.fleet.fence(run.caller), _fence_sender(run)))

    async def claim_above(shown: int) -> None:
        active = run.ledger.status.get("activeOperation") or {}
        operation = {k: active[k] for k in ("kind", "name", "uid", "committed") if k in active}
        await run.ledger.claim(operation, above=shown)

    await pass_barrier(
        run.ledger,
        fence=fence,
        claim_above=claim_above,
        wait=lambda: run.fleet.await_in_flight(lambda: run.deadline("pausedSeconds", "pausedAt")),
        write_round=write_round if takeover or run.ledger.round_status.get("lease") else None,
    )


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
