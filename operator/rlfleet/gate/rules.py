"""What a gate allows, judged from its own durable record: the rules without the calls around them.

Every rule returns or raises GateError; none reads a clock, a file or a socket, so the explorer of tests/model drives
the very functions that the gate calls.

Invariants (DESIGN section 5): an engine is opened only at weights that this record proves for this process; one order
at a time; an order without a known end lets nothing through but what can make nothing worse.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfleet.api.fencing import Fence
from rlfleet.api.wire import (
    ErrorReason,
    HoldsRecord,
    LoadRecord,
    OperationRecord,
    OperationState,
    PublishOrder,
    ResumeOrder,
    VerifyOrder,
)
from rlfleet.gate.errors import GateError
from rlfleet.gate.tags import MEMORY_KINDS

#: Accepted while an earlier operation's effect is unknown.
SAFE_KINDS = frozenset({"Pause", "Close"})
#: Touch nothing but the gate's own files, which a restart puts in order; a probe not even those.
LOCAL_KINDS = frozenset({"Prepare", "Discard", "Probe"})
#: Touch routers only: a Close settles them, not a Pause.
ROUTING_KINDS = frozenset({"Open", "Close"})


# ---------------------------------------------------------------------------------------------- who, and when


def for_this_process(asked: str, incarnation: str) -> None:
    """The call names the engine process that is here; another one may hold other weights."""
    if asked != incarnation:
        raise GateError(ErrorReason.IDENTITY_MISMATCH, f"incarnation is {incarnation}, the call is for {asked}")


def is_another_process(known: str | None, told: str | None, past: Sequence[str] = ()) -> bool:
    """The kubelet started the engine's container again: both names of it are known, and they differ.

    ``past``: names of containers before. Such a name never returns, and they have no order of their own: it is told by
    an operator whose view of pods lags behind, and says nothing of the engine that is here.
    """
    return known is not None and told is not None and known != told and told not in past


def same_instance(known: str | None, told: str | None) -> None:
    """The process that answers is the one whose weights the record is about, where processes tell who they are."""
    if known is not None and known != told:
        raise GateError(
            ErrorReason.IDENTITY_MISMATCH, f"the record is about instance {known}, instance {told or 'unknown'} answers"
        )


def same_order(op_id: str, kind: str, known: str, asked: str) -> None:
    """The same id asked again must be the same order (``known`` and ``asked`` are canonical texts)."""
    if known != asked:
        raise GateError(ErrorReason.OPERATION_CONFLICT, f"operation {op_id} is known with another order ({kind})")


def nothing_unsettled(kind: str, unsettled: Sequence[OperationRecord]) -> None:
    """While an operation's effect is unknown only Pause and Close are accepted: they can make nothing worse."""
    if kind in SAFE_KINDS or not unsettled:
        return
    names = ", ".join(f"{r.kind} {r.id}" for r in unsettled[-4:])
    raise GateError(
        ErrorReason.UNCERTAIN,
        f"without a known end: {names}; Pause settles this if the engine proves to be idle (Close for routing)",
    )


def nothing_runs(current: OperationRecord | None) -> None:
    """One operation at a time."""
    if current is not None:
        raise GateError(ErrorReason.BUSY, f"operation {current.id} ({current.kind}) runs")


def not_fenced_off(held: Fence, asked: Fence) -> None:
    """A higher fence may have been stored while a start waited for its turn or for the engine."""
    if held != asked:
        raise GateError(ErrorReason.STALE_FENCE, "a higher generation was stored meanwhile", held=held)


def after_restart(kind: str, *, in_between: bool = False) -> tuple[OperationState, bool]:
    """What an operation without a recorded end means to a restarted gate: its state, and whether it is settled.

    A release or wake is known to the tag: only one that died with a tag ``in_between`` left something unknown.
    """
    known = kind in LOCAL_KINDS or (kind in MEMORY_KINDS and not in_between)
    return (OperationState.FAILED if known else OperationState.UNKNOWN), known


# ---------------------------------------------------------------------------------------------- the engine


def proven_paused(admitting: bool | None, paused: bool) -> bool | None:
    """False where the engine admits requests, True where a verified pause (``paused``) still shows, else None."""
    if admitting is True:
        return False
    return True if admitting is False and paused else None


def voids_proof(label: str | None, holds: HoldsRecord) -> bool:
    """The engine's label says that it holds something else than what was proven: it has lost its weights."""
    return label is not None and label != str(holds.version)


def may_resume(holds: HoldsRecord | None, order: ResumeOrder) -> None:
    """The resume rule: only what the record proves, by version and digests, for this engine process."""
    if holds is None:
        raise GateError(ErrorReason.NOT_PROVEN, "no weights are proven for this engine process")
    if (holds.version, holds.manifest_digest) != (order.version, order.manifest_digest):
        raise GateError(
            ErrorReason.NOT_PROVEN,
            f"proven are version {holds.version} ({holds.manifest_digest}), "
            f"not {order.version} ({order.manifest_digest})",
        )
    if order.engine_digest is not None and order.engine_digest != holds.engine_digest:
        raise GateError(
            ErrorReason.NOT_PROVEN, f"the proven engine digest is {holds.engine_digest}, not {order.engine_digest}"
        )


def may_open(holds: HoldsRecord | None) -> None:
    """Only an engine with proven weights may be listed by a router."""
    if holds is None:
        raise GateError(ErrorReason.NOT_PROVEN, "no weights are proven for this engine process")


def may_load(paused: bool | None) -> None:
    """Weights are touched only while the engine is proven paused."""
    if paused is not True:
        raise GateError(ErrorReason.NOT_PROVEN, "the engine is not proven paused; Pause comes before Load")


def may_verify(latest: LoadRecord | None, order: VerifyOrder) -> LoadRecord:
    """The latest load, if it ended well and is the one that the order names."""
    if latest is None:
        raise GateError(ErrorReason.NOT_PROVEN, "nothing was loaded at this engine process")
    if (latest.version, latest.manifest_digest) != (order.version, order.manifest_digest):
        raise GateError(
            ErrorReason.NOT_PROVEN, f"the latest load is version {latest.version} ({latest.manifest_digest})"
        )
    if latest.state is not OperationState.SUCCEEDED:
        raise GateError(ErrorReason.NOT_PROVEN, f"the load of version {latest.version} is {latest.state}")
    _not_released(latest)
    return latest


def may_publish(latest: LoadRecord | None, order: PublishOrder) -> LoadRecord:
    """Only what was loaded, flushed and checked last may be published."""
    if latest is None:
        raise GateError(ErrorReason.NOT_PROVEN, "nothing was loaded at this engine process")
    wanted = (order.version, order.manifest_digest, OperationState.SUCCEEDED)
    if (latest.version, latest.manifest_digest, latest.state) != wanted or not latest.verified:
        raise GateError(
            ErrorReason.NOT_PROVEN,
            f"the latest load is version {latest.version} ({latest.manifest_digest}), {latest.state}, "
            f"{'verified' if latest.verified else 'not verified'}",
        )
    _not_released(latest)
    if order.engine_digest is not None and order.engine_digest != latest.engine_digest:
        raise GateError(
            ErrorReason.DIGEST_MISMATCH, f"the engine's checksum is {latest.engine_digest}, not {order.engine_digest}"
        )
    return latest


def _not_released(latest: LoadRecord) -> None:
    if latest.released:
        raise GateError(
            ErrorReason.NOT_PROVEN, f"memory was released after the load of version {latest.version}; load again"
        )


def has_changed(before: str | None, after: str | None, *, proven: str | None, manifest_digest: str) -> bool | None:
    """Whether a load moved the engine's checksum; None: not moving, or not knowing, says nothing.

    False (it did not move though it had to) needs other weights to be ``proven`` (their manifest digest) before.
    """
    if before is None or after is None:
        return None
    if before != after:
        return True
    return None if proven is None or proven == manifest_digest else False


# ---------------------------------------------------------------------------------------------- routers


def quiet_enough(*, pending: bool, quiet_seconds: float, needed_seconds: float) -> bool:
    """No addition can still reach a router, or the lists stayed empty for as long as one may take.

    Until then neither a Close nor the start-up promise is fulfilled.
    """
    return not pending or quiet_seconds > needed_seconds
