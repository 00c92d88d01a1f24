"""Leader election over one Lease: executes what plan/leader.py decides.

Invariants:
- the Lease is written under its resourceVersion only, and a write without an answer is read back before anything is
  believed about it;
- validity counts from before a renewal was sent, and no renewal may take longer than the validity that is left;
- the end of a term is final for this process: mutations stop first (the guard), then ``run`` returns.

The elector has a client of its own: renewals must not wait behind reconciles for a connection or a turn, and its
writes are the only ones that no guard is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from rlfleet.plan.leader import (
    Create,
    LeaseRecord,
    Lost,
    Renew,
    Take,
    Timing,
    View,
    Wait,
    decide,
    see,
    won,
)

from .client import KubeClient, Obj
from .errors import ApiError, Conflict, NotFound, Unknown
from .guard import Guard, boot_seconds
from .resources import LEASES

log = logging.getLogger(__name__)

#: Longest that one look at the Lease, or the write that releases it, may take.
LOOK_SECONDS = 5.0
RELEASE_SECONDS = 2.0
#: Own writes whose text is remembered, to recognize one that landed without an answer.
_REMEMBERED = 8


class LeaderObserver(Protocol):
    """Told of leadership, for metrics."""

    def leading(self, leads: bool, transitions: int) -> None:
        """We lead now, or do not; ``transitions``: the Lease's count of holders."""

    def renewal_failed(self) -> None:
        """One renewal did not succeed; leadership may still be valid."""


def record_of(obj: Obj) -> LeaseRecord:
    """A Lease object as the decisions see it."""
    spec = obj.get("spec") or {}
    return LeaseRecord(
        uid=str(obj["metadata"]["uid"]),
        holder=str(spec.get("holderIdentity") or ""),
        renewed=str(spec.get("renewTime") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
    )


class Elector:
    """One candidate. ``run()`` returns when a term was lost; ``acquired`` is set while (and after) we lead."""

    def __init__(
        self,
        client: KubeClient,
        guard: Guard,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing,
        observer: LeaderObserver | None = None,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self._client = client
        self._guard = guard
        self._namespace = namespace
        self._name = name
        self._me = identity
        self._timing = timing
        self._observer = observer
        self._clock = clock
        self._view = View()
        self._object: Obj | None = None
        self._attempts: dict[str, float] = {}
        self._stamp = datetime.min.replace(tzinfo=UTC)
        self._renewed_at = -math.inf
        self._said = ""
        self.acquired = asyncio.Event()

    @property
    def leads(self) -> bool:
        """Whether a term of ours is under way."""
        return self._view.term is not None

    # ------------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Stand by, lead, and return with the reason logged when the term ends; never returns otherwise."""
        await self._stand_by()
        assert self._view.term is not None
        self._guard.lead(self._view.term.until)
        log.info("leading: Lease %s/%s, holder number %d", self._namespace, self._name, self._view.term.transitions)
        self._report(True)
        self.acquired.set()
        why = await self._lead()
        self._guard.revoke(why)
        self._view = View(transitions=self._view.transitions)
        self._report(False)
        log.critical("leadership lost: %s", why)

    async def release(self) -> None:
        """Give the Lease back, if it is ours, so that nobody has to wait for it. Call it after ``run`` was cancelled
        and when no mutation of ours can happen any more; what fails is logged, and the Lease expires instead."""
        if self._guard.leads:
            raise RuntimeError("the guard must be revoked before the Lease is released")
        deadline = self._clock() + RELEASE_SECONDS
        try:
            if self._view.term is None and self._attempts:
                await self._look(RELEASE_SECONDS)  # cancelled while it tried: it may have won
            if self._view.term is None:
                return
            while (left := deadline - self._clock()) > 0:
                record = record_of(self._object) if self._object is not None else None
                if record is None or record.holder != self._me or record.uid != self._view.term.uid:
                    return
                # A renewal that was cancelled on its way may still have been written: then this conflicts once.
                try:
                    await self._write(holder="", transitions=record.transitions, seconds=1, timeout=left)
                except (Conflict, Unknown):
                    await self._look(max(0.1, deadline - self._clock()))
                    continue
                log.info("Lease %s/%s released", self._namespace, self._name)
                return
            log.warning("Lease %s/%s not released in time: it expires", self._namespace, self._name)
        except ApiError as e:
            log.warning("Lease %s/%s not released: %s; it expires", self._namespace, self._name, e)
        finally:
            self._view = View(transitions=self._view.transitions)
            self._report(False)

    def _report(self, leads: bool) -> None:
        if self._observer is not None:
            self._observer.leading(leads, self._view.transitions)

    # ------------------------------------------------------------------------------------------ standing by

    async def _stand_by(self) -> None:
        async with self._changes() as changed:
            while self._view.term is None:
                changed.clear()
                try:
                    await self._look(LOOK_SECONDS)
                    action = decide(self._view, self._me, self._clock(), timing=self._timing)
                    if isinstance(action, Create | Take):
                        await self._win(action)
                        continue
                except ApiError as e:
                    log.warning("Lease %s/%s: %s; again in %g s", self._namespace, self._name, e, self._timing.retry)
                    action = Wait(self._timing.retry)
                assert isinstance(action, Wait)
                self._say_standby()
                try:
                    async with asyncio.timeout(action.seconds):
                        await changed.wait()
                except TimeoutError:
                    continue

    async def _win(self, action: Create | Take) -> None:
        """Try to become the holder. A lost race or a lost answer is for the next look."""
        try:
            if isinstance(action, Create):
                await self._create(action.transitions)
            else:
                await self._write(
                    holder=self._me,
                    transitions=action.transitions,
                    seconds=self._timing.lease,
                    timeout=min(self._timing.renew, LOOK_SECONDS),
                    acquired=True,
                )
        except Conflict as e:
            log.info("Lease %s/%s: somebody was faster: %s", self._namespace, self._name, e.message)
        except Unknown as e:
            log.warning("Lease %s/%s: no answer, reading it back: %s", self._namespace, self._name, e.message)

    def _say_standby(self) -> None:
        holder = self._view.record.holder if self._view.record is not None else ""
        if holder and holder != self._said:
            self._said = holder
            log.info("standing by: %s holds Lease %s/%s", holder, self._namespace, self._name)
            self._report(False)

    @asynccontextmanager
    async def _changes(self) -> AsyncIterator[asyncio.Event]:
        """An event that is set soon after the Lease changed. Only a hint: every decision rests on a read."""
        changed = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._watch(changed), name="watch of the Lease")
        try:
            yield changed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, changed: asyncio.Event) -> None:
        while True:
            try:
                stream = self._client.watch(
                    LEASES, self._namespace, resource_version="0", field_selector=f"metadata.name={self._name}"
                )
                async with aclosing(stream):
                    async for event in stream:
                        if event.type != "BOOKMARK":
                            changed.set()
            except ApiError as e:
                # Without it we still look every ``retry`` seconds.
                log.info("watch of Lease %s/%s: %s", self._namespace, self._name, e)
            await asyncio.sleep(self._timing.retry)

    # ------------------------------------------------------------------------------------------ leading

    async def _lead(self) -> str:
        """Renew until the term ends; why it did."""
        while True:
            action = decide(self._view, self._me, self._clock(), timing=self._timing, renewed_at=self._renewed_at)
            if isinstance(action, Lost):
                return action.why
            if isinstance(action, Wait):
                await asyncio.sleep(action.seconds)
                continue
            assert isinstance(action, Renew)
            await self._renew(action.seconds)

    async def _renew(self, seconds: float) -> None:
        """One renewal, and after anything but success one look, together within ``seconds``."""
        assert self._view.term is not None
        deadline = self._clock() + seconds
        # A call that hangs must leave time for another one.
        timeout = min(seconds, max(self._timing.retry, self._timing.renew / 3))
        try:
            try:
                await self._write(
                    holder=self._me,
                    transitions=self._view.term.transitions,
                    seconds=self._timing.lease,
                    timeout=timeout,
                )
                return
            except (Conflict, Unknown, NotFound) as e:
                self._failed(e)
                left = deadline - self._clock()
                if left > 0:
                    await self._look(min(left, timeout))
        except ApiError as e:
            self._failed(e)
            # Not sooner than a quarter of the usual pause: an apiserver in trouble is not helped by more calls.
            pause = self._timing.retry / 4
            await asyncio.sleep(max(0.0, min(pause, deadline - self._clock())))

    def _failed(self, error: ApiError) -> None:
        if self._observer is not None:
            self._observer.renewal_failed()
        log.warning("Lease %s/%s: renewal: %s", self._namespace, self._name, error)

    # ------------------------------------------------------------------------------------------ calls

    async def _look(self, timeout: float) -> None:
        """Read the Lease; a write of ours that landed without an answer is recognized by its text."""
        try:
            obj: Obj | None = await self._client.get(LEASES, self._namespace, self._name, timeout=timeout)
        except NotFound:
            obj = None
        self._object = obj
        record = record_of(obj) if obj is not None else None
        now = self._clock()
        if record is not None and record.holder == self._me and record.renewed in self._attempts:
            self._take_in(record, sent=self._attempts[record.renewed])
            return
        self._view = see(self._view, record, now, timing=self._timing)

    def _take_in(self, record: LeaseRecord, *, sent: float) -> None:
        """A write in our name is proven. After a term began, only the Lease of that term renews it."""
        term = self._view.term
        if term is not None and (record.uid, record.transitions) != (term.uid, term.transitions):
            self._view = see(self._view, record, self._clock(), timing=self._timing)
            return
        self._view = won(self._view, record, sent=sent, now=self._clock(), timing=self._timing)
        self._renewed_at = max(self._renewed_at, sent)
        assert self._view.term is not None
        self._guard.lead(self._view.term.until)

    async def _create(self, transitions: int) -> None:
        spec, sent = self._spec({}, self._me, transitions, self._timing.lease, acquired=True)
        body = {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": spec}
        timeout = min(self._timing.renew, LOOK_SECONDS)
        self._object = await self._client.create(LEASES, self._namespace, body, timeout=timeout)
        self._take_in(record_of(self._object), sent=sent)

    async def _write(
        self, *, holder: str, transitions: int, seconds: float, timeout: float, acquired: bool = False
    ) -> None:
        """Replace the Lease's record under the resourceVersion as last read."""
        assert self._object is not None
        spec, sent = self._spec(self._object.get("spec") or {}, holder, transitions, seconds, acquired=acquired)
        body = {"metadata": self._object["metadata"], "spec": spec}
        self._object = await self._client.replace(LEASES, self._namespace, self._name, body, timeout=timeout)
        if holder:
            self._take_in(record_of(self._object), sent=sent)

    def _spec(
        self, old: dict[str, Any], holder: str, transitions: int, seconds: float, *, acquired: bool
    ) -> tuple[dict[str, Any], float]:
        """The new record, and the moment before it is sent; its text is remembered."""
        # Others see a renewal by this text alone, and we our own lost writes: it never repeats, whatever the wall
        # clock does.
        self._stamp = max(datetime.now(UTC), self._stamp + timedelta(microseconds=1))
        now = self._stamp.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        sent = self._clock()
        if holder:
            self._attempts[now] = sent
            while len(self._attempts) > _REMEMBERED:
                del self._attempts[next(iter(self._attempts))]
        spec = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(seconds)),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        if acquired:
            spec["acquireTime"] = now
        return spec, sent
