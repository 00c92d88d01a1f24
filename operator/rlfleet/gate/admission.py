"""Who may still act: tokens first, then identity, then the fence, which is stored before anything is done.

Invariant: a request that fails any of these checks changes nothing, in memory or on disk.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

from rlfleet.api import fencing
from rlfleet.api.fencing import Admission, Fence
from rlfleet.api.tokens import Claims, PublicKeys, Scope, TokenError, verify
from rlfleet.api.wire import Addressed, EnrollRequest, ErrorReason, Fenced
from rlfleet.gate.config import GateConfig
from rlfleet.gate.errors import GateError
from rlfleet.gate.links import now_ms
from rlfleet.gate.rules import for_this_process, is_another_process
from rlfleet.gate.store import Store

log = logging.getLogger(__name__)

_REFUSALS = {
    Admission.STALE: (ErrorReason.STALE_FENCE, "a higher generation is held; read RLPipeline.status again"),
    Admission.OTHER_OPERATION: (ErrorReason.OTHER_OPERATION, "this generation belongs to another operation"),
    Admission.OTHER_PIPELINE: (
        ErrorReason.OTHER_PIPELINE,
        "another pipeline's fence is held; it gives way only to a higher generation while this engine is closed",
    ),
    Admission.POISONED: (ErrorReason.FENCE_POISONED, "the generation is more than a day ahead of this gate's clock"),
}


class AdmissionControl:
    """Verifies tokens and keeps the fence.

    ``is_closed``: whether the engine is paused and in no router, read live. ``running``: id of the operation that runs;
    ``look``: meets another engine process if one listens, and tells whether the recorded one does; ``met``: called when
    another engine process stands beside the gate.
    """

    def __init__(
        self,
        config: GateConfig,
        store: Store,
        is_closed: Callable[[], Awaitable[bool]],
        running: Callable[[], str | None],
        look: Callable[[], bool],
        met: Callable[[], None],
    ) -> None:
        self._config = config
        self._store = store
        self._is_closed = is_closed
        self._running = running
        self._look = look
        self._met = met

    @property
    def keys(self) -> PublicKeys:
        """The keys that count now: those of the latest enrolment that brought any, else the environment's."""
        stored = self._store.public_keys
        return PublicKeys(stored) if stored else self._config.public_keys

    def authenticate(self, header: str | None, *scopes: Scope) -> Claims:
        """Verify a bearer token and its scope."""
        kind, _, token = (header or "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise GateError(ErrorReason.UNAUTHENTICATED, "an Authorization: Bearer token is needed")
        try:
            claims = verify(token.strip(), self.keys, audience=self._config.pod_uid)
        except TokenError as e:
            raise GateError(ErrorReason.UNAUTHENTICATED, str(e)) from e
        if claims.scope not in scopes:
            wanted = " or ".join(scopes)
            raise GateError(ErrorReason.FORBIDDEN, f"the token's scope is {claims.scope}, {wanted} is needed")
        return claims

    def match(self, claims: Claims, body: Fenced) -> None:
        """The token repeats the fence; both must agree."""
        for name, mine, theirs in (
            ("pipeline", claims.pipeline, body.pipeline),
            ("operation", claims.operation, body.operation),
            ("generation", claims.generation, body.generation),
        ):
            if mine != theirs:
                raise GateError(
                    ErrorReason.FORBIDDEN, f"the token was made for {name} {mine!r}, the body says {theirs!r}"
                )

    def identify(self, body: Addressed) -> None:
        """The call is meant for this pod and this engine process."""
        self._own_pod(body.pod_uid)
        self._look()  # a call for the process before must not reach the one that has just come
        enrolment, incarnation = self._store.enrolment, self._store.incarnation
        if enrolment is None or incarnation is None:
            raise GateError(ErrorReason.NOT_ENROLLED, "the start-up promise does not hold yet; see status")
        for_this_process(body.incarnation, incarnation)
        if body.pipeline != enrolment.pipeline:
            raise GateError(
                ErrorReason.OTHER_PIPELINE,
                f"this gate is enrolled with pipeline {enrolment.pipeline}",
                held=self._store.fence,
            )

    def _own_pod(self, pod_uid: str) -> None:
        if pod_uid != self._config.pod_uid:
            raise GateError(
                ErrorReason.IDENTITY_MISMATCH, f"this is pod {self._config.pod_uid}, the call is for {pod_uid}"
            )

    async def admit(self, body: Fenced) -> None:
        """Check the fence, and store a higher one durably before anything acts under it."""
        asked = Fence(body.pipeline, body.operation, body.generation)
        await self._judge(asked)
        if asked != self._store.fence:
            self._store.fence = asked

    async def _judge(self, asked: Fence) -> None:
        held = self._store.fence
        verdict = fencing.admit(held, asked, now_ms=now_ms(), closed=False)
        if verdict is Admission.OTHER_PIPELINE and asked.generation > held.generation:
            closed = await self._is_closed()
            held = self._store.fence  # may have moved while the routers were read
            verdict = fencing.admit(held, asked, now_ms=now_ms(), closed=closed)
        if verdict is not Admission.ACCEPT:
            reason, why = _REFUSALS[verdict]
            raise GateError(
                reason, f"generation {asked.generation} of operation {asked.operation!r} is refused: {why}", held=held
            )

    async def enroll(self, claims: Claims, body: EnrollRequest) -> None:
        """Check and store an enrolment: not below what is held, and never raising a fence that is held."""
        if (claims.pipeline, claims.generation) != (body.pipeline, body.generation):
            raise GateError(
                ErrorReason.FORBIDDEN,
                f"the token was made for pipeline {claims.pipeline!r} at generation {claims.generation}",
            )
        self._own_pod(body.pod_uid)
        try:
            if body.public_keys:
                PublicKeys(body.public_keys)
        except TokenError as e:
            raise GateError(ErrorReason.INVALID, f"publicKeys: {e}") from e
        held = self._store.fence
        # The operation is that of the fence, so that only pipeline and generation are judged.
        await self._judge(Fence(body.pipeline, held.operation, body.generation))
        before, held = self._store.enrolment, self._store.fence
        if before is not None and before.pipeline == body.pipeline and body.generation < before.generation:
            raise GateError(
                ErrorReason.STALE_FENCE, f"enrolled already under generation {before.generation}", held=held
            )
        known, past = self._store.engine_process, self._store.past_processes
        changed = is_another_process(known, body.engine_process, past)
        # The kubelet tells of it late. What was recorded since the process was met by its socket is its own.
        looked = self._look()
        was_met = looked and self._store.met_before_told
        restarted = self._store.incarnation is not None and changed and not was_met
        running = self._running()
        if restarted and running is not None:
            raise GateError(
                ErrorReason.BUSY, f"operation {running} still ends for the engine process before this one", held=held
            )
        with self._store.transaction():
            self._store.enrolment = body
            if restarted:
                # A pause is known to be of the socket that listens, under whatever names that was told: who comes late
                # tells the one of a container before this one first.
                self._store.forget_process(secrets.token_hex(16), self._store.engine_listener if looked else None)
            if changed and known is not None:
                self._store.past_processes = (*past, known)
                self._store.met_before_told = False
                # Nobody listens yet: this name is that of the process whose socket comes next.
                self._store.told_before_met = not was_met and not looked
            if body.engine_process is not None and body.engine_process not in past:
                self._store.engine_process = body.engine_process
            if body.public_keys:
                self._store.public_keys = dict(body.public_keys)
            if not held.generation and body.generation:
                self._store.fence = Fence(body.pipeline, "", body.generation)
        if restarted:
            log.error("the engine was restarted in place", extra={"incarnation": self._store.incarnation})
            self._met()

    def admit_push(self, claims: Claims, operation: str, *, feeds: int | None = None) -> None:
        """A push neither raises the fence nor outlives it: its token must be of exactly the one that is held.

        ``feeds``: generation of a load that runs and takes its buckets from a push. It runs to its end whoever takes
        the operation over, and so does the push that it needs: cut off, it would only leave the engine half loaded.
        """
        if claims.operation != operation:
            raise GateError(
                ErrorReason.FORBIDDEN, f"the token was made for operation {claims.operation!r}, not {operation!r}"
            )
        held = self._store.fence
        if (claims.pipeline, claims.operation, claims.generation) == (held.pipeline, held.operation, held.generation):
            return
        if (claims.pipeline, claims.operation, claims.generation) == (held.pipeline, held.operation, feeds):
            return
        if claims.generation > held.generation:
            raise GateError(ErrorReason.NOT_STAGED, "no Prepare was accepted under this token's generation", held=held)
        if claims.generation == held.generation:
            raise GateError(ErrorReason.OTHER_OPERATION, "this generation belongs to another operation", held=held)
        raise GateError(ErrorReason.STALE_FENCE, "a higher generation is held", held=held)
