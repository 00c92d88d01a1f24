"""What must hold of every recorded history, whatever was killed, frozen, lost or answered wrongly meanwhile.

One checker, fed with revisions and calls in the order in which they were seen, offline or while things happen. It
judges only what was observed: an answer that a proxy lost was still given by its server, and counts.

| | invariant |
|---|---|
| I1 | a pipeline's fence never decreases; a generation has one operation and one holder |
| I2 | a gate or sender never accepts a generation below one that it accepted before that call began |
| I3 | the fence that a gate or sender reports never decreases |
| I4 | at most one round of a pipeline is between Planned and its end |
| I5 | Succeeded only when committed, and each member is Ok (its gate reported these weights as proven) or named |
| I6 | a terminal phase is final; phases move forward within one generation |
| I7 | ``committed`` changes only under an operation marked committed, and falls only where a round allows it |
| I8 | observedGeneration neither decreases nor exceeds the generation |
| I9 | at quiescence no writes (``quiet`` in the sweeps) |
| I10 | nothing of ours is left after deletion (scenario deletion) |
| I11 | pods and rounds are deleted under a UID; status is written under a resourceVersion |
| I12 | writes per round are bounded (scenario round, error sweep) |
| I13 | engines that take requests hold what was committed (``serving``) |
| I14 | every answer that users get was made by weights committed while it was made (``answered``) |
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fault.calls import Call
from tests.fault.history import Revision

TERMINAL = frozenset({"Succeeded", "Failed", "Superseded", "Cancelled", "Expired"})
_RANK = {
    phase: rank
    for rank, phase in enumerate(["Pending", "Planned", "Staging", "Quiescing", "Transferring", "Holding", "Committed"])
}
_CLAIMED = frozenset(_RANK) - {"Pending"}
#: Seconds by which a commit may be seen here later than its effects.
LAG_SECONDS = 2.0
_OURS = frozenset({"rlpipelines", "enginepools", "syncrounds"})


@dataclass(slots=True)
class _Accepted:
    """Generations that one server accepted from one pipeline: when the maximum rose, and to what."""

    at: list[float] = field(default_factory=list)
    generation: list[int] = field(default_factory=list)

    def before(self, moment: float) -> int:
        """The highest accepted before ``moment``."""
        index = bisect_right(self.at, moment)
        return self.generation[index - 1] if index else 0

    def add(self, moment: float, generation: int) -> None:
        """One more."""
        if not self.generation or generation > self.generation[-1]:
            self.at.append(moment)
            self.generation.append(generation)
            del self.at[:-64], self.generation[:-64]


@dataclass(slots=True)
class _Pipeline:
    """What is known of one RLPipeline."""

    fence: int = 0
    committed: dict[str, Any] | None = None
    holders: dict[int, tuple[str, str]] = field(default_factory=dict)


class Checker:
    """Feed it; ``violations`` says what was broken, as ``I4: ...``.

    ``fence_may_fall``: the history contains a wiped status. Thread-safe.
    """

    def __init__(self, *, fence_may_fall: bool = False) -> None:
        self.fence_may_fall = fence_may_fall
        self.violations: list[str] = []
        self.checked = 0
        self._lock = threading.RLock()
        self._pipelines: dict[str, _Pipeline] = defaultdict(_Pipeline)
        #: By namespace and name of a pipeline, also a deleted one: (seen at, version, digests), the newest last.
        self._commits: dict[tuple[str, str], list[tuple[float, int, frozenset[str]]]] = defaultdict(list)
        self._rounds: dict[str, dict[str, Any]] = {}
        #: Rank of the phase that was last written under the present generation; a takeover starts anew.
        self._ranks: dict[str, int] = {}
        self._observed: dict[str, int] = {}
        self._accepted: dict[tuple[str, str], _Accepted] = defaultdict(_Accepted)
        self._reported: dict[tuple[str, str], tuple[float, int]] = {}
        self._proven: dict[str, set[tuple[int, str]]] = defaultdict(set)

    def _broken(self, invariant: str, text: str) -> None:
        line = f"{invariant}: {text}"
        if line not in self.violations:
            self.violations.append(line)

    # ------------------------------------------------------------------------------------------ revisions

    def revision(self, revision: Revision) -> None:
        """One state of an object."""
        with self._lock:
            self.checked += 1
            if revision.plural in _OURS and not revision.deleted:
                self._generations(revision)
            if revision.plural == "rlpipelines":
                self._pipeline(revision)
            elif revision.plural == "syncrounds":
                self._round(revision)

    def _generations(self, revision: Revision) -> None:
        obj = revision.obj
        generation = int(obj["metadata"].get("generation") or 0)
        status = obj.get("status") or {}
        seen = [int(status.get("observedGeneration") or 0)]
        seen += [int(c.get("observedGeneration") or 0) for c in status.get("conditions") or []]
        what = f"{revision.plural}/{obj['metadata']['name']}"
        if max(seen) > generation:
            self._broken("I8", f"{what} observed generation {max(seen)} of {generation}")
        before = self._observed.get(revision.uid, 0)
        if seen[0] < before and status:
            self._broken("I8", f"{what}: observedGeneration fell from {before} to {seen[0]}")
        self._observed[revision.uid] = seen[0]

    def _pipeline(self, revision: Revision) -> None:
        obj, uid = revision.obj, revision.uid
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        if revision.deleted:
            return
        known, status = self._pipelines[uid], obj.get("status") or {}
        fence = int(status.get("fence") or 0)
        if fence < known.fence and not self.fence_may_fall:
            self._broken("I1", f"{key}: fence fell from {known.fence} to {fence}")
        known.fence = fence
        active = status.get("activeOperation")
        if active:
            generation, whose = int(active["generation"]), (str(active["uid"]), str(active.get("holder")))
            if generation > fence:
                self._broken("I1", f"{key}: operation under generation {generation} above the fence {fence}")
            if known.holders.setdefault(generation, whose) != whose:
                self._broken("I1", f"{key}: generation {generation} had {known.holders[generation]}, then {whose}")
            for old in sorted(known.holders)[:-64]:
                del known.holders[old]
        committed = status.get("committed")
        if committed and committed != known.committed:
            self._commit(revision, known, committed, active)
        known.committed = committed

    def _commit(
        self, revision: Revision, known: _Pipeline, committed: dict[str, Any], active: dict[str, Any] | None
    ) -> None:
        digests = frozenset(d["digest"] for d in committed.get("engineDigests") or [])
        version = int(committed["version"])
        old = known.committed
        same = old is not None and (old["version"], old["manifestDigest"]) == (version, committed["manifestDigest"])
        name = revision.obj["metadata"]["name"]
        if not same and not (active and active.get("committed")):
            self._broken("I7", f"{name}: committed became {version} without an operation that commits")
        if old is not None and version < int(old["version"]):
            by = self._rounds.get(str((active or {}).get("uid")), {})
            if not (by.get("spec") or {}).get("allowRollback"):
                self._broken("I7", f"{name}: committed fell from {old['version']} to {version}")
        commits = self._commits[revision.obj["metadata"]["namespace"], name]
        commits.append((revision.at, version, digests))
        del commits[:-256]

    def _round(self, revision: Revision) -> None:
        obj, uid = revision.obj, revision.uid
        name = obj["metadata"]["name"]
        old = self._rounds.get(uid)
        if revision.deleted:
            self._rounds.pop(uid, None)
            self._ranks.pop(uid, None)
            return
        self._rounds[uid] = obj
        status, before = obj.get("status") or {}, (old or {}).get("status") or {}
        phase, was = status.get("phase") or "Pending", before.get("phase") or "Pending"
        if was in TERMINAL and phase != was:
            self._broken("I6", f"{name}: {was} became {phase}")
        lease, held = status.get("lease") or {}, before.get("lease") or {}
        generation, under = int(lease.get("generation") or 0), int(held.get("generation") or 0)
        if generation < under:
            self._broken("I1", f"{name}: lease fell from generation {under} to {generation}")
        if generation and generation == under and lease.get("holder") != held.get("holder"):
            self._broken("I1", f"{name}: generation {generation} leased by {held} and then {lease}")
        if generation != under:
            self._ranks.pop(uid, None)
        elif phase in _RANK and phase != was:
            # Healing goes back to moving weights, under the same claim.
            healing = (was, phase) in (("Holding", "Transferring"), ("Holding", "Staging"))
            if _RANK[phase] < self._ranks.get(uid, 0) and not healing:
                self._broken("I6", f"{name}: {was} became {phase} within generation {generation}")
            self._ranks[uid] = _RANK[phase]
        if phase in _CLAIMED:
            pipeline = obj["spec"]["pipeline"]
            others = [
                o["metadata"]["name"]
                for u, o in self._rounds.items()
                if u != uid
                and o["metadata"]["namespace"] == obj["metadata"]["namespace"]
                and o["spec"]["pipeline"] == pipeline
                and (o.get("status") or {}).get("phase") in _CLAIMED
                and "deletionTimestamp" not in o["metadata"]
            ]
            if others and was not in _CLAIMED:
                self._broken("I4", f"{name} is {phase} while {others} are not over")
        if phase == "Succeeded" and was != "Succeeded":
            self._succeeded(obj, status)

    def _succeeded(self, obj: dict[str, Any], status: dict[str, Any]) -> None:
        name, version = obj["metadata"]["name"], int(obj["spec"]["version"])
        catch_up = obj["spec"].get("kind") == "CatchUp"
        if not status.get("committed") and not catch_up:
            self._broken("I5", f"{name} Succeeded without a commit")
        results = {m["engine"]: m["result"] for m in status.get("members") or []}
        digest = status.get("manifestDigest")
        for member in (status.get("plan") or {}).get("members") or []:
            engine, uid = member["engine"], member.get("podUID") or ""
            result = results.get(engine)
            if result is None:
                self._broken("I5", f"{name} Succeeded and says nothing of {engine}")
            elif result == "Ok" and uid in self._proven and (version, digest) not in self._proven[uid]:
                self._broken(
                    "I5", f"{name} Succeeded, but the gate of {engine} never reported version {version} proven"
                )

    # ------------------------------------------------------------------------------------------ calls

    def call(self, call: Call) -> None:
        """One call that has ended."""
        with self._lock:
            self.checked += 1
            if call.lane == "peer":
                self._peer_call(call)
            elif not call.read and call.status is not None:
                self._write(call)

    def _write(self, call: Call) -> None:
        body = call.body if isinstance(call.body, dict) else {}
        deletes = call.method == "DELETE" and call.plural in ("pods", "syncrounds")
        if deletes and not (body.get("preconditions") or {}).get("uid"):
            self._broken("I11", f"{call.label} without a UID")
        reports = call.method == "PATCH" and call.plural in _OURS and call.path.endswith("/status")
        if reports and not (body.get("metadata") or {}).get("resourceVersion"):
            self._broken("I11", f"{call.label} without a resourceVersion")

    def _peer_call(self, call: Call) -> None:
        if call.status is None or call.status >= 300 or not call.peer_uid:
            return
        assert call.ended is not None
        body = call.body if isinstance(call.body, dict) else {}
        pipeline, generation = str(body.get("pipeline") or ""), int(body.get("generation") or 0)
        if call.method == "POST" and generation and not call.path.endswith("/enroll"):
            accepted = self._accepted[call.peer_uid, pipeline]
            highest = accepted.before(call.began)
            if generation < highest:
                self._broken("I2", f"{call.point} accepted generation {generation} after {highest}")
            accepted.add(call.ended, generation)
        answer = call.answer if isinstance(call.answer, dict) else {}
        fence = answer.get("fence")
        if isinstance(fence, dict) and fence.get("pipeline"):
            key = (call.peer_uid, str(fence["pipeline"]))
            held = int(fence.get("generation") or 0)
            ended, before = self._reported.get(key, (0.0, 0))
            # Answers may cross: only one that was asked for after the other was there can be compared.
            if held < before and call.began > ended:
                self._broken("I3", f"{call.peer} reported fence {held} after {before}")
            if held > before:
                self._reported[key] = (call.ended, held)
        holds = answer.get("holds")
        if isinstance(holds, dict) and holds.get("manifestDigest"):
            self._proven[call.peer_uid].add((int(holds["version"]), str(holds["manifestDigest"])))
        if "engine" in answer:
            self._proven.setdefault(call.peer_uid, set())

    # ------------------------------------------------------------------------------------------ engines

    def committed_between(
        self, namespace: str, pipeline: str, begin: float, end: float
    ) -> list[tuple[int, frozenset[str]]]:
        """What was committed at any time in between, as seen here."""
        with self._lock:
            commits = self._commits[namespace, pipeline]
            first = max(0, bisect_right([c[0] for c in commits], begin) - 1)
            return [(version, digests) for at, version, digests in commits[first:] if at <= end]

    def serving(
        self, namespace: str, pipeline: str, what: str, version: str, checksum: str | None, begin: float, end: float
    ) -> None:
        """``what`` was open, labelled ``version``, with these weights, all the time from ``begin`` to ``end``.

        Call it at least LAG_SECONDS after ``end``, so that a commit in between was seen here.
        """
        found = self.committed_between(namespace, pipeline, begin, end + LAG_SECONDS)
        with self._lock:
            self.checked += 1
            if version not in {str(v) for v, _ in found}:
                self._broken("I13", f"{what} takes requests at version {version}; committed: {[v for v, _ in found]}")
                return
            digests = frozenset[str]().union(*(d for v, d in found if str(v) == version))
            if checksum is not None and digests and checksum not in digests:
                self._broken("I13", f"{what} takes requests at version {version} with other weights: {checksum}")

    def answered(self, namespace: str, pipeline: str, version: str, begin: float, end: float) -> None:
        """A user asked at ``begin`` and had the answer at ``end``; its last token was made by ``version``."""
        found = self.committed_between(namespace, pipeline, begin, end + LAG_SECONDS)
        with self._lock:
            self.checked += 1
            if version not in {str(v) for v, _ in found}:
                self._broken("I14", f"an answer was made by version {version}; committed: {[v for v, _ in found]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.violations)
