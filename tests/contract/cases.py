"""What every adapter promises of its engine, case by case.

A case asserts what must hold of every engine, and returns what it observed where engines may differ by type. The real
engine and the reference engine of one type must return the same (tests/contract/differences.py lists exceptions).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from e2e.engines.fixtures import DISK
from e2e.engines.reference import TOLERANCE, lags
from rlfleet.api import wire
from rlfleet.api.wire import PauseMode
from rlfleet.calls import CallError
from rlfleet.engine import Bucket, Capability
from rlfleet.engine.common import PROBE_PROMPT
from rlfleet.gate.tags import RELEASE_ORDER
from rlfleet.sender import broadcast
from rlfleet.sender.cache import SpareBuffers, Weights, build
from rlfleet.sender.layout import check
from tests.contract.bench import CASES, OTHER, SECONDS, SHORT, Bench, Missed, Observed, case, outcome, state, still

__all__ = ["CASES"]

# ---------------------------------------------------------------------------------------------- observation


@case()
async def facts_are_told(bench: Bench) -> Observed:
    """Version, layout, and what it can do; asking twice tells the same."""
    facts = await bench.engine.facts(SECONDS)
    assert facts == await bench.engine.facts(SECONDS)
    assert len(facts.layout) == 16
    assert {Capability.SERIALIZED, Capability.LABEL} <= facts.capabilities
    return {
        "version": facts.version,
        "worldSize": facts.world_size,
        "refused": facts.refused,
        # Whether memory can be given back depends on how it was started; a case of its own covers it.
        "capabilities": sorted(facts.capabilities - {Capability.OFFLOAD}),
    }


@case()
async def a_view_tells_requests(bench: Bench) -> Observed:
    """Idle, with one running request, and idle again."""
    before = await bench.view()
    assert (before.reachable, before.admitting, before.label) == (True, True, "0")
    assert (before.running, before.waiting) == (0, 0)
    assert before.model
    async with bench.request() as task:
        running = (await bench.view()).running
        still(task)
        assert running == 1
    while (await bench.view()).running != 0:
        await asyncio.sleep(0.01)
    return None


@case()
async def keys_are_told_apart(bench: Bench) -> Observed:
    """Control paths take the admin key only, users' paths the user key only."""
    found = {}
    for name, keys in {
        "no key": (None, None),
        "user key on control paths": ("user-key", "user-key"),
        "admin key on users' paths": ("admin-key", "admin-key"),
    }.items():
        other = bench.subject.adapter(api_key=keys[0], admin_key=keys[1])
        try:
            found[name] = {
                "pause": await outcome(other.pause(bench.engine.default_pause, drain_seconds=0, seconds=2)),
                "label": await outcome(other.write_label("9", 5)),
                "probe": await outcome(other.probe(SECONDS)),
            }
        finally:
            await other.close()
    view = await bench.view()
    await bench.engine.resume()
    assert await bench.engine.guarded(SECONDS) is True
    return {**found, "label after all": view.label}


# ---------------------------------------------------------------------------------------------- admission


def _pause_case(mode: PauseMode) -> None:
    async def run(bench: Bench) -> Observed:
        """A running request under this mode, and one that comes during the pause; a refused mode touches nothing."""
        async with bench.request() as task:
            if Capability.of_pause(mode) not in bench.capabilities:
                assert await outcome(bench.pause(mode)) == "refused"
                assert (await bench.view()).admitting is True
                still(task)
                assert (await task).reason == "length"
                return "refused"
            await bench.pause(mode, drain=60.0)
            view = await bench.view()
            assert (view.admitting, view.running, view.label) == (False, 0, "0")
            late = asyncio.create_task(bench.subject.ask(SHORT, 4))
            assert await bench.engine.idle(SECONDS, memory_here=True) is True
            await bench.engine.flush(SECONDS)
            if mode in (PauseMode.KEEP, PauseMode.RETRACT):
                still(task)
            else:
                await asyncio.wait({task}, timeout=SECONDS)
            ended = task.done()
            assert not late.done()
            await bench.engine.resume()
            answer = await task
            if mode is PauseMode.ABORT and answer.reason == "length":
                raise Missed
            assert len((await late).tokens) == 4
            assert max(lags(DISK, SHORT, answer.tokens)) <= TOLERANCE
            return {
                "ended in the pause": ended,
                "reason": answer.reason,
                "all tokens": len(answer.tokens) == bench.subject.long,
                "waiting in the pause": view.waiting,
            }

    run.__name__ = f"pause_{mode.value.lower()}"
    case(Capability.of_pause(mode))(run)


for _mode in PauseMode:
    _pause_case(_mode)


@case(Capability.PAUSE_WAIT)
async def a_wait_ends_at_its_deadline(bench: Bench) -> Observed:
    """What still runs then is held as by default, and goes on afterwards."""
    async with bench.request() as task:
        await bench.pause(PauseMode.WAIT, drain=0.1)
        still(task)
        view = await bench.view()
        assert (view.admitting, view.running) == (False, 0)
        await bench.engine.resume()
        answer = await task
        assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    return None


@case()
async def pause_and_resume_may_be_asked_twice(bench: Bench) -> Observed:
    """Neither is an error the second time."""
    for _ in range(2):
        await bench.pause()
        assert (await bench.view()).admitting is False
    for _ in range(2):
        await bench.engine.resume()
        assert (await bench.view()).admitting is True
    return None


@case()
async def a_kept_request_goes_on_with_the_new_weights(bench: Bench) -> Observed:
    """Its cache is recomputed: every token is the choice of the weights that served it."""
    async with bench.request() as task:
        await bench.pause()
        still(task)
        await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
        await bench.engine.flush(SECONDS)
        assert await bench.engine.write_label("1", SECONDS) == "1"
        await bench.engine.resume()
        answer = await task
    assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    old, new = ([lag <= TOLERANCE for lag in lags(seed, SHORT, answer.tokens)] for seed in (DISK, OTHER))
    change = old.index(False)
    assert change > 0
    assert all(new[change:])
    return None


@case()
async def a_flush_under_load_never_lies(bench: Bench) -> Observed:
    """It says no, or it drops what runs as well; the request ends as it would have either way."""
    async with bench.request() as task:
        # An engine that can will do it at once; one that can not would do it when the request has ended.
        can = Capability.PAUSE_KEEP in bench.capabilities
        ended = await outcome(bench.engine.flush(SECONDS if can else 0.2))
        still(task)
        answer = await task
    assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    assert max(lags(DISK, SHORT, answer.tokens)) <= TOLERANCE
    # Whether the last of its refusals comes before or after its deadline says nothing.
    return "done" if ended == "done" else "not done"


# ---------------------------------------------------------------------------------------------- weights


@case(Capability.LABEL)
async def a_label_aborts_nothing(bench: Bench) -> Observed:
    """Written while a request runs."""
    async with bench.request() as task:
        assert await bench.engine.write_label("7", SECONDS) == "7"
        still(task)
        answer = await task
    assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    assert (await bench.view()).label == "7"
    await bench.holds(DISK)
    return None


@case(Capability.SERIALIZED, Capability.CHECKSUM)
async def a_directory_is_loaded(bench: Bench) -> Observed:
    """Other weights change answers and checksum; the old ones bring both back, as the start from disk had them."""
    first = await bench.engine.checksum(SECONDS)
    assert first is not None
    await bench.pause()
    await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
    other = await bench.loaded(OTHER)
    await bench.pause()
    await bench.engine.load_directory(bench.directory(DISK), seconds=SECONDS)
    again = await bench.loaded(DISK)
    assert again == first
    return {"checksum moves": other.digest != first.digest, "checksum means something": first.meaningful}


@case(Capability.PARTS)
async def parts_of_a_fused_parameter_may_come_one_by_one(bench: Bench) -> Observed:
    """One tensor per part, the parts of a fused parameter far from each other."""
    await bench.pause()
    whole = sorted(state(OTHER).items(), key=lambda item: item[0].split(".")[-2])
    await bench.engine.begin_parts(SECONDS)
    for index, (name, tensor) in enumerate(whole):
        await bench.engine.load_part(bench.directory(f"part-{index}", {name: tensor}), seconds=SECONDS)
    await bench.engine.end_parts(SECONDS)
    parts = await bench.loaded(OTHER)
    await bench.pause()
    await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
    assert await bench.loaded(OTHER) == parts
    return None


def _wrong(kind: str) -> dict[str, torch.Tensor] | None:
    good = state(OTHER)
    names = list(good)
    if kind == "half of them":
        return {name: good[name] for name in names[: len(names) // 2]}
    if kind == "a part of a fused one":
        return {name: value for name, value in good.items() if ".k_proj." not in name}
    if kind == "an unknown name":
        return good | {"model.layers.9.self_attn.q_proj.weight": torch.zeros(4, 4)}
    if kind == "a wrong shape":
        return good | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}
    return None


def _wrong_case(kind: str) -> None:
    async def run(bench: Bench) -> Observed:
        """However the load of wrong tensors ends, the next whole one makes the engine whole, or a new process is."""
        await bench.pause()
        tensors = _wrong(kind)
        where = str(bench.folder / "nothing") if tensors is None else bench.directory(f"wrong {kind}", tensors)
        ended = await outcome(bench.engine.load_directory(where, seconds=SECONDS))
        if ended == "no answer":
            # Whoever waits for the next answer, or for a resume, waits for a process that is not there.
            await asyncio.to_thread(bench.subject.restart)
            return {"load": ended, "engine": "ended"}
        readable = await outcome(bench.engine.checksum(SECONDS))
        assert await bench.engine.idle(SECONDS, memory_here=True) is True
        if readable != "done":
            await bench.engine.recover(SECONDS)
        await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
        await bench.loaded(OTHER)
        return {"load": ended, "checksum after it": readable}

    run.__name__ = f"load_{kind.replace(' ', '_')}"
    case(Capability.SERIALIZED)(run)


for _kind in ("half of them", "a part of a fused one", "an unknown name", "a wrong shape", "no directory"):
    _wrong_case(_kind)


# ---------------------------------------------------------------------------------------------- broadcast


class Trainer:
    """Rank 0 of a group of two that sends nothing. How the group ends on this side does not matter."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port: int = self._listener.getsockname()[1]
        self._thread: threading.Thread | None = None

    def come(self, name: str) -> None:
        """Form the group and leave it again, in a thread."""
        handle = self._listener.detach()  # by itself torch would listen on every address

        def work() -> None:
            timeout = timedelta(seconds=SECONDS)
            # An engine that has given up meanwhile lets it fail.
            with contextlib.suppress(RuntimeError):
                store: Store = TCPStore(
                    "127.0.0.1",
                    self.port,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=handle,
                )
                for prefix in (name, f"{name}/", "cpu/"):
                    store = PrefixStore(prefix, store)
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = timeout
                options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                ProcessGroupGloo(store, 0, 2, options)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def close(self) -> None:
        """Whatever it is doing, it ends."""
        self._listener.close()
        if self._thread is not None:
            self._thread.join(2 * SECONDS)


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


# ---------------------------------------------------------------------------------------------- device memory


@case(Capability.OFFLOAD)
async def memory_is_given_back_and_taken_again(bench: Bench) -> Observed:
    """Tag by tag; the engine stays paused all the time, and what its weights held is gone."""
    await bench.pause(PauseMode.ABORT)
    await bench.engine.flush(SECONDS)
    tags = [tag for tag in RELEASE_ORDER if tag in (await bench.engine.facts(SECONDS)).memory_tags]
    for tag in tags:
        await bench.engine.release_memory(tag, seconds=SECONDS)
    assert await bench.engine.idle(SECONDS, memory_here=False) is True
    for tag in reversed(tags):
        await bench.engine.resume_memory(tag, seconds=SECONDS)
        assert (await bench.view()).admitting is False
    await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
    await bench.loaded(OTHER)
    return {"tags": [tag.value for tag in tags]}


# ---------------------------------------------------------------------------------------------- proofs


@case()
async def a_probe_is_one_greedy_token(bench: Bench) -> Observed:
    """The token that these weights choose; what it says of their version."""
    token = await bench.engine.probe(SECONDS)
    assert max(lags(DISK, PROBE_PROMPT, [token.token])) <= TOLERANCE
    return {"label": token.label}


@case()
async def a_paused_engine_is_proven_idle(bench: Bench) -> Observed:
    """With its memory, and as if some were given back."""
    await bench.pause()
    found = [await bench.engine.idle(SECONDS, memory_here=here) for here in (True, False)]
    await bench.engine.resume()
    assert found == [True, True]
    return None
