"""The fleet as a tree: pipeline, its pools, their engines; with versions, what runs now, and what is wrong.

Invariant: an engine is shown as the pool's status last recorded it; larger pools list exceptions only, and the tree
says how many engines are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlfleet.show.facts import Obj, condition, key_of, newest_first, problems, status_of

STATES = ("active", "loading", "booting", "pending", "draining", "offloaded", "quarantined", "failed")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    name: str
    index: int
    state: str
    version: int | None = None
    fence: int | None = None
    fenced: bool | None = None
    """Its gate has stored the pipeline's present fence; None: unknown."""
    routed: bool | None = None
    transport: str | None = None
    """How it got its weights in the latest round that planned it."""
    node: str | None = None
    gpus: tuple[str, ...] | None = None
    pod_uid: str | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """One EnginePool."""

    name: str
    replicas: int
    active: int | None
    counts: Mapping[str, int]
    versions: tuple[Mapping[str, object], ...]
    engines: tuple[Engine, ...]
    unlisted: int
    """Engines that its status does not list one by one: they are active."""
    ready: str
    reason: str
    message: str
    fencing: str | None
    admission: str | None
    problems: tuple[Mapping[str, str], ...]

    @property
    def wanted(self) -> int:
        """Engines that are to be awake."""
        return self.replicas if self.active is None else min(self.replicas, self.active)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One RLPipeline."""

    namespace: str
    name: str
    committed: int | None
    newest: int | None
    """Newest complete version at the sender."""
    lag: int | None
    """How many versions the fleet is behind the sender; None: one of the two is unknown."""
    fence: int
    mode: str
    source: str
    operation: str | None
    """What owns the engines now: kind and name."""
    ready: str
    reason: str
    message: str
    engines_active: int
    engines_total: int
    engines_asleep: int
    last_round: str | None
    progress: int | None
    problems: tuple[Mapping[str, str], ...]
    pools: tuple[Pool, ...] = field(default=())
    waiting: tuple[str, ...] = ()
    """SyncRounds that were ordered and have not begun, newest first."""


def fleet(pipelines: Iterable[Obj], pools: Iterable[Obj], rounds: Iterable[Obj]) -> tuple[Pipeline, ...]:
    """The tree, by namespace and name. Pools whose pipeline is not there stand under one that says so."""
    rounds = tuple(rounds)
    by_owner: dict[tuple[str, str], list[Obj]] = {}
    for pool in pools:
        by_owner.setdefault((key_of(pool)[0], str(pool["spec"].get("pipeline"))), []).append(pool)
    ways = _transports(rounds)
    queued = _waiting(rounds)
    found = [
        replace(_pipeline(p, by_owner.pop(key_of(p), []), ways), waiting=tuple(queued.get(key_of(p), ())))
        for p in pipelines
    ]
    found += [_missing(key, orphans, ways) for key, orphans in by_owner.items()]
    return tuple(sorted(found, key=lambda p: (p.namespace, p.name)))


def _transports(rounds: Iterable[Obj]) -> dict[tuple[str, str], str]:
    """Namespace and pod UID -> transport, as the latest round planned it."""
    found: dict[tuple[str, str], str] = {}
    for r in newest_first(rounds):
        for row in (status_of(r).get("plan") or {}).get("members") or ():
            found.setdefault((key_of(r)[0], str(row.get("podUID"))), str(row.get("transport")))
    return found


def _waiting(rounds: Iterable[Obj]) -> dict[tuple[str, str], list[str]]:
    """Namespace and pipeline -> rounds that are still Pending, newest first."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in newest_first(rounds):
        if (status_of(r).get("phase") or "Pending") == "Pending":
            namespace, name = key_of(r)
            found.setdefault((namespace, str(r["spec"].get("pipeline"))), []).append(name)
    return found


def _pipeline(obj: Obj, pools: list[Obj], ways: Mapping[tuple[str, str], str]) -> Pipeline:
    namespace, name = key_of(obj)
    spec, status = obj["spec"], status_of(obj)
    committed = (status.get("committed") or {}).get("version")
    newest = (status.get("cacheReady") or {}).get("version")
    lag = max(0, newest - committed) if committed is not None and newest is not None else None
    active, totals, ready = status.get("activeOperation"), status.get("engines") or {}, condition(obj, "Ready")
    fence = int(status.get("fence") or 0)
    return Pipeline(
        namespace=namespace,
        name=name,
        committed=committed,
        newest=newest,
        lag=lag,
        fence=fence,
        mode=str((spec.get("transport") or {}).get("mode") or "CPUSerialize"),
        source="checkpoint" if "checkpoint" in (spec.get("weights") or {}) else "sender",
        operation=f"{active['kind']} {active['name']}" if active else None,
        ready=str(ready.get("status") or "Unknown"),
        reason=str(ready.get("reason") or ""),
        message=str(ready.get("message") or ""),
        engines_active=int(totals.get("active") or 0),
        engines_total=int(totals.get("total") or 0),
        engines_asleep=int(totals.get("asleep") or 0),
        last_round=status.get("lastRound"),
        progress=(status.get("progress") or {}).get("percent"),
        problems=tuple(_unseen(obj)),
        pools=tuple(_pool(p, fence, ways) for p in sorted(pools, key=key_of)),
    )


def _missing(key: tuple[str, str], pools: list[Obj], ways: Mapping[tuple[str, str], str]) -> Pipeline:
    text = f"EnginePool {pools[0]['metadata']['name']} names RLPipeline {key[1]}, which does not exist: create it"
    return Pipeline(
        namespace=key[0],
        name=key[1],
        committed=None,
        newest=None,
        lag=None,
        fence=0,
        mode="-",
        source="-",
        operation=None,
        ready="False",
        reason="PipelineNotFound",
        message=text,
        engines_active=0,
        engines_total=0,
        engines_asleep=0,
        last_round=None,
        progress=None,
        problems=({"type": "Ready", "status": "False", "reason": "PipelineNotFound", "message": text},),
        pools=tuple(_pool(p, 0, ways) for p in sorted(pools, key=key_of)),
    )


def _unseen(obj: Obj) -> list[dict[str, str]]:
    """Its problems; without any condition, that no operator has looked at it."""
    if status_of(obj).get("conditions"):
        return problems(obj)
    text = "no operator has looked at it yet: is one running, and does it watch this namespace?"
    return [{"type": "Ready", "status": "Unknown", "reason": "NotObserved", "message": text}]


def _pool(obj: Obj, fence: int, ways: Mapping[tuple[str, str], str]) -> Pool:
    namespace, name = key_of(obj)
    spec, status, ready = obj["spec"], status_of(obj), condition(obj, "Ready")
    engines = tuple(_engine(row, namespace, fence, ways) for row in status.get("engines") or ())
    counts = {s: int((status.get("counts") or {}).get(s) or 0) for s in STATES}
    pods = int(status.get("replicas") or 0)
    return Pool(
        name=name,
        # Of adopted pods the spec says no number: whoever makes them scales them.
        replicas=int(spec.get("replicas", 1)) if "template" in spec["source"] else pods,
        active=spec.get("active"),
        counts=counts,
        versions=tuple(dict(v) for v in status.get("versions") or ()),
        engines=engines,
        unlisted=max(0, pods - len(engines)),
        ready=str(ready.get("status") or "Unknown"),
        reason=str(ready.get("reason") or ""),
        message=str(ready.get("message") or ""),
        fencing=status.get("fencing"),
        admission=status.get("admissionGuarantee"),
        problems=tuple(_unseen(obj)),
    )


def _engine(row: Obj, namespace: str, fence: int, ways: Mapping[tuple[str, str], str]) -> Engine:
    stored = row.get("fence")
    return Engine(
        name=str(row["name"]),
        index=int(row.get("index") or 0),
        state=str(row.get("state") or "Unknown"),
        version=row.get("version"),
        fence=stored,
        fenced=None if stored is None or not fence else stored >= fence,
        routed=row.get("routed"),
        transport=ways.get((namespace, str(row.get("podUID")))),
        node=row.get("node"),
        gpus=tuple(row["gpus"]) if row.get("gpus") is not None else None,
        pod_uid=row.get("podUID"),
        failure=row.get("failure"),
    )
