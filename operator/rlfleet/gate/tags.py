"""What of the engine's device memory is here, given back, or in between: the durable record and its rules.

The rules are pure, as those of rules.py. Invariants:
- a tag moves only Here -> Releasing -> Released -> Waking -> Here; Releasing and Waking are written before the engine
  is asked, and left only on its answer;
- a tag in between is never asked for again, in either direction: a release of what is gone and a resume of what is
  here both kill a real engine;
- while any tag is not here, nothing that touches weights, caches or requests is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rlfleet.api.wire import DeviceMemory, ErrorReason, MemoryTag
from rlfleet.gate.errors import GateError

#: The two orders that move tags.
MEMORY_KINDS = frozenset({"Release", "Wake"})
#: Touch weights, caches or requests, which an engine without its memory does not survive.
NEEDS_MEMORY = frozenset({"Load", "Verify", "Publish", "Resume", "Probe", "Open"})

#: Weights last, and first when waking: what fails half-way then leaves the weights where they are, or back.
RELEASE_ORDER = (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH, MemoryTag.WEIGHTS)


class TagState(StrEnum):
    """Where one tag is; one that is here has no entry in the record."""

    RELEASING = "Releasing"
    RELEASED = "Released"
    WAKING = "Waking"


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Tags that are not here, and per device what was in use before the first of them was released and after the last.

    ``before`` and ``after`` (UUID -> bytes) are empty where memory could not be read.
    """

    tags: Mapping[MemoryTag, TagState] = field(default_factory=dict)
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> MemoryRecord:
        """From its durable form; None: everything is here."""
        if value is None:
            return cls()
        tags = {MemoryTag(tag): TagState(state) for tag, state in value["tags"].items()}
        return cls(tags, dict(value["before"]), dict(value["after"]))

    def durable(self) -> dict[str, Any] | None:
        """Its durable form."""
        if not self.tags and not self.before:
            return None
        return {"tags": dict(self.tags), "before": dict(self.before), "after": dict(self.after)}

    @property
    def all_here(self) -> bool:
        """Nothing is given back, or may be."""
        return not self.tags

    @property
    def released(self) -> tuple[MemoryTag, ...]:
        """Tags that are given back, in the order in which they are released."""
        return tuple(t for t in RELEASE_ORDER if self.tags.get(t) is TagState.RELEASED)

    @property
    def in_between(self) -> tuple[MemoryTag, ...]:
        """Tags that were asked for and did not answer yet."""
        return tuple(t for t in RELEASE_ORDER if self.tags.get(t) in (TagState.RELEASING, TagState.WAKING))

    def with_tag(self, tag: MemoryTag, state: TagState | None) -> MemoryRecord:
        """The record after one step of one tag; None: it is here. With all of them here nothing is left to remember."""
        moved = {t: s for t, s in self.tags.items() if t is not tag} | ({tag: state} if state else {})
        return replace(self, tags=moved) if moved else MemoryRecord()

    def measured(self, memory: Mapping[str, DeviceMemory] | None) -> MemoryRecord:
        """The record with what is in use now. Until the first tag goes that is "before", from then on "after"."""
        used = {u: m.used_bytes for u, m in (memory or {}).items()}
        return MemoryRecord(before=used) if self.all_here else replace(self, after=used)

    def needs(self) -> dict[str, int]:
        """Bytes per device that waking takes: what releasing freed. Empty where that was not measured."""
        return {u: used - self.after[u] for u, used in self.before.items() if u in self.after and used > self.after[u]}


def memory_is_here(kind: str, memory: MemoryRecord) -> None:
    """Refuse what an engine without (all of) its memory does not survive."""
    if kind in NEEDS_MEMORY and not memory.all_here:
        gone = ", ".join(f"{tag} {state}" for tag, state in memory.tags.items())
        raise GateError(ErrorReason.OFFLOADED, f"the engine's memory is not here ({gone}); Wake comes before {kind}")


def nothing_in_between(memory: MemoryRecord) -> None:
    """Refuse to move tags while one may be here or gone."""
    if memory.in_between:
        raise GateError(
            ErrorReason.UNCERTAIN,
            f"whether {', '.join(memory.in_between)} is released is not known, and asking again would kill the engine; "
            "replace the pod",
        )


def goes_along(
    wanted: Sequence[MemoryTag], memory: MemoryRecord, before: Mapping[MemoryTag, MemoryTag], engine: str
) -> None:
    """Refuse a release that would take something with it that stays recorded as here: nobody would wake that again."""
    for tag in wanted:
        other = before.get(tag)
        if other is not None and other not in wanted and other not in memory.tags:
            raise GateError(
                ErrorReason.UNSUPPORTED, f"tags: {engine} gives {tag} back only together with {other}: name both"
            )


def may_release(
    *,
    paused: bool | None,
    running: int | None,
    waiting: int | None,
    routed: Mapping[str, bool | None],
    late_add: bool,
) -> None:
    """Only a paused, idle engine that no router lists, or may still list, gives its memory back."""
    if paused is not True:
        raise GateError(ErrorReason.NOT_PROVEN, "the engine is not proven paused; Pause comes before Release")
    if running != 0 or waiting != 0:
        raise GateError(
            ErrorReason.NOT_PROVEN,
            f"the engine is not proven idle: {_count(running)} running, {_count(waiting)} waiting; "
            "Pause with mode Abort ends them",
        )
    listed = [name for name, answer in routed.items() if answer is not False]
    if listed or late_add:
        where = ", ".join(listed) or "an addition that may still arrive"
        raise GateError(ErrorReason.NOT_PROVEN, f"not proven out of the routers: {where}; Close comes before Release")


def _count(value: int | None) -> str:
    return "an unknown number" if value is None else str(value)


def judge(memory: Mapping[str, DeviceMemory] | None, limit: int | None) -> str:
    """Residual: Ok or High by the limit on each whole device; Unknown without a reading or a limit."""
    if memory is None or limit is None:
        return "Unknown"
    return "High" if any(m.used_bytes > limit for m in memory.values()) else "Ok"


def lacking(needs: Mapping[str, int], memory: Mapping[str, DeviceMemory] | None) -> Sequence[str]:
    """Devices that are seen to lack the room for what was released, in words; one that is not read is not named."""
    short = []
    for uuid, wanted in needs.items():
        seen = (memory or {}).get(uuid)
        if seen is not None and seen.total_bytes - seen.used_bytes < wanted:
            short.append(f"{uuid}: {seen.total_bytes - seen.used_bytes} bytes are free, waking takes {wanted}")
    return short
