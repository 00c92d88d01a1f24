"""Why a pod ended, in the words of whoever ended it.

Invariant: nothing is made up. Where every container ends with code 0 when it is told to, the kubelet's own words on an
eviction do not reach the pod's status, which then reads as if all had been well; its Events have them all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Reason of the kubelet's Events about pods that it ends.
EVICTED: Final = "Evicted"


@dataclass(frozen=True, slots=True)
class Ending:
    """What a pod's status says of its end. ``unexplained``: the engine ended as if it was asked to, by nobody named."""

    text: str
    unexplained: bool = False


def disruption_of(pod: Mapping[str, Any]) -> str:
    """Why others are about to end the pod (eviction, preemption, drain, taint), in the API's words; empty: none is."""
    for c in (pod.get("status") or {}).get("conditions") or []:
        if c.get("type") == "DisruptionTarget" and c.get("status") == "True":
            return _words(c) or "DisruptionTarget"
    return ""


def ending_of(pod: Mapping[str, Any], engine: Mapping[str, Any]) -> Ending:
    """Why a pod that is over ended. ``engine``: the state of the engine's container."""
    status = pod.get("status") or {}
    # What ended the pod as a whole (Evicted, for instance) explains the engine's end, not the other way round.
    if known := _words(status):
        return Ending(known)
    ended: Mapping[str, Any] | None = engine.get("terminated")
    text = _exit(ended) if ended else f"pod is {status.get('phase')}"
    if disruption := disruption_of(pod):
        return Ending(f"{disruption} ({text})")
    return Ending(text, unexplained=ended is not None and ended.get("exitCode") == 0)


def evictions(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Why the kubelet evicted pods, by their UID, from Events (events.k8s.io/v1)."""
    return {
        str(e["regarding"].get("uid")): f"{EVICTED}: {str(e.get('note') or '').strip() or 'no message given'}"
        for e in events
        if e.get("reason") == EVICTED and (e.get("regarding") or {}).get("kind") == "Pod"
    }


def _words(said: Mapping[str, Any]) -> str:
    # The kubelet's messages may end with a space.
    return ": ".join(str(said[k]).strip() for k in ("reason", "message") if said.get(k))


def _exit(ended: Mapping[str, Any]) -> str:
    signal = f", signal {ended['signal']}" if ended.get("signal") else ""
    text = f"engine ended with exit code {ended.get('exitCode')}{signal}"
    return f"{text} ({ended['reason']})" if ended.get("reason") else text
