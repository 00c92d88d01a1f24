"""Nodes and devices, and who holds them: engines, trainers, train blocks, demands.

Invariant: a device appears where some object names it; that nobody names one does not mean that it is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlfleet.show.facts import Obj, key_of, status_of


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who uses, may use or demands a device."""

    kind: str
    """engine, trainer, or demand."""
    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """One device of one node; ``device`` is empty for engines whose devices are unknown."""

    node: str
    device: str
    holders: tuple[Holder, ...]

    @property
    def shared(self) -> bool:
        """More than one engine or trainer is on it."""
        return sum(h.kind != "demand" for h in self.holders) > 1


def topology(pipelines: Iterable[Obj], pools: Iterable[Obj], nodes: Iterable[str] = ()) -> tuple[Place, ...]:
    """Every device that anybody names, by node. ``nodes``: names of nodes to show although nobody uses them."""
    found: dict[tuple[str, str], list[Holder]] = {}

    def put(node: object, device: object, holder: Holder) -> None:
        rows = found.setdefault((str(node or "?"), str(device)), [])
        if holder not in rows:
            rows.append(holder)

    for p in pipelines:
        namespace, name = key_of(p)
        for node, device in _listed((p["spec"].get("trainer") or {}).get("gpus")):
            put(node, device, Holder("trainer", f"{namespace}/{name}", "spec.trainer.gpus"))
        for block in status_of(p).get("blocks") or ():
            for device in block.get("devices") or ():
                put(block.get("node"), device, Holder("trainer", f"{namespace}/{name}", f"block {block['name']}"))
        for grant in status_of(p).get("grants") or ():
            state = "granted" if grant.get("granted") else f"waits: {grant.get('reason')}"
            for node, device in _listed(grant.get("devices")):
                put(node, device, Holder("demand", f"{namespace}/{name}", f"{grant['cluster']} {state}"))
    for pool in pools:
        namespace, name = key_of(pool)
        for e in status_of(pool).get("engines") or ():
            holder = Holder("engine", f"{namespace}/{e['name']}", str(e.get("state")))
            for device in e.get("gpus") or ("",):
                put(e.get("node"), device, holder)
    for node in nodes:
        if not any(place == node for place, _ in found):
            found[(node, "")] = []
    return tuple(Place(n, d, tuple(h)) for (n, d), h in sorted(found.items()))


def _listed(rows: object) -> Iterable[tuple[str, str]]:
    for row in rows or ():  # type: ignore[attr-defined]
        assert isinstance(row, Mapping)
        for device in row.get("devices") or ():
            yield str(row["node"]), str(device)
