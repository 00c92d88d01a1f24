"""The engine's front end: the pause gate, the lock between requests and updates, and every control call's meaning.

Invariants, all the real engine's:
- a request that arrives while paused waits here, out of reach of ``abort_all``, and runs after ``continue``;
- an update without a pause waits for the requests in flight, one during a pause does not;
- the version label is what the caller wrote; it moves only when the call that carries it succeeds.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from e2e.sim.tensors import decode, element_size

from . import bodies
from .groups_api import GroupError, Groups
from .scheduler import GenerateRequest, Sampling, Scheduler
from .weights import LoadError, WeightStore, combined

T = TypeVar("T")
Answer = dict[str, Any]

VERSION = "0.5.23"
_MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class Refused(Exception):
    """The engine answers 400 with this message in an error object."""


def outcome(success: bool, message: str, **more: Any) -> Answer:
    """The usual body of a control call."""
    return {"success": success, "message": message, **more}


class FrontEnd:
    """One engine as seen over HTTP. Lives in the event loop; reaches the scheduler only through its queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        weights: WeightStore,
        groups: Groups | None,
        *,
        model_path: str,
        served_model_name: str,
        health_seconds: float,
        fatal: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self.model_path = model_path
        self.started_with = {"model_path": model_path, "served_model_name": served_model_name}
        self.served_model_name = served_model_name
        self.weight_version = "default"
        self.paused = False
        self.healthy = True
        self._weights = weights
        self._groups = groups
        self._health_seconds = health_seconds
        self._fatal = fatal
        self._changed = asyncio.Condition()
        self._readers = 0
        self._writer = False
        self._session = False
        self._flushing = False
        self._released: set[str] = set()

    async def _in_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self.scheduler.call(work)))

    # ---- requests ---------------------------------------------------------------------------------------------

    def sampling(self, raw: dict[str, Any], prompt: list[int]) -> Sampling:
        """Check sampling parameters against the model. Refused for what can not be served."""
        config = self._weights.config
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
            "weight_version": self.weight_version,
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
    async def _exclusive(self) -> AsyncIterator[None]:
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
            await self._in_loop(lambda: self.scheduler.pause(mode))
            return
        while True:
            await self.abort_all()
            if self._readers == 0:
                return
            await asyncio.sleep(1)

    async def resume(self) -> None:
        """Open the gate again; harmless when open."""
        await self._in_loop(self.scheduler.resume)
        async with self._changed:
            self.paused = False
            self._changed.notify_all()

    async def abort_all(self) -> None:
        """Abort every request that the scheduler knows; those at the gate are out of reach."""
        await self._in_loop(lambda: self.scheduler.abort(None))

    async def abort(self, body: bodies.Abort) -> None:
        """Abort one request or all; unknown ids are ignored."""
        if body.abort_all:
            await self.abort_all()
        elif body.rid:
            await self._in_loop(lambda: self.scheduler.abort(body.rid))

    async def flush(self, timeout: float) -> bool:
        """Flush the cache, waiting up to ``timeout`` seconds for the engine to be idle."""
        if self._flushing:
            return False
        self._flushing = True
        deadline = time.monotonic() + timeout
        try:
            while not (done := await self._in_loop(self.scheduler.flush)) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            return done
        finally:
            self._flushing = False

    async def release_memory(self, tags: list[str] | None) -> None:
        """A no-op that says yes (no memory saver); with a request running the engine dies."""

        def work() -> None:
            if not self.scheduler.flush():
                self._fatal("AssertionError: release_memory_occupation should be called only when no ongoing request")
            self._released.update(tags or _MEMORY_TAGS)

        await self._in_loop(work)

    async def resume_memory(self, tags: list[str] | None) -> None:
        """Take back what was released; a tag that is not released kills the engine."""

        def work() -> None:
            for tag in tags or _MEMORY_TAGS:
                if tag not in self._released:
                    self._fatal(f"KeyError: {tag!r}")
                self._released.discard(tag)

        await self._in_loop(work)

    # ---- weights ----------------------------------------------------------------------------------------------

    async def init_group(self, body: bodies.InitGroup) -> Answer:
        """Join a broadcast group; the scheduler is stuck until all ranks have joined."""
        if self._groups is None:
            return outcome(False, "broadcast groups need the torch backend")
        groups = self._groups
        where = (body.master_address, body.master_port, body.rank_offset, body.world_size)
        return await self._group_call(
            lambda: groups.create(body.group_name, body.backend, *where),
            "Succeeded to initialize custom process group.",
        )

    async def destroy_group(self, body: bodies.DestroyGroup) -> Answer:
        """Leave a broadcast group."""
        if self._groups is None:
            return outcome(False, "The group to be destroyed does not exist.")
        groups = self._groups
        return await self._group_call(
            lambda: groups.destroy(body.group_name), "Succeeded to destroy custom process group."
        )

    async def _group_call(self, work: Callable[[], None], done: str) -> Answer:
        try:
            await self._in_loop(work)
        except GroupError as error:
            return outcome(False, str(error))
        return outcome(True, done)

    async def begin_update(self) -> Answer:
        """Open an update session; a second is refused."""
        if self._session:
            return outcome(False, "A weight update session is already open.")
        self._session = True
        return outcome(True, "Weight update session opened.")

    async def end_update(self) -> Answer:
        """Close the session, whatever happened in it."""
        if not self._session:
            return outcome(False, "No weight update session is open.")
        self._session = False
        return outcome(True, "Weight update session closed.")

    async def from_distributed(self, body: bodies.FromDistributed) -> Answer:
        """Receive all tensors of the call from rank 0, then load them; then flush, when asked."""
        if not self._session:
            return outcome(False, "Weight updates must run between begin_weight_update and end_weight_update.")
        if self._groups is None:
            return outcome(False, f"Group {body.group_name} not in the weight update groups.")
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            return outcome(False, "names, dtypes and shapes must have the same length")
        if body.load_format not in (None, "flattened_bucket"):
            return outcome(False, f"Unknown load_format={body.load_format}")
        if body.abort_all_requests:
            await self.abort_all()
        groups = self._groups

        def work() -> Answer:
            try:
                sizes = [
                    element_size(dtype) * int(np.prod(shape, dtype=np.int64))
                    for dtype, shape in zip(body.dtypes, body.shapes, strict=True)
                ]
                if body.load_format == "flattened_bucket":
                    whole = groups.receive(body.group_name, [sum(sizes)])[0]
                    ends = np.cumsum(sizes).tolist()
                    parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
                else:
                    parts = groups.receive(body.group_name, sizes)
            except (GroupError, ValueError) as error:
                return outcome(False, str(error))
            tensors = [
                (name, decode(part, dtype, tuple(shape)))
                for name, part, dtype, shape in zip(body.names, parts, body.dtypes, body.shapes, strict=True)
            ]
            try:
                self._weights.load(tensors)
            except LoadError as error:
                return outcome(
                    False,
                    f"Failed to update parameter online: {error}. The full weights of the ModelRunner are partially "
                    "updated. Please discard the whole weights.",
                )
            return self._loaded("Succeeded to update parameter online.", body.weight_version, body.flush_cache)

        async with self._exclusive():
            return self._labelled(await self._in_loop(work), body.weight_version)

    async def from_disk(self, body: bodies.FromDisk) -> Answer:
        """Load every safetensors file of a directory. On success the path becomes the served model's name."""
        if body.abort_all_requests:
            await self.abort_all()

        def work() -> Answer:
            held = len(self.scheduler.waiting) if self.scheduler.paused else 0
            directory = Path(body.model_path)
            if not directory.is_dir() or not any(directory.glob("*.safetensors")):
                return outcome(
                    False,
                    f"Failed to get weights iterator: {body.model_path} holds no weights",
                    num_paused_requests=held,
                )
            try:
                self._weights.load_directory(directory)
            except LoadError as error:
                # The real engine says this too, and reads the new path once more instead of the old one.
                return outcome(
                    False,
                    f"Failed to update weights: {error}.\nRolling back to original weights.",
                    num_paused_requests=held,
                )
            done = self._loaded("Succeeded to update model weights.", body.weight_version, body.flush_cache)
            return {**done, "num_paused_requests": held}

        async with self._exclusive():
            answer = self._labelled(await self._in_loop(work), body.weight_version)
        if answer["success"]:
            self.model_path = self.served_model_name = body.model_path
        return answer

    def _loaded(self, message: str, version: str | None, flush: bool) -> Answer:
        """After a load, in the scheduler: new tokens carry the version, even if the flush is then refused."""
        if version is not None:
            self.scheduler.version = version
        if flush and not self.scheduler.flush():
            return outcome(False, "Cache flush failed after updating weights")
        return outcome(True, message)

    def _labelled(self, answer: Answer, version: str | None) -> Answer:
        if answer["success"] and version is not None:
            self.weight_version = version
        return answer

    async def set_version(self, body: bodies.WeightVersion) -> Answer:
        """Write the version label, which nobody checks; by default every running request is aborted."""
        if body.abort_all_requests:
            await self.abort_all()

        def work() -> None:
            self.scheduler.version = body.new_version

        await self._in_loop(work)
        self.weight_version = body.new_version
        return outcome(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)

    async def weights_by_name(self, body: bodies.WeightsByName) -> list[Any]:
        """The first rows of one tensor. Refused for an unknown name."""
        value = await self._in_loop(lambda: self._weights.get(body.name))
        if value is None:
            raise Refused("Get parameter by name failed")
        return list(value[: body.truncate_size].tolist())

    async def check_weights(self, body: bodies.CheckWeights) -> Answer:
        """``checksum``: content hashes of the engine's own parameters; ``snapshot``, ``compare``, ``reset_tensors``."""
        store = self._weights
        if body.action == "checksum":
            sums = await self._in_loop(lambda: store.checksums(body.skip_tensor_list or ()))
            total = combined(sums)
            rank = {
                "checksums": sums,
                "per_gpu_checksum": total,
                "parallelism_info": {
                    "tp_rank": 0,
                    "tp_size": 1,
                    "pp_rank": 0,
                    "pp_size": 1,
                    "dp_rank": 0,
                    "dp_size": 1,
                },
            }
            return outcome(True, "Success.", ranks=[rank], per_engine_checksum=combined({"0": total}))
        if body.action == "snapshot":
            await self._in_loop(store.snapshot)
        elif body.action == "reset_tensors":
            await self._in_loop(store.reset)
        elif body.action == "compare":
            changed = await self._in_loop(store.changed_since_snapshot)
            if changed is None or changed:
                return outcome(
                    False, "no snapshot to compare with" if changed is None else f"tensors differ: {changed}"
                )
        else:
            return outcome(False, f"Unsupported action={body.action!r}")
        return outcome(True, "Success.")

    # ---- what the engine says of itself -------------------------------------------------------------------------

    def model_info(self) -> Answer:
        """Answered by the front end alone, also while the scheduler is stuck."""
        return {
            "model_path": self.model_path,
            "tokenizer_path": "",
            "served_model_name": self.served_model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "disaggregation_mode": "null",
            "model_type": "rlfleet-reference",
        }

    async def server_info(self) -> Answer:
        """Goes through the scheduler, so it waits while that is stuck. Says what the engine was started with."""
        running = await self._in_loop(lambda: len(self.scheduler.running))
        return {
            **self.started_with,
            "tokenizer_path": "",
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "version": VERSION,
            "weight_version": "default",
            "context_length": self._weights.config.context_length,
            "internal_states": [{"num_running_reqs": running}],
        }

    def loads(self) -> Answer:
        """Request counts of the only data-parallel rank, from a snapshot (answers while the scheduler is stuck)."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_paused_reqs": waiting if self.scheduler.paused else 0,
        }
        return {"version": VERSION, "dp_rank_count": 1, "loads": [load]}
