"""What planning a round is made of: committed weights, rounds, engines, members. Plain frozen data.

Invariant: an engine whose gate gave no answer has ``status`` None, which every decision reads as unknown, never "no".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlfleet.api.v1alpha1.rlpipeline_status import MAX_LAYOUTS
from rlfleet.api.wire import EngineState, GateStatus, SenderCache, SenderStatus, StagingMode, Transport
from rlfleet.plan.asleep import is_touched
from rlfleet.plan.checkpoint import is_shelf
from rlfleet.plan.topology import Device, Evidence, Identity, identify, report_evidence

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
    kind: str = "Refresh"
    engines: tuple[str, ...] = ()
    """CatchUp only: the pods it is for."""


def held(sender: SenderStatus, version: int, digest: str | None) -> SenderCache | None:
    """The complete weights that the sender holds for this version (and digest, if one is asked for).

    A checkpoint that is named by its digest is taken to be there: whether it is, gates say when they have read it.
    """
    if is_shelf(sender):
        if digest is None:
            return None
        return SenderCache(version=version, manifest_digest=digest, total_bytes=0, tensors=0, buckets=0)
    slots = [*sender.slots, *([sender.cache] if sender.cache else [])]
    for slot in reversed(slots):
        if slot.version == version and (digest is None or slot.manifest_digest == digest):
            return slot
    return None


def has_weights(sender: SenderStatus | None) -> bool:
    """Whether complete weights can be had at all: the sender has published some, or they come from checkpoints."""
    return sender is not None and (is_shelf(sender) or sender.cache is not None)


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
    unwanted: bool = False
    """Its pool wants fewer engines, or is being deleted: it is to go, and nobody has begun to remove it."""
    index: int = -1
    """Its place in the pool; -1 where its label is no number."""
    resting: bool = False
    """It is to sleep, whether it does already or not (plan.elastic.wish)."""
    quarantined: bool = False
    """A person keeps it out of service (plan.quarantine)."""
    kept_out: str = ""
    """Why Dynamo's discovery keeps it out of service: a reason, then what is known; empty: it does not."""
    undiscovered: str = ""
    """Why nothing is known of it from Dynamo's discovery now; empty: what is known is known."""
    address: str = ""
    """IP address of its pod; empty while it has none."""
    draining: bool = False
    """Its pool has taken it out of the routers between rounds, to replace its pod. A round may still use it."""
    owned: bool = True
    refusal: str = ""
    """Why its gate refused to be fenced; empty where it answered or kept silent."""
    unborn: bool = False
    """None of its containers has ever run, as far as its node told."""
    starting: bool = False
    """Its gate's container runs for the first time, and its start-up probe has not succeeded yet, as its node told."""
    claimed: Evidence | None = None
    """What its ResourceClaims say of its devices; None: it uses none."""
    assigned: Evidence | None = None
    """What placement Pinned gave it; None: nothing."""
    checkpoint_mount: str | None = None
    """Where its volume of checkpoints is mounted; None: it mounts none."""

    @property
    def dropped(self) -> bool:
        """It leaves, sleeps or is shut on purpose, or is to: no round takes it along, and none waits for it."""
        return self.leaving or self.unwanted or self.resting or self.shut

    @property
    def shut(self) -> bool:
        """It is kept out of service, by a person or by Dynamo's discovery: closed, and a member of no round."""
        return self.quarantined or bool(self.kept_out)

    @property
    def incarnation(self) -> str:
        """The engine process's nonce, or empty while unknown."""
        return (self.status.incarnation or "") if self.status else ""

    @property
    def identity(self) -> Identity:
        """Its physical devices, from every source that knows any, and what they contradict each other in."""
        report = self.status.devices if self.status is not None else None
        told = report_evidence(f"the gate of {self.name}", report)
        return identify([s for s in (self.claimed, told, self.assigned) if s is not None])

    @property
    def devices(self) -> frozenset[Device] | None:
        """Its physical devices; None when unknown, or when sources contradict each other."""
        return self.identity.devices


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
    blocked: tuple[str, ...] = ()
    """Pod UIDs of engines whose gates answered, but take no order of a round (``is_blocked``)."""
    staging: StagingMode = StagingMode.FULL
    bucket_mib: int = 0
    """Largest bucket; 0: as published."""

    def streams(self, m: Member) -> bool:
        """The member's bytes come while it loads: they are never staged, and the sender is needed for every load."""
        return m.transport is Transport.SERIALIZED and self.staging is StagingMode.BUCKET

    def needs_sender(self, m: Member) -> bool:
        """The member can be loaded with the sender only."""
        return m.transport is Transport.BROADCAST or self.streams(m)

    @property
    def total(self) -> int:
        """Engines of which ``maxUnavailable`` is a share: members, and those that can not be any."""
        return len(self.members) + len(self.silent) + len(self.blocked)

    def of(self, transport: Transport) -> tuple[Member, ...]:
        """The members that use one transport."""
        return tuple(m for m in self.members if m.transport is transport)


def unavailable_limit(max_unavailable: int | str, total: int) -> int:
    """``spec.sync.maxUnavailable`` as a count: percentages are rounded up, of ``RoundPlan.total``."""
    if isinstance(max_unavailable, int):
        return max_unavailable
    return math.ceil(int(max_unavailable.rstrip("%")) * total / 100)


def layout_of(e: Engine) -> str:
    """The engine's layout: checksums compare only within one."""
    return (e.status.engine.layout or "unknown") if e.status is not None else "unknown"


def digest_rows(digests: Mapping[str, str], engines: Iterable[Engine]) -> list[dict[str, str]]:
    """``committed.engineDigests``. A version may stay committed for long, while templates come and go: the list is
    bounded, and layouts that no engine has any more make room."""
    present = {layout_of(e) for e in engines if not e.gone}
    kept = sorted(digests, key=lambda layout: (layout not in present, layout))[:MAX_LAYOUTS]
    return [{"layout": layout, "digest": digests[layout]} for layout in sorted(kept)]


def can_join(e: Engine) -> bool:
    """The gate answers, is enrolled, and its engine process is up and awake: the engine can be a member of a round.

    A gate that was just taken over from a deleted pipeline holds our fence, and must still be enrolled with us.
    """
    return (
        e.status is not None
        and e.status.enrolled
        and (not e.status.pipeline or e.status.fence.pipeline in ("", e.status.pipeline))
        and e.status.incarnation is not None
        and e.status.engine.state is EngineState.READY
        and (is_known(e.status) or e.status.holds is not None or bool(e.status.loads))
        and not is_touched(e.status)
    )


def is_known(gate: GateStatus) -> bool:
    """The gate has learned what its engine is; one that has just started may answer that late.

    Nobody can say what such an engine can take. It serves nothing: its gate closes what nothing proves.
    """
    return gate.engine.version is not None or bool(gate.capabilities)


def is_blocked(e: Engine) -> bool:
    """The gate answers, but an operation there runs on or has no known end: it takes no order but Pause and Close.

    Or nothing is known of the engine from discovery: it may have been taken out of service, so no round opens it.

    So it is with an engine that hangs in a rendezvous with a trainer that died. Whoever asks has waited already for
    operations that end by themselves (the takeover barrier).
    """
    return e.status is not None and (e.status.uncertain or e.status.in_flight is not None or bool(e.undiscovered))
