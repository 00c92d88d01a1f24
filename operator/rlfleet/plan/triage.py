"""Which round of a pipeline runs next (DESIGN section 5, Pending).

Invariant: at most one round of a pipeline is claimed; of the pending ones the newest of the reported sender goes first
and the older ones are Superseded; an order that can only fail supersedes nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import SenderStatus
from rlfleet.plan.checkpoint import is_shelf
from rlfleet.plan.rounds import Committed, RoundRef, held


@dataclass(frozen=True, slots=True)
class Settlement:
    """A round that ends without having been claimed: nothing was touched."""

    round: RoundRef
    outcome: Literal["Succeeded", "Failed", "Superseded", "Cancelled", "Expired"]
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Triage:
    """What to do with the unclaimed rounds of a pipeline."""

    settle: tuple[Settlement, ...] = ()
    run: RoundRef | None = None
    waiting: RoundRef | None = None
    later: tuple[RoundRef, ...] = ()
    """Rounds that stay Pending behind the one that runs: newer, but the sender does not hold their versions yet."""
    why: tuple[Reason, str] | None = None


def newer_than(r: RoundRef, other: RoundRef) -> bool:
    """The order ``r`` replaces ``other``: a higher version or attempt, or a later order to roll back."""
    if r.allow_rollback and r.created_ms > other.created_ms:
        return True
    return (r.version, r.attempt) > (other.version, other.attempt)


def may_replace(r: RoundRef, holding: RoundRef, sender: SenderStatus | None) -> bool:
    """``r`` supersedes a round in Holding: it is newer, or the sender process of that one is no longer reported.

    Another sender process counts its versions anew, so theirs are not compared.
    """
    if newer_than(r, holding):
        return True
    return (
        sender is not None
        and bool(holding.sender_incarnation)
        and holding.sender_incarnation != sender.incarnation
        and r.sender_incarnation == sender.incarnation
    )


def ended_waiting(
    rounds: Iterable[RoundRef], *, sender: SenderStatus | None, now_ms: int, pending_ms: int
) -> tuple[Settlement, ...]:
    """Unclaimed rounds that end while another round owns the slot: their exits do not wait for that one."""
    out = []
    for r in sorted(rounds, key=lambda r: (r.created_ms, r.name)):
        end = _asked_to_end(r, sender)
        if end is None and now_ms - r.created_ms > pending_ms:
            end = _expired(r, pending_ms, "another round owns the engines")
        if end is not None:
            out.append(end)
    return tuple(out)


def _asked_to_end(r: RoundRef, sender: SenderStatus | None) -> Settlement | None:
    if r.cancel or r.deleting:
        return Settlement(r, "Cancelled", Reason.CANCELLED, "cancelled before anything was touched")
    if sender is not None and r.sender_incarnation and r.sender_incarnation != sender.incarnation:
        message = f"the sender is {sender.incarnation} now, this round was made by {r.sender_incarnation}"
        return Settlement(r, "Superseded", Reason.SENDER_INCARNATION_GONE, message)
    return None


def _expired(r: RoundRef, pending_ms: int, message: str) -> Settlement:
    return Settlement(
        r, "Expired", Reason.PENDING_DEADLINE, f"not started within {pending_ms // 1000} s of its creation: {message}"
    )


def triage(
    rounds: Iterable[RoundRef],
    *,
    committed: Committed | None,
    sender: SenderStatus | None,
    sender_problem: tuple[Reason, str] | None,
    now_ms: int,
    pending_ms: int,
    joinable: int,
    expected: int,
) -> Triage:
    """Sort the unclaimed rounds: settle those that can not run, pick the newest that can, or say what it waits for.

    ``joinable``: engines that can take part now; ``expected``: engines that exist or that pools still owe.
    """
    settle: list[Settlement] = []
    alive: list[RoundRef] = []
    for r in sorted(rounds, key=lambda r: (r.created_ms, r.name)):
        end = _asked_to_end(r, sender)
        if end is not None:
            settle.append(end)
        else:
            alive.append(r)
    # A verdict that waiting can not change comes first: an order that fails supersedes nobody.
    # One that the sender has passed is an older order, though, where a newer one is there.
    ends = {r.uid: end for r in alive if (end := _final(r, committed, sender)) is not None}
    passed = {uid: end for uid, end in ends.items() if end.reason is Reason.VERSION_NOT_HELD}
    settle += [end for uid, end in ends.items() if uid not in passed]
    alive = [r for r in alive if r.uid not in ends or r.uid in passed]
    # What the sender holds goes before what it may publish one day: a slip in a version must not stop a trainer.
    there = [r for r in alive if sender is not None and held(sender, r.version, r.manifest_digest) is not None]
    later = tuple(r for r in alive if r not in there) if there else ()
    alive = there or alive
    if not alive:
        return Triage(settle=tuple(settle))
    newest = max(alive, key=lambda r: (r.version, r.attempt, r.created_ms, r.name))
    if newest.allow_rollback is False:
        # A rollback asks for a lower version on purpose: the latest such order is newer than what it rolls back.
        rollbacks = [r for r in alive if r.allow_rollback and r.created_ms > newest.created_ms]
        newest = max(rollbacks, key=lambda r: (r.created_ms, r.name), default=newest)
    settle += [
        Settlement(r, "Superseded", Reason.SUPERSEDED, f"superseded by {newest.name} (version {newest.version})")
        for r in alive
        if r is not newest
    ]
    settle += [
        Settlement(r, "Superseded", Reason.SUPERSEDED, f"superseded by {newest.name} (version {newest.version})")
        for r in later
        if not newer_than(r, newest)
    ]
    settle += [passed[r.uid] for r in later if newer_than(r, newest) and r.uid in passed]
    later = tuple(r for r in later if newer_than(r, newest) and r.uid not in passed)
    settle += [
        _expired(r, pending_ms, f"the sender never held version {r.version}")
        for r in later
        if now_ms - r.created_ms > pending_ms
    ]
    later = tuple(r for r in later if now_ms - r.created_ms <= pending_ms)
    if newest.uid in passed:
        return Triage(settle=(*settle, passed[newest.uid]), later=later)
    waited = now_ms - newest.created_ms
    if sender is None:
        reason, message = sender_problem or (Reason.SENDER_UNREACHABLE, "the sender does not answer")
    elif held(sender, newest.version, newest.manifest_digest) is not None:
        gathering = gather(joinable, expected, first=committed is None, waited_ms=waited, pending_ms=pending_ms)
        if gathering is None:
            return Triage(settle=tuple(settle), run=newest, later=later)
        reason, message = gathering
    else:
        reason, message = (
            Reason.SENDER_NOT_READY,
            f"the sender does not hold version {newest.version} yet "
            f"(newest: {sender.cache.version if sender.cache else 'none'}); publish it",
        )
    if waited > pending_ms:
        return Triage(settle=(*settle, _expired(newest, pending_ms, message)), later=later)
    return Triage(settle=tuple(settle), waiting=newest, later=later, why=(reason, message))


def gather(joinable: int, expected: int, *, first: bool, waited_ms: int, pending_ms: int) -> tuple[Reason, str] | None:
    """Whether a round should wait for engines that are still starting; None: go.

    A round with nobody in it, while engines exist, would commit a version that nobody holds: it waits. The first round
    of a pipeline waits for all engines, for up to half of pendingSeconds, because nobody is served before it; later
    rounds never do (a late joiner is taken along by the next one).
    """
    message = f"{joinable} of {expected} engines are up; the round waits for the others"
    if joinable == 0 and expected > 0:
        return Reason.WAITING_FOR_ENGINES, message
    if first and joinable < expected and waited_ms < pending_ms // 2:
        return Reason.WAITING_FOR_ENGINES, message
    return None


def _final(r: RoundRef, committed: Committed | None, sender: SenderStatus | None) -> Settlement | None:
    """A verdict that waiting can not change."""
    if committed is not None:
        have = committed.version
        if r.allow_rollback and r.expected_committed != have:
            return Settlement(
                r,
                "Failed",
                Reason.COMMITTED_MISMATCH,
                f"spec.expectedCommitted is {r.expected_committed} but version {have} is committed; "
                "look at the pipeline again before rolling back",
            )
        slot = held(sender, r.version, r.manifest_digest) if sender else None
        digest = r.manifest_digest or (slot.manifest_digest if slot else None)
        if r.version == have and digest == committed.manifest_digest:
            return Settlement(r, "Succeeded", Reason.ALREADY_COMMITTED, f"version {have} is committed already")
        other_bytes = r.version == have and digest is not None
        if not r.allow_rollback and (r.version < have or other_bytes):
            what = "lower than" if r.version < have else "the same as, but with other bytes than,"
            return Settlement(
                r,
                "Failed",
                Reason.VERSION_GOES_BACKWARDS,
                f"version {r.version} is {what} the committed version {have}; "
                f"set spec.allowRollback and spec.expectedCommitted: {have} to go back on purpose",
            )
    if is_shelf(sender) and r.manifest_digest is None:
        return Settlement(
            r,
            "Failed",
            Reason.DIGEST_REQUIRED,
            "spec.manifestDigest is needed: with spec.weights.checkpoint the round names the bytes, by the digest of "
            "the manifest that rlfleet.sender.checkpoint.write returned",
        )
    if sender is not None and sender.cache is not None and held(sender, r.version, r.manifest_digest) is None:
        newest = sender.cache.version
        if newest > r.version or (newest == r.version and not sender.publish_waiting):
            return Settlement(
                r,
                "Failed",
                Reason.VERSION_NOT_HELD,
                f"the sender holds version {newest} now, not version {r.version} with these bytes; sync what it holds",
            )
    return None
