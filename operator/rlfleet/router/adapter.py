"""What the gate needs of a router: list, add and remove one URL, and know when an addition has ended.

Invariants every adapter keeps:
- URLs are compared in one normal form (``normal``): a router that does not normalise would otherwise hold the same
  engine twice, and a look-up for one spelling would miss the other;
- "accepted" is not "listed": ``add`` ends only when the router's own job has ended;
- "listed" is not "used": an entry that the router shuns (health check, circuit breaker) says so;
- a router that does not answer raises; an empty list is only ever an answer;
- a key is asked for anew with each call, so that one that was changed counts at once, and stands in no message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine as one router sees it. ``shunned``: why it is sent no requests though listed, in the router's words;
    empty: as far as the router tells, it is sent some.
    """

    listed: bool
    shunned: str = ""


#: The key that the router demands on its API as it is now; empty: none is known.
Key = Callable[[], str]


def no_key() -> str:
    """For routers that were started without one."""
    return ""


def usable_key(raw: bytes) -> str:
    """The key that a Secret or file holds, without the white space around it; empty: it can stand in no header."""
    text = raw.decode("ascii", "replace").strip()
    return text if text.isascii() and text.isprintable() and " " not in text else ""


class RouterAdapter(Protocol):
    """One router. All durations are seconds; failures are rlfleet.calls.CallError."""

    type: str

    async def close(self) -> None:
        """Close connections; touches nothing at the router."""

    async def look(self, url: str, seconds: float) -> Entry:
        """Whether the router knows this engine, and uses it."""

    async def lists(self, url: str, seconds: float) -> bool:
        """Whether the router knows this engine."""

    async def add(self, url: str, *, seconds: float) -> None:
        """Add the engine; returns when the router's job ended and the list shows it."""

    async def remove(self, url: str, *, seconds: float) -> None:
        """Remove every spelling of the engine's URL; returns when the list shows none. Absent counts as removed."""


def normal(url: str) -> str:
    """Scheme and host in lower case, explicit port, no trailing slash, no credentials, query or fragment."""
    parts = urlsplit(url.strip())
    scheme = parts.scheme.lower()
    host = (parts.hostname or "").lower()
    if ":" in host:
        host = f"[{host}]"
    port = parts.port or (443 if scheme == "https" else 80)
    return f"{scheme}://{host}:{port}{parts.path.rstrip('/')}"
