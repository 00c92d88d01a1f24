"""What ``rlfleet doctor`` judges: pure functions from what was read to verdicts with what to do.

Invariant: what could not be looked at is Unknown and says so; it is never counted as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlfleet.api import labels, remedies, served
from rlfleet.api.conditions import Reason
from rlfleet.api.tokens import LEEWAY_SECONDS
from rlfleet.plan.template import staging_mib
from rlfleet.plan.validate import staging_over_limit
from rlfleet.show.facts import age, key_of, problems, size, status_of, time_ms
from rlfleet.show.rounds import meaning

Obj = Mapping[str, Any]
MIB = 2**20
#: Seconds by which clocks may differ before somebody should know; tokens are refused beyond LEEWAY_SECONDS.
CLOCK_SECONDS = 5
DRA_REMEDY = (
    "Claims need Kubernetes 1.34 or later with a DRA driver for the GPUs; placement Scheduler or Pinned does without"
)


class Level(StrEnum):
    """How bad it is."""

    OK = "Ok"
    WARN = "Warning"
    FAIL = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. ``fix``: what to do about it."""

    level: Level
    what: str
    message: str
    fix: str = ""


def crds(openapi: Obj) -> Check:
    """Whether the cluster serves our kinds as this version needs them."""
    lack = served.lacking(served.kinds(openapi))
    if not lack:
        return Check(Level.OK, "CRDs", f"{labels.API_VERSION} is served as this version needs it")
    more = f" and {len(lack) - 3} more" if len(lack) > 3 else ""
    fix = "rlfleet crds | kubectl apply --server-side --force-conflicts -f -"
    return Check(Level.FAIL, "CRDs", f"{'; '.join(lack[:3])}{more}", fix)


def clock(what: str, ahead_ms: int) -> Check:
    """A clock against the apiserver's. Clocks are read to a second."""
    seconds = ahead_ms / 1000
    if abs(seconds) <= CLOCK_SECONDS:
        return Check(Level.OK, f"clock of {what}", f"{seconds:+.0f} s against the apiserver's")
    level = Level.FAIL if abs(seconds) > LEEWAY_SECONDS else Level.WARN
    why = f"beyond {LEEWAY_SECONDS} s gates refuse the operator's tokens"
    return Check(level, f"clock of {what}", f"{seconds:+.0f} s against the apiserver's; {why}", "run NTP on its node")


def rights(allowed: Mapping[tuple[str, str], bool], where: str) -> list[Check]:
    """What this identity may do. It is no fault to have few rights: what they do not reach is said."""
    missing = sorted(f"{verb} {resource}" for (verb, resource), yes in allowed.items() if not yes)
    if not missing:
        return [Check(Level.OK, "your rights", f"every command can be used in {where}")]
    fix = "bind a ClusterRole of the chart: rlfleet view for looking, edit for steering (aggregated to view and edit)"
    return [Check(Level.WARN, "your rights", f"in {where} you may not: {', '.join(missing)}", fix)]


def lease(found: Obj | None, now_ms: int, namespace: str) -> Check:
    """Whether an operator leads, by its Lease. ``found`` None: there is none."""
    what = "operator"
    if found is None:
        fix = "install the operator, or name its namespace with --operator-namespace"
        return Check(Level.FAIL, what, f"there is no Lease rlfleet-operator in namespace {namespace}", fix)
    spec = found.get("spec") or {}
    holder, renewed = spec.get("holderIdentity"), time_ms(spec.get("renewTime"))
    if not holder or renewed is None:
        return Check(Level.FAIL, what, "nobody leads: the Lease has no holder", f"kubectl get pods -n {namespace}")
    seconds = int(spec.get("leaseDurationSeconds") or 15)
    if now_ms - renewed > (seconds + CLOCK_SECONDS) * 1000:
        message = f"the Lease of {holder} was renewed {age(renewed, now_ms)} ago, it is good for {seconds} s"
        return Check(Level.FAIL, what, message, f"kubectl get pods,events -n {namespace}")
    return Check(Level.OK, what, f"{str(holder).split('_', 1)[0]} leads")


def conditions(obj: Obj, kind: str) -> list[Check]:
    """What is wrong by an object's own conditions."""
    namespace, name = key_of(obj)
    what = f"{kind} {namespace}/{name}"
    if not status_of(obj).get("conditions"):
        fix = "is an operator running, and does it watch this namespace (--watch-namespaces)?"
        return [Check(Level.FAIL, what, "no operator has looked at it", fix)]
    rows = problems(obj)
    if not rows:
        return [Check(Level.OK, what, "nothing is wrong by its conditions")]
    return [
        Check(
            Level.UNKNOWN if row["status"] == "Unknown" else Level.WARN,
            what,
            f"{row['type']} is {row['status']}: {row['reason']}: {row['message'] or meaning(row['reason'])}",
            remedies.remedy(row["reason"]),
        )
        for row in rows
    ]


def dra(pipelines: Iterable[Obj], pools: Iterable[Obj], classes: Iterable[str] | None) -> list[Check]:
    """Dynamic resource allocation, where somebody uses it. ``classes``: DeviceClasses; None: the API is not there."""
    wanted = {
        str(b["deviceClassName"]): f"RLPipeline {'/'.join(key_of(p))}"
        for p in pipelines
        for b in (p["spec"].get("trainer") or {}).get("blocks") or ()
    }
    users = [key_of(p) for p in pools if (p["spec"].get("placement") or {}).get("mode") == "Claims"]
    if not wanted and not users:
        return [Check(Level.OK, "DRA", "nobody uses placement Claims")]
    if classes is None:
        return [Check(Level.FAIL, "DRA", "resource.k8s.io/v1 is not served, and placement Claims needs it", DRA_REMEDY)]
    have = set(classes)
    missing = [(c, who) for c, who in sorted(wanted.items()) if c not in have]
    if missing:
        return [
            Check(Level.FAIL, "DRA", f"there is no DeviceClass {c}, which {who} names", "install the GPU's DRA driver")
            for c, who in missing
        ]
    return [Check(Level.OK, "DRA", f"{len(users)} pools use claims, every DeviceClass is there")]


def capacity(pool: Obj, engines: Iterable[Obj]) -> int | None:
    """Bytes that every gate of the pool says it can stage: what its volume and its limit leave. None: none says so."""
    mine = (e for e in engines if e["pool"] == pool["metadata"]["name"] and e["answers"] and not e["gone"])
    return min((int(e["stagingCapacityBytes"]) for e in mine), default=None)


def staging(pipeline: Obj, pool: Obj, total_bytes: int | None, told: int | None = None) -> list[Check]:
    """Whether the gate's memory volume holds what it must, within the gate's memory limit. ``told``: see capacity."""
    what = f"EnginePool {'/'.join(key_of(pool))}"
    transport = pipeline["spec"].get("transport") or {}
    room = staging_mib(pool) * MIB
    found: list[Check] = []
    if (short := staging_over_limit(pool)) is not None:
        found.append(Check(Level.FAIL, what, *short))
    whole = transport.get("staging", "Full") == "Full" and "checkpoint" not in (pipeline["spec"].get("weights") or {})
    if transport.get("mode") == "Broadcast" or not whole or total_bytes is None:
        return found
    if told is not None and total_bytes > told:
        message = f"the weights have {total_bytes} bytes, a gate of it can stage {told}"
        fix = "raise spec.gate.stagingMiB and the gate's memory limit, or set transport.staging: Bucket"
        found.append(Check(Level.FAIL, what, message, fix))
    elif told is None and total_bytes > room:
        need = -(-total_bytes // MIB)
        message = f"the weights have {size(total_bytes)}, spec.gate.stagingMiB holds {size(room)}"
        found.append(
            Check(Level.FAIL, what, message, f"set stagingMiB to {need} or more, or transport.staging: Bucket")
        )
    elif not found and told is not None:
        found.append(Check(Level.OK, what, f"{size(total_bytes)} of weights fit into {size(told)} of staging"))
    return found


def live(what: str, seen: Obj) -> list[Check]:
    """What gates and sender of one pipeline answered the operator just now (its ``observed``)."""
    found = [_sender(what, seen)]
    found += [clock("the operator", int(seen["operatorClockMs"]) - int(seen["apiserverClockMs"]))]
    engines = list(seen["engines"])
    bad = [c for e in engines for c in _gate(e, int(seen["protocolVersion"]))]
    answered = sum(bool(e["answers"]) for e in engines)
    if not bad:
        found.append(Check(Level.OK, f"gates of {what}", f"{answered} of {len(engines)} answer, as they should"))
    return [*found, *bad]


def _sender(what: str, seen: Obj) -> Check:
    name, sender, problem = f"sender of {what}", seen["sender"], seen["senderProblem"]
    if sender is None:
        problem = problem or {"reason": "SenderUnreachable", "message": "it does not answer"}
        return Check(Level.FAIL, name, f"{problem['reason']}: {problem['message']}", remedies.remedy(problem["reason"]))
    if sender["protocolVersion"] < seen["protocolVersion"]:
        message = f"speaks protocol {sender['protocolVersion']}, the operator {seen['protocolVersion']}"
        return Check(Level.FAIL, name, message, "update rlfleet in the trainer")
    if sender["newest"] is None and sender["totalBytes"] is None:
        return Check(Level.OK, name, "answers; it has no weights of its own yet, or they come from checkpoints")
    return Check(Level.OK, name, f"answers, holds version {sender['newest']} ({size(sender['totalBytes'])})")


def _gate(e: Obj, protocol: int) -> Iterable[Check]:
    what = f"engine {e['name']}"
    if e["gone"]:
        return
    if not e["answers"]:
        if e["born"]:
            fix = "kubectl get pod and logs -c gate; a NetworkPolicy must let the operator reach the gate's port"
            yield Check(Level.FAIL, what, f"its gate at {e['url'] or 'no address'} does not answer the operator", fix)
        return
    if e["protocolVersion"] < protocol:
        message = f"its gate (rlfleet {e['gateVersion'] or '?'}) speaks protocol {e['protocolVersion']}, not {protocol}"
        yield Check(Level.FAIL, what, message, "set spec.gate.image to this release and delete the pod")
    if e["clockAheadMs"] is not None and abs(e["clockAheadMs"]) > CLOCK_SECONDS * 1000:
        yield clock(what, e["clockAheadMs"])
    if e["startup"]:
        yield Check(
            Level.WARN,
            what,
            f"{e['startup']['reason']}: {e['startup']['message']}",
            remedies.remedy(e["startup"]["reason"]),
        )
    for router, listed in sorted(e["routed"].items()):
        if listed is None:
            fix = "is the router up, and does a NetworkPolicy let gates reach it?"
            yield Check(Level.WARN, what, f"whether router {router} lists it is not known", fix)
    if e["uncertain"]:
        yield Check(Level.WARN, what, "an operation at its gate has no known end", "if it stays so, delete the pod")
    if e["devicesProblem"]:
        yield Check(
            Level.WARN,
            what,
            f"its devices can not be read: {e['devicesProblem']}",
            remedies.REMEDIES[Reason.MEMORY_UNREADABLE],
        )
