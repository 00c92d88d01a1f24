"""Groups, broadcasts, and senders that go away or come late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from e2e.engines.fixtures import DISK
from rlfleet.api import wire
from rlfleet.calls import CallError
from rlfleet.engine import Bucket, Capability
from rlfleet.sender import broadcast
from rlfleet.sender.cache import SpareBuffers, Weights, build
from rlfleet.sender.layout import check
from tests.contract.bench import OTHER, SECONDS, Bench, Observed, case, outcome, state
from tests.rank0 import Rank0


class Trainer(Rank0):
    """Sends nothing. How the group ends on this side does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None

    def come(self, name: str) -> None:
        """Form the group of two, in a thread."""

        def work() -> None:
            # An engine that has given up meanwhile lets it fail.
            with contextlib.suppress(RuntimeError):
                self.open(name, seconds=SECONDS)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def close(self) -> None:
        """Whatever it is doing, it ends, and the group with it."""
        if self._thread is not None:
            self._thread.join(2 * SECONDS)
        super().close()


def _weights(seed: int) -> Weights:
    tensors = state(seed)
    return build(
        1, check(tensors), tensors.__getitem__, layout_changed=False, bucket_bytes=200_000, spare=SpareBuffers()
    )


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@case(Capability.BROADCAST)
async def a_broadcast_is_received(bench: Bench) -> Observed:
    """The real sender's buckets, one after the other; the result is what a load from disk makes."""
    await bench.pause()
    sent = _weights(OTHER)
    assert len(sent.buckets) > 2
    group = wire.BroadcastGroup(
        master_address="127.0.0.1", master_port=_port(), group_name="contract", world_size=2, backend="gloo"
    )
    order = wire.BroadcastOrder(manifest_digest=sent.digest, group=group)
    sending = asyncio.create_task(broadcast.Broadcast(sent, order, ["gloo"]).run())
    await _join(bench, group.master_port, group.group_name)
    await bench.engine.begin_update(SECONDS)
    for index in range(len(sent.buckets)):
        tensors = sent.manifest.bucket(index)
        bucket = Bucket([t.name for t in tensors], [t.dtype for t in tensors], [t.shape for t in tensors])
        await bench.engine.receive(bucket, group=group.group_name, seconds=SECONDS)
    await bench.engine.end_update(SECONDS)
    await bench.engine.leave_group(group.group_name, SECONDS)
    assert (await sending)["bytes"] == sent.manifest.total_bytes
    received = await bench.loaded(OTHER)
    await bench.pause()
    await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
    assert await bench.loaded(OTHER) == received
    return None


async def _join(bench: Bench, port: int, group: str, seconds: float = SECONDS) -> None:
    at = wire.BroadcastGroup(
        master_address="127.0.0.1", master_port=port, group_name=group, world_size=2, backend="gloo"
    )
    await bench.engine.join_group(at, rank=1, seconds=seconds)


@case(Capability.BROADCAST)
async def a_sender_that_goes_away_leaves_the_weights_alone(bench: Bench) -> Observed:
    """It formed the group, and sends nothing."""
    await bench.pause()
    trainer = Trainer()
    try:
        trainer.come("leaving")
        await _join(bench, trainer.port, "leaving")
    finally:
        await asyncio.to_thread(trainer.close)
    await bench.engine.begin_update(SECONDS)
    value = state(OTHER)["model.norm.weight"]
    bucket = Bucket(["model.norm.weight"], ["float32"], [tuple(value.shape)])
    ended = await outcome(bench.engine.receive(bucket, group="leaving", seconds=SECONDS))
    assert ended != "done"
    with contextlib.suppress(CallError):
        await bench.engine.end_update(SECONDS)
    await bench.engine.leave_group("leaving", SECONDS)
    assert await bench.engine.idle(SECONDS, memory_here=True) is True
    await bench.loaded(DISK)
    return {"receive": ended}


@case(Capability.BROADCAST)
async def a_sender_that_comes_late_frees_the_engine(bench: Bench) -> Observed:
    """Until it comes, or the engine gives up, nothing is proven; then it is, and no weight was touched."""
    await bench.pause()
    trainer = Trainer()
    try:
        ended = await outcome(_join(bench, trainer.port, "late", seconds=1.5))
        while_it_waits = await bench.engine.idle(1.0, memory_here=True)
        if ended == "no answer":
            trainer.come("late")
        for _ in range(300):
            if await bench.engine.idle(1.0, memory_here=True):
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the engine never came out of the rendezvous")
        await bench.engine.leave_group("late", SECONDS)
    finally:
        await asyncio.to_thread(trainer.close)
    await bench.loaded(DISK)
    return {"join": ended, "idle while it waits": while_it_waits}


@case(Capability.BROADCAST)
async def groups_and_sessions_can_be_cleared(bench: Bench) -> Observed:
    """A group that does not exist can be left; a session that was left open does not prevent the next."""
    await bench.pause()
    await bench.engine.leave_group("never joined", SECONDS)
    await bench.engine.begin_update(SECONDS)
    await bench.engine.begin_update(SECONDS)
    await bench.engine.end_update(SECONDS)
    await bench.loaded(DISK)
    return None
