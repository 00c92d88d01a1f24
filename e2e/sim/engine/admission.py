"""Admission: the pause gate, the lock between requests and updates, cache and memory calls.

Invariants, all the real engine's:
- a request that arrives while paused waits here, out of reach of ``abort_all``, and runs after ``continue``;
- an update without a pause waits for the requests in flight, one during a pause does not.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from e2e.sim.model import ModelConfig

from . import bodies
from .labels import VERSION, Answer, Labels, Refused
from .memory import TAGS, WEIGHTS, DeviceMemory
from .scheduler import GenerateRequest, Sampling, Scheduler

T = TypeVar("T")


class Admission:
    """Requests of one engine. Lives in the event loop; reaches the scheduler only through its queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: ModelConfig,
        labels: Labels,
        *,
        memory: DeviceMemory,
        health_seconds: float,
        fatal: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self.paused = False
        self.healthy = True
        self._config = config
        self._labels = labels
        self._health_seconds = health_seconds
        #: Ends the engine.
        self.fatal = fatal
        self._changed = asyncio.Condition()
        self._readers = 0
        self._writer = False
        self._flushing = False
        self.memory = memory

    async def in_loop(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the scheduler's thread; it runs even when the caller stops waiting."""
        return await asyncio.shield(asyncio.wrap_future(self.scheduler.call(work)))

    # ---- requests ---------------------------------------------------------------------------------------------

    def sampling(self, raw: dict[str, Any], prompt: list[int]) -> Sampling:
        """Check sampling parameters against the model. Refused for what can not be served."""
        config = self._config
        if not prompt or any(not 0 <= t < config.vocab_size for t in prompt):
            raise Refused(f"input_ids must be 1 or more token ids below the vocabulary size {config.vocab_size}")
        stop = raw.get("stop") or []
        stops = [*(stop if isinstance(stop, list) else [stop]), *(raw.get("stop_token_ids") or [])]
        if any(not isinstance(t, int) for t in stops):
            raise Refused("stop strings need a tokenizer; this engine knows stop token ids only")
        seed = raw.get("sampling_seed", raw.get("seed"))
        new = raw.get("max_new_tokens")
        how = Sampling(
            max_new_tokens=128 if new is None else int(new),
            temperature=float(raw.get("temperature", 1.0)),
            top_p=float(raw.get("top_p", 1.0)),
            stop_token_ids=frozenset(stops),
            seed=None if seed is None else int(seed),
        )
        if how.max_new_tokens < 1 or how.temperature < 0 or not 0 < how.top_p <= 1:
            raise Refused("max_new_tokens must be at least 1, temperature at least 0, top_p in (0, 1]")
        if len(prompt) + how.max_new_tokens > config.context_length:
            raise Refused(
                f"Requested token count exceeds the model's maximum context length of {config.context_length} tokens"
            )
        return how

    async def generate(self, body: bodies.Generate) -> Answer:
        """Serve one request; waits at the gate while paused. A cancelled caller aborts its request."""
        if body.input_ids is None:
            raise Refused("input_ids are required: the engine runs without a tokenizer")
        if body.stream:
            raise Refused("streaming is not supported by the reference engine")
        prompt = body.input_ids
        request = GenerateRequest(
            body.rid or uuid.uuid4().hex, prompt, self.sampling(body.sampling_params or {}, prompt)
        )
        began = time.monotonic()
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused)
            await self._changed.wait_for(lambda: not self._writer)
            self._readers += 1
        try:
            self.scheduler.submit(request)
            reason = await asyncio.shield(asyncio.wrap_future(request.done))
        except asyncio.CancelledError:
            self.scheduler.call(lambda: self.scheduler.abort(request.rid))
            raise
        finally:
            await asyncio.shield(self._reader_left())
        meta: Answer = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": 0,
            "weight_version": self._labels.weight_version,
            "weight_versions": request.spans(),
            "num_retractions": request.retractions,
            "e2e_latency": time.monotonic() - began,
        }
        if body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [p, t, None] for p, t in zip(request.logprobs, request.output, strict=True)
            ]
        return {"text": "", "output_ids": request.output, "meta_info": meta}

    async def _reader_left(self) -> None:
        async with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """The writer's side of the lock; free of charge during a pause."""
        if self.paused:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._writer)
            self._writer = True  # from now on no new request enters
            await self._changed.wait_for(lambda: self._readers == 0)
        try:
            yield
        finally:
            async with self._changed:
                self._writer = False
                self._changed.notify_all()

    async def health(self) -> bool:
        """Generate one token, at least one second long; False after the health timeout (paused, blocked)."""
        probe = bodies.Generate([0], {"max_new_tokens": 1, "temperature": 0}, rid=f"HEALTH_CHECK_{uuid.uuid4().hex}")
        task = asyncio.ensure_future(self.generate(probe))
        try:
            await asyncio.sleep(1)
            await asyncio.wait({task}, timeout=max(0.0, self._health_seconds - 1))
            self.healthy = task.done()
        finally:
            task.cancel()
        return self.healthy

    def ready(self) -> bool:
        """Not paused, and the last health check was good."""
        return self.healthy and not self.paused

    # ---- admission, cache, memory -----------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Close the gate. ``abort`` then aborts until nothing is in flight; the others pause the scheduler."""
        self.paused = True
        if mode in ("retract", "in_place"):
            await self.in_loop(lambda: self.scheduler.pause(mode))
            return
        while True:
            await self.abort_all()
            if self._readers == 0:
                return
            await asyncio.sleep(1)

    async def resume(self) -> None:
        """Open the gate again; harmless when open."""
        await self.in_loop(self.scheduler.resume)
        async with self._changed:
            self.paused = False
            self._changed.notify_all()

    async def abort_all(self) -> None:
        """Abort every request that the scheduler knows; those at the gate are out of reach."""
        await self.in_loop(lambda: self.scheduler.abort(None))

    async def abort(self, body: bodies.Abort) -> None:
        """Abort one request or all; unknown ids are ignored."""
        if body.abort_all:
            await self.abort_all()
        elif body.rid:
            await self.in_loop(lambda: self.scheduler.abort(body.rid))

    async def flush(self, timeout: float) -> bool:
        """Flush the cache, waiting up to ``timeout`` seconds for the engine to be idle."""
        if self._flushing:
            return False
        self._flushing = True
        deadline = time.monotonic() + timeout
        try:
            while not (done := await self.in_loop(self.scheduler.flush)) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            return done
        finally:
            self._flushing = False

    async def release_memory(self, tags: list[str] | None) -> None:
        """Give device memory back; with a request in the scheduler the engine dies."""

        def work() -> None:
            if not self.scheduler.flush():
                self.fatal("AssertionError: release_memory_occupation should be called only when server is idle.")
            self.memory.release(tags)
            if self.memory.saver and WEIGHTS in (tags or TAGS):
                self.scheduler.weights.forget_extra()

        await self.in_loop(work)

    async def resume_memory(self, tags: list[str] | None) -> None:
        """Take back what was released."""
        await self.in_loop(lambda: self.memory.resume(tags))

    async def server_info(self) -> Answer:
        """Goes through the scheduler, so it waits while that is stuck."""
        running = await self.in_loop(lambda: len(self.scheduler.running))
        return self._labels.server_info(running, self._config.context_length, memory_saver=self.memory.saver)

    def loads(self) -> Answer:
        """Request counts of the only data-parallel rank, from a snapshot (answers while the scheduler is stuck).

        While the scheduler is paused they stay what they were before.
        """
        running, waiting = self.scheduler.snapshot
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_paused_reqs": waiting if self.scheduler.paused else 0,
        }
        return {"version": VERSION, "dp_rank_count": 1, "loads": [load]}
