"""How the time in which engines are paused is divided, and how gate and sender keep to it by themselves. Pure.

The shares of ``pausedSeconds`` (DESIGN section 5, Transferring): rendezvous 0.15, transport 0.5, one collective in
flight 0.15, teardown 0.1. What is left, 0.1, is for verification and publication.

Invariants:
- every bound is an instant counted from the reception of the order, so nothing in one leg can eat the time of the next;
- ``budget`` is what was left of the whole when the order was given: an order that is given late, again, or by a
  successor never gets more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

RENDEZVOUS_SHARE = 0.15
TRANSPORT_SHARE = 0.5
COLLECTIVE_SHARE = 0.15
TEARDOWN_SHARE = 0.1

#: Fields of orders that only say how long something may take. They are no part of an operation's identity: a successor
#: that asks again has less time left, and joins the same operation.
TIME_FIELDS = frozenset(
    {
        "budgetSeconds",
        "rendezvousSeconds",
        "transportSeconds",
        "collectiveSeconds",
        "teardownSeconds",
        "deadlineSeconds",
        "drainSeconds",
        "stallSeconds",
    }
)


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds for each part of a transfer."""

    rendezvous: float
    transport: float
    collective: float
    teardown: float

    @classmethod
    def of(cls, paused_seconds: float) -> Split:
        """The shares of pausedSeconds."""
        return cls(
            RENDEZVOUS_SHARE * paused_seconds,
            TRANSPORT_SHARE * paused_seconds,
            COLLECTIVE_SHARE * paused_seconds,
            TEARDOWN_SHARE * paused_seconds,
        )

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return self.rendezvous + self.transport + self.collective + self.teardown


#: What an order says when the time is used up: gates and sender then refuse or end it before they touch anything.
MIN_BUDGET_SECONDS = 0.001


def order_times(paused_seconds: float, left: float) -> dict[str, float]:
    """The time fields of a Load or Broadcast order: the shares, and the ``left`` seconds there are for all of it."""
    split = Split.of(paused_seconds)
    return {
        "rendezvous_seconds": split.rendezvous,
        "transport_seconds": split.transport,
        "collective_seconds": split.collective,
        "teardown_seconds": split.teardown,
        "budget_seconds": max(MIN_BUDGET_SECONDS, left),
    }


@dataclass(frozen=True, slots=True)
class Bounds:
    """The same as instants of a clock that only goes forward (seconds)."""

    split: Split
    ends: float
    """When everything is over, whatever part runs."""
    rendezvous_until: float

    @classmethod
    def counted_from(cls, started: float, split: Split, budget: float | None) -> Bounds:
        """Bounds of an order received at ``started`` of which ``budget`` seconds were left (None: not said)."""
        ends = started + (split.total if budget is None else min(budget, split.total))
        return cls(split, ends, min(started + split.rendezvous, ends))

    def transport_until(self, joined: float) -> float:
        """Until when a collective may still begin, for a group that was complete at ``joined``."""
        return min(joined + self.split.transport, self.ends)

    def collective(self, now: float, transport_until: float) -> float:
        """Seconds that a collective which begins now may take; 0: none may begin any more.

        One that began in time may go on beyond ``transport_until``: that is the share of one collective in flight.
        """
        if now >= transport_until:
            return 0.0
        return max(0.0, min(self.split.collective, self.ends - now))

    def left(self, now: float, at_most: float) -> float:
        """Seconds for a call that begins now: ``at_most``, never beyond the end, and enough to hear a quick answer."""
        return max(min(at_most, self.ends - now), 0.05)
