"""Who leads: decisions of the Lease elector. Pure; every time is the caller's own monotonic clock, in seconds.

Invariants:
- another's Lease is judged by how long its record has stayed as it is *by our clock*; a time stamp that somebody else
  wrote is compared for equality only;
- a holder stops believing in its Lease (``Timing.renew``) before anybody else may take it (``Timing.lease``), both
  counted from before the write that renewed it was sent, so the order holds whatever the calls took;
- a Lease that is not the one we hold (deleted, made anew, taken, its count gone back) ends our term at once. Leadership
  is for efficiency; what makes a second leader harmless is the fence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

#: Longest Lease that is believed: a record that claims more must not keep everybody out.
MAX_LEASE_SECONDS = 3600.0
#: Share of the renew deadline that must be left for a mutation to be allowed.
MARGIN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Timing:
    """``lease``: seconds that others wait for us; ``renew``: seconds without a renewal after which we stop;
    ``retry``: seconds between two renewals or looks."""

    lease: float = 15.0
    renew: float = 10.0
    retry: float = 2.0

    @property
    def margin(self) -> float:
        """Seconds of validity below which no mutation is begun."""
        return self.renew * MARGIN_SHARE


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease as read. ``uid`` is its identity, ``renewed`` the text of its renewTime, ``seconds`` its duration."""

    uid: str
    holder: str
    renewed: str = ""
    seconds: float = 0.0
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """Our leadership: the Lease that we hold, its count of holders, and until when we may act."""

    uid: str
    transitions: int
    until: float


@dataclass(frozen=True, slots=True)
class View:
    """What one elector knows. ``record`` None after a look: there is no Lease. ``since``: when it became as it is."""

    record: LeaseRecord | None = None
    since: float = -inf
    #: When the last holder that we saw stops being believed, also after its Lease vanished.
    expires: float = -inf
    #: Highest count of holders ever seen; a Lease that is made anew goes on from it.
    transitions: int = -1
    term: Term | None = None


@dataclass(frozen=True, slots=True)
class Create:
    """Make the Lease in our name, with this count."""

    transitions: int


@dataclass(frozen=True, slots=True)
class Take:
    """Write our name into the Lease that was read, under its resourceVersion, with this count."""

    transitions: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Write a new renewTime under the resourceVersion; no call may last longer than ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again after ``seconds``, or sooner when the Lease changes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Our term has ended; ``why`` is for people."""

    why: str


Action = Create | Take | Renew | Wait | Lost


def see(view: View, record: LeaseRecord | None, now: float, *, timing: Timing) -> View:
    """Take in one look at the Lease (None: there is none). Only a change of what it says restarts the clock."""
    if record == view.record:
        return view
    if record is None:
        return replace(view, record=None, since=now)
    seconds = min(record.seconds, MAX_LEASE_SECONDS) if record.seconds > 0 else timing.lease
    expires = now + seconds if record.holder else now
    return replace(
        view, record=record, since=now, expires=expires, transitions=max(view.transitions, record.transitions)
    )


def won(view: View, record: LeaseRecord, *, sent: float, now: float, timing: Timing) -> View:
    """A write in our name is proven to have happened; ``sent``: when that very write was begun."""
    until = sent + timing.renew
    if view.term is not None:
        until = max(until, view.term.until)
    return replace(see(view, record, now, timing=timing), term=Term(record.uid, record.transitions, until))


def decide(view: View, me: str, now: float, *, timing: Timing, renewed_at: float = -inf) -> Action:
    """What to do now. ``renewed_at``: when our last renewal was begun (while we lead)."""
    record, term = view.record, view.term
    if term is not None:
        why = _ended(term, record, me, now)
        if why:
            return Lost(why)
        due = renewed_at + timing.retry
        return Renew(term.until - now) if now >= due else Wait(min(due - now, term.until - now))
    if record is None:
        if now < view.expires:
            return Wait(min(timing.retry, view.expires - now))
        return Create(view.transitions + 1)
    # A record in our own name here is an old write of ours whose time is not known: it expires like anybody's.
    if record.holder and now < view.expires:
        return Wait(min(timing.retry, view.expires - now))
    return Take(max(view.transitions, record.transitions) + 1)


def _ended(term: Term, record: LeaseRecord | None, me: str, now: float) -> str:
    if record is None:
        return "the Lease was deleted"
    if record.uid != term.uid:
        return "the Lease was deleted and made anew"
    if record.holder != me:
        return f"{record.holder} took the Lease" if record.holder else "somebody released the Lease in our name"
    if record.transitions != term.transitions:
        return f"the Lease's leaseTransitions went from {term.transitions} to {record.transitions} in our name"
    if now >= term.until:
        return "the Lease could not be renewed in time"
    return ""


def may_mutate(until: float, now: float, *, margin: float) -> bool:
    """Whether enough validity is left to begin a mutation."""
    return until - now >= margin
