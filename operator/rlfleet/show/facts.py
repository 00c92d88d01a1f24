"""Small readings of objects that every view needs: conditions, times, versions.

Invariant: what is not there reads as None or an empty text, never as a value that could be meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rlfleet.api.timestamps import epoch_ms

Obj = Mapping[str, Any]

#: Condition types whose True is bad news; of all others it is False that people should see.
BAD_WHEN_TRUE = frozenset(
    {"Degraded", "TemplateOutdated", "StuckLoading", "ResidualMemoryHigh", "HeterogeneousStates", "Failed"}
)
#: Conditions that tell what goes on, not that something is wrong.
_INFORMATIVE = frozenset({"Progressing", "CancelRequested", "Complete"})


def status_of(obj: Obj) -> Obj:
    """``status``, or nothing."""
    found = obj.get("status")
    return found if isinstance(found, Mapping) else {}


def key_of(obj: Obj) -> tuple[str, str]:
    """Namespace and name."""
    meta = obj["metadata"]
    return str(meta.get("namespace") or ""), str(meta["name"])


def condition(obj: Obj, kind: str) -> Obj:
    """One condition; an empty mapping where it is absent."""
    return next((c for c in status_of(obj).get("conditions") or () if c.get("type") == kind), {})


def problems(obj: Obj) -> list[dict[str, str]]:
    """Conditions that tell of something wrong or unknown: type, status, reason, message. Each reason once."""
    found: list[dict[str, str]] = []
    said: set[str] = set()
    rows = sorted(status_of(obj).get("conditions") or (), key=lambda c: c.get("type") != "Degraded")
    for c in rows:
        kind, status = str(c.get("type")), str(c.get("status"))
        wrong = status in ("True" if kind in BAD_WHEN_TRUE else "False", "Unknown")
        reason = str(c.get("reason"))
        if kind in _INFORMATIVE or not wrong or reason in said:
            continue
        said.add(reason)
        found.append({"type": kind, "status": status, "reason": reason, "message": str(c.get("message") or "")})
    return found


def time_ms(text: object) -> int | None:
    """Milliseconds since the epoch of an RFC 3339 time; None where there is none."""
    try:
        return epoch_ms(str(text)) if text else None
    except ValueError:
        return None


def age(ms: int | None, now_ms: int) -> str:
    """``42s``, ``5m``, ``3h``, ``9d``; ``-`` where unknown."""
    if ms is None:
        return "-"
    seconds = max(0, now_ms - ms) // 1000
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def duration(ms: int | None) -> str:
    """``870ms``, ``4.2s``, ``3m10s``; ``-`` where unknown."""
    if ms is None:
        return "-"
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}s"
    return f"{ms // 60_000}m{ms // 1000 % 60:02d}s"


def version_text(version: int | None) -> str:
    """``v12``, ``base`` for -1, ``-`` for none."""
    if version is None:
        return "-"
    return "base" if version < 0 else f"v{version}"


def size(count: int | None) -> str:
    """Bytes in the unit that fits; ``-`` where unknown."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def newest_first(rounds: Iterable[Obj]) -> list[Obj]:
    """SyncRounds, the one created last first."""
    return sorted(rounds, key=lambda r: (str(r["metadata"].get("creationTimestamp")), key_of(r)), reverse=True)


def document(value: Any) -> Any:
    """Dataclasses as plain JSON values, in camelCase; properties are not part of it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {_camel(f.name): document(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): document(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [document(v) for v in value]
    return value


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(w.title() for w in rest)
