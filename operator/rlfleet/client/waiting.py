"""One call's deadline, and what it has told its caller.

Invariant: the same thing is told once, however often it is observed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlfleet.client.api import CALL_SECONDS

#: Called with the phase of the sync and what it waits for.
Progress = Callable[[str, str], None]
log = logging.getLogger(__name__)


def say_nothing(phase: str, detail: str) -> None:
    """A caller that does not want to be told."""


@dataclass(slots=True)
class Wait:
    """One call's deadline and what it has told its caller."""

    started: float
    until: float
    say: Progress
    said: tuple[str, str] | None = None
    #: Keep waiting for a round that needs a person.
    patient: bool = True

    def tell(self, phase: str, detail: str, *, warn: bool = False) -> None:
        """Say it if it is new; ``warn``: log it as well."""
        if (phase, detail) != self.said:
            self.said = (phase, detail)
            self.say(phase, detail)
            if warn:
                log.warning(detail)

    def left(self) -> float:
        """Seconds to the deadline."""
        return self.until - time.monotonic()

    def call_until(self) -> float:
        """How long one call may be retried: to our own deadline, and at least one whole call."""
        return max(self.until, time.monotonic() + CALL_SECONDS)
