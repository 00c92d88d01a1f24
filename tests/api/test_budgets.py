"""How paused time is divided: every part has its own share, and nobody gets more than what is left of the whole."""

from __future__ import annotations

import pytest

from rlfleet.api import wire
from rlfleet.api.budgets import Bounds, Split, order_times

SPLIT = Split.of(100)


def test_the_shares_leave_a_tenth_for_the_proof() -> None:
    assert (SPLIT.rendezvous, SPLIT.transport, SPLIT.collective, SPLIT.teardown) == (15, 50, 15, 10)
    assert SPLIT.total == pytest.approx(90)


@pytest.mark.parametrize(("left", "ends"), [(140.0, 90.0), (20.0, 20.0), (-5.0, 0.001)])
def test_an_order_given_late_or_by_a_successor_gets_no_more_than_is_left(left: float, ends: float) -> None:
    digest = "sha256:" + "a" * 64
    times = order_times(100, left)
    order = wire.LoadOrder(transport=wire.Transport.SERIALIZED, version=1, manifest_digest=digest, **times)
    split = Split(order.rendezvous_seconds, order.transport_seconds, order.collective_seconds, order.teardown_seconds)
    assert split == SPLIT
    assert Bounds.counted_from(0, split, order.budget_seconds).ends == pytest.approx(ends)


def test_a_part_that_starts_early_does_not_stretch_the_next() -> None:
    bounds = Bounds.counted_from(1000, SPLIT, None)
    assert bounds.rendezvous_until == 1015
    assert bounds.transport_until(1001) == 1051
    assert bounds.transport_until(1015) == 1065
    assert bounds.ends == pytest.approx(1090)


def test_a_collective_in_flight_has_its_own_share_but_none_begins_late() -> None:
    bounds = Bounds.counted_from(0, SPLIT, None)
    until = bounds.transport_until(15)
    assert bounds.collective(20, until) == 15
    assert bounds.collective(64.9, until) == 15
    assert bounds.collective(65, until) == 0


@pytest.mark.parametrize(("budget", "ends"), [(None, 90), (500, 90), (30, 30), (0.5, 0.5)])
def test_what_is_left_bounds_everything(budget: float | None, ends: float) -> None:
    bounds = Bounds.counted_from(0, SPLIT, budget)
    assert bounds.ends == pytest.approx(ends)
    assert bounds.rendezvous_until <= bounds.ends
    assert bounds.transport_until(bounds.rendezvous_until) <= bounds.ends
    assert bounds.collective(ends - 0.1, ends) <= 0.1 + 1e-9
    assert bounds.left(ends - 0.2, 10) == pytest.approx(0.2)
    assert bounds.left(ends + 5, 10) == 0.05


def test_time_and_tokens_are_no_part_of_an_orders_identity() -> None:
    digest = "sha256:" + "a" * 64

    def load(**time: float) -> wire.LoadOrder:
        return wire.LoadOrder(transport=wire.Transport.SERIALIZED, version=1, manifest_digest=digest, **time)

    assert wire.order_identity(load()) == wire.order_identity(
        load(budget_seconds=3, transport_seconds=1, rendezvous_seconds=2, collective_seconds=1, teardown_seconds=1)
    )
    other = wire.LoadOrder(transport=wire.Transport.SERIALIZED, version=2, manifest_digest=digest)
    assert wire.order_identity(load()) != wire.order_identity(other)

    def push(token: str, url: str = "http://g:1") -> wire.PushOrder:
        target = wire.PushTarget(engine="e", url=url, pod_uid="u", buckets=True, token=token)
        return wire.PushOrder(manifest_digest=digest, targets=(target,), deadline_seconds=len(token))

    assert wire.order_identity(push("a")) == wire.order_identity(push("bb"))
    assert wire.order_identity(push("a")) != wire.order_identity(push("a", "http://h:1"))
