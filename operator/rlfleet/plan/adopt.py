"""Adopted pods: which pool's engines they are, under which index, and what keeps one from being an engine. Pure.

Invariants:
- a pod is the engine of one pool at most: of those that select it the oldest has it, the others say so;
- a pod that an EnginePool made, or that has no gate, is adopted by nobody, and named;
- a pod that has finished is no engine any more where a controller made it, which makes another if it wants one: such
  pods lie about for long. One that a person made stays, as a failed engine, until a person deletes it;
- an index is a place in status and in the order of sleep. It follows from the pods that are there and is kept nowhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api import labels
from rlfleet.api.wire import GateStatus
from rlfleet.plan.template import ENGINE, GATE

Obj = dict[str, Any]
Pod = Mapping[str, Any]
Pool = Mapping[str, Any]

#: Labels with which those who make pods number them.
ORDINALS: Final = ("apps.kubernetes.io/pod-index", "leaderworkerset.sigs.k8s.io/group-index")
MAX_INDEX: Final = 1_000_000
#: Rounds name their members by pod, in fields that take a DNS label.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TAIL = re.compile(r"-([0-9]{1,6})$")


def source_of(pool: Pool) -> str:
    """Which of spec.source the pool's engines come from: template, adopt or dynamo."""
    source = pool["spec"].get("source") or {}
    return next((name for name in ("adopt", "dynamo") if source.get(name)), "template")


def adopts(pool: Pool) -> bool:
    """The pool's engines are pods that somebody else makes."""
    return source_of(pool) != "template"


def selector_of(pool: Pool) -> Mapping[str, str]:
    """Labels that all pods of the pool carry, whoever makes them."""
    if not adopts(pool):
        return {labels.POOL: str(pool["metadata"]["name"])}
    found: Mapping[str, str] = pool["spec"]["source"][source_of(pool)]["selector"]["matchLabels"]
    return found


def selects(pool: Pool, pod: Pod) -> bool:
    """An adopting pool's selector matches the pod, in its namespace."""
    marks: Mapping[str, str] = pod["metadata"].get("labels") or {}
    return (
        adopts(pool)
        and pool["metadata"].get("namespace") == pod["metadata"].get("namespace")
        and selector_of(pool).items() <= marks.items()
    )


def made_by_pool(pod: Pod) -> str:
    """Name of the EnginePool that made the pod; empty: none did."""
    for o in pod["metadata"].get("ownerReferences") or []:
        if (
            o.get("controller")
            and o.get("kind") == "EnginePool"
            and o.get("apiVersion", "").split("/")[0] == labels.GROUP
        ):
            return str(o.get("name") or "")
    return ""


def is_home(pool: Pool, pod: Pod) -> bool:
    """The pod may be an engine of this pool, which made it or adopts it."""
    return made_by_pool(pod) == pool["metadata"]["name"] or (
        selects(pool, pod) and has_gate(pod) and not made_by_pool(pod)
    )


def has_gate(pod: Pod) -> bool:
    """A container named gate stands beside the engine."""
    spec = pod.get("spec") or {}
    return any(c.get("name") == GATE for c in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])])


def _age(pool: Pool) -> tuple[str, str]:
    return str(pool["metadata"].get("creationTimestamp") or ""), str(pool["metadata"].get("uid") or "")


@dataclass(frozen=True, slots=True)
class Adopted:
    """What an adopting pool has: its pods, and those that it selects and does not get."""

    pods: tuple[Obj, ...] = ()
    ended: tuple[Obj, ...] = ()
    """Pods of controllers that have finished: no engines, but their addresses may still stand in routers."""
    gateless: tuple[str, ...] = ()
    """Names of selected pods without a gate."""
    misnamed: tuple[str, ...] = ()
    """Names of selected pods that no round could name."""
    contested: tuple[tuple[str, str, bool], ...] = ()
    """(pod, other pool, whether this pool has it) where another EnginePool wants the same pod."""


def adopted(pool: Pool, pools: Iterable[Pool], pods: Iterable[Obj]) -> Adopted:
    """Sort the pods of a namespace for one pool. ``pools``: all EnginePools of it, this one included."""
    rivals = [p for p in pools if p["metadata"]["uid"] != pool["metadata"]["uid"]]
    mine: list[Obj] = []
    over: list[Obj] = []
    gateless: list[str] = []
    misnamed: list[str] = []
    contested: list[tuple[str, str, bool]] = []
    for pod in sorted(pods, key=lambda p: str(p["metadata"]["name"])):
        if not selects(pool, pod):
            continue
        name = str(pod["metadata"]["name"])
        maker = made_by_pool(pod)
        others = [p for p in rivals if selects(p, pod)]
        has = all(_age(pool) < _age(p) for p in others)
        if ended(pod):
            # Whatever is wrong with it matters to nobody any more.
            if has and not maker and has_gate(pod) and _NAME.fullmatch(name):
                (over if _controlled(pod) else mine).append(pod)
            continue
        if maker:
            contested.append((name, maker, False))
            continue
        if not has_gate(pod):
            gateless.append(name)
            continue
        if not _NAME.fullmatch(name):
            misnamed.append(name)
            continue
        contested += [(name, str(p["metadata"]["name"]), has) for p in sorted(others, key=_age)]
        if has:
            mine.append(pod)
    return Adopted(tuple(mine), tuple(over), tuple(gateless), tuple(misnamed), tuple(contested))


def ended(pod: Pod) -> bool:
    """Nothing runs in the pod any more, and never will."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _controlled(pod: Pod) -> bool:
    """A controller of whatever kind made it."""
    return any(o.get("controller") for o in pod["metadata"].get("ownerReferences") or [])


def indices(pods: Sequence[Pod]) -> dict[str, int]:
    """Index of each pod by UID: the number that its maker gave it, where no two have the same; the free ones in order
    of creation for all others."""
    given = {str(p["metadata"]["uid"]): _ordinal(p) for p in pods}
    counts = Counter(o for o in given.values() if o is not None)
    result = {uid: o for uid, o in given.items() if o is not None and counts[o] == 1}
    taken = set(result.values())
    rest = sorted(
        (p for p in pods if p["metadata"]["uid"] not in result),
        key=lambda p: (str(p["metadata"].get("creationTimestamp") or ""), str(p["metadata"]["uid"])),
    )
    free = (i for i in range(MAX_INDEX) if i not in taken)
    result |= {str(p["metadata"]["uid"]): i for p, i in zip(rest, free, strict=False)}
    return result


def _ordinal(pod: Pod) -> int | None:
    marks = pod["metadata"].get("labels") or {}
    for key in ORDINALS:
        text = str(marks.get(key, ""))
        if text.isascii() and text.isdigit() and int(text) < MAX_INDEX:
            return int(text)
    tail = _TAIL.search(str(pod["metadata"]["name"]))
    return int(tail.group(1)) if tail else None


def believed(status: GateStatus, process: str) -> GateStatus:
    """What an adopted gate says, as far as it is said of the engine process that is there (``process``: its container).

    Of an engine that its kubelet has replaced since, or of which the gate was not told yet, nothing is proven.
    """
    if status.engine_process == process:
        return status
    return status.model_copy(update={"incarnation": None, "holds": None})


def engine_process(pod: Pod) -> str:
    """What the kubelet calls the engine's present container; empty: it has not told of one.

    A container that restarts in place gets another one. Where no container is named engine it is the first.
    """
    containers = (pod.get("spec") or {}).get("containers") or []
    name = next((c.get("name") for c in containers if c.get("name") == ENGINE), None)
    if name is None:
        name = next((c.get("name") for c in containers if c.get("name") != GATE), None)
    known = (pod.get("status") or {}).get("containerStatuses") or []
    found: Mapping[str, Any] = next((s for s in known if s.get("name") == name), {})
    return str(found.get("containerID") or "")
