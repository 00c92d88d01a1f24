"""An order to the sender is waited for at the sender that was given it, whoever is found to be the sender meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.context import Context, SystemClock
from rlfleet.control.peers import Caller, Peer, Silent
from rlfleet.control.rounds.sender_link import RELEASE_SECONDS, SenderLink
from rlfleet.plan.checkpoint import SHELF

PEER = Peer("trainer", "uid-1", "http://127.0.0.1:9450")
CALLER = Caller("p", "round", 5)


def record(state: wire.OperationState) -> wire.OperationRecord:
    return wire.OperationRecord(id="x", kind="Push", operation="round", generation=5, state=state)


def pod(name: str, phase: str, **metadata: str) -> dict[str, Any]:
    return {"metadata": {"name": name, **metadata}, "spec": {}, "status": {"phase": phase, "podIP": "10.0.0.7"}}


class Sender:
    """Runs the order; while it does, somebody who looks for the sender finds none."""

    link: SenderLink

    async def sender_start(self, peer: Peer, caller: Caller, **order: Any) -> wire.OperationRecord:
        assert peer == PEER
        self.link.peer = None
        return record(wire.OperationState.RUNNING)

    async def operation(self, peer: Peer, caller: Caller, op_id: str, *, wait: float) -> wire.OperationRecord:
        assert peer == PEER
        return record(wire.OperationState.SUCCEEDED)


async def test_an_order_is_waited_for_although_the_sender_is_not_found_any_more() -> None:
    sender = Sender()
    link = SenderLink(cast(Context, SimpleNamespace(peers=sender, clock=SystemClock())), "ns", "p", "uid-p")
    sender.link, link.peer = link, PEER
    ended = await link.run(CALLER, "Push", 1, None, incarnation="i", deadline=SystemClock().monotonic() + 60)
    assert ended == record(wire.OperationState.SUCCEEDED)


class Deaf:
    """Answers no release before the ``heard``-th, if ever."""

    link: SenderLink | None = None

    def __init__(self, heard: float) -> None:
        self.heard, self.asked = heard, 0

    async def release(self, peer: Peer, caller: Caller) -> str:
        assert peer == PEER
        self.asked += 1
        if self.link is not None:
            self.link.peer = None  # somebody looks for the sender meanwhile, and finds none
        if self.asked < self.heard:
            raise Silent(peer, "no answer")
        return "released"


@pytest.mark.parametrize("heard", [1, 3])
async def test_a_hold_whose_end_was_not_heard_is_ended_anew(heard: int) -> None:
    sender = Deaf(heard)
    link = SenderLink(cast(Context, SimpleNamespace(peers=sender, clock=SystemClock())), "ns", "p", "uid-p", peer=PEER)
    sender.link = link
    await link.release(CALLER)
    assert (sender.asked, cast(Any, link.status)) == (heard, "released")


async def test_a_sender_that_hears_nothing_keeps_no_round_from_ending() -> None:
    times = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)))
    sender = Deaf(float("inf"))
    link = SenderLink(cast(Context, SimpleNamespace(peers=sender, clock=clock)), "ns", "p", "uid-p", peer=PEER)
    await link.release(CALLER)
    assert sender.asked == RELEASE_SECONDS


def holding(operation: str, *, fence: wire.Held) -> wire.SenderStatus:
    kept = wire.SenderHold(operation=operation, version=1, manifest_digest="sha256:" + "0" * 64, expires_ms=1)
    return SHELF.model_copy(update={"hold": kept, "fence": fence})


@pytest.mark.parametrize(
    ("said", "released"),
    [
        (holding("round", fence=wire.Held(pipeline="uid-p", operation="round", generation=7)), True),
        (holding("round", fence=wire.Held(pipeline="uid-p", operation="newer", generation=8)), False),
        (holding("round", fence=wire.Held(pipeline="another", operation="round", generation=7)), False),
        (SHELF, False),
        (None, False),
    ],
    ids=["its own fence", "a newer operation came", "another pipeline's", "no hold", "silent"],
)
async def test_a_hold_that_outlived_its_operation_is_ended_in_its_own_name(
    said: wire.SenderStatus | None, released: bool
) -> None:
    told: list[Caller] = []

    async def release(peer: Peer, caller: Caller) -> wire.SenderStatus:
        told.append(caller)
        return SHELF

    ctx = cast(Context, SimpleNamespace(peers=SimpleNamespace(release=release), clock=SystemClock()))
    link = SenderLink(ctx, "ns", "p", "uid-p", peer=PEER, status=said)
    await link.end_left_hold()
    assert told == ([Caller("uid-p", "round", 7)] if released else [])


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://10.0.0.7:9450", "10.0.0.7"), ("https://[fd00::1]:9450/x", "fd00::1"), ("http://[fd00::1]", "fd00::1")],
)
def test_a_rendezvous_is_hosted_at_the_senders_address(url: str, host: str) -> None:
    link = SenderLink(cast(Context, SimpleNamespace()), "ns", "p", "uid-p", peer=Peer("trainer", "uid-1", url))
    assert link.host == host


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        ([], "(spec.weights.sender)"),
        ([pod("b", "Running", deletionTimestamp="now"), pod("a", "Failed")], "there is a (Failed), b (Terminating)"),
    ],
)
async def test_a_trainer_that_does_not_run_is_named_with_what_it_does(pods: list[Any], told: str) -> None:
    class Kube:
        def at(self, priority: object) -> Kube:
            return self

        async def list(self, *args: object, **options: object) -> Any:
            return SimpleNamespace(items=pods)

    context = SimpleNamespace(kube=Kube(), settings=SimpleNamespace(api_timeout=1.0))
    link = SenderLink(cast(Context, context), "ns", "p", "uid-p")
    await link.find({"weights": {"sender": {"podSelector": {"matchLabels": {"app": "x"}}}}})
    assert link.problem is not None
    assert link.problem[0] is Reason.SENDER_ABSENT
    assert link.problem[1].startswith("no running pod matches 'app=x'")
    assert link.problem[1].endswith(told)
