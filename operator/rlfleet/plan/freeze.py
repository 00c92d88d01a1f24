"""With whom a round runs: members, transports and ranks, or why it does not (DESIGN section 5, Planned).

Invariants:
- every refusal happens here, on observed facts, and leaves every engine as it is;
- an engine whose gate takes no orders is unavailable, as a silent one is: it never makes a round fail half way;
- the ranks of a broadcast group are prefix sums of each member's own world size (the sender is rank 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import PROTOCOL_VERSION, PauseMode, SenderStatus, StagingMode, Transport
from rlfleet.plan.checkpoint import below
from rlfleet.plan.quiesce import refuse_mode
from rlfleet.plan.rounds import Engine, Member, RoundPlan, can_join, is_blocked, layout_of, unavailable_limit
from rlfleet.plan.topology import Device
from rlfleet.plan.transport import Cut, Refusal, choose

#: Capability of an engine that loads weights part by part (engine.Capability.PARTS).
PARTS = "Serialized/Parts"
#: Whole weights in the gates' memory, in the buckets that the trainer made.
AS_PUBLISHED = Cut()
#: How often who is silent is asked again before that counts, and how often while a gate among them is being started.
ASKED_AGAIN = 3
ASKED_WHILE_STARTING = 15
_UNHEARD = (Reason.GATES_UNREACHABLE, Reason.DISCOVERY_UNREACHABLE)


@dataclass(frozen=True)
class AskAgain:
    """``seconds``: pause before that. ``silent``: engines whose gates are asked; ``whom``: all that is unheard of."""

    seconds: float
    silent: tuple[str, ...]
    whom: tuple[str, ...]


def ask_again(engines: Sequence[Engine], plan: RoundPlan | Refusal, tries: int) -> AskAgain | None:
    """Whether silence is believed after ``tries`` more questions; None: it is, or nobody is silent.

    A plan that can do without the silent ones waits for one more answer only. A gate that has just been started is
    silent until it listens, which says nothing of a partition: it is given some 12 s. Nothing is paused meanwhile.
    """
    mute = [e for e in engines if e.status is None and not e.gone and not e.unborn]
    whom = (*(e.name for e in mute), *(e.name for e in engines if e.undiscovered and not e.gone))
    enough = tries > 0 if isinstance(plan, RoundPlan) else plan.reason not in _UNHEARD
    if not whom or enough or tries >= (ASKED_WHILE_STARTING if any(e.starting for e in mute) else ASKED_AGAIN):
        return None
    return AskAgain(0.3 if tries < ASKED_AGAIN else 1.0, tuple(e.name for e in mute), whom)


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
    quiesce: PauseMode | None = None,
    disputes: Sequence[str] = (),
    cut: Cut = AS_PUBLISHED,
    path: str | None = None,
) -> RoundPlan | Refusal:
    """Freeze the members of a Refresh: every live engine whose gate answers, has met its engine and takes orders.

    Checked in this order, all before anything is quiesced: silent gates, gates that take no orders, versions and
    capabilities of gates, mode of the pause, transports, capabilities of the sender, memory for staging, verification.
    """
    live = [e for e in engines if not e.gone and not e.dropped]
    silent = [e for e in live if e.status is None and not e.unborn]
    able = sorted((e for e in live if can_join(e)), key=lambda e: (e.pool, e.name))
    ready = [e for e in able if not is_blocked(e)]
    blocked = [e for e in able if is_blocked(e)]
    limit = unavailable_limit(max_unavailable, len(able) + len(silent))
    if len(silent) > limit:
        names = ", ".join(sorted(f"{e.name}: {e.refusal}" if e.refusal else e.name for e in silent)[:8])
        return Refusal(
            Reason.GATES_UNREACHABLE,
            f"{len(silent)} of {len(live)} gates do not answer or refuse ({names}), more than maxUnavailable allows "
            f"({limit}); a partition is not an empty fleet: mend the network or delete these pods",
        )
    if blocked and (len(silent) + len(blocked) > limit or not ready):
        more = f" and {len(silent)} do not answer" if silent else ""
        names = "; ".join(f"{e.name}: {_why_blocked(e)}" for e in blocked[:8])
        return Refusal(
            Reason.DISCOVERY_UNREACHABLE if all(e.undiscovered for e in blocked) else Reason.UNCERTAIN,
            f"{len(blocked)} of {len(live)} engines can not take part ({names}){more}; maxUnavailable allows {limit}, "
            "and somebody must be left. Sync again once they have healed or been replaced, or delete these pods",
        )
    plan = assign(
        ready,
        fleet=[e for e in live if not e.unborn],
        mode=mode,
        assert_mixed=assert_mixed,
        backend=backend,
        train=train,
        sender=sender,
        total_bytes=total_bytes,
        verify=verify,
        quiesce=quiesce,
        disputes=disputes,
        cut=cut,
        path=path,
    )
    if isinstance(plan, Refusal):
        return plan
    uids = tuple(sorted(e.pod_uid for e in blocked))
    return replace(plan, silent=tuple(sorted(e.name for e in silent)), blocked=uids)


def _why_blocked(e: Engine) -> str:
    assert e.status is not None
    if e.undiscovered:
        return f"nothing is known of it from discovery: {e.undiscovered}"
    if e.status.wedged:
        return "it hangs in a rendezvous that never came about"
    if e.status.in_flight is not None:
        return f"operation {e.status.in_flight} runs on"
    return "an operation has no known end"


def assign(
    ready: Sequence[Engine],
    *,
    mode: str,
    assert_mixed: bool,
    backend: str,
    train: frozenset[Device] | None,
    sender: SenderStatus,
    total_bytes: int,
    verify: str,
    quiesce: PauseMode | None = None,
    cut: Cut = AS_PUBLISHED,
    path: str | None = None,
    confirmed: frozenset[str] = frozenset(),
    fleet: Sequence[Engine] = (),
    disputes: Sequence[str] = (),
) -> RoundPlan | Refusal:
    """Transports and ranks of engines that can take part, or why they can not, whichever kind of round asks.

    ``fleet``: all engines of the pipeline, for ``assert_mixed``. ``disputes``: what sources say differently of the
    trainer's devices; those about engines are found here.
    ``confirmed``: layouts whose engine digest is committed for these bytes already, so that one engine is enough to
    compare. ``path``: where the checkpoint lies that engines read; None: a sender has the weights.
    """
    for e in ready:
        assert e.status is not None
        if e.status.protocol_version < PROTOCOL_VERSION:
            return Refusal(
                Reason.GATE_TOO_OLD,
                f"the gate of {e.name} speaks protocol {e.status.protocol_version}, {PROTOCOL_VERSION} is needed; "
                f"set spec.gate.image of EnginePool {e.pool} to this release's, and delete the pod",
            )
    unpausable = refuse_mode(ready, quiesce)
    if unpausable is not None:
        return unpausable
    choice = choose(
        mode,
        {e.name: e.devices for e in ready},
        train,
        assert_mixed=assert_mixed,
        fleet={e.name: e.devices for e in fleet},
        ranks={e.name: e.status.engine.world_size or 1 for e in (*fleet, *ready) if e.status is not None},
        disputes=[*disputes, *(e.identity.conflict for e in ready if e.identity.conflict)],
    )
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
        refusal = _capable(e, how.transport, total_bytes, verify, cut) or _mounts(e, path)
        if refusal is not None:
            return refusal
    if verify == "Required":
        lone = _lone([e for e in ready if layout_of(e) not in confirmed])
        if lone is not None:
            return lone
    plan = RoundPlan(tuple(members), offset, staging=cut.staging, bucket_mib=cut.bucket_mib)
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
        layouts.setdefault(layout_of(e), []).append(e.name)
    for names in layouts.values():
        if len(names) == 1:
            return Refusal(
                Reason.VERIFY_UNSUPPORTED,
                f"engine {names[0]} is the only one of its layout, so nothing can confirm its checksum, and "
                "spec.sync.verify is Required; add an engine or use IfSupported",
            )
    return None


def _mounts(e: Engine, path: str | None) -> Refusal | None:
    """The engine, and its gate, see what lies at ``path``."""
    if path is None or below(e.checkpoint_mount, path) is not None:
        return None
    what = (
        f"has no volume of checkpoints: set spec.gate.checkpointVolume of EnginePool {e.pool}, and replace its pods"
        if e.checkpoint_mount is None
        else f"mounts its checkpoints at {e.checkpoint_mount}, which does not hold {path}: make "
        "spec.weights.checkpoint.pathTemplate and the mount path agree"
    )
    return Refusal(Reason.CHECKPOINT_NOT_MOUNTED, f"engine {e.name} {what}")


def _capable(e: Engine, transport: Transport, total_bytes: int, verify: str, cut: Cut) -> Refusal | None:
    assert e.status is not None
    if e.status.engine.refused is not None:
        return Refusal(Reason.UNSUPPORTED, f"engine {e.name}: {e.status.engine.refused}")
    capabilities = set(e.status.capabilities)
    # A checkpoint is loaded from a directory, as what was pushed is.
    needed = Transport.SERIALIZED if transport is Transport.CHECKPOINT else transport
    what = f"engine {e.name} ({e.status.engine.type} {e.status.engine.version or '?'})"
    if needed.value not in capabilities:
        return Refusal(
            Reason.UNSUPPORTED,
            f"{what} can not take {transport.value} weights; change spec.transport or the engine's image",
        )
    if transport is Transport.SERIALIZED and cut.staging is StagingMode.BUCKET and PARTS not in capabilities:
        return Refusal(
            Reason.UNSUPPORTED,
            f"{what} can not take weights bucket by bucket; start it with rlfleet's weight transfer plug-in, or use "
            "spec.transport.staging Full",
        )
    if transport is Transport.SERIALIZED:
        refusal = cut.refuse(e.name, total_bytes, e.status.staging_capacity_bytes)
        if refusal is not None:
            return refusal
    if verify == "Required" and "Checksum" not in capabilities:
        return Refusal(
            Reason.VERIFY_UNSUPPORTED,
            f"engine {e.name} has no usable checksum and spec.sync.verify is Required; use IfSupported",
        )
    return None
