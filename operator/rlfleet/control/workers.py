"""What Dynamo frontends say of the engines of ``source.dynamo`` pools, seen from a reconcile.

Invariants:
- a frontend that gives no whole list changes nothing: the last verdict on each process stands, and is said to be old;
- a verdict is about one process (instance id) in one pod (UID). Another process in the pod begins without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.api.wire import EngineState, GateStatus
from rlfleet.discovery.client import Unknown
from rlfleet.plan.adopt import has_gate
from rlfleet.plan.dynamo import Candidate, Listing, Standing, Verdict, considered, host_of, join, strangers
from rlfleet.plan.lifecycle import PodFact
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.rounds import Engine
from rlfleet.plan.template import engine_port

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.pool_memory import PoolMemory

Obj = Mapping[str, Any]
#: A list that was asked for so many seconds ago is new enough; pool and pipeline look one after the other.
FRESH_SECONDS = 0.5

_REASONS = {
    Standing.UNLISTED: Reason.WORKER_NOT_LISTED,
    Standing.FAILING: Reason.WORKER_NOT_LISTED,
    Standing.CONTRADICTED: Reason.WORKER_NOT_JOINED,
    Standing.LACKING: Reason.ROUTES_MISSING,
}


@dataclass(slots=True)
class WorkerMemory:
    """The last verdict on each process, by pod UID. All of it can be lost: then nothing is known until a list comes."""

    verdicts: dict[str, tuple[str, Verdict]] = field(default_factory=dict)

    def copy(self) -> WorkerMemory:
        """The same knowledge, for somebody who must not change this one."""
        return WorkerMemory(dict(self.verdicts))

    def note(self, candidates: Sequence[Candidate], found: Mapping[str, Verdict]) -> None:
        """Take in what a list says of these pods."""
        for c in candidates:
            if c.instance is not None:
                self.verdicts[c.uid] = (c.instance, found[c.uid])

    def recall(self, c: Candidate) -> Verdict | None:
        """What was last said of this very process."""
        known = self.verdicts.get(c.uid)
        return known[1] if known is not None and known[0] == c.instance else None

    def keep_only(self, is_there: Callable[[str], bool]) -> None:
        """Forget pods that are gone."""
        self.verdicts = {uid: told for uid, told in self.verdicts.items() if is_there(uid)}


def dynamo_of(pool: Obj) -> Mapping[str, Any] | None:
    """``spec.source.dynamo``; None: the pool's engines come from elsewhere."""
    found: Mapping[str, Any] | None = (pool["spec"].get("source") or {}).get("dynamo")
    return found


def frontend_url(pool: Obj) -> str:
    """Base URL of the discovery listener of a ``source.dynamo`` pool."""
    spec = dynamo_of(pool) or {}
    service = spec.get("service")
    if service is None:
        return str(spec["url"]).rstrip("/")
    return f"http://{service['name']}.{pool['metadata']['namespace']}.svc:{service.get('port', 8001)}"


def _components(pool: Obj) -> frozenset[str]:
    return frozenset((dynamo_of(pool) or {}).get("components") or ())


async def listings(ctx: Context, pools: Iterable[Obj]) -> dict[str, Listing | Unknown]:
    """What their frontends say now, by pool name; pools from elsewhere are left out."""
    mine = {p["metadata"]["name"]: frontend_url(p) for p in pools if dynamo_of(p) is not None}
    told = await asyncio.gather(*(ctx.frontends.look(u, fresh=FRESH_SECONDS) for u in mine.values()))
    return dict(zip(mine, told, strict=True))


def judge(
    memory: WorkerMemory, pool: Obj, listing: Listing | Unknown, candidates: Sequence[Candidate]
) -> dict[str, Verdict | None]:
    """The verdict on each pod by UID; None: not known."""
    if isinstance(listing, Unknown):
        return {c.uid: memory.recall(c) for c in candidates}
    found = join(listing, candidates, port=engine_port(pool), components=_components(pool))
    memory.note(candidates, found)
    return {uid: v if v.standing is not Standing.UNTOLD else None for uid, v in found.items()}


# ------------------------------------------------------------------------------------------------ rounds


def stand(
    memory: WorkerMemory, pools: Mapping[str, Obj], told: Mapping[str, Listing | Unknown], engines: Iterable[Engine]
) -> dict[str, Engine]:
    """The engines of ``source.dynamo`` pools with what discovery says of them, by pod name.

    One that is not listed as it should be is kept out of rounds and closed, as one in quarantine. No round makes a
    member of one that nothing is known of now (``undiscovered``), and nobody opens it.
    """
    result: dict[str, Engine] = {}
    by_pool: dict[str, list[Engine]] = {name: [] for name in told}
    for e in engines:
        if e.pool in by_pool and not e.gone:
            by_pool[e.pool].append(e)
    for name, mine in by_pool.items():
        listing = told[name]
        candidates = {e.name: Candidate(e.pod_uid, e.name, e.address, _instance(e.status)) for e in mine}
        verdicts = judge(memory, pools[name], listing, list(candidates.values()))
        for e in mine:
            verdict = verdicts[e.pod_uid]
            kept_out = verdict is not None and not verdict.joined
            why = ""
            if isinstance(listing, Unknown):
                why = listing.message
            elif verdict is None and e.status is not None and e.status.engine.state is EngineState.READY:
                why = "its gate reads no instance id from the worker"
            result[e.name] = replace(
                e,
                kept_out=f"{_REASONS[verdict.standing].value}: {verdict.message}" if verdict and kept_out else "",
                undiscovered=why,
            )
    return result


def _instance(status: GateStatus | None) -> str | None:
    return status.engine.instance if status is not None else None


# ------------------------------------------------------------------------------------------------ pools


@dataclass(frozen=True, slots=True)
class Seen:
    """A pool's engines with what discovery says of them, and what a person should know."""

    facts: list[PodFact]
    problems: tuple[Problem, ...] = ()
    unknown: Problem | None = None
    """The frontend gave no whole list."""


async def observe(ctx: Context, pool: Obj, facts: list[PodFact], memory: PoolMemory) -> Seen:
    """Judge a pool's engines by what its frontend says, and by the processes that its gates saw last."""
    if dynamo_of(pool) is None:
        return Seen(facts)
    listing = (await listings(ctx, [pool]))[pool["metadata"]["name"]]
    candidates = {f.uid: Candidate(f.uid, f.name, f.ip, _instance(memory.gates.get(f.uid))) for f in facts if f.live}
    verdicts = judge(ctx.workers, pool, listing, list(candidates.values()))
    marked = []
    for f in facts:
        verdict = verdicts.get(f.uid)
        out = verdict is not None and not verdict.joined
        marked.append(replace(f, withheld=(_REASONS[verdict.standing], verdict.message)) if verdict and out else f)
    if isinstance(listing, Unknown):
        reason = Reason.DISCOVERY_REFUSED if listing.refused else Reason.DISCOVERY_UNREACHABLE
        problem = Problem(reason, f"{listing.message}; engines stay as they are, and no round takes them along")
        return Seen(marked, (problem,), problem)
    return Seen(marked, tuple(_strange(ctx, pool, listing)))


def _strange(ctx: Context, pool: Obj, listing: Listing) -> Iterable[Problem]:
    """Workers that serve with nobody to keep them on the right weights."""
    namespace, components = pool["metadata"]["namespace"], _components(pool)
    hosts = {host for w in considered(listing, components) if (host := host_of(w.system_url))}
    gated = [p["status"]["podIP"] for p in ctx.pods.at_address(namespace, *hosts) if has_gate(p)]
    found = strangers(listing, gated, components=components)
    if found:
        first = found[0]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        text = (
            f"worker {first.name} at {first.system_url or 'no address'}{more} is in no pod with a gate in this "
            "namespace, so nobody keeps it on the right weights: give its pod a gate, or name in "
            "spec.source.dynamo.components the components that are this pool's"
        )
        yield Problem(Reason.WORKER_NOT_JOINED, text)
