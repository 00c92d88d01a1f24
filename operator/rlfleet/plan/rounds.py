"""Which round runs next, and with whom: the decisions before an engine is touched (DESIGN section 5, Pending, Planned).

Invariants:
- at most one round of a pipeline is claimed; of the pending ones the newest of the reported sender goes first and the
  older ones are Superseded;
- every refusal happens here, on observed facts, and leaves every engine as it is;
- the ranks of a broadcast group are prefix sums of each member's own world size (the sender is rank 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import PROTOCOL_VERSION, EngineState, GateStatus, SenderCache, SenderStatus, Transport
from rlfleet.plan.topology import Device
from rlfleet.plan.transport import Refusal, choose

TERMINAL = frozenset({"Succeeded", "Failed", "Superseded", "Cancelled", "Expired"})


@dataclass(frozen=True, slots=True)
class Committed:
    """``RLPipeline.status.committed``: the weights that may serve. Digests per layout of the engines."""

    version: int
    manifest_digest: str
    sender_incarnation: str = ""
    engine_digests: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RoundRef:
    """What triage needs of one SyncRound."""

    name: str
    uid: str
    version: int
    attempt: int
    sender_incarnation: str
    phase: str
    created_ms: int
    cancel: bool = False
    deleting: bool = False
    manifest_digest: str | None = None
    allow_rollback: bool = False
    expected_committed: int | None = None


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


def held(sender: SenderStatus, version: int, digest: str | None) -> SenderCache | None:
    """The complete weights that the sender holds for this version (and digest, if one is asked for)."""
    slots = [*sender.slots, *([sender.cache] if sender.cache else [])]
    for slot in reversed(slots):
        if slot.version == version and (digest is None or slot.manifest_digest == digest):
            return slot
    return None


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
        if r.cancel or r.deleting:
            settle.append(Settlement(r, "Cancelled", Reason.CANCELLED, "cancelled before anything was touched"))
        elif sender is not None and r.sender_incarnation and r.sender_incarnation != sender.incarnation:
            settle.append(
                Settlement(
                    r,
                    "Superseded",
                    Reason.SENDER_INCARNATION_GONE,
                    f"the sender is {sender.incarnation} now, this round was made by {r.sender_incarnation}",
                )
            )
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
        late = Settlement(
            newest, "Failed", Reason.PENDING_DEADLINE, f"not started within {pending_ms // 1000} s: {message}"
        )
        return Triage(settle=(*settle, late), later=later)
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


# ------------------------------------------------------------------------------------------------ members


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine pod as observed. ``status`` is None while its gate gave no answer: unknown, never "no"."""

    name: str
    pool: str
    pod_uid: str
    url: str
    status: GateStatus | None
    gone: bool = False
    leaving: bool = False
    owned: bool = True
    refusal: str = ""
    """Why its gate refused to be fenced; empty where it answered or kept silent."""
    unborn: bool = False
    """None of its containers has ever run, as far as its node told."""

    @property
    def incarnation(self) -> str:
        """The engine process's nonce, or empty while unknown."""
        return (self.status.incarnation or "") if self.status else ""

    @property
    def devices(self) -> frozenset[Device] | None:
        """Its physical devices; None when unknown."""
        if self.status is None or self.status.devices.source == "Unknown" or not self.status.devices.uuids:
            return None
        return frozenset(Device(self.status.devices.node, uuid) for uuid in self.status.devices.uuids)


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of a frozen round."""

    engine: str
    pod_uid: str
    incarnation: str
    transport: Transport
    world_size: int = 1
    rank_offset: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """A frozen round: its members with transports and ranks. No member: commit at once."""

    members: tuple[Member, ...]
    world_size: int
    silent: tuple[str, ...] = ()

    def of(self, transport: Transport) -> tuple[Member, ...]:
        """The members that use one transport."""
        return tuple(m for m in self.members if m.transport is transport)


def unavailable_limit(max_unavailable: int | str, total: int) -> int:
    """``spec.sync.maxUnavailable`` as a count: percentages are rounded up, of members plus silent engines."""
    if isinstance(max_unavailable, int):
        return max_unavailable
    return math.ceil(int(max_unavailable.rstrip("%")) * total / 100)


def freeze(
    engines: Sequence[Engine],
    *,
    mode: str,
    assert_mixed: bool,
    backend: str,
    train: frozenset[Device] | None,
    sender: SenderStatus,
    total_bytes: int,
    verify: str,
    max_unavailable: int | str,
) -> RoundPlan | Refusal:
    """Freeze the members of a Refresh: every live engine whose gate answers and has met its engine.

    Checked in this order, all before anything is quiesced: silent gates, versions and capabilities of gates,
    transports, capabilities of the sender, memory for staging, verification.
    """
    live = [e for e in engines if not e.gone and not e.leaving]
    silent = [e for e in live if e.status is None and not e.unborn]
    ready = sorted((e for e in live if can_join(e)), key=lambda e: (e.pool, e.name))
    limit = unavailable_limit(max_unavailable, len(ready) + len(silent))
    if len(silent) > limit:
        names = ", ".join(sorted(f"{e.name}: {e.refusal}" if e.refusal else e.name for e in silent)[:8])
        return Refusal(
            Reason.GATES_UNREACHABLE,
            f"{len(silent)} of {len(live)} gates do not answer or refuse ({names}), more than maxUnavailable allows "
            f"({limit}); a partition is not an empty fleet: mend the network or delete these pods",
        )
    for e in ready:
        assert e.status is not None
        if e.status.protocol_version < PROTOCOL_VERSION:
            return Refusal(
                Reason.GATE_TOO_OLD,
                f"the gate of {e.name} speaks protocol {e.status.protocol_version}, {PROTOCOL_VERSION} is needed; "
                "delete the pod so that it is made anew with the present gate image",
            )
    choice = choose(mode, {e.name: e.devices for e in ready}, train, assert_mixed=assert_mixed)
    if isinstance(choice, Refusal):
        return choice
    members: list[Member] = []
    offset = 1
    for e in ready:
        assert e.status is not None
        how = choice[e.name]
        size = e.status.engine.world_size or 1
        rank = offset if how.transport is Transport.BROADCAST else None
        offset += size if rank is not None else 0
        members.append(Member(e.name, e.pod_uid, e.incarnation, how.transport, size, rank, how.reason))
        refusal = _capable(e, how.transport, total_bytes, verify)
        if refusal is not None:
            return refusal
    if verify == "Required":
        lone = _lone(ready)
        if lone is not None:
            return lone
    plan = RoundPlan(tuple(members), offset, tuple(sorted(e.name for e in silent)))
    needed = {"Serialized"} if plan.of(Transport.SERIALIZED) else set()
    if plan.of(Transport.BROADCAST):
        needed.add(f"Broadcast/{backend}")
    missing = sorted(needed - set(sender.capabilities))
    if sender.protocol_version < PROTOCOL_VERSION or missing:
        return Refusal(
            Reason.SENDER_TOO_OLD,
            f"the sender (rlfleet {sender.sender_version or '?'}, protocol {sender.protocol_version}) can not do "
            f"{', '.join(missing) or f'protocol {PROTOCOL_VERSION}'}; update rlfleet in the trainer or change "
            "spec.transport",
        )
    return plan


def _lone(ready: Sequence[Engine]) -> Refusal | None:
    """``verify: Required`` needs a second engine of the same layout whose checksum can agree."""
    layouts: dict[str, list[str]] = {}
    for e in ready:
        assert e.status is not None
        layouts.setdefault(e.status.engine.layout or "unknown", []).append(e.name)
    for names in layouts.values():
        if len(names) == 1:
            return Refusal(
                Reason.VERIFY_UNSUPPORTED,
                f"engine {names[0]} is the only one of its layout, so nothing can confirm its checksum, and "
                "spec.sync.verify is Required; add an engine or use IfSupported",
            )
    return None


def can_join(e: Engine) -> bool:
    """The gate answers, is enrolled, and its engine process is up: the engine can be a member of a round."""
    return (
        e.status is not None
        and e.status.enrolled
        and e.status.incarnation is not None
        and e.status.engine.state is EngineState.READY
    )


def _capable(e: Engine, transport: Transport, total_bytes: int, verify: str) -> Refusal | None:
    assert e.status is not None
    capabilities = set(e.status.capabilities)
    if transport.value not in capabilities:
        return Refusal(
            Reason.UNSUPPORTED,
            f"engine {e.name} ({e.status.engine.type} {e.status.engine.version or '?'}) can not take {transport.value} "
            "weights; change spec.transport or the engine's image",
        )
    if transport is Transport.SERIALIZED and total_bytes > e.status.staging_capacity_bytes:
        return Refusal(
            Reason.STAGING_TOO_LARGE,
            f"{total_bytes} bytes do not fit into the staging volume of {e.name} "
            f"({e.status.staging_capacity_bytes} bytes usable); raise spec.gate.stagingMiB and the gate's memory limit",
        )
    if verify == "Required" and "Checksum" not in capabilities:
        return Refusal(
            Reason.VERIFY_UNSUPPORTED,
            f"engine {e.name} has no usable checksum and spec.sync.verify is Required; use IfSupported",
        )
    return None
