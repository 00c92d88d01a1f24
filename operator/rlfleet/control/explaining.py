"""A dry run for a person: what the operator observes of one pipeline now, and what a sync to a version would do.

Invariants:
- the observation is made as a reconcile makes it, and judged by the same plan functions with the same arguments;
- nothing is written, ordered or remembered: the context that looks has a guard that allows no mutation, and memories
  of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.claim_memory import ClaimMemory
from rlfleet.control.context import Metrics
from rlfleet.control.elastic.memory import ElasticMemory
from rlfleet.control.identity import poisoned_fence
from rlfleet.control.peers import Peer, fan_out
from rlfleet.control.repair.memory import RepairMemories
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import API_SECONDS, Ledger
from rlfleet.control.rounds.memory import GateMemory
from rlfleet.control.rounds.objects import is_terminal, kind_of, ref_of
from rlfleet.control.rounds.preparing import freeze_now
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.control.sorting import triage_now
from rlfleet.kube.guard import Guard
from rlfleet.kube.resources import ENGINEPOOLS, RLPIPELINES, SYNCROUNDS
from rlfleet.plan.deletion import belongs
from rlfleet.plan.elastic import wanted_pods
from rlfleet.plan.explain import Explanation, explain
from rlfleet.plan.quiesce import wanted_mode
from rlfleet.plan.rounds import RoundRef, held

if TYPE_CHECKING:
    from rlfleet.control.context import Context

Obj = dict[str, Any]
#: UID of the round that is only imagined.
IMAGINED = "dry-run"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sync that a person thinks of."""

    version: int
    digest: str | None = None
    rollback: bool = False


@dataclass(slots=True)
class Look:
    """One pipeline as observed by a dry run."""

    ledger: Ledger
    sender: SenderLink
    fleet: Fleet
    rounds: list[Obj]
    expected: int
    clocks: Mapping[str, int]
    """How many milliseconds each gate's clock is ahead of the apiserver's, by engine; those that said."""


def _quiet(ctx: Context) -> Context:
    """The same view of the world, without the right or the memory to change anything."""
    guard = Guard()
    guard.revoke("a dry run changes nothing")
    return replace(
        ctx,
        kube=ctx.kube.guarded(guard),
        guard=guard,
        enqueue=_ignore,
        metrics=Metrics(),
        gates=GateMemory(),
        claims=ClaimMemory(),
        repairs=RepairMemories(),
        elastic=ElasticMemory(),
        workers=ctx.workers.copy(),
    )


def _ignore(*_: object, **__: object) -> None:
    """Nothing is queued by a dry run."""


async def look(ctx: Context, namespace: str, name: str) -> Look:
    """Read the pipeline's objects live, ask its sender and all its gates. NotFound where there is no such pipeline."""
    quiet = _quiet(ctx)
    pipeline, listed, pools = await asyncio.gather(
        quiet.kube.get(RLPIPELINES, namespace, name, timeout=API_SECONDS),
        quiet.kube.list(SYNCROUNDS, namespace, timeout=API_SECONDS),
        quiet.kube.list(ENGINEPOOLS, namespace, timeout=API_SECONDS),
    )
    ledger = Ledger(quiet, pipeline, holder=quiet.settings.identity)
    sender = SenderLink(quiet, namespace, name, ledger.uid)
    fleet = Fleet.of(quiet, ledger)
    await asyncio.gather(sender.find(ledger.spec), fleet.read_pods())
    await fleet.poll()
    clocks = await fan_out(fleet.heard(), lambda n: _ahead(quiet, fleet.peers[n]))
    mine = [r for r in listed.items if r["spec"]["pipeline"] == name and belongs(r, pipeline=ledger.uid)]
    rounds = [r for r in mine if not is_terminal(r)]
    expected = sum(wanted_pods(p) for p in pools.items if p["spec"]["pipeline"] == name)
    told = {n: ms for n, ms in clocks.items() if isinstance(ms, int)}
    return Look(ledger, sender, fleet, rounds, expected, told)


async def _ahead(ctx: Context, gate: Peer) -> int:
    return await ctx.peers.clock_ms(gate) - ctx.now_ms()


def would(found: Look, wanted: Wanted) -> Explanation:
    """What a sync would do, from one look."""
    ctx, ledger = found.ledger.ctx, found.ledger
    active = ledger.status.get("activeOperation") or {}
    committed = ledger.committed
    sender = found.sender.status
    ref = RoundRef(
        name=f"(sync to {wanted.version})",
        uid=IMAGINED,
        version=wanted.version,
        attempt=1 + max((ref_of(r).attempt for r in found.rounds), default=0),
        sender_incarnation=sender.incarnation if sender is not None else "",
        phase="Pending",
        created_ms=ctx.now_ms(),
        manifest_digest=wanted.digest,
        allow_rollback=wanted.rollback,
        expected_committed=committed.version if wanted.rollback and committed is not None else None,
    )
    unclaimed = [r for r in found.rounds if kind_of(r) == "Refresh" and r["metadata"]["uid"] != active.get("uid")]
    waiting = next((r for r in map(ref_of, unclaimed) if _is_meant(r, wanted)), None)
    ref = waiting or ref
    blocked = poisoned_fence(ctx, ledger)
    live = [e for e in found.fleet.engines.values() if not e.gone]
    sorted_ = triage_now(
        ctx,
        ledger,
        found.sender,
        live,
        [*(ref_of(r) for r in unclaimed if r["metadata"]["uid"] != ref.uid), ref],
        expected=found.expected,
        blocked=blocked,
    )
    plan, size = None, 0
    if sorted_.run is not None and sorted_.run.uid == ref.uid and sender is not None:
        slot = held(sender, wanted.version, wanted.digest)
        if slot is not None:
            size = slot.total_bytes
            plan = freeze_now(ledger.spec, found.fleet, found.sender, slot)
    owner = f"{active['kind']} {active['name']}" if active else None
    found_out = explain(
        ref,
        sorted_,
        plan,
        found.fleet.engines.values(),
        max_unavailable=ledger.spec["sync"]["maxUnavailable"],
        mode=wanted_mode(ledger.spec["sync"]),
        total_bytes=size,
        owner=owner,
    )
    return replace(found_out, ordered=waiting.name if waiting is not None else None)


def _is_meant(ref: RoundRef, wanted: Wanted) -> bool:
    """The round is what the person thinks of: asking for it once more would find it."""
    return (
        ref.version == wanted.version
        and ref.allow_rollback == wanted.rollback
        and wanted.digest in (None, ref.manifest_digest)
    )


def observed(found: Look) -> Obj:
    """What gates and sender said of themselves, as ``rlfleet doctor`` judges it. No keys, tokens or arguments."""
    ctx = found.ledger.ctx
    sender = found.sender.status
    problem = found.sender.problem
    return {
        "protocolVersion": wire.PROTOCOL_VERSION,
        "operatorClockMs": ctx.clock.wall_ms(),
        "apiserverClockMs": ctx.now_ms(),
        "sender": None
        if sender is None
        else {
            "protocolVersion": sender.protocol_version,
            "version": sender.sender_version,
            "capabilities": list(sender.capabilities),
            "fence": sender.fence.generation,
            "newest": sender.cache.version if sender.cache is not None else None,
            "totalBytes": sender.cache.total_bytes if sender.cache is not None else None,
        },
        "senderProblem": None if problem is None else _problem(*problem),
        "engines": [_engine(n, found) for n in sorted(found.fleet.engines)],
    }


def _problem(reason: Reason, message: str) -> Obj:
    return {"reason": reason.value, "message": message, "meaning": reason.meaning}


def _engine(name: str, found: Look) -> Obj:
    e = found.fleet.engines[name]
    s = e.status
    row: Obj = {
        "name": name,
        "pool": e.pool,
        "answers": s is not None,
        "url": e.url,
        "gone": e.gone,
        "born": not e.unborn,
    }
    if s is None:
        return row
    return row | {
        "protocolVersion": s.protocol_version,
        "gateVersion": s.gate_version,
        "capabilities": list(s.capabilities),
        "enrolled": s.enrolled,
        "fence": s.fence.generation,
        "clockAheadMs": found.clocks.get(name),
        "engineState": s.engine.state.value,
        "engineVersion": s.engine.version,
        "uncertain": s.uncertain,
        "inFlight": s.in_flight,
        "routed": dict(s.routed),
        "stagingCapacityBytes": s.staging_capacity_bytes,
        "devices": s.devices.source,
        "devicesProblem": s.devices.problem,
        "startup": None if s.startup is None else _problem(Reason.parse(s.startup.reason.value), s.startup.message),
    }


async def report(ctx: Context, namespace: str, name: str, wanted: Wanted | None) -> Obj:
    """What is observed of the pipeline and, with ``wanted``, what that sync would do (an Explanation)."""
    found = await look(ctx, namespace, name)
    return {"observed": observed(found), "explanation": None if wanted is None else would(found, wanted)}
