"""Client: what a training loop calls.

Invariants:
- a sync is found again by its name, whatever answers were lost: calling twice, or from a restarted trainer whose
  sender lives on, never makes a second round for the same thing;
- a round is judged by its recorded end only; when we stop waiting, it goes on, and the error says how to stop it.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from rlfleet.api.v1alpha1 import RLPipeline, SyncRound
from rlfleet.client import errors, rounds
from rlfleet.client.api import ROUNDS, Exists, Invalid
from rlfleet.client.demand import ACTOR, Demanding
from rlfleet.client.waiting import Progress, Wait, say_nothing

#: Seconds after which it is said that no operator has looked at a round.
OPERATOR_SECONDS = 5.0
#: Phases of a sync before there is a round.
WAITING_FOR_SENDER = "WaitingForSender"


class Client(Demanding):
    """One pipeline, seen by its trainer. May be used by several threads.

    Credentials: ``kubeconfig`` (with ``context``); else KUBECONFIG; else, in a pod, its service account; else
    ~/.kube/config. The identity needs ``get`` on rlpipelines and ``create``, ``get`` on syncrounds; with ``list`` and
    ``watch`` on both it hears of changes at once instead of asking every half second; ``cancel`` needs ``patch``.
    Progress and GPUs need ``create``, ``get`` and ``patch`` on trainerdemands, and name the trainer: ``pod_uid`` and
    ``pod_name``, default RLFLEET_POD_UID and RLFLEET_POD_NAME. By these the operator can prove that a trainer is gone,
    and what it held goes back to the engines.
    """

    def __init__(
        self,
        namespace: str,
        pipeline: str,
        kubeconfig: str | os.PathLike[str] | None = None,
        *,
        context: str | None = None,
        pod_uid: str | None = None,
        pod_name: str | None = None,
    ) -> None:
        super().__init__(namespace, pipeline, kubeconfig, context=context)
        self._trainer(pod_uid, pod_name)

    # ---------------------------------------------------------------------------------------------- syncing

    def sync(
        self,
        version: int,
        *,
        sender_incarnation: str | None = None,
        manifest_digest: str | None = None,
        timeout: float = 1800.0,
        sender_timeout: float = 60.0,
        retries: int = 0,
        allow_rollback: bool = False,
        on_holding: Literal["raise", "wait"] = "raise",
        on_progress: Progress | None = None,
    ) -> rounds.SyncResult:
        """Bring ``version``, which the sender has published, into all engines; return when it is served.

        - ``sender_incarnation``: WeightSender.incarnation; default: the sender that the operator reports.
        - ``manifest_digest``: digest of the published manifest, needed with ``spec.weights.checkpoint``; with it, other
          bytes under the same version are told apart. Nothing is asked for when the version with this digest is
          committed already.
        - ``timeout``: seconds for everything; ``sender_timeout``: seconds of it for the operator to report the sender.
        - ``retries``: how many new attempts to make after one ended without success. An attempt that failed in an
          earlier call is reported as it is with 0, and followed by a new one otherwise.
        - ``allow_rollback``: a version below the committed one is meant.
        - ``on_holding``: what to do when the round cannot heal by itself and waits for a person: "raise"
          HoldingNeedsAction (the round goes on; sync again to wait for it), or "wait" for the person.
        - ``on_progress``: called with (phase, what it waits for) whenever that changes.

        Raises SyncRefused (nothing was begun), SenderNotReady, SyncFailed (the version is not committed),
        RoutingDegraded (a SyncFailed whose version IS committed: go on, do not send it again), HoldingNeedsAction,
        SyncTimeout (the round goes on), and the errors of the API: PipelineNotFound, NamespaceNotFound, Forbidden,
        ApiUnavailable...
        """
        if on_holding not in ("raise", "wait"):
            raise ValueError(f'on_holding must be "raise" or "wait", not {on_holding!r}')
        wait = _begin(version, retries, timeout, on_progress, patient=on_holding == "wait")
        asked = self._what(version, sender_incarnation, manifest_digest, sender_timeout, wait, rollback=allow_rollback)
        return asked if isinstance(asked, rounds.SyncResult) else self._carry(asked, retries, wait)

    def order(
        self,
        version: int,
        *,
        sender_incarnation: str | None = None,
        manifest_digest: str | None = None,
        timeout: float = 60.0,
        sender_timeout: float = 60.0,
        retries: int = 0,
        allow_rollback: bool = False,
    ) -> rounds.SyncResult | str:
        """Ask for what ``sync`` brings, and do not wait for it: the name of the round that carries it, or its result
        where it has ended already.

        Arguments and errors as of ``sync``; ``timeout`` is for the calls that ask.
        """
        wait = _begin(version, retries, timeout, None, patient=True)
        asked = self._what(version, sender_incarnation, manifest_digest, sender_timeout, wait, rollback=allow_rollback)
        if isinstance(asked, rounds.SyncResult):
            return asked
        attempt, found = 1, self._find_or_create(asked, 1, wait)
        while rounds.ended(found):
            later, retries = self._after(asked, attempt, found, retries, wait)
            if later is None:
                return rounds.result(found, time.monotonic() - wait.started)
            attempt, found = attempt + 1, later
        return found.metadata.name

    def _what(
        self,
        version: int,
        sender_incarnation: str | None,
        manifest_digest: str | None,
        sender_timeout: float,
        wait: Wait,
        *,
        rollback: bool,
    ) -> rounds.SyncResult | rounds.Order:
        """What is to be asked for; a result: nothing, it is committed already."""
        pipeline = self._pipeline(wait.until)
        done = self._committed_already(pipeline, version, manifest_digest, sender_incarnation, wait)
        if done is not None:
            return done
        committed = pipeline.status.committed
        rollback_from = None
        if committed is not None and version < committed.version:
            if not rollback:
                raise errors.SyncRefused(
                    f"version {version} is below version {committed.version}, which is committed; "
                    "sync(..., allow_rollback=True) if that is meant",
                    version=version,
                    reason="VersionGoesBackwards",
                )
            rollback_from = committed.version
        if pipeline.spec.weights.checkpoint is not None:
            incarnation = rounds.named_checkpoint(version, manifest_digest)
        else:
            pipeline, incarnation = self._sender(pipeline, version, sender_incarnation, sender_timeout, wait)
        return rounds.Order(pipeline, version, incarnation, manifest_digest, rollback_from)

    def _committed_already(
        self, pipeline: RLPipeline, version: int, digest: str | None, incarnation: str | None, wait: Wait
    ) -> rounds.SyncResult | None:
        committed = pipeline.status.committed
        if committed is None or committed.version != version:
            return None
        ready = pipeline.status.cache_ready
        if digest is None and ready is not None and ready.version == version:
            # Without a digest from the caller, what the sender holds under this version is what is meant.
            same_process = incarnation in (None, committed.sender_incarnation)
            digest = ready.manifest_digest if same_process else None
        if digest != committed.manifest_digest:
            return None
        seconds = time.monotonic() - wait.started
        return rounds.SyncResult(version=version, manifest_digest=committed.manifest_digest, seconds=seconds)

    def _sender(
        self, pipeline: RLPipeline, version: int, asked: str | None, seconds: float, wait: Wait
    ) -> tuple[RLPipeline, str]:
        """Wait until the operator reports the sender that is meant: a round of another one would be superseded."""

        def known(p: RLPipeline) -> bool:
            return p.status.sender is not None and asked in (None, p.status.sender.incarnation)

        if not known(pipeline):
            wait.tell(WAITING_FOR_SENDER, _sender_says(pipeline))
            limit = Wait(wait.started, min(wait.until, time.monotonic() + seconds), wait.say)
            pipeline = self._pipeline_until(limit, known)
        sender = pipeline.status.sender
        if not known(pipeline) or sender is None:
            meant = "a weight sender" if asked is None else f"the weight sender with incarnation {asked}"
            raise errors.SenderNotReady(
                f"version {version} was not asked for: within {seconds:g} s the operator did not report {meant} for "
                f"RLPipeline {self.namespace}/{self.pipeline_name} ({_sender_says(pipeline)}). Check "
                "spec.weights.sender, and that WeightSender has been started with the operator's public keys",
                version=version,
                reason="SenderNotReady",
            )
        return pipeline, sender.incarnation

    def _carry(self, order: rounds.Order, retries: int, wait: Wait) -> rounds.SyncResult:
        attempt = 1
        found = self._find_or_create(order, attempt, wait)
        while True:
            found = self._until_ended(found, wait)
            later, retries = self._after(order, attempt, found, retries, wait)
            if later is None:
                return rounds.result(found, time.monotonic() - wait.started)
            attempt, found = attempt + 1, later

    def _after(
        self, order: rounds.Order, attempt: int, found: SyncRound, retries: int, wait: Wait
    ) -> tuple[SyncRound | None, int]:
        """The attempt after one that has ended (None: it is the success that was asked for), and the retries left."""
        other_bytes = self._other_bytes(order, found)
        if rounds.succeeded(found) and not other_bytes:
            return None, retries
        # Attempts of earlier calls are the past of this one: the latest of them counts.
        later = self._find(order, attempt + 1, wait)
        if later is None:
            if not other_bytes and (retries <= 0 or found.status.committed):
                # A committed version needs no other attempt, however many are allowed.
                raise rounds.failure(found, "" if found.status.committed else "Try again with sync(..., retries=1)")
            if not other_bytes:
                retries -= 1
            later = self._find_or_create(order, attempt + 1, wait)
        return later, retries

    @staticmethod
    def _other_bytes(order: rounds.Order, found: SyncRound) -> bool:
        """The round was about other bytes under the same version, so its end does not answer this order."""
        had = found.status.manifest_digest or found.spec.manifest_digest
        return order.manifest_digest is not None and had is not None and had != order.manifest_digest

    def _find(self, order: rounds.Order, attempt: int, wait: Wait) -> SyncRound | None:
        try:
            return self._adopt(order, self._api.get(ROUNDS, order.name(attempt), wait.call_until()))
        except errors.RoundNotFound:
            return None

    def _find_or_create(self, order: rounds.Order, attempt: int, wait: Wait) -> SyncRound:
        name = order.name(attempt)
        while True:
            try:
                return SyncRound.from_dict(self._api.create(ROUNDS, order.body(attempt), wait.call_until()))
            except Invalid as e:
                raise errors.SyncRefused(
                    f"the apiserver refused SyncRound {name}: {e}", version=order.version, reason="Invalid", round=name
                ) from e
            except Exists:
                # Ours (an answer was lost, or an earlier call made it), unless it has just been deleted.
                found = self._find(order, attempt, wait)
                if found is not None:
                    return found

    def _adopt(self, order: rounds.Order, obj: dict[str, object]) -> SyncRound:
        found = SyncRound.from_dict(obj)
        mine = (order.pipeline.metadata.name, order.version, order.incarnation)
        if (found.spec.pipeline, found.spec.version, found.spec.sender_incarnation) != mine:
            raise errors.SyncRefused(
                f"SyncRound {found.metadata.name} exists and is not about version {order.version} of this sender: "
                "somebody made it by hand under our name; delete it",
                version=order.version,
                reason="OtherRound",
                round=found.metadata.name,
            )
        if not rounds.ended(found) and self._other_bytes(order, found):
            raise errors.SyncRefused(
                f"SyncRound {found.metadata.name} is moving other bytes of version {order.version} "
                f"({found.status.manifest_digest or found.spec.manifest_digest}): wait for its end, or cancel it with "
                f"client.cancel({found.metadata.name!r})",
                version=order.version,
                reason="ManifestMismatch",
                round=found.metadata.name,
            )
        return found

    def _until_ended(self, found: SyncRound, wait: Wait) -> SyncRound:
        name, uid = found.metadata.name, found.metadata.uid
        while True:
            if self._over(found, wait):
                return found
            opened = time.monotonic()
            # While no operator has said a word, look up now and then to say so.
            until = wait.until if rounds.has_been_seen(found) else min(wait.until, opened + OPERATOR_SECONDS)
            for kind, obj in self._api.watch(ROUNDS, name, found.metadata.resource_version, until):
                if kind == "DELETED":
                    break
                found = SyncRound.from_dict(obj)
                if found.metadata.uid == uid and self._over(found, wait):
                    return found
            self._breathe(opened, wait)
            try:
                latest = SyncRound.from_dict(self._api.get(ROUNDS, name, wait.call_until()))
            except errors.RoundNotFound:
                latest = None
            if latest is None or latest.metadata.uid != uid:
                raise self._gone(found, wait)
            found = latest

    def _gone(self, found: SyncRound, wait: Wait) -> errors.SyncFailed:
        """The error for a round whose object vanished, or stands there under another UID, while we waited."""
        name, reason = found.metadata.name, "RoundGone"
        text = f"SyncRound {name} was deleted before its end was seen, which cancels it"
        owner = next((o.uid for o in found.metadata.owner_references if o.kind == "RLPipeline"), None)
        try:
            again = owner is not None and self._pipeline(wait.call_until()).metadata.uid != owner
        except errors.PipelineNotFound:
            again = True
        if again:
            reason = "PipelineGone"
            text = (
                f"RLPipeline {self.namespace}/{self.pipeline_name} was deleted (and perhaps created anew) while "
                f"SyncRound {name} ran, which ended with it: publish and sync again once it is there"
            )
        return errors.SyncFailed(
            f"{text}; its last phase was {_phase(found)}",
            version=found.spec.version,
            round=name,
            committed=found.status.committed,
            phase=_phase(found),
            stage=_phase(found),
            reason=reason,
            digest="",
        )

    def _over(self, found: SyncRound, wait: Wait) -> bool:
        if not rounds.has_been_seen(found) and time.monotonic() - wait.started >= OPERATOR_SECONDS:
            wait.tell(
                _phase(found),
                f"no operator has taken SyncRound {found.metadata.name} up yet: is the rlfleet operator running, "
                f"and does it watch namespace {self.namespace!r}?",
                warn=True,
            )
        else:
            wait.tell(_phase(found), rounds.detail(found))
        if rounds.ended(found):
            return True
        remedy = rounds.needs_action(found)
        if remedy is not None and not wait.patient:
            raise errors.HoldingNeedsAction(
                f"SyncRound {found.metadata.name} needs a person: {remedy}. It goes on: call "
                f'sync({found.spec.version}) again after that, or with on_holding="wait"',
                version=found.spec.version,
                round=found.metadata.name,
                committed=found.status.committed,
            )
        if wait.left() <= 0:
            name = found.metadata.name
            waits_for = rounds.detail(found) or "no detail"
            raise errors.SyncTimeout(
                f"SyncRound {name} was {_phase(found)} when the time was over ({waits_for}). It goes on by itself: "
                f"call sync({found.spec.version}) again to wait for it, or stop it with "
                f"client.cancel({name!r})",
                version=found.spec.version,
                round=name,
                committed=found.status.committed,
                phase=_phase(found),
            )
        return False

    def after_train_step(self, version: int, *, cluster: str = ACTOR, **how: Any) -> rounds.SyncResult:
        """Sync the published version, then give the GPUs of ``before_train_step`` back, also when the sync failed.

        Arguments as of ``sync``, whose errors it raises.
        """
        try:
            return self.sync(version, **how)
        finally:
            self._give_back(cluster)

    def cancel(self, round: str, timeout: float = 30.0) -> None:
        """Ask for a round to be stopped (``spec.cancel``). It acts until engines begin to load; see the round's end."""
        self._api.merge(ROUNDS, round, {"spec": {"cancel": True}}, time.monotonic() + timeout)


def _begin(version: object, retries: int, timeout: float, say: Progress | None, *, patient: bool) -> Wait:
    """The wait of one call. ValueError: an argument that can not be meant."""
    if isinstance(version, bool) or not isinstance(version, int) or not -1 <= version <= 2**53:
        raise ValueError(f"version must be an integer from -1 (the base) to 2**53, not {version!r}")
    if retries < 0 or timeout <= 0:
        raise ValueError("retries must not be negative, timeout must be positive")
    now = time.monotonic()
    return Wait(now, now + timeout, say or say_nothing, patient=patient)


def _phase(found: SyncRound) -> str:
    return found.status.phase.value if found.status.phase is not None else "Pending"


def _sender_says(pipeline: RLPipeline) -> str:
    for condition in pipeline.status.conditions:
        if condition.type == "SenderReady":
            return f"SenderReady is {condition.status}, {condition.reason}: {condition.message}"
    return "the operator has not said anything about the sender; is it running?"
