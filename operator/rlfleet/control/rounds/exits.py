"""The exits of Holding that others open: cancel, deletion, a newer round, the end of the sender.

Invariant: other rounds of the pipeline do not wait for the one that holds the slot to be told their end: those that are
cancelled, overdue or can never run are settled from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlfleet.control.rounds.ledger import API_SECONDS, FenceLost, Ledger, RoundGone
from rlfleet.control.rounds.objects import committed_of, is_terminal, ref_of
from rlfleet.control.rounds.settling import end_round
from rlfleet.kube.errors import ApiError
from rlfleet.kube.resources import SYNCROUNDS
from rlfleet.plan.deletion import is_deleting
from rlfleet.plan.holding import Wishes
from rlfleet.plan.rounds import RoundRef
from rlfleet.plan.triage import Settlement, ended_waiting, may_replace, triage

if TYPE_CHECKING:
    from rlfleet.control.rounds.ending import Ending
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.kube.client import Obj


async def look_for_exits(run: Executor, ending: Ending) -> tuple[Wishes, RoundRef | None]:
    """What is wanted of the round that ``run`` holds, and the newer round if there is one that can take over."""
    ledger = run.ledger
    try:
        await ledger.read_round()
    except RoundGone:
        return Wishes(vanished=True), None
    assert ledger.round is not None
    me = ref_of(ledger.round)
    if me.cancel or me.deleting or is_deleting(ledger.pipeline):
        return Wishes(cancelled=True), None
    # Looked for anew, not only asked: a trainer that was replaced has another pod.
    await run.sender.find(ledger.spec)
    sender = run.sender.status
    if sender is not None and sender.publish_waiting:
        # A trainer waits for our hold before it can publish (and then order) anything; what is staged stays staged.
        await ending.release()
    newer = await _others(run, me)
    replaced = sender is not None and bool(me.sender_incarnation) and sender.incarnation != me.sender_incarnation
    wishes = Wishes(superseded=newer is not None, sender_gone=run.sender.absent, sender_replaced=replaced)
    return wishes, newer


async def _others(run: Executor, me: RoundRef) -> RoundRef | None:
    """The round that takes over from ``me``; others that can only end are settled."""
    ledger, sender = run.ledger, run.sender.status
    listed = await ledger.kube.list(SYNCROUNDS, ledger.namespace, timeout=API_SECONDS)
    waiting = {
        r["metadata"]["uid"]: r
        for r in listed.items
        if r["spec"]["pipeline"] == ledger.name
        and not is_terminal(r)
        and r["metadata"]["uid"] != me.uid
        and r["spec"].get("kind", "Refresh") == "Refresh"
    }
    if not waiting:
        return None
    refs = [ref_of(r) for r in waiting.values()]
    pending_ms = int(ledger.spec["sync"]["deadlines"]["pendingSeconds"]) * 1000
    now_ms = run.ctx.now_ms()
    todo = triage(
        [r for r in refs if may_replace(r, me, sender)],
        committed=committed_of(ledger.pipeline),
        sender=sender,
        sender_problem=run.sender.problem,
        now_ms=now_ms,
        pending_ms=pending_ms,
        joinable=1,
        expected=1,  # this round's own engines are there for it
    )
    ends = {e.round.uid: e for e in ended_waiting(refs, sender=sender, now_ms=now_ms, pending_ms=pending_ms)}
    ends |= {e.round.uid: e for e in todo.settle}
    if todo.run is not None:
        ends.pop(todo.run.uid, None)
    for end in ends.values():
        await _settle(run, waiting[end.round.uid], end)
    return todo.run


async def _settle(run: Executor, obj: Obj, end: Settlement) -> None:
    other = Ledger(run.ctx, run.ledger.pipeline, holder=run.ledger.holder)
    committed = end.outcome == "Succeeded"
    try:
        await end_round(
            other,
            obj,
            outcome=end.outcome,
            stage="Pending",
            reason=end.reason,
            message=end.message,
            committed=committed,
        )
    except (ApiError, RoundGone, FenceLost):
        return  # somebody writes it at this moment: the next turn looks again
