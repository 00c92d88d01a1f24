"""Engines that end, or have to be replaced, again and again before they ever serve: how long their successors wait,
and what a person is told. Pure.

Invariants:
- what counts is recorded (``EnginePool.status.startFailures``) with the pod that was counted last, so a restart of the
  operator neither shortens a pause nor counts an ending twice;
- an index is forgiven once an engine of it serves, and only then: a new pod is no progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlfleet.api.timestamps import epoch_ms, rfc3339

#: Seconds before the second, third, ... replacement of an engine that never served; the first is immediate.
PAUSE_SECONDS = 5.0
PAUSE_MAX_SECONDS = 300.0
#: Failures in a row from which on a person is told.
TELL = 3
#: Milliseconds by which the apiserver's clock may seem to go back without having been set back.
SLACK_MS = 60_000


@dataclass(frozen=True, slots=True)
class StartFailure:
    """What is known of one engine index. ``at_ms``: when the latest ended, in milliseconds since the epoch."""

    count: int
    node: str
    on_node: int
    """How many of them, the latest included, were on ``node`` in a row."""
    at_ms: int
    pod_uid: str

    def pause_seconds(self) -> float:
        """How long the successor of the latest waits."""
        return 0.0 if self.count < 2 else min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2 ** min(self.count - 2, 10))

    def left_seconds(self, now_ms: int) -> float:
        """How long it still waits; a clock that was set back holds nobody up."""
        if now_ms < self.at_ms - SLACK_MS:
            return 0.0
        return max(0.0, self.pause_seconds() - (now_ms - self.at_ms) / 1000)

    def row(self, index: int) -> dict[str, Any]:
        """For the pool's status."""
        found = {
            "index": index,
            "count": self.count,
            "node": self.node or None,
            "onNode": self.on_node,
            "at": rfc3339(self.at_ms),
            "podUID": self.pod_uid,
        }
        return {k: v for k, v in found.items() if v is not None}


def failures_of(status: Mapping[str, Any]) -> dict[int, StartFailure]:
    """By index, as the pool's status has them."""
    return {
        int(r["index"]): StartFailure(
            int(r["count"]), str(r.get("node") or ""), int(r["onNode"]), epoch_ms(r["at"]), str(r["podUID"])
        )
        for r in status.get("startFailures") or ()
    }


def one_more(old: StartFailure | None, *, node: str, pod_uid: str, now_ms: int) -> StartFailure:
    """One more engine of the index has ended before it served. The same pod counts once."""
    if old is None:
        return StartFailure(1, node, 1, now_ms, pod_uid)
    if old.pod_uid == pod_uid:
        return old
    on_node = old.on_node + 1 if old.node == node else 1
    return replace(old, count=old.count + 1, node=node, on_node=on_node, at_ms=now_ms, pod_uid=pod_uid)


def keep_failing(failures: Mapping[int, StartFailure]) -> str:
    """What a person is told; empty: nothing. A node is named where its engines failed ``TELL`` times in a row."""
    by_node: dict[str, dict[int, int]] = {}
    for index, f in failures.items():
        if f.node:
            by_node.setdefault(f.node, {})[index] = f.on_node
    bad = {node: found for node, found in by_node.items() if sum(found.values()) >= TELL}
    named = {i for found in bad.values() for i in found}
    parts = [
        f"on node {node} {sum(found.values())} engines in a row (index {_some(found)}): see the pods' logs; "
        "if engines start on other nodes, look at this one, or cordon it"
        for node, found in sorted(bad.items(), key=lambda item: (-sum(item[1].values()), item[0]))[:4]
    ]
    anywhere = {i: f.count for i, f in failures.items() if i not in named and f.count >= TELL}
    if anywhere:
        parts.append(
            f"wherever they ran {max(anywhere.values())} in a row (index {_some(anywhere)}): see the pods' logs"
        )
    return "ended or had to be replaced before they served: " + "; ".join(parts) if parts else ""


def _some(indices: Iterable[int]) -> str:
    listed = sorted(indices)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
