"""The EnginePool reconciler: observe, plan, execute, write status once.

Invariants:
- decisions are made on a live read of the pool and a view of pods that shows this process's own writes;
- status is written only when it differs from what is there, at most once per run and about once per second, under the
  resourceVersion that was read;
- while a round or repair of the pipeline runs no living engine is removed and no member is asked anything.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control import pool_adopt, pool_endings, pool_gates, pool_pods, routers, workers
from rlfleet.control.context import Context
from rlfleet.control.pool_budget import ensure_budget, rolling
from rlfleet.control.pool_elastic import Sleepers, facts_for_conditions, sleepers
from rlfleet.control.pool_end import finalize, let_go
from rlfleet.control.pool_memory import PoolMemory
from rlfleet.control.pool_readiness import write_readiness
from rlfleet.control.pool_rows import committed_of, drained, rows_of
from rlfleet.control.queue import After, Done, Result, Retry
from rlfleet.control.rounds.pods import is_owned
from rlfleet.control.train_blocks import missing_claims
from rlfleet.kube.client import Obj
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, PODS, RLPIPELINES
from rlfleet.plan import presets, template
from rlfleet.plan.adopt import adopts, selector_of, source_of
from rlfleet.plan.blocks import slots_of
from rlfleet.plan.deletion import is_deleting
from rlfleet.plan.demand import grants_of, held_devices
from rlfleet.plan.elastic import on_devices, shrinks_by_delete, wanted_pods
from rlfleet.plan.lifecycle import PodFact, pod_fact
from rlfleet.plan.pool import PodPlan, PoolView, plan_pods
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.pool_observed import Observed, Problem
from rlfleet.plan.pool_status import build_status
from rlfleet.plan.rolling import Rolling, is_rolling
from rlfleet.plan.validate import stopped, violations

log = logging.getLogger(__name__)

#: Longest that a view may lag behind an own write before the object is read live.
STALE_SECONDS = 3.0
#: Least seconds between two status writes of a pool that only differ in what engines do.
STATUS_SECONDS = 1.0
_STARTING = frozenset({EngineState.PENDING, EngineState.BOOTING})


def _reason(word: str) -> Reason:
    """The reason of a gate's answer; every ErrorReason is a Reason (api/conditions.py)."""
    return next((r for r in Reason if r.value == word), Reason.INTERNAL)


class PoolReconciler:
    """Reconciles EnginePools. One instance per operator; close it at the end."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._memories: dict[tuple[str, str], PoolMemory] = {}
        self._routers = routers.RouterClients(ctx.kube, timeout=ctx.settings.router_timeout, guard=ctx.guard)
        self._router_urls: dict[tuple[str, str], set[str]] = {}
        self._frontends: dict[tuple[str, str], str] = {}

    async def close(self) -> None:
        """Close connections to routers."""
        await self._routers.close()

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Move one pool a step towards its spec."""
        ctx = self._ctx
        key = (namespace, name)
        kube = ctx.kube.at(Priority.RESYNC, field_manager=labels.POOL_MANAGER)
        if not ctx.pods.covers(namespace):
            raise Retry("the view of pods is not complete yet")
        await self._catch_up(namespace, name)
        try:
            pool = await kube.get(ENGINEPOOLS, namespace, name, timeout=ctx.settings.api_timeout)
        except NotFound:
            self._memories.pop(key, None)
            await self._note_routers(key, routers.Resolved())
            await self._note_frontend(key, None)
            ctx.metrics.pool(namespace, name, None, 0, None)
            return Done()
        memory = self._memories.get(key)
        if memory is None or memory.uid != pool["metadata"]["uid"]:
            memory = self._memories[key] = PoolMemory.of(pool)
        found = routers.resolve(pool, ctx.pods)
        await self._note_routers(key, found)
        await self._note_frontend(key, pool)
        mine = await pool_adopt.find(ctx, pool)
        facts = self._facts(pool) if mine is None else [*mine.facts, *mine.ended]
        try:
            pipeline: Obj | None = await kube.get(
                RLPIPELINES, namespace, pool["spec"]["pipeline"], timeout=ctx.settings.api_timeout
            )
        except NotFound:
            pipeline = None
        if is_deleting(pool):
            if mine is not None:
                return await let_go(ctx, pool, pipeline, facts, found, self._routers, memory)
            return await finalize(ctx, pool, pipeline, facts, found, self._routers, memory)
        if labels.POOL_FINALIZER not in (pool["metadata"].get("finalizers") or []):
            pool = await kube.patch_metadata(
                ENGINEPOOLS,
                namespace,
                name,
                resource_version=pool["metadata"]["resourceVersion"],
                finalizers=[*(pool["metadata"].get("finalizers") or []), labels.POOL_FINALIZER],
                timeout=ctx.settings.api_timeout,
            )
            ctx.metrics.write(ENGINEPOOLS.plural)
        return await self._step(pool, pipeline, facts, found, memory, mine)

    async def _step(
        self,
        pool: Obj,
        pipeline: Obj | None,
        facts: list[PodFact],
        found: routers.Resolved,
        memory: PoolMemory,
        mine: pool_adopt.Found | None,
    ) -> Result:
        ctx = self._ctx
        problems = [*found.problems, *(mine.problems if mine is not None else ())]
        valid = mine is None
        try:
            if valid:
                template.validate(pool)
                presets.validate(pool)
        except template.InvalidPool as e:
            valid = False
            problems.insert(0, Problem(Reason.INVALID_SPEC, str(e), stops=True))
        status = (pipeline or {}).get("status") or {}
        demanded = on_devices(pool, held_devices(grants_of(status)))
        vacate = demanded if shrinks_by_delete(pool) else frozenset[int]()
        vacated = sum(i < wanted_pods(pool) for i in vacate)
        problems += await ensure_budget(ctx, pool, facts, memory, vacated=vacated)
        if pipeline is not None:
            await pool_gates.observe(ctx, pool, pipeline, facts, found, memory)
        seen = await workers.observe(ctx, pool, facts, memory)
        facts, now = seen.facts, ctx.clock.monotonic()
        problems += seen.problems
        failed, lost = memory.see(facts, ctx.now_ms())
        if mine is None:
            memory.keep_indices(wanted_pods(pool))
        pool_endings.report(ctx, pool, await pool_endings.explain(ctx, pool, failed, memory), lost)

        out = pool_pods.Outcome(problems=problems, unknown=seen.unknown)
        fence = int(status.get("fence") or 0)
        slots = slots_of(pool, pipeline)
        owned = bool(status.get("activeOperation"))
        texts = [s.text for s in slots]
        may_create = valid and pipeline is not None and not is_deleting(pipeline) and not memory.namespace_ending

        async def obstacle() -> str:
            return await self._obstacle(pool, pipeline, memory, may_create=may_create)

        turn = Rolling()
        if valid:
            turn = await rolling(ctx, pool, facts, memory, texts, owned=owned, demanded=demanded, obstacle=obstacle)
        view = PoolView(
            name=pool["metadata"]["name"],
            uid=memory.uid,
            replicas=wanted_pods(pool),
            pods=tuple(facts),
            slots=len(template.assignments(pool)) if template.is_pinned(pool) else None,
            claims=tuple(s.claim for s in slots) if template.is_claims(pool) else None,
            foreign=self._foreign(pool),
            may_create=may_create,
            may_remove=not owned,
            outdated=turn.replace,
            adopted=mine is not None,
            unrouted=pool_pods.unrouted(memory, found, fence=fence),
            demanded=demanded,
            vacate=vacate,
            held_back=frozenset(memory.held_back(ctx.now_ms())),
            predecessors=memory.predecessors,
            bumps=memory.bumps,
        )
        plan = plan_pods(view)
        if not plan.owed:
            memory.note_made()
        elif plan.create and memory.create_pause(int(pool["metadata"]["generation"]), now):
            problems += memory.refused
            view = replace(view, may_create=False)
            plan = plan_pods(view)
        if plan.create:
            broken = await self._broken(pool, pipeline)
            missing = () if broken or pipeline is None else await missing_claims(ctx, pool, pipeline)
            problems += broken
            view = replace(view, may_create=not broken and not missing, missing=missing)
            out.retry = out.retry or bool(missing)
            plan = plan_pods(view)
        if plan.unroute or memory.departures:
            await pool_pods.unroute(ctx, pool, plan.unroute, found, self._routers, memory, fence=fence, out=out)
            gone = pool_pods.unrouted(memory, found, fence=fence)
            drain = drained(plan, pipeline, gone, found, memory, now)
            plan = plan_pods(replace(view, unrouted=gone, drained=drain))
        elif plan.draining:
            drain = drained(plan, pipeline, view.unrouted, found, memory, now)
            plan = plan_pods(replace(view, drained=drain))
        if plan.create:
            await pool_pods.create_pods(ctx, pool, plan, memory, out, slots)
        if plan.delete:
            await pool_pods.delete_pods(ctx, pool, plan.delete, out)

        out.waits = turn.waits
        present = memory.explained(self._facts(pool) if mine is None else mine.engines(facts))
        sleep = sleepers(pool, pipeline, present, plan.draining, memory)
        rows = rows_of(ctx, pool, present, plan, pipeline, found, memory, sleep, slots)
        await write_readiness(ctx, pool, rows, out, operating=bool(status.get("activeOperation")))
        return await self._report(pool, pipeline, plan, rows, found, memory, out, sleep, valid=valid)

    async def _obstacle(self, pool: Obj, pipeline: Obj | None, memory: PoolMemory, *, may_create: bool) -> str:
        """Why no pod could be made in place of one that goes; empty: one could, as far as is known."""
        if pipeline is None or not may_create:
            return "the pool makes no pods now"
        if memory.refused_since is not None:
            return "the apiserver refuses its pods"
        broken = await self._broken(pool, pipeline)
        if broken:
            return broken[0].message
        missing = await missing_claims(self._ctx, pool, pipeline)
        return f"ResourceClaim {', '.join(missing)} is not there to use yet" if missing else ""

    async def _broken(self, pool: Obj, pipeline: Obj | None) -> list[Problem]:
        """Broken rules that keep this pool from making pods. Read live: what others were changed to may decide."""
        if pipeline is None:
            return []
        listed = await self._ctx.kube.at(Priority.SCALE).list(
            ENGINEPOOLS, pool["metadata"]["namespace"], timeout=self._ctx.settings.api_timeout
        )
        found = stopped(violations(pipeline, listed.items), pool["metadata"]["name"])
        return [Problem(v.reason, v.message, stops=True) for v in found]

    # ------------------------------------------------------------------------------------------ observing

    async def _catch_up(self, namespace: str, name: str) -> None:
        """Wait for own writes in the view; read live what it does not show for too long."""
        ctx = self._ctx
        for _, pod in ctx.pods.stale_keys(namespace, f"{name}-", older_than=STALE_SECONDS):
            try:
                ctx.pods.observe(await ctx.kube.get(PODS, namespace, pod, timeout=ctx.settings.api_timeout))
            except NotFound:
                ctx.pods.observe_absent(namespace, pod)
        if ctx.pods.stale_keys(namespace, f"{name}-"):
            raise Retry("the view of pods is behind our own writes", after=0.05)

    def _facts(self, pool: Obj) -> list[PodFact]:
        meta = pool["metadata"]
        pods = self._ctx.pods.by_label(labels.POOL, meta["name"], namespace=meta["namespace"])
        facts = [pod_fact(p, owner_uid=meta["uid"]) for p in pods]
        return [f for f in facts if f.owned]

    def _foreign(self, pool: Obj) -> int:
        """Pods that an EnginePool of this name and another UID left running."""
        meta = pool["metadata"]
        pods = self._ctx.pods.by_label(labels.POOL, meta["name"], namespace=meta["namespace"])
        return sum(is_owned(p) and not (f := pod_fact(p, owner_uid=meta["uid"])).owned and not f.finished for p in pods)

    async def _note_routers(self, key: tuple[str, str], found: routers.Resolved) -> None:
        self._router_urls[key] = {e.url for e in found.endpoints}
        if not self._router_urls[key]:
            del self._router_urls[key]
        await self._routers.keep_only(set().union(*self._router_urls.values()))

    async def _note_frontend(self, key: tuple[str, str], pool: Obj | None) -> None:
        """Forget what a pool named before and none names now, and what was said of workers whose pods are gone.

        Only that: after a takeover others ask frontends of pools that were not looked at here yet.
        """
        self._ctx.workers.keep_only(lambda uid: self._ctx.pods.by_uid(uid) is not None)
        before = self._frontends.pop(key, None)
        if pool is not None and workers.dynamo_of(pool) is not None:
            self._frontends[key] = workers.frontend_url(pool)
        if before is not None and before not in self._frontends.values():
            await self._ctx.frontends.forget(before)

    # ------------------------------------------------------------------------------------------ reporting

    async def _report(
        self,
        pool: Obj,
        pipeline: Obj | None,
        plan: PodPlan,
        rows: list[Row],
        found: routers.Resolved,
        memory: PoolMemory,
        out: pool_pods.Outcome,
        sleep: Sleepers,
        *,
        valid: bool,
    ) -> Result:
        ctx = self._ctx
        meta = pool["metadata"]
        refused = next((memory.refusals[r.pod.uid] for r in rows if r.pod.uid in memory.refusals), None)
        if refused is not None:
            out.problems.append(Problem(_reason(refused[0]), f"a gate refuses: {refused[1][:300]}"))
        observed = Observed(
            generation=int(meta["generation"]),
            replicas=sum(r.pod.live for r in rows) if adopts(pool) else wanted_pods(pool),
            rows=tuple(rows),
            pool=meta["name"],
            routers=found.names,
            template_hash=template.template_hash(pool) if valid else None,
            committed=committed_of(pipeline),
            pipeline_found=pipeline is not None,
            pipeline_deleting=pipeline is not None and is_deleting(pipeline),
            problems=tuple(dict.fromkeys(out.problems)),
            waits=(*plan.waits, *sleep.waits, *out.waits),
            selector=",".join(f"{k}={v}" for k, v in sorted(selector_of(pool).items())),
            source=source_of(pool),
            unknown=out.unknown,
            replaces=(((pipeline or {}).get("spec") or {}).get("sync") or {}).get("onFailure") == "Replace",
            rolling=is_rolling(pool),
            awake=sleep.awake,
            elastic=facts_for_conditions(pool, pipeline, memory, ctx.now_ms()),
            refused_since=memory.refused_since,
            failures=memory.failures,
        )
        old = pool.get("status") or {}
        new = build_status(observed, old, now=rfc3339(ctx.now_ms()))
        committed = observed.committed.version if observed.committed is not None else None
        ctx.metrics.pool(meta["namespace"], meta["name"], new, observed.replicas, committed)
        # catchUp is written by rounds (control/rounds/counting.py): what is not ours is neither compared nor deleted.
        changes = {k: new.get(k) for k in {*old, *new} - {"catchUp"} if old.get(k) != new.get(k)}
        wait = self._next(
            plan, rows, memory, out, pipeline, generation=int(meta["generation"]), moving=bool(sleep.unmoved)
        )
        if not changes:
            return After(wait)
        now = ctx.clock.monotonic()
        urgent = old.get("observedGeneration") != new["observedGeneration"]
        if not urgent and memory.status_at is not None and now < memory.status_at + STATUS_SECONDS:
            return After(min(wait, memory.status_at + STATUS_SECONDS - now))
        await ctx.kube.at(Priority.SCALE, field_manager=labels.POOL_MANAGER).patch_status(
            ENGINEPOOLS,
            meta["namespace"],
            meta["name"],
            resource_version=meta["resourceVersion"],
            status=changes,
            timeout=ctx.settings.api_timeout,
        )
        ctx.metrics.write(ENGINEPOOLS.plural)
        memory.status_at = now
        return After(wait)

    def _next(
        self,
        plan: PodPlan,
        rows: list[Row],
        memory: PoolMemory,
        out: pool_pods.Outcome,
        pipeline: Obj | None,
        *,
        generation: int,
        moving: bool,
    ) -> float:
        """When to look again if nothing happens."""
        settings = self._ctx.settings
        waits = [settings.poll_seconds]
        held = memory.held_back(self._ctx.now_ms())
        if held:
            waits.append(max(0.05, min(held.values())))
        if (left := memory.create_pause(generation, self._ctx.clock.monotonic())) > 0:
            waits.append(max(0.05, left))
        if out.retry or plan.draining or memory.departures or moving:
            waits.append(settings.boot_poll_seconds)
        busy = any(r.derived.state in _STARTING for r in rows) or bool(out.created or out.deleted)
        if busy and pipeline is not None:
            waits.append(settings.boot_poll_seconds)
        return min(waits)
