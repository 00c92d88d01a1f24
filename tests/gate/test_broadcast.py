"""Broadcast loads over real gloo: the test is rank 0, the engine joins as its gate tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gate.kit import Engine, Gate, Operator, Weights, free_port, until
from tests.rank0 import Rank0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    started = Engine(tmp_path, "--group-timeout", "4", backend="torch")
    try:
        yield started.up()
    finally:
        started.close()


class Sender(Rank0):
    """Broadcasts in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def serve(self, name: str, buckets: list[bytes]) -> None:
        """Open the group of two and broadcast the buckets in order."""

        def work() -> None:
            group = self.open(name, seconds=20)
            try:
                for data in buckets:
                    group.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0).wait()
            except RuntimeError as e:
                self.error = e

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(30)
        super().close()


@pytest.fixture
def make_sender() -> Iterator[Callable[[], Sender]]:
    made: list[Sender] = []

    def make() -> Sender:
        made.append(Sender())
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def load_order(weights: Weights, version: int, port: int, name: str = "g", **more: Any) -> dict[str, Any]:
    group = {
        "masterAddress": "127.0.0.1",
        "masterPort": port,
        "groupName": name,
        "worldSize": 2,
        "backend": "gloo",
    }
    order = {"transport": "Broadcast", "version": version, "manifestDigest": weights.digest}
    return order | {"group": group, "rankOffset": 1} | more


def staged(operator: Operator, weights: Weights, version: int) -> None:
    operator.prepare(weights, version, "Broadcast")
    assert operator.push_manifest(weights).status_code == 200
    assert operator.status()["staged"]["complete"] is True
    operator.ok("Pause")


def test_broadcast_and_serialized_give_the_same_engine_digest(
    operator: Operator, engine: Engine, gate: Gate, make_sender: Callable[[], Sender]
) -> None:
    weights, sender = Weights.of(3), make_sender()
    staged(operator, weights, 3)
    sender.serve("g", weights.buckets)
    record = operator.ok("Load", **load_order(weights, 3, sender.port))
    assert record["result"]["bytes"] == weights.total
    assert not [p for p in gate.staging.rglob("*.safetensors")]
    result = operator.ok("Verify", **operator.names(weights, 3))["result"]
    assert (result["changed"], result["engineDigest"]) == (True, engine.checksum())
    operator.ok("Publish", **operator.names(weights, 3))
    operator.ok("Resume", **operator.names(weights, 3))
    newer = operator.next()
    newer.deliver(weights, 4)
    assert newer.status()["holds"]["engineDigest"] == result["engineDigest"]


def test_a_manifest_is_needed_for_broadcast_too(operator: Operator) -> None:
    weights = Weights.of(3)
    operator.prepare(weights, 3, "Broadcast")
    operator.ok("Pause")
    assert operator.refused("Load", **load_order(weights, 3, 1)) == "NotStaged"


def test_no_sender_leaves_the_weights_provably_untouched(operator: Operator, engine: Engine) -> None:
    committed, weights = Weights.of(1), Weights.of(3)
    operator.deliver(committed, 1)
    newer = operator.next()
    staged(newer, weights, 3)
    record = newer.run("Load", **load_order(weights, 3, free_port("127.0.0.1"), rendezvousSeconds=0.5))
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "RendezvousTimeout")
    status = newer.status()
    assert status["uncertain"] is True
    assert [load["version"] for load in status["loads"]] == [1]
    assert status["holds"]["version"] == 1
    assert newer.refused("Resume", **newer.names(committed, 1)) == "Uncertain"
    # While the scheduler waits for the group nothing proves it idle; once it gave up, a pause settles the rest.
    attempts = iter(range(2, 60))

    def settled() -> bool:
        newer.run("Pause", attempt=next(attempts))
        return newer.status()["uncertain"] is False

    until("settled", settled)
    newer.ok("Resume", **newer.names(committed, 1))
    assert engine.ready() == 200


def test_a_sender_that_leaves_in_the_middle_fails_the_load(
    operator: Operator, make_sender: Callable[[], Sender]
) -> None:
    weights, sender = Weights.of(3), make_sender()
    staged(operator, weights, 3)
    sender.serve("g", weights.buckets[:1])
    record = operator.run("Load", **load_order(weights, 3, sender.port))
    assert (record["state"], record["error"]["reason"]) == ("Failed", "TransportFailed")
    assert operator.status()["loads"][-1]["state"] == "Failed"
    assert operator.refused("Verify", **operator.names(weights, 3)) == "NotProven"
    # Session and group were cleared: the next load under the same group name works.
    again = make_sender()
    again.serve("g", weights.buckets)
    operator.ok("Load", attempt=2, **load_order(weights, 3, again.port))


def test_a_refused_rendezvous_is_a_plain_failure(operator: Operator) -> None:
    weights = Weights.of(3)
    staged(operator, weights, 3)
    record = operator.run("Load", **load_order(weights, 3, 1, rendezvousSeconds=20))
    assert record["state"] == "Failed"
    assert operator.status()["loads"] == []
    assert operator.status()["uncertain"] is False
