"""Conditions in the status of an object: setting one, finding one.

Invariant: a condition that says what it said before is left as it is, transition time and all, so nothing is written
when nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfleet.api.conditions import ConditionStatus, ConditionType, Reason

MAX_MESSAGE = 1024


def set_condition(
    existing: Sequence[Mapping[str, Any]],
    type: ConditionType,
    status: ConditionStatus,
    reason: Reason,
    message: str,
    observed_generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """Return ``existing`` with one condition set; equal to it when nothing changed, so that nothing is written.

    ``now`` (RFC 3339) becomes lastTransitionTime only when the status changes. Messages are cut to 1024 characters.
    """
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    new: dict[str, Any] = {
        "type": type.value,
        "status": status.value,
        "reason": reason.value,
        "message": message,
        "observedGeneration": observed_generation,
        "lastTransitionTime": now,
    }
    result: list[dict[str, Any]] = []
    found = False
    for old in existing:
        if old.get("type") != new["type"]:
            result.append(dict(old))
            continue
        found = True
        if old.get("status") == new["status"] and old.get("lastTransitionTime"):
            new["lastTransitionTime"] = old["lastTransitionTime"]
        result.append(new)
    if not found:
        result.append(new)
    return result


def find_condition(conditions: Sequence[Mapping[str, Any]], type: ConditionType) -> Mapping[str, Any] | None:
    """The condition of this type, or None."""
    return next((c for c in conditions if c.get("type") == type.value), None)
