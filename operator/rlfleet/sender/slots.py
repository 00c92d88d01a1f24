"""Which complete weights are held, for whom, and when a publish may replace them.

Invariants:
- weights become visible only when they are complete, and stay as they are while a round holds them or an operation
  reads them: a publish waits (one slot) or takes the second slot, it never writes into what somebody reads;
- a hold ends by release, by its deadline, or when another operation, which has the fence by then, takes its own.

Used from the trainer's thread and from the server's; everything is guarded by one condition variable and nobody does
slow work while holding it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlfleet.api import wire
from rlfleet.sender.cache import SpareBuffers, Weights
from rlfleet.sender.errors import PublishTimeout, Refused, SenderClosed


@dataclass(frozen=True, slots=True)
class Hold:
    """One operation's hold. ``until`` is monotonic seconds, ``expires_ms`` the same moment on the wall clock."""

    operation: str
    version: int
    digest: str
    until: float
    expires_ms: int


class Slots:
    """The weights of one sender.

    ``second_slot``: keep held weights beside newer ones instead of making a publish wait.
    """

    def __init__(self, *, second_slot: bool) -> None:
        self.spare = SpareBuffers()
        self._second_slot = second_slot
        self._changed = threading.Condition()
        self._slots: list[Weights] = []  # newest last
        self._hold: Hold | None = None
        self._readers: dict[int, int] = {}  # id(weights) -> operations that read them
        self._waiting = False
        self._closed = False

    # ------------------------------------------------------------------------------------------ trainer

    def newest(self) -> Weights | None:
        """The newest complete weights."""
        with self._changed:
            return self._slots[-1] if self._slots else None

    def put(self, weights: Weights, give_up: float | None) -> None:
        """Make complete weights visible as the newest; wait while a round holds what they would replace.

        PublishTimeout at ``give_up`` (monotonic seconds; None: as long as it takes, every hold has a deadline).
        """
        with self._changed:
            self._waiting = True
            try:
                while not self._closed and (hold := self._blocking()) is not None:
                    now = time.monotonic()
                    if give_up is not None and now >= give_up:
                        raise PublishTimeout(
                            f"version {weights.version} was not published in time: operation {hold.operation} holds "
                            f"version {hold.version} for up to {hold.until - now:.0f} s more. "
                            "Publish after its round ended, or create the sender with second_slot=True"
                        )
                    self._changed.wait((hold.until if give_up is None else min(hold.until, give_up)) - now)
            finally:
                self._waiting = False
            if self._closed:
                raise SenderClosed("the sender was closed")
            self._slots.append(weights)
            self._drop()
            self._changed.notify_all()

    def close(self) -> None:
        """End a publish that waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _blocking(self) -> Hold | None:
        # With a second slot the held weights stay and only the newest, unheld ones are replaced.
        hold = self._live_hold()
        return None if self._second_slot else hold

    def _live_hold(self) -> Hold | None:
        if self._hold is not None and self._hold.until <= time.monotonic():
            self._hold = None
            self._drop()
        return self._hold

    def _drop(self) -> None:
        """Forget all weights but the newest and the held ones; their buffers serve the next publish."""
        kept: list[Weights] = []
        for w in self._slots:
            held = self._hold is not None and (w.version, w.digest) == (self._hold.version, self._hold.digest)
            if w is self._slots[-1] or held:
                kept.append(w)
            elif id(w) not in self._readers:
                self.spare.give(w.buckets)
        self._slots = kept

    # ------------------------------------------------------------------------------------------ server

    def hold(self, operation: str, version: int, digest: str | None, seconds: float) -> None:
        """Keep these bytes for an operation. Refused VersionNotHeld when they are not here (any more)."""
        with self._changed:
            self._live_hold()
            found = next((w for w in reversed(self._slots) if w.version == version), None)
            if found is None or (digest is not None and digest != found.digest):
                found = next((w for w in self._slots if w.version == version and w.digest == digest), None)
            if found is None:
                raise Refused(wire.ErrorReason.VERSION_NOT_HELD, self._not_held(f"version {version}", digest))
            self._hold = Hold(
                operation, version, found.digest, time.monotonic() + seconds, int((time.time() + seconds) * 1000)
            )
            self._drop()
            self._changed.notify_all()

    def release(self, operation: str) -> None:
        """End this operation's hold; nothing to do when it has none."""
        with self._changed:
            if self._hold is not None and self._hold.operation == operation:
                self._hold = None
                self._drop()
                self._changed.notify_all()

    def holding(self) -> bool:
        """Whether a hold lasts."""
        with self._changed:
            return self._live_hold() is not None

    def find(self, digest: str) -> Weights | None:
        """The newest weights with this digest."""
        with self._changed:
            self._live_hold()
            return next((w for w in reversed(self._slots) if w.digest == digest), None)

    @contextmanager
    def reading(self, digest: str) -> Iterator[Weights]:
        """The weights with this digest, kept unchanged while the block runs even if their hold ends meanwhile."""
        with self._changed:
            self._live_hold()
            weights = next((w for w in reversed(self._slots) if w.digest == digest), None)
            if weights is None:
                raise Refused(wire.ErrorReason.VERSION_NOT_HELD, self._not_held("bytes", digest))
            self._readers[id(weights)] = self._readers.get(id(weights), 0) + 1
        try:
            yield weights
        finally:
            with self._changed:
                self._readers[id(weights)] -= 1
                if not self._readers[id(weights)]:
                    del self._readers[id(weights)]

    def describe(self, make: Callable[[list[Weights], Hold | None, bool], wire.SenderStatus]) -> wire.SenderStatus:
        """A status made from one consistent look."""
        with self._changed:
            hold = self._live_hold()
            waiting = self._waiting and self._blocking() is not None
            return make(list(self._slots), hold, waiting)

    def _not_held(self, what: str, digest: str | None) -> str:
        have = ", ".join(f"version {w.version} ({w.digest[:19]}…)" for w in self._slots) or "nothing yet"
        named = f" with digest {digest[:19]}…" if digest else ""
        return f"{what}{named} is not here: the sender holds {have}"
