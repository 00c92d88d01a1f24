"""Waiting on a condition with a deadline, for tests and the demo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_SECONDS = 0.05


def wait_until(check: Callable[[], T], what: str, timeout: float = 180.0) -> T:
    """Calls ``check`` until it returns something true, and returns that.

    Raises TimeoutError, which says ``what`` did not happen and what ``check`` returned last.
    """
    deadline = time.monotonic() + timeout
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:.0f} s: {what} (last: {result!r})")
        time.sleep(_PAUSE_SECONDS)
