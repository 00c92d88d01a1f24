"""Scripted misbehaviour, per call: ``{"<path without slash>": {"action": ..., "seconds": ..., "times": ...}}``.

Actions: ``delay`` (wait, then act), ``hold`` (act when the rules are replaced), ``http500`` and ``http400`` (answer
so), ``hang`` (never answer), ``die`` (exit at once), ``lie`` (do nothing and answer success), ``subset`` (load the
first half of the tensors and answer success), ``partial`` (the same, and answer 400), ``keep`` (a release of memory
that answers success and frees nothing), ``late`` (one whose memory is free only ``seconds`` after its answer),
``zombie`` (the core is dead: this and every later call gets no answer, the port is closed, and yet the process
stays).
``when`` is ``before`` (default) or ``after`` the real work: a 500 after the work is a failure that was none. It means
nothing from ``lie`` on.
``times`` limits how often it strikes (default: always). The file is read again at every call, so a test can change
its mind; a changed rule starts to count anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACTIONS = ("delay", "hold", "http500", "http400", "hang", "die", "lie", "subset", "partial", "keep", "late", "zombie")

#: Between looks at the file.
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Fault:
    """One rule. ``seconds`` applies to ``delay`` and ``late``; ``times`` None means without limit."""

    action: str
    seconds: float = 1.0
    times: int | None = None
    when: str = "before"


def parse(raw: Any) -> dict[str, Fault]:
    """Rules from JSON. ValueError that names the wrong field."""
    if not isinstance(raw, dict):
        raise ValueError("faults must be an object of path: rule")
    rules = {}
    for path, rule in raw.items():
        if not isinstance(rule, dict) or set(rule) - {"action", "seconds", "times", "when"}:
            raise ValueError(f"faults[{path}]: wants action, seconds, times, when")
        fault = Fault(**rule)
        if fault.action not in ACTIONS or fault.when not in ("before", "after"):
            raise ValueError(f"faults[{path}]: action must be one of {ACTIONS}, when before or after")
        rules[path.strip("/")] = fault
    return rules


class Faults:
    """The rules in force: those of the file (if any), overridden by those set over HTTP."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._set: dict[str, Fault] = {}
        self._used: dict[tuple[str, Fault], int] = {}
        self._replaced = asyncio.Event()

    def replace(self, rules: Mapping[str, Fault]) -> None:
        """Replace the rules set over HTTP, and start counting anew."""
        self._set = dict(rules)
        self._used.clear()
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def until_replaced(self) -> None:
        """Return when the rules of now are replaced: over HTTP, even by the same ones, or in the file by others."""
        now = self.rules()
        waiting = asyncio.ensure_future(self._replaced.wait())
        try:
            while not waiting.done() and self.rules() == now:
                await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        finally:
            waiting.cancel()

    def rules(self) -> dict[str, Fault]:
        """All rules in force. ValueError when the file is malformed."""
        rules: dict[str, Fault] = {}
        if self._file is not None and self._file.exists():
            rules = parse(json.loads(self._file.read_text() or "{}"))
        return rules | self._set

    def struck(self, path: str) -> int:
        """How many calls of ``path`` were hit since the rules were replaced."""
        return sum(used for (hit, _), used in self._used.items() if hit == path)

    def strike(self, path: str, when: str) -> Fault | None:
        """The fault that hits this call now, counted; None for none. ValueError when the file is malformed."""
        fault = self.rules().get(path.strip("/"))
        if fault is None or fault.when != when:
            return None
        used = self._used.get((path.strip("/"), fault), 0)
        if fault.times is not None and used >= fault.times:
            return None
        self._used[path.strip("/"), fault] = used + 1
        return fault
