"""Times as the Kubernetes API writes them: RFC 3339, UTC, whole seconds.

They are for people and alerts. Nothing here decides by them: decisions use monotonic time or the fence.
"""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(epoch_ms: int) -> str:
    """``2026-01-31T12:00:00Z`` for milliseconds since the epoch; parts of a second are cut off."""
    return datetime.fromtimestamp(epoch_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_ms(text: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 time with a zone; ValueError on anything else."""
    value = datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise ValueError(f"time {text!r} names no zone")
    return int(value.timestamp() * 1000)
