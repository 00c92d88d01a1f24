"""Holds and the second slot: what a round holds is never torn, and a publish waits or stands beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlfleet.api import wire
from rlfleet.sender import PublishTimeout, SenderClosed, WeightSender
from tests.sender.caller import SECONDS, Operator, weights
from tests.sender.receiver import Receiver, targets

Make = Callable[..., WeightSender]
Operators = Callable[[WeightSender], Operator]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads in which a training loop publishes."""
    with ThreadPoolExecutor() as made:
        yield made


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def big(value: int) -> dict[str, torch.Tensor]:
    """Weights that do not fit into socket buffers, each byte the same."""
    return {"w": torch.full((24 * 2**20,), value, dtype=torch.uint8)}


def test_a_publish_waits_for_the_round_that_moves_the_bytes(
    make_sender: Make, make_operator: Operators, pool: ThreadPoolExecutor
) -> None:
    sender = make_sender(bucket_bytes=8 * 2**20)
    operator = make_operator(sender)
    first = sender.publish(1, big(1))
    assert operator.hold(1, first.digest).status_code == 200
    with Receiver(freeze=True) as gate:
        request = operator.request(
            wire.PushOrder(
                manifest_digest=first.digest,
                targets=targets({"e": gate}, operator.push_token),
                deadline_seconds=SECONDS,
            )
        )
        assert operator.post("/v1/operations", request).status_code == 202
        # In the middle of the transfer the trainer publishes the next version.
        assert gate.reached.wait(SECONDS)
        publishing = pool.submit(sender.publish, 2, big(2))
        wait_until(lambda: operator.status().publish_waiting, "the publish does not wait")
        status = operator.status()
        assert status.cache is not None
        assert (status.cache.version, [s.version for s in status.slots]) == (1, [1])
        gate.thaw()
        record = operator.ended(request["id"])
        assert record.result["targets"]["e"]["ok"], record.result
        assert gate.tensor_hashes() == {"w": first.tensors[0].hash}
        assert not publishing.done()
        assert operator.release().status_code == 200
        second = publishing.result(SECONDS)
    status = operator.status()
    assert not status.publish_waiting
    assert status.cache is not None
    assert (status.cache.version, status.cache.manifest_digest) == (2, second.digest)
    assert [s.version for s in status.slots] == [2]


def test_bytes_that_travel_stay_whole_even_after_their_hold_ended(make_sender: Make, make_operator: Operators) -> None:
    sender = make_sender(bucket_bytes=8 * 2**20)
    operator = make_operator(sender)
    first = sender.publish(1, big(1))
    with Receiver(freeze=True) as gate:
        request = operator.request(
            wire.PushOrder(
                manifest_digest=first.digest,
                targets=targets({"e": gate}, operator.push_token),
                deadline_seconds=SECONDS,
            )
        )
        operator.post("/v1/operations", request)
        assert gate.reached.wait(SECONDS)
        # Nobody holds version 1, so these replace it while it travels; neither may reuse its memory.
        sender.publish(2, big(2))
        sender.publish(3, big(3))
        gate.thaw()
        assert operator.ended(request["id"]).result["targets"]["e"]["ok"]
        assert gate.tensor_hashes() == {"w": first.tensors[0].hash}
    assert operator.status().cache.version == 3  # type: ignore[union-attr]


def test_memory_of_replaced_weights_is_used_again_and_holds_the_new_bytes(
    make_sender: Make, make_operator: Operators
) -> None:
    sender = make_sender(bucket_bytes=8 * 2**20)
    operator = make_operator(sender)
    for version in range(4):
        manifest = sender.publish(version, big(version))
    with Receiver() as gate:
        order = wire.PushOrder(
            manifest_digest=manifest.digest,
            targets=targets({"e": gate}, operator.push_token),
            deadline_seconds=SECONDS,
        )
        assert operator.run(order).result["targets"]["e"]["ok"]
        assert gate.buckets[0] == bytes([3]) * len(gate.buckets[0])


def test_a_second_slot_keeps_both(make_sender: Make, make_operator: Operators) -> None:
    sender = make_sender(second_slot=True)
    operator = make_operator(sender)
    assert "SecondSlot" in operator.status().capabilities
    first = sender.publish(1, weights(1))
    operator.hold(1, first.digest)
    sender.publish(2, weights(2), timeout=SECONDS)
    third = sender.publish(3, weights(3), timeout=SECONDS)
    status = operator.status()
    # The held one and the newest; the one between them, which nobody holds, is gone.
    assert [s.version for s in status.slots] == [1, 3]
    assert status.cache is not None
    assert status.cache.version == 3
    with Receiver() as old, Receiver() as new:
        for attempt, (manifest, gate) in enumerate([(first, old), (third, new)], 1):
            order = wire.PushOrder(
                manifest_digest=manifest.digest,
                targets=targets({"e": gate}, operator.push_token),
                deadline_seconds=SECONDS,
            )
            assert operator.run(order, attempt).result["targets"]["e"]["ok"]
            assert gate.tensor_hashes() == {t.name: t.hash for t in manifest.tensors}
    operator.release()
    assert [s.version for s in operator.status().slots] == [3]


def test_a_publish_that_waits_too_long_changes_nothing(sender: WeightSender, operator: Operator) -> None:
    first = sender.publish(1, weights(1))
    operator.hold(1, first.digest)
    with pytest.raises(PublishTimeout, match=f"{operator.operation} holds version 1.*second_slot"):
        sender.publish(2, weights(2), timeout=0.3)
    status = operator.status()
    assert not status.publish_waiting
    assert [s.version for s in status.slots] == [1]
    operator.release()
    sender.publish(2, weights(2), timeout=SECONDS)


def test_a_hold_ends_by_its_deadline(sender: WeightSender, operator: Operator) -> None:
    sender.publish(1, weights(1))
    assert operator.hold(1, seconds=1).status_code == 200
    hold = operator.status().hold
    assert hold is not None
    assert (hold.operation, hold.version) == (operator.operation, 1)
    # Nobody releases; without the deadline this would wait for good.
    sender.publish(2, weights(2), timeout=SECONDS)
    assert operator.status().hold is None


def test_closing_ends_a_publish_that_waits(sender: WeightSender, operator: Operator, pool: ThreadPoolExecutor) -> None:
    sender.publish(1, weights(1))
    operator.hold(1)
    publishing = pool.submit(sender.publish, 2, weights(2))
    wait_until(lambda: operator.status().publish_waiting, "the publish does not wait")
    sender.close()
    with pytest.raises(SenderClosed):
        publishing.result(SECONDS)
    with pytest.raises(SenderClosed):
        sender.publish(3, weights(3))


def test_holding_what_is_not_there_is_refused(sender: WeightSender, operator: Operator) -> None:
    nothing = operator.hold(1)
    assert (nothing.status_code, nothing.json()["reason"]) == (409, "VersionNotHeld")
    assert "nothing yet" in nothing.json()["message"]
    sender.publish(1, weights(1))
    for version, digest in ((2, None), (1, "sha256:" + "0" * 64)):
        answer = operator.hold(version, digest)
        assert (answer.status_code, answer.json()["reason"]) == (409, "VersionNotHeld")
        assert "version 1 (sha256:" in answer.json()["message"]
    assert operator.status().hold is None


def test_a_hold_is_taken_over_by_the_operation_that_has_the_fence(
    sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    sender.publish(1, weights(1))
    operator.hold(1)
    later = make_operator(sender)
    later.generation = operator.generation + 1
    assert later.hold(1).status_code == 200
    assert operator.release().status_code == 412
    hold = later.status().hold
    assert hold is not None
    assert hold.operation == later.operation
    assert later.release().status_code == 200
    assert later.release().status_code == 200
    assert later.status().hold is None


def test_readers_never_see_half_a_version(make_sender: Make, make_operator: Operators) -> None:
    sender = make_sender(bucket_bytes=1024)
    operator = make_operator(sender)
    digests = {0: sender.publish(0, weights(0)).digest}
    stop = threading.Event()
    seen: set[tuple[int, str]] = set()

    def look() -> None:
        reader = make_operator(sender)
        while not stop.is_set():
            cache = reader.status().cache
            assert cache is not None
            seen.add((cache.version, cache.manifest_digest))

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        for version in range(1, 30):
            digests[version] = sender.publish(version, weights(version)).digest
        wait_until(lambda: (29, digests[29]) in seen, "the last version is not seen")
        stop.set()
        looking.result(SECONDS)
    assert seen <= set(digests.items())
    assert operator.status().cache.version == 29  # type: ignore[union-attr]
