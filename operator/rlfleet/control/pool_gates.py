"""The gates of a pool: ask them how they are, and tell them where they belong.

Invariants:
- a gate that does not answer leaves the last known status in place, marked as not answered; status says so only when
  the silence lasts;
- a gate is told again when its own word is that it was told something else, and nothing is told before the pipeline's
  fence is above that of every earlier leader;
- while a round or repair runs, engines that were up before it are not asked: they are its members, and their passing
  states are none of the pool's business (so a round costs the pool one status write, not one per step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlfleet.api import labels, naming
from rlfleet.api.fencing import MAX_AHEAD_MS
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.wire import EnrollRequest, GateStatus
from rlfleet.control.context import Context
from rlfleet.control.peers import Peer, PeerError, Refused, fan_out
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.routers import Resolved, base_url
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import RLPIPELINES
from rlfleet.plan.adopt import adopts
from rlfleet.plan.claims import next_fence
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.template import engine_port, gate_port

_UP = frozenset({EngineState.LOADING, EngineState.ACTIVE, EngineState.QUARANTINED, EngineState.OFFLOADED})


def gate_peer(pool: Mapping[str, Any], pod: PodFact) -> Peer:
    """How to reach the gate of a pod."""
    name = _name(pool, pod)
    url = base_url(pod.ip, gate_port(pool))
    if pod.tls:
        return Peer(
            name, pod.uid, f"https{url.removeprefix('http')}", naming.gate_server_name(pool["metadata"]["namespace"])
        )
    return Peer(name, pod.uid, url)


def enrollment(
    pool: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    pod: PodFact,
    routers: Resolved,
    public_keys: Mapping[str, str],
) -> EnrollRequest:
    """What the gate of a pod must know."""
    name = pool["metadata"]["name"]
    return EnrollRequest(
        pipeline=pipeline["metadata"]["uid"],
        generation=int((pipeline.get("status") or {}).get("fence") or 0),
        pod_uid=pod.uid,
        pool=name,
        engine=_name(pool, pod),
        engine_url=base_url(pod.ip, engine_port(pool)),
        routers=routers.endpoints,
        public_keys=dict(public_keys),
        engine_process=pod.process or None,
    )


def _name(pool: Mapping[str, Any], pod: PodFact) -> str:
    """An adopted engine is called as its pod: its index follows from which pods are there."""
    return pod.name if adopts(pool) else naming.engine_name(pool["metadata"]["name"], pod.index)


async def observe(
    ctx: Context,
    pool: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    pods: Iterable[PodFact],
    routers: Resolved,
    memory: PoolMemory,
) -> None:
    """Ask the gates, enroll those that need it, and put what they said into ``memory``."""
    busy = bool((pipeline.get("status") or {}).get("activeOperation"))
    ask = [
        p
        for p in pods
        if p.ip
        and p.owned
        and not p.finished
        and not (busy and p.uid in memory.gates and memory.states.get(p.uid) in _UP and not _restarted(p, memory))
    ]
    uid = pipeline["metadata"]["uid"]
    keys = ctx.keys.public_text()

    requests = {p: enrollment(pool, pipeline, p, routers, keys) for p in ask}
    peers = {p: gate_peer(pool, p) for p in ask}
    limit = ctx.settings.gate_parallel
    results = await fan_out(ask, lambda p: ctx.peers.gate_status(peers[p], uid), limit=limit)
    # Compared with what the gate holds, not with what this process once said: a leader that was frozen may have told it
    # something older since.
    late = [p for p, r in results.items() if isinstance(r, GateStatus) and _needs(r, uid, requests[p])]
    if late and (stood := await stand(ctx, pipeline)) is not None:
        requests = {p: enrollment(pool, stood, p, routers, keys) for p in late}
        results |= await fan_out(late, lambda p: ctx.peers.enroll(peers[p], requests[p]), limit=limit)
    for pod, result in results.items():
        memory.answered[pod.uid] = not isinstance(result, PeerError)
        memory.refusals.pop(pod.uid, None)
        if isinstance(result, Refused):
            memory.silence.heard(pod.uid)
            memory.refusals[pod.uid] = (result.body.reason.value, result.body.message)
        elif isinstance(result, PeerError):
            memory.silence.missed(pod.uid, ctx.clock.monotonic())
        else:
            memory.silence.heard(pod.uid)
            memory.gates[pod.uid] = result


def _restarted(pod: PodFact, memory: PoolMemory) -> bool:
    """Its gate stands beside another engine process than it was told of: it is told even while a round owns it."""
    return bool(pod.process) and memory.gates[pod.uid].engine_process != pod.process


def _needs(status: GateStatus, pipeline: str, request: EnrollRequest) -> bool:
    return not status.enrolled or status.pipeline != pipeline or status.enrolment != request.digest()


async def stand(ctx: Context, pipeline: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The pipeline with a fence above everything that an earlier leader may still have under way.

    Raised once by each process, and only where an operation was claimed before: a pipeline that never had one has
    opened no engine. None: something is claimed, and whoever executes it (we, in a moment) raises the fence.
    """
    status = pipeline.get("status") or {}
    held = int(status.get("fence") or 0)
    uid = pipeline["metadata"]["uid"]
    if uid in ctx.raised or not held or held > ctx.now_ms() + MAX_AHEAD_MS:
        return pipeline
    if status.get("activeOperation"):
        return None
    stood = await ctx.kube.at(Priority.SCALE, field_manager=labels.PIPELINE_MANAGER).patch_status(
        RLPIPELINES,
        pipeline["metadata"]["namespace"],
        pipeline["metadata"]["name"],
        resource_version=pipeline["metadata"]["resourceVersion"],
        status={"fence": next_fence(held, 0, ctx.kube.last_date_ms)},
        timeout=ctx.settings.api_timeout,
    )
    ctx.metrics.write(RLPIPELINES.plural)
    ctx.raised.add(uid)
    return stood
