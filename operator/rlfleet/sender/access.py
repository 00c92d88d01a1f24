"""Who may call the sender, and under which fence.

Invariants: a call is authenticated before anything of it is stored; the fence never goes down while this process
lives. It is not stored on disk: a restarted trainer is another incarnation, and every order names the incarnation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rlfleet.api import fencing, tokens, wire
from rlfleet.sender.errors import Refused

KeySource = tokens.PublicKeys | Mapping[str, str] | Callable[[], Mapping[str, str]]
#: A source that is called is asked again at most this often.
_ASK_SECONDS = 2.0


def _keys(given: tokens.PublicKeys | Mapping[str, str]) -> tokens.PublicKeys:
    return given if isinstance(given, tokens.PublicKeys) else tokens.PublicKeys(given)


class Access:
    """Verifies tokens for one audience and keeps the fence. Without keys every call is Unauthenticated."""

    def __init__(self, audience: str, source: KeySource | None) -> None:
        self._audience = audience
        self._asking = threading.Lock()
        self._source: Callable[[], Mapping[str, str]] | None = None
        self._asked = float("-inf")
        self._public: tokens.PublicKeys | None = None
        self._fence = fencing.Fence()
        if source is not None:
            self.set_keys(source)

    def set_keys(self, source: KeySource) -> None:
        """Keys to verify with from now on. A callable is asked when needed, from a worker thread."""
        if callable(source):
            self._source = source
        else:
            self._source, self._public = None, _keys(source)

    def refresh(self) -> bool:
        """Ask the source of the keys again, unless that was just done. Blocks; True when it was asked."""
        source = self._source
        if source is None or not self._asking.acquire(blocking=False):
            return False
        try:
            if time.monotonic() - self._asked < _ASK_SECONDS:
                return False
            self._asked = time.monotonic()
            self._public = _keys(source())
            return True
        finally:
            self._asking.release()

    def authenticate(self, header: str | None) -> tokens.Claims:
        """The claims of a bearer token; Refused Unauthenticated."""
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(wire.ErrorReason.UNAUTHENTICATED, "a bearer token is needed")
        if not self._public:
            raise Refused(
                wire.ErrorReason.UNAUTHENTICATED,
                "this sender has no public keys yet: give it those of RLPipeline.status.publicKeys, as "
                "WeightSender(public_keys=client.public_keys) does",
            )
        try:
            return tokens.verify(token, self._public, audience=self._audience)
        except tokens.TokenError as e:
            raise Refused(wire.ErrorReason.UNAUTHENTICATED, str(e)) from e

    @property
    def held(self) -> wire.Held:
        """The fence as it stands."""
        f = self._fence
        return wire.Held(pipeline=f.pipeline, operation=f.operation, generation=f.generation)

    def authorize(self, claims: tokens.Claims, body: wire.Fenced) -> None:
        """The token must allow control, of exactly this operation; Refused Forbidden."""
        if claims.scope is not tokens.Scope.CONTROL:
            raise Refused(wire.ErrorReason.FORBIDDEN, f"a token of scope {claims.scope.value} does not allow this")
        for field, ours, theirs in (
            ("pipeline", claims.pipeline, body.pipeline),
            ("operation", claims.operation, body.operation),
            ("generation", claims.generation, body.generation),
        ):
            if ours != theirs:
                raise Refused(wire.ErrorReason.FORBIDDEN, f"{field} of the token and of the body differ")

    def admit(self, body: wire.Fenced, *, idle: bool) -> None:
        """Store the fence of a call if it is not below what is held; Refused with what is held otherwise.

        ``idle``: no hold and no operation, so that another pipeline may take this sender over.
        """
        asked = fencing.Fence(body.pipeline, body.operation, body.generation)
        answer = fencing.admit(self._fence, asked, now_ms=int(time.time() * 1000), closed=idle)
        if answer is not fencing.Admission.ACCEPT:
            held = self.held
            raise Refused(
                wire.ErrorReason(answer.value),
                f"generation {asked.generation} of operation {asked.operation} is refused: held is generation "
                f"{held.generation} of operation {held.operation or '-'} in pipeline {held.pipeline or '-'}",
                held,
            )
        if asked.generation > self._fence.generation:
            self._fence = asked
