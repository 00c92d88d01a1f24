"""What this process knows of gates because it has led all the time: what they answered, what is on its way to them.

Invariant: it is never persisted and may be empty. Without it a silent gate is waited for, which is always safe; nothing
that is in it lets anybody act who has not driven the pipeline without interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlfleet.api import wire


@dataclass(slots=True)
class _Reign:
    """An unbroken row of claims by this process."""

    first: int
    last: int


@dataclass(slots=True)
class _Gate:
    pipeline: str = ""
    answered: int | None = None
    on_their_way: dict[str, int] = field(default_factory=dict)


class GateMemory:
    """By pipeline UID and pod UID."""

    def __init__(self) -> None:
        self._reigns: dict[str, _Reign] = {}
        self._gates: dict[str, _Gate] = {}

    def claimed(self, pipeline: str, *, before: int, now: int) -> None:
        """This process claimed the pipeline: the fence was ``before`` (whoever wrote it) and is ``now``."""
        reign = self._reigns.get(pipeline)
        if reign is not None and reign.last == before:
            reign.last = now
        else:
            self._reigns[pipeline] = _Reign(now, now)

    def led_since(self, pipeline: str, generation: int) -> int | None:
        """The first generation of the row of claims that ends with ``generation``; None where that is not ours."""
        reign = self._reigns.get(pipeline)
        return reign.first if reign is not None and reign.last == generation else None

    def answered(self, pipeline: str, status: wire.GateStatus) -> None:
        """A gate said how it is."""
        gate = self._gates.setdefault(status.pod_uid, _Gate())
        gate.pipeline = pipeline
        gate.answered = status.fence.generation if status.fence.pipeline == pipeline else None
        if status.in_flight is None and not status.uncertain:
            # It stands behind a later generation and does nothing: earlier orders that still travel are refused.
            gate.on_their_way = {k: g for k, g in gate.on_their_way.items() if g >= status.fence.generation}

    def sent(self, pod_uid: str, operation_id: str, generation: int) -> None:
        """An order that may open the engine was sent, or may have been."""
        self._gates.setdefault(pod_uid, _Gate()).on_their_way[operation_id] = generation

    def ended(self, pod_uid: str, operation_id: str) -> None:
        """It has a recorded end at the gate, or was refused."""
        if pod_uid in self._gates:
            self._gates[pod_uid].on_their_way.pop(operation_id, None)

    def last_answer(self, pod_uid: str) -> int | None:
        """The generation that the gate showed last; None: it never answered (or not for this pipeline)."""
        gate = self._gates.get(pod_uid)
        return gate.answered if gate is not None else None

    def unanswered(self, pod_uid: str) -> bool:
        """Something that may open its engine has no known end."""
        gate = self._gates.get(pod_uid)
        return gate is not None and bool(gate.on_their_way)

    def forget(self, pipeline: str, present: set[str]) -> None:
        """Drop gates of pods that do not exist any more."""
        self._gates = {uid: g for uid, g in self._gates.items() if g.pipeline != pipeline or uid in present}
