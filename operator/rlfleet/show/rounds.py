"""SyncRounds as people see them: how they ended, where the time went, who took part, and what to do after a failure.

Invariant: durations are those that the operator recorded; of a round that runs, only what is over by now is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlfleet.api import remedies
from rlfleet.api.conditions import Reason
from rlfleet.show.facts import Obj, condition, key_of, newest_first, status_of, time_ms

#: Parts of a round in their order: field of status.timings without Ms, and the letter that draws it.
PARTS = (
    ("plan", "p"),
    ("stage", "s"),
    ("quiesce", "q"),
    ("transfer", "t"),
    ("verify", "v"),
    ("publish", "u"),
    ("reopen", "r"),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of a round."""

    engine: str
    transport: str | None = None
    ranks: str | None = None
    result: str | None = None
    """None: not known yet, or Ok in a round that lists exceptions only and has not ended."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One SyncRound."""

    namespace: str
    name: str
    pipeline: str
    kind: str
    version: int
    attempt: int
    phase: str
    outcome: str | None
    committed: bool
    created_ms: int | None
    started_ms: int | None
    paused_at_ms: int | None
    finished_ms: int | None
    parts: Mapping[str, int]
    """Milliseconds by part, those that took place."""
    total_ms: int | None
    paused_ms: int | None
    members: int
    bytes: int | None
    waits: str
    """What it does or waits for, while it runs."""
    failure: Mapping[str, str] | None

    @property
    def paused_share(self) -> float | None:
        """Part of the whole time in which engines did not serve, 0 to 1; None: unknown."""
        if self.paused_ms is None or not self.total_ms:
            return None
        return min(1.0, self.paused_ms / self.total_ms)


def rounds(objects: Iterable[Obj], *, pipeline: str | None = None, limit: int | None = None) -> tuple[Round, ...]:
    """Rounds, newest first; of one ``pipeline``, at most ``limit``."""
    mine = [r for r in newest_first(objects) if pipeline is None or r["spec"].get("pipeline") == pipeline]
    return tuple(round_of(r) for r in mine[:limit])


def round_of(obj: Obj) -> Round:
    """One SyncRound."""
    namespace, name = key_of(obj)
    spec, status, timings = obj["spec"], status_of(obj), status_of(obj).get("timings") or {}
    plan = status.get("plan") or {}
    going = condition(obj, "Progressing")
    waits = ": ".join(str(going[k]) for k in ("reason", "message") if going.get(k))
    failure = status.get("failure")
    return Round(
        namespace=namespace,
        name=name,
        pipeline=str(spec.get("pipeline")),
        kind=str(spec.get("kind") or "Refresh"),
        version=int(spec["version"]),
        attempt=int(spec.get("attempt") or 1),
        phase=str(status.get("phase") or "Pending"),
        outcome=status.get("outcome"),
        committed=bool(status.get("committed")),
        created_ms=time_ms(obj["metadata"].get("creationTimestamp")),
        started_ms=time_ms(status.get("startedAt")),
        paused_at_ms=time_ms(status.get("pausedAt")),
        finished_ms=time_ms(status.get("finishedAt")),
        parts={part: int(timings[f"{part}Ms"]) for part, _ in PARTS if timings.get(f"{part}Ms") is not None},
        total_ms=timings.get("totalMs"),
        paused_ms=timings.get("pausedMs"),
        members=len(plan.get("members") or ()),
        bytes=status.get("bytes"),
        waits=waits if going.get("status") == "True" and not status.get("outcome") else "",
        failure={k: str(failure.get(k) or "") for k in ("stage", "reason", "message", "digest")} if failure else None,
    )


def members(obj: Obj) -> tuple[Member, ...]:
    """Its members with what became of them. Ended rounds of more than 64 record exceptions only: the others are Ok."""
    status = status_of(obj)
    plan = status.get("plan") or {}
    results = {str(m["engine"]): m for m in status.get("members") or ()}
    ended = bool(status.get("outcome")) and bool(results)
    found = []
    for row in plan.get("members") or ():
        engine, result = str(row["engine"]), results.pop(str(row["engine"]), None)
        first, size = row.get("rankOffset"), int(row.get("worldSize") or 1)
        default = "Ok" if ended and status.get("committed") else None
        found.append(
            Member(
                engine=engine,
                transport=row.get("transport"),
                ranks=None if first is None else str(first) if size == 1 else f"{first}-{first + size - 1}",
                result=str(result["result"]) if result else default,
                reason=(result or {}).get("reason") or row.get("reason"),
            )
        )
    found += [Member(engine=n, result=str(r["result"]), reason=r.get("reason")) for n, r in results.items()]
    found += [
        Member(engine=str(n), result="Silent", reason="its gate did not answer") for n in plan.get("silent") or ()
    ]
    return tuple(found)


def bar(parts: Mapping[str, int], width: int) -> str:
    """Letters in proportion to the parts' durations, ``width`` in all; every part that took place has at least one."""
    present = [(letter, parts[part]) for part, letter in PARTS if parts.get(part) is not None]
    if not present or width < len(present):
        return "".join(letter for letter, _ in present)[:width]
    total = sum(ms for _, ms in present)
    free = width - len(present)
    wanted = [free * ms / total if total else free / len(present) for _, ms in present]
    cells = [int(w) for w in wanted]
    rest = sorted(range(len(present)), key=lambda i: cells[i] - wanted[i])
    for i in rest[: free - sum(cells)]:
        cells[i] += 1
    return "".join(letter * (1 + n) for (letter, _), n in zip(present, cells, strict=True))


def meaning(reason: str) -> str:
    """What a reason means; empty for a word of a newer release."""
    try:
        return Reason.parse(reason).meaning
    except ValueError:
        return ""


def remedy(found: Round) -> str:
    """What a person does next about a round that ended without success, or that waits."""
    if found.failure is None:
        return ""
    if found.committed:
        return (
            f"The version IS committed: go on, do not send it again. The operator repairs what could not be reopened; "
            f"see: rlfleet status -n {found.namespace}"
        )
    if found.kind == "CatchUp":
        return f"The operator tries again by itself; see: rlfleet status -n {found.namespace}"
    again = f"rlfleet sync {found.pipeline} -n {found.namespace} --version {found.version} --retries 1"
    if found.outcome == "Superseded":
        return "Nothing: a newer round took its place"
    if found.failure.get("reason") == Reason.CANCELLED:
        return f"Nothing, if that was meant; to bring the version after all: {again}"
    known = remedies.remedy(str(found.failure.get("reason")))
    return f"{known[:1].upper()}{known[1:]}. To bring the version then: {again}" if known else f"Then: {again}"
