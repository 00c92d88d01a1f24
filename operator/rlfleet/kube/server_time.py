"""The apiserver's clock, carried on between its answers by our monotonic one.

Invariant: our own wall clock is never read. Instants that are persisted or compared with persisted ones (deadlines of a
round, creation and deletion times, generations, the validity of tokens) mean the same to every operator, however far
their machines' clocks are apart.
"""

from __future__ import annotations

#: Date headers are whole seconds: a reading that seems to go back by less than this is only rounded off.
ROUNDING_MS = 2_000


class ServerTime:
    """Fed with the Date headers of answers. Monotonic arguments are seconds."""

    def __init__(self) -> None:
        self.last_date_ms = 0
        self._offset_ms: int | None = None

    def note(self, date_ms: int, monotonic: float) -> None:
        """An answer with this Date arrived at ``monotonic``."""
        self.last_date_ms = date_ms
        offset = date_ms - round(monotonic * 1000)
        # The header is rounded down and the answer has travelled: the largest offset is the nearest to the truth.
        # Where the clock was set back, or another apiserver answers, the old one is not held on to.
        if self._offset_ms is None or offset > self._offset_ms or offset < self._offset_ms - ROUNDING_MS:
            self._offset_ms = offset

    def now_ms(self, monotonic: float) -> int | None:
        """Milliseconds since the epoch by the apiserver's clock; None before its first answer."""
        return None if self._offset_ms is None else self._offset_ms + round(monotonic * 1000)
