"""A round before any engine is touched: Planned and Staging (DESIGN section 5).

Invariant: whatever fails here leaves every engine as it was; what is frozen is durable before its first side effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.peers import PeerError
from rlfleet.control.rounds.plan_record import plan_row, summary
from rlfleet.control.rounds.results import why
from rlfleet.control.rounds.transfer import Transfer
from rlfleet.plan.checkpoint import checkpoint_path, is_shelf, mode_of
from rlfleet.plan.freeze import ask_again, freeze
from rlfleet.plan.quiesce import drain_allowance, wanted_mode
from rlfleet.plan.rounds import RoundPlan, held
from rlfleet.plan.transport import Cut, Refusal

if TYPE_CHECKING:
    from rlfleet.control.rounds.closing import Closing
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.control.rounds.fleet import Fleet
    from rlfleet.control.rounds.sender_link import SenderLink

log = logging.getLogger(__name__)


async def plan_members(run: Executor, closing: Closing) -> Transfer | None:
    """Planned: hold at the sender, members frozen, all refusals; nothing is touched when one applies."""
    started = run.ctx.clock.monotonic()
    slot = await _taken_hold(run, closing)
    if slot is None:
        return None
    plan = await _frozen_for_sure(run, slot)
    if isinstance(plan, Refusal):
        await closing.refuse("Planned", plan.reason, plan.message)
        return None
    target = run.target(slot)
    now = rfc3339(run.ctx.now_ms())
    run.lap("planMs", started)
    await run.phase(
        "Planned",
        Reason.PLANNED,
        summary(plan),
        startedAt=run.ledger.round_status.get("startedAt") or now,
        manifestDigest=target.manifest_digest,
        bytes=target.total_bytes or None,
        plan=plan_row(plan),
    )
    transfer = run.transfer(plan, target)
    if not plan.members:
        await closing.commit_without_members(transfer)
        return None
    return transfer


async def _taken_hold(run: Executor, closing: Closing) -> wire.SenderCache | None:
    """What the round brings, held at the sender for its time; None: the round was refused."""
    deadlines = run.ledger.spec["sync"]["deadlines"]
    version = int(run.round_spec["version"])
    if is_shelf(run.sender.status):
        # Nobody is there to hold anything: gates hash what lies at the path when it is staged.
        assert run.sender.status is not None
        named = held(run.sender.status, version, run.round_spec.get("manifestDigest"))
        if named is None:
            await closing.refuse("Planned", Reason.DIGEST_REQUIRED, "spec.manifestDigest is needed with checkpoints")
        return named
    if run.sender.peer is None or run.sender.status is None:
        reason, message = run.sender.problem or (Reason.SENDER_UNREACHABLE, "the sender does not answer")
        await closing.refuse("Planned", reason, message)
        return None
    budget = sum(int(deadlines[k]) for k in ("stagingSeconds", "pausedSeconds")) + 60
    budget += drain_allowance(run.ledger.spec["sync"])
    try:
        run.sender.status = await run.ctx.peers.hold(
            run.sender.peer,
            run.caller,
            version=version,
            digest=run.round_spec.get("manifestDigest"),
            deadline_seconds=budget,
        )
    except PeerError as e:
        await closing.refuse("Planned", *why(e))
        return None
    made_by = run.round_spec.get("senderIncarnation")
    if made_by and run.sender.status.incarnation != made_by:
        # Another trainer process may hold other bytes under the same version number.
        await closing.refuse(
            "Planned",
            Reason.SENDER_INCARNATION_GONE,
            f"the sender is {run.sender.status.incarnation} now, this round was made by {made_by}",
        )
        return None
    hold = run.sender.status.hold
    slot = held(run.sender.status, version, hold.manifest_digest if hold else None)
    if hold is None or slot is None:
        await closing.refuse("Planned", Reason.VERSION_NOT_HELD, "the sender took no hold on this version")
        return None
    return slot


async def _frozen_for_sure(run: Executor, slot: wire.SenderCache) -> RoundPlan | Refusal:
    """Freeze; who is silent is asked again first: one lost answer must not fail a round, or leave an engine out.

    Gates, and the Dynamo frontends of engines that nothing is known of (asked with every look at pods and gates).
    """
    plan, tries = frozen(run, slot), 0
    while (again := ask_again(list(run.fleet.engines.values()), plan, tries)) is not None:
        log.info("asked again, %d silent or unknown: %s", len(again.whom), ", ".join(again.whom[:8]))
        await asyncio.sleep(again.seconds)
        await run.fleet.read_pods()
        await run.fleet.fence(run.caller, again.silent)
        plan, tries = frozen(run, slot), tries + 1
    return plan


def cut_of(spec: Mapping[str, Any], slot: wire.SenderCache | None) -> Cut:
    """What an RLPipeline's spec says of buckets and staging, for these weights (None: the sender holds none)."""
    return Cut(
        staging=wire.StagingMode(spec["transport"].get("staging") or wire.StagingMode.FULL),
        bucket_mib=int(spec["transport"].get("bucketMiB") or 0),
        largest=(slot.largest_tensor, slot.largest_tensor_bytes) if slot is not None else ("", 0),
    )


def frozen(run: Executor, slot: wire.SenderCache) -> RoundPlan | Refusal:
    """The members of this round from the fleet as last observed, or why it can not run."""
    return freeze_now(run.ledger.spec, run.fleet, run.sender, slot)


def freeze_now(
    spec: Mapping[str, Any], fleet: Fleet, sender: SenderLink, slot: wire.SenderCache
) -> RoundPlan | Refusal:
    """Members of a round that brings ``slot`` to the pipeline of this ``spec``; a dry run asks here, too."""
    assert sender.status is not None
    return freeze(
        list(fleet.engines.values()),
        mode=mode_of(spec),
        assert_mixed=bool(spec["transport"].get("assertMixed")),
        backend=spec["transport"]["backend"],
        train=sender.train.devices,
        sender=sender.status,
        total_bytes=slot.total_bytes,
        verify=spec["sync"]["verify"],
        max_unavailable=spec["sync"]["maxUnavailable"],
        quiesce=wanted_mode(spec["sync"]),
        disputes=[sender.train.conflict] if sender.train.conflict else (),
        cut=cut_of(spec, slot),
        path=checkpoint_path(spec, slot.version),
    )


async def stage_bytes(run: Executor, transfer: Transfer, closing: Closing) -> bool:
    """Staging: bytes to the gates while engines serve; failure touches nothing."""
    started = run.ctx.clock.monotonic()
    await run.phase(
        "Staging",
        Reason.STAGING,
        transfer.what_is_staged(transfer.plan.members),
        stagingAt=run.ledger.round_status.get("stagingAt") or rfc3339(run.ctx.now_ms()),
    )
    deadline = run.deadline("stagingSeconds", "stagingAt")
    missing = await transfer.stage(transfer.plan.members, deadline=deadline)
    run.lap("stageMs", started)
    if await run.cancelled():
        await closing.refuse("Staging", Reason.CANCELLED, "cancelled before engines were touched", outcome="Cancelled")
        return False
    limit = closing.limit(transfer)
    if len(missing) + len(transfer.plan.blocked) > limit or len(missing) == len(transfer.plan.members):
        late = run.ctx.clock.monotonic() >= deadline
        reason, message = transfer.trouble.first() or (Reason.STAGING_FAILED, "no gate received its bytes")
        await closing.refuse(
            "Staging",
            Reason.STAGING_DEADLINE if late else Reason.STAGING_FAILED,
            f"{len(missing)} of {len(transfer.plan.members)} gates did not receive the weights "
            f"({limit} may be unavailable); {reason.value}: {message}",
        )
        return False
    return True
