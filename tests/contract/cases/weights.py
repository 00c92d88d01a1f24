"""Loads from directories, whole and in parts, and what a wrong one leaves behind."""

from __future__ import annotations

import asyncio

import torch

from e2e.engines.fixtures import DISK
from rlfleet.engine import Capability
from tests.contract.bench import OTHER, SECONDS, Bench, Observed, case, outcome, state, still


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
