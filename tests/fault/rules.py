"""What can happen to a call, and to which calls it happens.

Invariant: which call a rule strikes depends on labels and counts alone, never on time, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.fault.calls import Call


class Fault(StrEnum):
    """What happens to a call."""

    KILL_BEFORE = "kill-before"  # the client dies, and the call never arrives
    KILL_AFTER = "kill-after"  # the call is carried out, and the client dies before it learns of it
    FREEZE_BEFORE = "freeze-before"  # the client is stopped; the call arrives when it is thawed
    FREEZE_AFTER = "freeze-after"  # the call is carried out; the answer waits for the client to be thawed
    CONFLICT = "409"
    EXPIRED = "410"  # the version, or the continuation of a list, is too old
    INVALID = "422"
    THROTTLED = "429"  # with Retry-After: 1
    ERROR = "500"  # refused without effect, but the client can not know that
    BUSY = "503"
    TIMEOUT = "504"  # carried out, and answered 504
    RESET = "reset"  # the connection breaks, and the call never arrives
    DROP = "drop"  # carried out, and the connection breaks instead of an answer
    TRUNCATE = "truncate"  # carried out, and the connection breaks in the middle of the answer
    DELAY = "delay"  # carried out late


class Watching(StrEnum):
    """What happens to watch streams of one kind."""

    PASS = "pass"
    HOLD = "hold"  # events (bookmarks too) wait until the mode changes: a stale view
    CLOSE = "close"  # streams end, and new ones end at once
    GONE = "gone"  # streams end with ERROR 410, new ones at once
    FORBID = "forbid"  # new streams are refused with 403


#: Faults of a call that reaches its server.
CARRIED_OUT = frozenset({Fault.KILL_AFTER, Fault.FREEZE_AFTER, Fault.TIMEOUT, Fault.DROP, Fault.TRUNCATE})


@dataclass(slots=True)
class Rule:
    """``fault`` strikes calls that ``when`` accepts: ``times`` of them (0: all), after the first ``skip``."""

    when: Callable[[Call], bool]
    fault: Fault
    times: int = 1
    skip: int = 0
    seconds: float = 0.0
    seen: int = 0
    struck: int = 0

    def strikes(self, call: Call) -> bool:
        """Count the call; whether it is struck."""
        if (self.times and self.struck >= self.times) or not self.when(call):
            return False
        self.seen += 1
        if self.seen <= self.skip:
            return False
        self.struck += 1
        return True


def at(point: str) -> Callable[[Call], bool]:
    """Accepts the call with this ``Call.point``."""
    return lambda call: call.point == point


def nothing() -> None:
    """For clients that no rule kills or freezes."""
    raise AssertionError("this client can not be killed or frozen")
