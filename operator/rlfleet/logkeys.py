"""Keys that every log line of a reconcile carries: whose it is, and under which round and generation.

Invariant: keys live in a context variable, so they follow a reconcile into its tasks and never leak into another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_KEYS: ContextVar[Mapping[str, Any]] = ContextVar("rlfleet_log_keys", default={})  # noqa: B039 - never changed in place


def current() -> Mapping[str, Any]:
    """The keys of the running reconcile; none outside of one."""
    return _KEYS.get()


def add(**keys: Any) -> None:
    """Add keys to every line until the enclosing ``bound`` ends."""
    _KEYS.set({**_KEYS.get(), **keys})


@contextmanager
def bound(**keys: Any) -> Iterator[None]:
    """Add keys to every line that is logged within."""
    token = _KEYS.set({**_KEYS.get(), **keys})
    try:
        yield
    finally:
        _KEYS.reset(token)
