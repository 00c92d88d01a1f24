"""What a case of the contract works with: one engine, an adapter for it, and requests that run meanwhile.

Invariant: a case begins with the engine serving seed ``DISK`` under the label "0", whatever an earlier one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from e2e.engines.fixtures import DISK
from e2e.engines.prompts import PROMPTS
from e2e.engines.reference import TOLERANCE, lags
from e2e.engines.tiny import MODEL
from e2e.sim.model import MODELS, initial_state
from rlfleet.api.wire import PauseMode
from rlfleet.calls import NoAnswer, NotSent, Refused
from rlfleet.engine import Capability, Checksum, EngineAdapter, View
from tests.contract.subjects import Subject

Observed = Any
Run = Callable[["Bench"], Awaitable[Observed]]

#: The seed that cases load.
OTHER = 100
SECONDS = 30.0
SHORT = PROMPTS[0]


@dataclass(frozen=True)
class Case:
    """One promise. ``covers``: capabilities that it puts to the test."""

    name: str
    run: Run
    covers: tuple[Capability, ...]


CASES: dict[str, Case] = {}


def case(*covers: Capability) -> Callable[[Run], Run]:
    """Register a case under its function's name."""

    def register(run: Run) -> Run:
        name = run.__name__  # type: ignore[attr-defined]
        CASES[name] = Case(name, run, covers)
        return run

    return register


def state(seed: int) -> dict[str, torch.Tensor]:
    """A policy's weights by checkpoint names."""
    return {name: torch.from_numpy(value) for name, value in initial_state(MODELS[MODEL], seed).items()}


def still(task: asyncio.Task[Any]) -> None:
    """Missed, unless the request goes on."""
    if task.done():
        raise Missed


async def outcome(call: Awaitable[Any]) -> str:
    """How a call ended, in one word."""
    try:
        await call
    except NotSent:
        return "not sent"
    except NoAnswer:
        return "no answer"
    except Refused:
        return "refused"
    return "done"


class Missed(Exception):
    """A request had ended before it was met: nothing was shown, and the case is to be run again."""


class Bench:
    """One engine, an adapter for it, and a folder for weights that both can read."""

    def __init__(self, subject: Subject, adapter: EngineAdapter, folder: Path) -> None:
        self.subject = subject
        self.engine = adapter
        self.folder = folder
        self.capabilities: frozenset[Capability] = frozenset()

    async def restore(self) -> None:
        """Whatever came before: seed DISK, label "0", admitting."""
        self.capabilities = (await self.engine.facts(SECONDS)).capabilities
        if await self._is_as_it_should_be():
            return
        await self.pause()
        await self.engine.recover(SECONDS)
        await self.engine.load_directory(self.directory(DISK), seconds=SECONDS)
        await self.engine.flush(SECONDS)
        assert await self.engine.write_label("0", SECONDS) == "0"
        await self.engine.resume()
        self.subject.begins_with = await self.engine.checksum(SECONDS)

    async def _is_as_it_should_be(self) -> bool:
        view = await self.view()
        if (view.admitting, view.label, view.running, view.waiting) != (True, "0", 0, 0):
            return False
        with contextlib.suppress(Refused):
            return await self.engine.checksum(SECONDS) == self.subject.begins_with
        return False

    async def pause(self, mode: PauseMode | None = None, drain: float = 0.0) -> None:
        """As the gate does: see it admit, if it does, then pause."""
        await self.engine.pause(mode or self.engine.default_pause, drain_seconds=drain, seconds=SECONDS)

    def directory(self, name: object, tensors: dict[str, torch.Tensor] | None = None) -> str:
        """A folder with these weights (default: those of seed ``name``)."""
        folder = self.folder / str(name)
        if not folder.exists():
            folder.mkdir()
            found = state(int(str(name))) if tensors is None else tensors
            save_file({k: v.contiguous() for k, v in found.items()}, str(folder / "model.safetensors"))
        return str(folder)

    async def view(self) -> View:
        """The engine now."""
        return await self.engine.view(SECONDS)

    async def holds(self, seed: int, prompt: Sequence[int] = SHORT) -> None:
        """Its answers are those of this policy, and of no other."""
        answer = await self.subject.ask(prompt, 12)
        worst = max(lags(seed, prompt, answer.tokens))
        assert worst <= TOLERANCE, f"not the answer of seed {seed}: a token lags by {worst:.3g}"

    async def loaded(self, seed: int) -> Checksum:
        """After a load: flush, resume, and see whose answers come; what the parameters hash to."""
        digest = await self.engine.checksum(SECONDS)
        assert digest is not None
        await self.engine.flush(SECONDS)
        await self.engine.resume()
        for prompt in PROMPTS:
            await self.holds(seed, prompt)
        return digest

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[asyncio.Task[Any]]:
        """A request that runs, as far as can be seen."""
        task = asyncio.create_task(self.subject.ask(SHORT, self.subject.long))
        try:
            while (await self.view()).running == 0:
                still(task)
                await asyncio.sleep(0.002)
            yield task
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def plain(observed: Observed) -> Any:
    """As it reads in the file of results."""
    return json.loads(json.dumps(observed, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} can not be written down")
