"""Who leads: expiry by our own clock, the end of a term, and never two at once however calls and clocks behave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.plan.leader import (
    MAX_LEASE_SECONDS,
    Create,
    LeaseRecord,
    Lost,
    Renew,
    Take,
    Timing,
    View,
    Wait,
    decide,
    may_mutate,
    see,
    won,
)

T = Timing(15, 10, 2)
ME, OTHER = "me", "other"


def record(holder: str = OTHER, renewed: str = "t1", *, transitions: int = 3, seconds: float = 15) -> LeaseRecord:
    return LeaseRecord("uid", holder, renewed, seconds, transitions)


def seen(*looks: tuple[float, LeaseRecord | None]) -> View:
    view = View()
    for at, what in looks:
        view = see(view, what, at, timing=T)
    return view


def leading(*, sent: float = 100.0) -> View:
    return won(View(), record(ME, "mine"), sent=sent, now=sent + 1, timing=T)


def test_no_lease_is_created_and_one_that_vanished_is_waited_for() -> None:
    assert decide(View(), ME, 0, timing=T) == Create(0)
    vanished = seen((10, record()), (12, None))
    assert decide(vanished, ME, 24.9, timing=T) == Wait(pytest.approx(0.1))
    assert decide(vanished, ME, 25, timing=T) == Create(4), "the count of holders goes on"


def test_only_a_change_of_the_record_restarts_the_wait() -> None:
    same = seen((10, record()), (20, record()))
    assert decide(same, ME, 24, timing=T) == Wait(1)
    assert decide(same, ME, 25, timing=T) == Take(4)
    renewed = seen((10, record()), (20, record(renewed="t2")))
    assert decide(renewed, ME, 25, timing=T) == Wait(2)
    # Whatever time the text names: a clock far ahead or behind changes nothing.
    old = seen((10, record(renewed="1970-01-01T00:00:00.000000Z")))
    assert isinstance(decide(old, ME, 24, timing=T), Wait)


def test_the_holders_own_duration_counts_within_reason() -> None:
    assert isinstance(decide(seen((0, record(seconds=60))), ME, 59, timing=T), Wait)
    assert decide(seen((0, record(seconds=60))), ME, 60, timing=T) == Take(4)
    assert decide(seen((0, record(seconds=0))), ME, 15, timing=T) == Take(4)
    assert decide(seen((0, record(seconds=1e9))), ME, MAX_LEASE_SECONDS, timing=T) == Take(4)


def test_a_released_lease_is_taken_at_once() -> None:
    assert decide(seen((10, record()), (11, record(""))), ME, 11, timing=T) == Take(4)


def test_a_count_that_went_back_is_not_followed() -> None:
    assert decide(seen((0, record(transitions=7)), (1, record("", transitions=0))), ME, 1, timing=T) == Take(8)


def test_an_old_record_in_our_own_name_expires_like_anybodys() -> None:
    assert isinstance(decide(seen((0, record(ME))), ME, 14, timing=T), Wait)
    assert decide(seen((0, record(ME))), ME, 15, timing=T) == Take(4)


def test_a_term_is_renewed_in_time_and_counts_from_before_the_write() -> None:
    view = leading(sent=100)
    assert view.term is not None
    assert view.term.until == 110
    assert decide(view, ME, 101.5, timing=T, renewed_at=100) == Wait(0.5)
    assert decide(view, ME, 102, timing=T, renewed_at=100) == Renew(8)
    assert decide(view, ME, 109, timing=T, renewed_at=100) == Renew(1), "no call may outlast the validity"
    assert isinstance(decide(view, ME, 110, timing=T, renewed_at=100), Lost)


def test_a_late_answer_never_shortens_a_term() -> None:
    view = won(leading(sent=100), record(ME, "older"), sent=95, now=103, timing=T)
    assert view.term is not None
    assert view.term.until == 110


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (None, "was deleted"),
        (replace(record(ME, "mine"), uid="another"), "made anew"),
        (record(OTHER), "other took"),
        (record(""), "released"),
        (record(ME, "mine", transitions=0), "from 3 to 0"),
        (record(ME, "mine", transitions=4), "from 3 to 4"),
    ],
)
def test_any_other_lease_ends_the_term(now: LeaseRecord | None, why: str) -> None:
    view = see(leading(), now, 101, timing=T)
    action = decide(view, ME, 101, timing=T, renewed_at=100)
    assert isinstance(action, Lost)
    assert why in action.why


def test_mutations_need_a_margin() -> None:
    assert may_mutate(110, 109, margin=T.margin)
    assert not may_mutate(110, 109.01, margin=T.margin)


# ---------------------------------------------------------------------------------------------- several at once


@dataclass
class Store:
    """One Lease in an apiserver: conditional writes, in the order of arrival."""

    version: int = 0
    lease: LeaseRecord | None = None

    def write(self, based_on: int, lease: LeaseRecord) -> bool:
        if based_on != self.version:
            return False
        self.version += 1
        self.lease = lease
        return True


@dataclass
class Call:
    """A write on its way: it reaches the store at ``arrives``; its answer, if one comes, the caller at ``answers``."""

    arrives: float
    answers: float
    based_on: int
    lease: LeaseRecord
    sent: float
    stored: bool | None = None


@dataclass
class Process:
    """One elector with a clock of its own."""

    name: str
    offset: float
    view: View = field(default_factory=View)
    renewed_at: float = float("-inf")
    frozen_until: float = 0.0
    calls: list[Call] = field(default_factory=list)
    over: bool = False

    def clock(self, now: float) -> float:
        return now + self.offset

    def allowed(self, now: float) -> bool:
        """Whether a mutation would be sent now, also by a process that has just been thawed."""
        term = self.view.term
        return term is not None and may_mutate(term.until, self.clock(now), margin=T.margin)

    def take_in(self, call: Call, now: float) -> None:
        self.view = won(self.view, call.lease, sent=call.sent, now=self.clock(now), timing=T)
        self.renewed_at = max(self.renewed_at, call.sent)


def deliver(store: Store, process: Process, now: float) -> None:
    for call in process.calls:
        if call.stored is None and now >= call.arrives:
            call.stored = store.write(call.based_on, call.lease)
    if now >= process.frozen_until and not process.over:
        for call in [c for c in process.calls if now >= c.answers]:
            process.calls.remove(call)
            if call.stored:
                process.take_in(call, now)


def act(store: Store, process: Process, now: float, rng: random.Random, number: int) -> None:
    """Look, decide, send; a process waits for its call before it goes on."""
    if process.calls:
        return
    mine = process.clock(now)
    process.view = see(process.view, store.lease, mine, timing=T)
    action = decide(process.view, process.name, mine, timing=T, renewed_at=process.renewed_at)
    if isinstance(action, Lost):
        process.over, process.view = True, View()
    elif isinstance(action, Create | Take | Renew):
        term = process.view.term
        transitions = action.transitions if not isinstance(action, Renew) else term.transitions if term else 0
        lease = LeaseRecord("uid", process.name, f"{process.name}-{number}", T.lease, transitions)
        arrives = now + rng.choice([0.0, 0.0, 0.1, 3.0, 9.0])
        answers = arrives + rng.choice([0.0, 0.0, 0.1, 3.0, 9.0])
        process.calls.append(Call(arrives, answers, store.version, lease, mine))


def simulate(seed: int, *, processes: int, steps: int) -> tuple[float, int]:
    """Delayed writes and answers, freezes, restarts; (share of the time that somebody led, holders)."""
    rng = random.Random(seed)
    store = Store()
    all_ = [Process(f"p{i}", rng.uniform(-1e6, 1e6)) for i in range(processes)]
    now = led = 0.0
    for number in range(steps):
        step = rng.choice([0.05, 0.3, 1.0])
        now += step
        for process in rng.sample(all_, len(all_)):
            deliver(store, process, now)
            leaders = [q.name for q in all_ if q.allowed(now)]
            assert len(leaders) <= 1, (seed, now, leaders)
            if process.over or now < process.frozen_until:
                continue
            if rng.random() < 0.01:
                process.frozen_until = now + rng.uniform(1, 40)
            elif rng.random() < 0.8:
                act(store, process, now, rng, number)
            if process.over:
                # It ends; another one starts under a name of its own.
                all_.append(Process(f"p{len(all_)}", rng.uniform(-1e6, 1e6)))
        led += step * any(q.allowed(now) for q in all_)
    return led / now, store.lease.transitions if store.lease else 0


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_never_two_leaders_whatever_calls_and_clocks_do(seed: int, processes: int) -> None:
    simulate(seed, processes=processes, steps=500)


def test_somebody_leads_most_of_the_time_although_leaders_change() -> None:
    runs = [simulate(seed, processes=2, steps=1000) for seed in range(10)]
    assert sum(share for share, _ in runs) / len(runs) > 0.25, runs
    assert all(holders > 3 for _, holders in runs), runs
