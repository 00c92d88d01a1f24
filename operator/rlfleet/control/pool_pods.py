"""Carrying out a pool's plan: create pods, take addresses out of routers, delete pods.

Invariants:
- creates go out in growing batches, and stop at the first error: a wrong template costs one call, not a thousand;
- a create without an answer is asked again under the same name, and an existing pod of ours counts as created;
- a pod is deleted under its UID, after its address has left the routers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.control.context import Context
from rlfleet.control.pool_memory import Departure, PoolMemory
from rlfleet.control.routers import Resolved, RouterClients, base_url, routers_of
from rlfleet.kube.client import KubeClient, Obj
from rlfleet.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, NotFound, TooManyRequests
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, PODS
from rlfleet.plan.adopt import ended
from rlfleet.plan.blocks import Slot
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.pods import build_pod
from rlfleet.plan.pool import Create, Delete, PodPlan, slow_start
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.pool_status import ranges
from rlfleet.plan.template import engine_port

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What executing a plan came to."""

    created: list[int] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    retry: bool = False
    waits: tuple[tuple[Reason, str], ...] = ()
    """What a rolling update does or waits for."""
    unknown: Problem | None = None
    """Why nothing is known of the engines from discovery."""


def _client(ctx: Context, priority: Priority) -> KubeClient:
    return ctx.kube.at(priority, field_manager=labels.POOL_MANAGER)


async def create_pods(
    ctx: Context, pool: Obj, plan: PodPlan, memory: PoolMemory, out: Outcome, slots: Sequence[Slot]
) -> None:
    """Create pods in growing batches; the first error ends it for now. ``slots``: of train blocks, by engine index."""
    kube = _client(ctx, Priority.SCALE)
    actions, start, before = plan.create, 0, len(out.problems)
    for size in slow_start(len(actions), largest=ctx.settings.create_parallel):
        batch = actions[start : start + size]
        start += size
        results = await asyncio.gather(
            *(_create(ctx, kube, pool, a, memory, slots) for a in batch), return_exceptions=True
        )
        errors: list[ApiError] = []
        for action, result in zip(batch, results, strict=True):
            if isinstance(result, ApiError):
                errors.append(result)
            elif isinstance(result, BaseException):
                raise result
            elif result:
                out.created.append(action.index)
        if errors:
            hard = next((e for e in errors if isinstance(e, Invalid | Forbidden)), None)
            if isinstance(hard, Forbidden) and hard.namespace_terminating:
                memory.namespace_ending = True
                log.info("pool %s: no pods are made, its namespace is being deleted", pool["metadata"]["name"])
            elif hard is not None:
                out.problems.append(Problem(Reason.POD_CREATE_FAILED, f"pod not created: {hard.message[:500]}"))
            else:
                log.warning("pool %s: creating pods: %s", pool["metadata"]["name"], errors[0])
            memory.note_refused(
                out.problems[before:],
                generation=int(pool["metadata"]["generation"]),
                now=ctx.clock.monotonic(),
                now_ms=ctx.now_ms(),
                retry_after=max((e.retry_after for e in errors if isinstance(e, TooManyRequests)), default=0.0),
            )
            break
    else:
        # Those that wait for something else may be refused as well: it is over when none is owed any more.
        if len(actions) == plan.owed:
            memory.note_made()
    if out.created:
        count = len(out.created)
        note = f"Created {count} engine pod{'s' * (count != 1)}: {ranges(out.created)}"
        ctx.events.record(pool, "Normal", Reason.POD_CREATED.value, note, action="CreatePods")
    for problem in out.problems:
        ctx.events.record(pool, "Warning", problem.reason.value, problem.message, action="CreatePods")


async def _create(
    ctx: Context, kube: KubeClient, pool: Obj, action: Create, memory: PoolMemory, slots: Sequence[Slot]
) -> bool:
    namespace = pool["metadata"]["namespace"]
    body = build_pod(
        pool,
        action.index,
        action.name,
        public_keys=ctx.keys.public_text(),
        slots=slots,
        tls_secret=ctx.settings.tls_secret,
        admin_key=secrets.token_urlsafe(32),
    )
    try:
        pod = await kube.create(PODS, namespace, body, timeout=ctx.settings.api_timeout)
        ctx.metrics.write("pods")
    except AlreadyExists:
        pod = await kube.get(PODS, namespace, action.name, timeout=ctx.settings.api_timeout)
        owner: Obj = next((o for o in pod["metadata"].get("ownerReferences") or [] if o.get("controller")), {})
        if owner.get("uid") != pool["metadata"]["uid"]:
            # The name is a hash and belongs to somebody else: take the next one.
            memory.bumps[action.index] = memory.bumps.get(action.index, 0) + 1
            return False
        ctx.pods.observe(pod)
        return False
    ctx.pods.observe(pod)
    return True


async def unroute(
    ctx: Context,
    pool: Obj,
    pods: Iterable[PodFact],
    routers: Resolved,
    clients: RouterClients,
    memory: PoolMemory,
    *,
    fence: int,
    out: Outcome,
) -> None:
    """Take the addresses of leaving and gone pods out of every router; done ones are remembered."""
    port = engine_port(pool)
    for pod in pods:
        memory.departures.setdefault(pod.uid, Departure(pod, fence=fence))
    targets = {e.url for e in routers.endpoints}
    namespace = pool["metadata"]["namespace"]

    async def one(departure: Departure) -> None:
        left = [e for e in routers.endpoints if e.url not in departure.done]
        if not left:
            return
        theirs = await _routers_of_bearers(ctx, namespace, departure.pod)
        departure.done |= theirs & targets
        left = [e for e in left if e.url not in theirs]
        for url, error in (await clients.remove(left, base_url(departure.pod.ip, port), routers.keys)).items():
            if error is None:
                departure.done.add(url)
            else:
                out.retry = True
                out.problems.append(Problem(Reason.ROUTER_UNREACHABLE, error[:300]))

    await asyncio.gather(*(one(d) for d in memory.departures.values()))
    # A pod that is gone needs to be remembered no longer once every router is done.
    for uid, departure in list(memory.departures.items()):
        if uid not in memory.facts and targets <= departure.done:
            del memory.departures[uid]


async def _routers_of_bearers(ctx: Context, namespace: str, pod: PodFact) -> set[str]:
    """URLs of the routers in which the pod's address is the entry of a living engine, which got it since.

    Other engines may have other routers: what a router of the dead one's pool alone lists would send its requests to
    another pipeline's engine.
    """
    if not (pod.finished or pod.deleting) and ctx.pods.by_uid(pod.uid) is not None:
        return set()
    bearers = [o for o in ctx.pods.at_address(namespace, pod.ip) if o["metadata"]["uid"] != pod.uid and not ended(o)]
    if not bearers:
        return set()
    listed = await ctx.kube.at(Priority.SCALE).list(ENGINEPOOLS, namespace, timeout=ctx.settings.api_timeout)
    return routers_of(bearers, listed.items, ctx.pods)


def unrouted(memory: PoolMemory, routers: Resolved, *, fence: int) -> frozenset[str]:
    """UIDs of pods whose address is out of every router.

    For a pod that still lives this holds only under the fence that it was seen with: a later round may have opened
    the engine again.
    """
    targets = {e.url for e in routers.endpoints}
    result = set()
    for uid, departure in memory.departures.items():
        fact = memory.facts.get(uid)
        if fact is not None and fact.live and departure.fence != fence:
            departure.done.clear()
            departure.fence = fence
            memory.drain_until.pop(uid, None)
        if targets <= departure.done:
            result.add(uid)
    return frozenset(result)


async def delete_pods(ctx: Context, pool: Obj, actions: Sequence[Delete], out: Outcome) -> None:
    """Delete pods under their UIDs."""
    kube = _client(ctx, Priority.DELETE)
    namespace = pool["metadata"]["namespace"]
    slots = asyncio.Semaphore(ctx.settings.create_parallel)

    async def one(action: Delete) -> None:
        pod = action.pod
        async with slots:
            try:
                if action.reason is Reason.UPDATING:
                    await kube.evict(namespace, pod.name, uid=pod.uid, timeout=ctx.settings.api_timeout)
                else:
                    await kube.delete(PODS, namespace, pod.name, uid=pod.uid, timeout=ctx.settings.api_timeout)
                ctx.metrics.write("pods")
            except NotFound:
                ctx.pods.observe_absent(namespace, pod.name)
                return
            except Conflict:
                return  # another pod bears the name by now; the view will show it
            except TooManyRequests:
                if action.reason is not Reason.UPDATING:
                    raise
                out.retry = True  # a budget that allowed it a moment ago does not any more
                return
            ctx.pods.note_delete(namespace, pod.name, pod.uid)
            out.deleted.append(pod.name)

    results = await asyncio.gather(*(one(a) for a in actions), return_exceptions=True)
    for result in results:
        if isinstance(result, ApiError):
            out.retry = True
            log.warning("pool %s: deleting pods: %s", pool["metadata"]["name"], result)
        elif isinstance(result, BaseException):
            raise result
    updated = sorted({a.pod.index for a in actions if a.reason is Reason.UPDATING and a.pod.name in out.deleted})
    if updated:
        note = f"Evicted {len(updated)} engine pod{'s' * (len(updated) != 1)} of an earlier template: {ranges(updated)}"
        ctx.events.record(pool, "Normal", Reason.UPDATING.value, note, action="UpdatePods")
    shrunk = sorted({a.pod.index for a in actions if a.reason is Reason.SCALING_DOWN and a.pod.name in out.deleted})
    if shrunk:
        note = f"Deleted {len(shrunk)} engine pod{'s' * (len(shrunk) != 1)}: {ranges(shrunk)}"
        ctx.events.record(pool, "Normal", Reason.POD_DELETED.value, note, action="DeletePods")
