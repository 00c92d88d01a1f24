"""Broadcast as rank 0 to real receiver processes, and every way in which receivers fail to take part."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlfleet.api import wire
from rlfleet.api.manifest import Manifest
from rlfleet.sender import WeightSender
from tests.sender.caller import SECONDS, Operator, weights

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as s:
        s.bind((ADDRESS, 0))
        port: int = s.getsockname()[1]
        return port


def order(manifest: Manifest, world_size: int, **change: Any) -> wire.BroadcastOrder:
    """A broadcast of these bytes on a free port."""
    fields: dict[str, Any] = {
        "manifest_digest": manifest.digest,
        "group": wire.BroadcastGroup(
            master_address=ADDRESS,
            master_port=free_port(),
            group_name=f"g-{time.monotonic_ns()}",
            world_size=world_size,
            backend="gloo",
        ),
        "rendezvous_seconds": SECONDS,
        "transport_seconds": SECONDS,
        "collective_seconds": SECONDS,
    }
    return wire.BroadcastOrder(**(fields | change))


class Ranks:
    """Receiver processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def join(self, of: wire.BroadcastOrder, manifest: Manifest, rank: int, *then: str) -> subprocess.Popen[str]:
        """Start a receiver that joins as ``rank``."""
        known = self.folder / "manifest.json"
        known.write_text(manifest.model_dump_json(by_alias=True))
        group = of.group
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests/sender/rank.py"),
                f"127.0.0.{rank + 10}",
                group.master_address,
                str(group.master_port),
                group.group_name,
                str(rank),
                str(group.world_size),
                str(known),
                str(self.folder / f"{group.group_name}-{rank}.pt"),
                *then,
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def received(self, of: wire.BroadcastOrder, rank: int) -> dict[str, torch.Tensor]:
        """What a receiver wrote after it ended well."""
        process = self.processes[rank - 1]
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{of.group.group_name}-{rank}.pt")
        return loaded

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=SECONDS)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Receiver processes; none is left behind."""
    made = Ranks(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is freed by the garbage collector: what an operation used must be gone at its end by itself."""
    gc.disable()
    yield
    gc.enable()


def start(operator: Operator, of: wire.BroadcastOrder, attempt: int = 1) -> str:
    """Start a broadcast; its id."""
    answer = operator.post("/v1/operations", operator.request(of, attempt))
    assert answer.status_code == 202, answer.text
    return wire.OperationRecord.model_validate_json(answer.content).id


LONG = 3600.0


def test_what_is_left_of_the_whole_ends_a_rendezvous_whatever_its_share(
    sender: WeightSender, operator: Operator
) -> None:
    manifest = sender.publish(1, weights())
    of = order(
        manifest,
        world_size=2,
        rendezvous_seconds=LONG,
        transport_seconds=LONG,
        collective_seconds=LONG,
        budget_seconds=1,
    )
    record = operator.ended(start(operator, of))
    assert record.state is wire.OperationState.FAILED
    assert record.error is not None
    assert record.error.reason is wire.ErrorReason.RENDEZVOUS_TIMEOUT


def test_two_processes_receive_every_dtype_exactly(sender: WeightSender, operator: Operator, ranks: Ranks) -> None:
    state = weights(7) | {
        "half": torch.randn(5, 7).to(torch.float16),
        "double": torch.randn(3).to(torch.float64),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "other eight": torch.randn(9).to(torch.float8_e5m2),
        "scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 4),
        "strided": torch.randn(8, 6).t()[1:5, ::2],
    }
    manifest = sender.publish(2, state)
    assert len(manifest.bucket_bytes) > 1
    of = order(manifest, world_size=3)
    op_id = start(operator, of)
    for rank in (1, 2):
        ranks.join(of, manifest, rank)
    record = operator.ended(op_id)
    assert record.state is wire.OperationState.SUCCEEDED, record.error
    assert record.result["bytes"] == manifest.total_bytes
    assert {"rendezvousMs", "transportMs"} <= set(record.result)
    for rank in (1, 2):
        got = ranks.received(of, rank)
        assert set(got) == set(state)
        for name, tensor in state.items():
            assert got[name].dtype == tensor.dtype
            assert got[name].shape == tensor.shape
            raw = (got[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
            assert torch.equal(*raw), name


def test_a_receiver_that_never_joins_ends_the_operation_only(
    sender: WeightSender, operator: Operator, ranks: Ranks, no_collector: None
) -> None:
    manifest = sender.publish(2, weights())
    alone = order(manifest, world_size=3, rendezvous_seconds=3)
    op_id = start(operator, alone)
    ranks.join(alone, manifest, 1)
    record = operator.ended(op_id)
    assert record.state is wire.OperationState.FAILED
    assert record.error is not None
    assert record.error.reason is wire.ErrorReason.RENDEZVOUS_TIMEOUT
    assert "2 receivers" in record.error.message
    assert operator.status().in_flight is None
    # The sender is as good as before, on the very same port.
    port = alone.group.master_port
    again = order(manifest, world_size=2)
    again = again.model_copy(update={"group": again.group.model_copy(update={"master_port": port})})
    ranks.stop()
    ranks.processes.clear()
    op_id = start(operator, again, attempt=3)
    ranks.join(again, manifest, 1)
    assert operator.ended(op_id).state is wire.OperationState.SUCCEEDED
    assert torch.equal(ranks.received(again, 1)["head.weight"], weights()["head.weight"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_freezes_ends_the_operation(
    how: signal.Signals,
    make_sender: Callable[..., WeightSender],
    make_operator: Callable[[WeightSender], Operator],
    ranks: Ranks,
    no_collector: None,
) -> None:
    sender = make_sender(bucket_bytes=64 * 2**20)
    operator = make_operator(sender)
    # More than the kernel buffers, so that the broadcast needs its receiver.
    manifest = sender.publish(2, {"w": torch.zeros(48 * 2**20, dtype=torch.uint8)})
    of = order(manifest, world_size=2, collective_seconds=3)
    op_id = start(operator, of)
    victim = ranks.join(of, manifest, 1, "stop-after-joining")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "joined\n"
    if how == signal.SIGKILL:
        victim.kill()
    record = operator.ended(op_id)
    assert record.state is wire.OperationState.FAILED
    assert record.error is not None
    assert record.error.reason is wire.ErrorReason.TRANSPORT_FAILED
    assert "bucket 0 of 1" in record.error.message
    ranks.stop()
    ranks.processes.clear()
    again = order(manifest, world_size=2)
    again = again.model_copy(update={"group": of.group.model_copy(update={"group_name": again.group.group_name})})
    op_id = start(operator, again, attempt=2)
    ranks.join(again, manifest, 1)
    assert operator.ended(op_id).state is wire.OperationState.SUCCEEDED


def test_a_taken_port_fails_at_once(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(2, weights())
    of = order(manifest, world_size=2)
    with socket.create_server((ADDRESS, of.group.master_port)):
        answer = operator.post("/v1/operations", operator.request(of))
    assert answer.status_code == 200
    record = wire.OperationRecord.model_validate_json(answer.content)
    assert record.state is wire.OperationState.FAILED
    assert record.error is not None
    assert record.error.reason is wire.ErrorReason.TRANSPORT_FAILED
    assert "address already in use" in record.error.message
    # The end is recorded under the id: asking again does not try again.
    assert operator.post("/v1/operations", operator.request(of)).json() == answer.json()


def test_rendezvous_and_group_listen_on_the_given_address_only(
    sender: WeightSender, operator: Operator, ranks: Ranks
) -> None:
    manifest = sender.publish(2, weights())
    of = order(manifest, world_size=3)
    op_id = start(operator, of)
    ranks.join(of, manifest, 1)
    until = time.monotonic() + SECONDS

    def listeners() -> list[Any]:
        return [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    # The server answers while the broadcast waits, and a second order has to wait its turn.
    assert operator.status().in_flight == op_id
    assert operator.post("/v1/operations", operator.request(order(manifest, 2), 2)).json()["reason"] == "Busy"
    # The server, the store and the group's own device.
    while len(now := listeners()) < 3:
        assert time.monotonic() < until, now
        time.sleep(0.02)
    assert of.group.master_port in {where.port for where in now}
    assert {where.ip for where in now} == {ADDRESS}
    ranks.join(of, manifest, 2)
    assert operator.ended(op_id).state is wire.OperationState.SUCCEEDED


def test_an_unknown_backend_is_refused_before_anything_starts(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(2, weights())
    of = order(manifest, world_size=2)
    nccl = of.model_copy(update={"group": of.group.model_copy(update={"backend": "nccl"})})
    answer = operator.post("/v1/operations", operator.request(nccl))
    assert answer.status_code == 409
    assert answer.json()["reason"] == "Unsupported"
    assert "spec.transport.backend" in answer.json()["message"]
    assert operator.status().in_flight is None
    assert "Broadcast/nccl" not in operator.status().capabilities
