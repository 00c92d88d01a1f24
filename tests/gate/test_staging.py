"""Staging: only checked bytes reach the load directory, within bounds, and no request names a path."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rlfleet.api.tokens import Scope
from tests.gate.kit import Engine, Gate, Operator, Weights, until


def files(gate: Gate) -> list[str]:
    return sorted(str(p.relative_to(gate.staging)) for p in gate.staging.rglob("*") if p.is_file())


def current(gate: Gate) -> list[str]:
    return [name for name in files(gate) if name.startswith("current/")]


@pytest.fixture
def weights() -> Weights:
    return Weights.of(9)


def test_received_buckets_are_safetensors_files_with_the_manifests_tensors(
    operator: Operator, gate: Gate, weights: Weights
) -> None:
    operator.prepare(weights, 9)
    operator.push_all(weights)
    count = len(weights.buckets)
    names = [f"current/model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert current(gate) == names
    loaded = {k: v for name in names for k, v in load_file(gate.staging / name).items()}
    assert set(loaded) == {t.name for t in weights.manifest.tensors}
    assert operator.status()["staged"]["complete"] is True


def test_one_flipped_bit_is_found_named_and_can_be_pushed_again(
    operator: Operator, gate: Gate, weights: Weights
) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    broken = bytearray(weights.buckets[0])
    broken[-1] ^= 1
    answer = operator.push("buckets/0", bytes(broken))
    last = weights.manifest.bucket(0)[-1].name
    assert (answer.status_code, answer.json()["reason"]) == (409, "HashMismatch")
    assert last in answer.json()["message"]
    assert current(gate) == []
    assert operator.status()["staged"]["error"]["reason"] == "HashMismatch"
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    assert "error" not in operator.status()["staged"]
    assert len(current(gate)) == 1


def test_a_complete_bucket_may_be_pushed_again_but_not_changed(
    operator: Operator, gate: Gate, weights: Weights
) -> None:
    operator.prepare(weights, 9)
    operator.push_all(weights)
    path = gate.staging / current(gate)[0]
    before = path.read_bytes(), path.stat().st_ino
    assert operator.push("buckets/0", weights.buckets[0]).status_code == 200
    assert operator.push("buckets/0", bytes(len(weights.buckets[0]))).json()["reason"] == "HashMismatch"
    assert (path.read_bytes(), path.stat().st_ino) == before
    assert operator.status()["staged"]["complete"] is True


def test_wrong_lengths_are_refused(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    data = weights.buckets[0]

    def pieces(body: bytes) -> Iterator[bytes]:  # httpx sends an iterator chunked, without a length
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    assert operator.push("buckets/0", data[:-1]).json()["reason"] == "Invalid"
    assert operator.push("buckets/0", data + b"x").json()["reason"] == "TooLarge"
    assert operator.push("buckets/0", pieces(data[:-1])).json()["reason"] == "Invalid"
    assert operator.push("buckets/0", pieces(data + b"x")).json()["reason"] == "TooLarge"
    assert current(gate) == []
    assert operator.push("buckets/0", pieces(data)).status_code == 200


def raw_put(operator: Operator, path: str, length: int, body: bytes, *extra: str) -> socket.socket:
    connection = socket.create_connection((operator.gate.host, 9440), timeout=60)
    lines = [
        f"PUT {path} HTTP/1.1",
        "Host: gate",
        f"Authorization: Bearer {operator.token(Scope.PUSH)}",
        f"Content-Length: {length}",
        *extra,
    ]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    return connection


def receiving(gate: Gate) -> list[str]:
    return [name for name in files(gate) if name.startswith("receiving/")]


def test_a_truncated_body_leaves_nothing(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    data = weights.buckets[0]
    connection = raw_put(operator, "/v1/staging/round-1/buckets/0", len(data), data[:100])
    until("receive begun", lambda: receiving(gate))
    connection.close()
    until("file gone", lambda: not receiving(gate))
    assert current(gate) == []
    assert operator.status()["staged"]["receivedBytes"] == 0


def test_a_newer_push_ends_a_stuck_one(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    data = weights.buckets[0]
    with raw_put(operator, "/v1/staging/round-1/buckets/0", len(data), data[:100]) as stuck:
        until("receive begun", lambda: receiving(gate))
        assert operator.push("buckets/0", data).status_code == 200
        assert b"409" in stuck.recv(4096)
    assert len(current(gate)) == 1


def test_discard_ends_a_receive_that_waits(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    data = weights.buckets[0]
    with raw_put(operator, "/v1/staging/round-1/buckets/0", len(data), data[:100]) as stuck:
        until("receive begun", lambda: receiving(gate))
        operator.ok("Discard")
        assert b"409" in stuck.recv(4096)
    assert files(gate) == []
    assert "staged" not in operator.status()


def test_expect_continue_refuses_before_the_body_travels(operator: Operator, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    size = len(weights.buckets[0])
    with raw_put(operator, "/v1/staging/round-2/buckets/0", size, b"", "Expect: 100-continue") as refused:
        answer = refused.recv(4096)
        assert answer.startswith(b"HTTP/1.1 403")
        assert b"Forbidden" in answer
    with raw_put(operator, "/v1/staging/round-1/buckets/0", size, b"", "Expect: 100-continue") as accepted:
        assert accepted.recv(4096).startswith(b"HTTP/1.1 100 Continue")
        accepted.sendall(weights.buckets[0])
        assert accepted.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "path",
    [
        "buckets/-1",
        "buckets/999",
        "buckets/1e3",
        "buckets/%2e%2e%2f%2e%2e%2fx",
        "buckets/..%2F..%2Fx",
        "buckets/٣",
        "buckets/" + "1" * 50,
        "buckets/0/../../x",
    ],
)
def test_no_text_of_a_request_becomes_a_path(operator: Operator, gate: Gate, weights: Weights, path: str) -> None:
    operator.prepare(weights, 9)
    operator.push_manifest(weights)
    before = files(gate)
    outside = sorted(p.name for p in gate.directory.iterdir())
    answer = operator.push(path, weights.buckets[0])
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["reason"] in ("Invalid", "NotFound")
    assert files(gate) == before
    assert sorted(p.name for p in gate.directory.iterdir()) == outside


def test_tensor_names_may_look_like_paths_without_being_any(operator: Operator, gate: Gate) -> None:
    weights = Weights.of(9, rename=lambda name: "../../../" + name)
    operator.prepare(weights, 9)
    operator.push_all(weights)
    assert all(name.startswith(("current/model-", "manifest.json")) for name in files(gate))
    assert sorted(p.name for p in gate.directory.iterdir()) == ["gate.log", "staging", "state"]


def test_the_manifest_must_be_the_announced_one(operator: Operator, weights: Weights) -> None:
    operator.prepare(weights, 9)
    other = Weights.of(10)
    assert operator.push_manifest(other).json()["reason"] == "HashMismatch"
    assert operator.push("manifest", b"{").json()["reason"] == "Invalid"
    assert operator.push("manifest", b"[" * 100_000).json()["reason"] == "Invalid"
    changed = weights.manifest.model_dump(mode="json", by_alias=True)
    changed["tensors"][0]["offset"] += 4
    assert "offset" in operator.push("manifest", json.dumps(changed)).json()["message"]
    assert operator.push("buckets/0", weights.buckets[0]).json()["reason"] == "NotStaged"
    assert operator.push_manifest(weights).status_code == 200
    assert operator.push_manifest(weights).status_code == 200
    recut = Weights.of(9, tensors_per_bucket=3)
    assert recut.digest == weights.digest
    assert operator.push_manifest(recut).json()["reason"] == "OperationConflict"


def test_announced_bytes_must_be_the_manifests(operator: Operator, weights: Weights) -> None:
    operator.ok(
        "Prepare", transport="Serialized", version=9, manifestDigest=weights.digest, totalBytes=weights.total + 1
    )
    assert operator.push_manifest(weights).json()["reason"] == "Invalid"


def test_nothing_is_accepted_before_prepare(operator: Operator, weights: Weights) -> None:
    operator.fence()
    assert operator.push_manifest(weights).json()["reason"] == "NotStaged"
    assert operator.push("buckets/0", weights.buckets[0]).json()["reason"] == "NotStaged"


def test_what_does_not_fit_is_refused_with_both_numbers_and_the_remedy(
    engine: Engine, make_gate: Callable[..., Gate], weights: Weights
) -> None:
    limit = 192 * 2**20  # the process keeps 128 MiB of it, and a margin of 1 MiB
    gate = make_gate(engine.url, RLFLEET_MEMORY_LIMIT_BYTES=str(limit), RLFLEET_STAGING_LIMIT_BYTES=str(2**30))
    operator = Operator(gate).ready()
    usable = limit - 129 * 2**20
    assert operator.status()["stagingCapacityBytes"] == usable
    order = {"transport": "Serialized", "version": 9, "manifestDigest": weights.digest}
    record = operator.run("Prepare", **order, totalBytes=usable + 1)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "StagingTooLarge")
    for part in (str(usable), str(usable + 1), "stagingMiB"):
        assert part in record["error"]["message"]
    assert "staged" not in operator.status()
    # Broadcast needs no room; neither does what fits.
    operator.ok("Prepare", attempt=2, **(order | {"transport": "Broadcast"}), totalBytes=usable + 1)
    operator.ok("Prepare", attempt=3, **order, totalBytes=usable)


def test_the_volumes_size_bounds_too(engine: Engine, make_gate: Callable[..., Gate], weights: Weights) -> None:
    gate = make_gate(engine.url, RLFLEET_STAGING_LIMIT_BYTES=str(2 * 2**20))
    operator = Operator(gate).ready()
    order = {"transport": "Serialized", "version": 9, "manifestDigest": weights.digest, "totalBytes": 2**20 + 1}
    assert operator.run("Prepare", **order)["error"]["reason"] == "StagingTooLarge"


def test_a_new_round_deletes_what_an_older_one_staged(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_all(weights)
    newer = operator.next()
    other = Weights.of(10)
    newer.prepare(other, 10)
    assert files(gate) == []
    assert newer.status()["staged"]["operation"] == "round-2"
    assert newer.refused("Load", **newer.load_order(weights, 9)) == "NotStaged"
    newer.push_all(other)
    assert len(current(gate)) == len(other.buckets)


def test_the_same_round_keeps_what_it_has(operator: Operator, gate: Gate, weights: Weights) -> None:
    operator.prepare(weights, 9)
    operator.push_all(weights)
    before = {name: (gate.staging / name).stat().st_ino for name in current(gate)}
    operator.prepare(weights, 9, attempt=2)
    assert {name: (gate.staging / name).stat().st_ino for name in current(gate)} == before
    assert operator.status()["staged"]["complete"] is True


@pytest.mark.parametrize("missing", ["everything", "manifest", "a bucket"])
def test_load_needs_complete_bytes(operator: Operator, engine: Engine, weights: Weights, missing: str) -> None:
    checksum = engine.checksum()
    if missing != "everything":
        operator.prepare(weights, 9)
    if missing == "a bucket":
        operator.push_manifest(weights)
        for index in range(len(weights.buckets) - 1):
            operator.push(f"buckets/{index}", weights.buckets[index])
    operator.ok("Pause")
    assert operator.refused("Load", **operator.load_order(weights, 9)) == "NotStaged"
    assert (operator.status()["loads"], engine.checksum()) == ([], checksum)


def test_memory_of_the_gate_does_not_grow_with_a_bucket(operator: Operator, gate: Gate) -> None:
    weights = Weights.random(48 * 2**20)
    operator.prepare(weights, 1)
    operator.push_manifest(weights)
    assert gate.process is not None
    status = Path(f"/proc/{gate.process.popen.pid}/status")

    def peak() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    before = peak()
    data = weights.buckets[0]
    pieces: Any = (data[i : i + 2**20] for i in range(0, len(data), 2**20))
    assert operator.push("buckets/0", pieces).status_code == 200
    assert peak() - before < len(data) // 2
    assert os.path.getsize(gate.staging / current(gate)[0]) > len(data)
