"""Staging Bucket: bytes pass through the gate while the engine loads, one bucket at a time."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlfleet.api.tokens import Scope
from tests.gate.kit import Engine, Gate, Operator, Weights, until


@pytest.fixture
def staged(operator: Operator) -> tuple[Operator, Weights]:
    """A paused engine whose gate has the manifest; version 1 is proven, 2 is to come in several buckets."""
    operator.deliver(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2, tensors_per_bucket=4)
    assert len(weights.buckets) > 2
    stream(newer, weights)
    return newer, weights


def stream(operator: Operator, weights: Weights, **more: Any) -> None:
    operator.prepare(weights, 2, staging="Bucket", **more)
    assert operator.push_manifest(weights).status_code == 200
    report = operator.status()["staged"]
    assert (report["staging"], report["complete"], report["receivedBytes"]) == ("Bucket", True, 0)
    operator.ok("Pause", **more)


def load(operator: Operator, weights: Weights, **more: Any) -> str:
    answer = operator.start("Load", **operator.load_order(weights, 2), **more)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def files(gate: Gate) -> list[Path]:
    return [p for p in gate.staging.rglob("*") if p.suffix in (".safetensors", ".part")]


def proven(operator: Operator, weights: Weights, engine: Engine, attempt: int = 1) -> None:
    result = operator.ok("Verify", attempt=attempt, **operator.names(weights, 2))["result"]
    assert (result["changed"], result["engineDigest"]) == (True, engine.checksum())
    operator.ok("Publish", attempt=attempt, **operator.names(weights, 2))
    assert operator.status()["holds"]["version"] == 2


def again(operator: Operator, weights: Weights, engine: Engine) -> None:
    """A second load of the same round brings every bucket anew, and the engine is whole."""
    op = load(operator, weights, attempt=2)
    for index, data in enumerate(weights.buckets):
        assert operator.push(f"buckets/{index}", data).status_code == 200
    assert operator.wait(op)["state"] == "Succeeded"
    proven(operator, weights, engine)


def test_streamed_weights_are_the_same_weights_and_one_bucket_is_here_at_a_time(
    staged: tuple[Operator, Weights], engine: Engine, gate: Gate
) -> None:
    operator, weights = staged
    op = load(operator, weights)
    for index, data in enumerate(weights.buckets):
        engine.faults(update_weights_from_disk={"action": "delay", "seconds": 0.1, "times": 1})
        assert operator.push(f"buckets/{index}", data).status_code == 200
        # It was answered when the engine had loaded it, and its file is gone.
        assert files(gate) == []
    record = operator.wait(op)
    assert (record["state"], record["result"]["bytes"]) == ("Succeeded", weights.total)
    proven(operator, weights, engine)
    text = gate.http.get("/metrics").text
    received = next(line for line in text.splitlines() if line.startswith("rlfleet_gate_received_bytes_total"))
    assert float(received.split()[-1]) == Weights.of(1).total + weights.total
    streamed = engine.checksum()
    full = operator.next("round-3")
    full.deliver(weights, 2)
    assert engine.checksum() == streamed


def test_buckets_come_in_their_turn_and_to_a_load_only(staged: tuple[Operator, Weights], engine: Engine) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/1", weights.buckets[1]).json()["reason"] == "NotStaged"
    record = operator.wait(op)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "TransportFailed")
    assert "bucket 1 is out of turn: bucket 0 of" in record["error"]["message"]
    # Nothing was touched: what was proven before still is.
    assert operator.status()["holds"]["version"] == 1
    again(operator, weights, engine)


def test_no_bucket_at_all_leaves_the_engine_untouched(staged: tuple[Operator, Weights]) -> None:
    operator, weights = staged
    record = operator.wait(load(operator, weights, transportSeconds=0.3))
    assert (record["state"], record["error"]["reason"]) == ("Failed", "TransportFailed")
    assert "bucket 0 of" in record["error"]["message"]
    status = operator.status()
    assert [entry["version"] for entry in status["loads"]] == [1]
    operator.ok("Resume", **operator.names(Weights.of(1), 1))


def test_a_takeover_in_mid_stream_lets_the_load_end(staged: tuple[Operator, Weights], engine: Engine) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    successor = replace(operator, generation=operator.generation + 1)
    assert successor.fence().status_code == 200
    for index, data in enumerate(weights.buckets[1:], 1):
        assert operator.push(f"buckets/{index}", data).status_code == 200
    assert successor.wait(op)["state"] == "Succeeded"
    proven(successor, weights, engine)
    # With the load its token's time is over.
    assert operator.push("buckets/0", weights.buckets[0]).json()["reason"] == "StaleFence"


def test_another_operation_in_mid_stream_ends_it(staged: tuple[Operator, Weights]) -> None:
    operator, weights = staged
    op = load(operator, weights, transportSeconds=2.0)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    assert operator.next("round-3").fence().status_code == 200
    assert operator.push("buckets/1", weights.buckets[1]).json()["reason"] == "StaleFence"
    assert operator.next("round-3").wait(op)["state"] == "Failed"


def poisoned(operator: Operator, state: str) -> None:
    """A load of version 2 began and is not proven: nothing opens this engine."""
    status = operator.status()
    assert (status["loads"][-1]["version"], status["loads"][-1]["state"]) == (2, state)
    assert "holds" not in status
    assert operator.refused("Resume", **operator.names(Weights.of(1), 1)) in ("NotProven", "Uncertain")


def test_a_sender_that_dies_between_buckets_poisons_the_engine(
    staged: tuple[Operator, Weights], engine: Engine
) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    # The connection breaks off in the middle of the next one.
    where = urlsplit(str(operator.gate.http.base_url))
    with socket.create_connection((where.hostname or "", where.port or 0)) as raw:
        head = f"PUT /v1/staging/{operator.operation}/buckets/1 HTTP/1.1\r\nHost: gate\r\n"
        head += f"Content-Length: {len(weights.buckets[1])}\r\n"
        head += "".join(f"{k}: {v}\r\n" for k, v in operator.headers(Scope.PUSH).items())
        raw.sendall(head.encode() + b"\r\n" + weights.buckets[1][:100])
    record = operator.wait(op)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "TransportFailed")
    poisoned(operator, "Failed")
    again(operator, weights, engine)


def test_a_sender_that_goes_silent_between_buckets_poisons_the_engine(
    staged: tuple[Operator, Weights], engine: Engine
) -> None:
    operator, weights = staged
    op = load(operator, weights, transportSeconds=1.0)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    record = operator.wait(op)
    assert record["state"] == "Failed"
    assert f"bucket 1 of {len(weights.buckets)} did not arrive within" in record["error"]["message"]
    poisoned(operator, "Failed")
    again(operator, weights, engine)


def test_a_bucket_of_other_bytes_is_not_loaded(staged: tuple[Operator, Weights], engine: Engine, gate: Gate) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    partly = engine.checksum()
    wrong = bytes([weights.buckets[1][0] ^ 1]) + weights.buckets[1][1:]
    assert operator.push("buckets/1", wrong).json()["reason"] == "HashMismatch"
    assert operator.wait(op)["state"] == "Failed"
    assert engine.checksum() == partly
    assert files(gate) == []
    poisoned(operator, "Failed")
    again(operator, weights, engine)


def test_a_gate_that_dies_between_buckets_knows_that_it_does_not_know(
    staged: tuple[Operator, Weights], engine: Engine, gate: Gate
) -> None:
    operator, weights = staged
    load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    gate.kill()
    gate.start()
    until("the engine to be seen", lambda: operator.status()["engine"]["state"] == "Ready")
    poisoned(operator, "Unknown")
    assert operator.status()["uncertain"] is True
    operator.ok("Pause", attempt=2)
    assert operator.status()["staged"]["complete"] is True  # the manifest outlived the gate
    assert files(gate) == []
    again(operator, weights, engine)


def test_an_engine_that_refuses_a_bucket_ends_push_and_load(staged: tuple[Operator, Weights], engine: Engine) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    engine.faults(update_weights_from_disk={"action": "http400", "times": 1})
    answer = operator.push("buckets/1", weights.buckets[1])
    assert (answer.status_code, answer.json()["reason"]) == (409, "EngineRefused")
    assert operator.wait(op)["error"]["message"].startswith("load of bucket 1 of")
    poisoned(operator, "Failed")
    again(operator, weights, engine)


def test_an_engine_that_dies_between_buckets_ends_push_and_load(
    staged: tuple[Operator, Weights], engine: Engine
) -> None:
    operator, weights = staged
    op = load(operator, weights)
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    engine.faults(update_weights_from_disk={"action": "die", "times": 1})
    assert operator.push("buckets/1", weights.buckets[1]).status_code == 409
    assert operator.wait(op)["state"] in ("Failed", "Unknown")
    assert operator.status()["loads"][-1]["state"] in ("Failed", "Unknown")
    assert "holds" not in operator.status()


def test_a_tensor_larger_than_the_volume_is_refused_by_name(operator: Operator, gate: Gate) -> None:
    capacity = operator.status()["stagingCapacityBytes"]
    weights = Weights.random(capacity + 2**20)
    operator.prepare(weights, 2, staging="Bucket")
    answer = operator.push_manifest(weights)
    assert (answer.status_code, answer.json()["reason"]) == (409, "StagingTooLarge")
    assert "tensor 't' alone needs" in answer.json()["message"]
    assert "raise spec.gate.stagingMiB" in answer.json()["message"]


def test_weights_larger_than_the_volume_pass_through_it(operator: Operator) -> None:
    capacity = operator.status()["stagingCapacityBytes"]
    order = {"transport": "Serialized", "version": 2, "manifestDigest": "sha256:" + "0" * 64}
    assert operator.run("Prepare", totalBytes=capacity + 1, **order)["error"]["reason"] == "StagingTooLarge"
    operator.ok("Prepare", attempt=2, totalBytes=capacity + 1, staging="Bucket", **order)
