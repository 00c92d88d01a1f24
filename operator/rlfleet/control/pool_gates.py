"""The gates of a pool: ask them how they are, and tell them where they belong.

Invariants:
- a gate that does not answer leaves the last known status in place, marked as not answered; status says so only when
  the silence lasts;
- while a round or repair runs, engines that were up before it are not asked: they are its members, and their passing
  states are none of the pool's business (so a round costs the pool one status write, not one per step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlfleet.api import naming
from rlfleet.api.v1alpha1.enginepool import EngineState
from rlfleet.api.wire import EnrollRequest, GateStatus
from rlfleet.control.context import Context
from rlfleet.control.peers import Peer, PeerError, Refused, fan_out
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.routers import Resolved, base_url
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.template import engine_port, gate_port

_UP = frozenset({EngineState.LOADING, EngineState.ACTIVE, EngineState.QUARANTINED})


def gate_peer(pool: Mapping[str, Any], pod: PodFact) -> Peer:
    """How to reach the gate of a pod."""
    name = naming.engine_name(pool["metadata"]["name"], pod.index)
    return Peer(name, pod.uid, base_url(pod.ip, gate_port(pool)))


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
        engine=naming.engine_name(name, pod.index),
        engine_url=base_url(pod.ip, engine_port(pool)),
        routers=routers.endpoints,
        public_keys=dict(public_keys),
    )


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
        and not (busy and p.uid in memory.gates and memory.states.get(p.uid) in _UP)
    ]
    uid = pipeline["metadata"]["uid"]
    keys = ctx.keys.public_text()

    async def one(pod: PodFact) -> GateStatus:
        peer = gate_peer(pool, pod)
        status = await ctx.peers.gate_status(peer, uid)
        request = enrollment(pool, pipeline, pod, routers, keys)
        # Compared with what the gate holds, not with what this process once said: a leader that was frozen may have
        # told it something older since.
        if not status.enrolled or status.pipeline != uid or status.enrolment != request.digest():
            status = await ctx.peers.enroll(peer, request)
        return status

    for pod, result in (await fan_out(ask, one, limit=ctx.settings.gate_parallel)).items():
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
