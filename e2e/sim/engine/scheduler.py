"""The engine's only loop: continuous batching of requests, one token for all running ones per step.

Invariants:
- everything that touches weights, cache or requests runs in this one thread, in the order in which it was submitted;
  a call that blocks here (a collective that waits for its peers) stalls generation and every later call;
- every token is sampled from the weights and cache held at its step, and stamped with the version label of that
  moment; a retracted request loses its cache and is recomputed from its first token.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from e2e.sim.model import Array
from e2e.sim.model_numpy import Ints

from .weights import WeightStore

T = TypeVar("T")
log = logging.getLogger(__name__)


class Model(Protocol):
    """What a backend offers; see :class:`e2e.sim.model_numpy.NumpyModel`."""

    def forward(self, tokens: Ints, starts: Ints, lengths: Ints, slots: Ints) -> Array:
        """Logits after the last new token of each sequence."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. ``temperature`` 0 is greedy; log-probabilities are those after the temperature."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None


@dataclass
class GenerateRequest:
    """One request and all that is known of its tokens. Owned by the scheduler thread until ``done`` is set."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    done: Future[dict[str, Any]] = field(default_factory=Future)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    retractions: int = 0
    slot: int | None = None
    rng: np.random.Generator | None = None

    def spans(self) -> list[dict[str, Any]]:
        """Runs of tokens that share a version label, as [start, end) over the output tokens."""
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": version, "start": i, "end": i + 1})
        return spans


@dataclass
class Counters:
    """Totals since start, for /metrics."""

    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0


class Scheduler:
    """The loop and its state. Other threads use :meth:`call` and :meth:`submit` only.

    ``touch`` is called before weights and cache are used; ``fatal`` ends the process.
    """

    def __init__(
        self,
        weights: WeightStore,
        model: Model,
        *,
        slots: int,
        seed: int,
        step_seconds: float = 0.0,
        touch: Callable[[], None] = lambda: None,
        fatal: Callable[[str], None],
    ) -> None:
        self.weights = weights
        self.version = "default"
        self.paused = False
        #: Whether waiting requests begin to run; False: those that run end, and no other begins.
        self.admits = True
        #: Running and waiting requests as of the last step, which is all that some engines tell.
        self.counted = (0, 0)
        self.running: list[GenerateRequest] = []
        self.waiting: deque[GenerateRequest] = deque()
        self.counters = Counters()
        #: Running and waiting requests as told outside; a paused scheduler renews it no more than the real one does.
        self.snapshot = (0, 0)
        self._model = model
        self._free = list(range(slots))
        self._slots = slots
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._step_seconds = step_seconds
        self._touch = touch
        self._fatal = fatal
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the loop to end; False when it is still stuck in a call after ``timeout`` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in the loop's thread between two steps. It runs even if nobody waits for it any more."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  handed to the caller, whoever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(run)
        return future

    def submit(self, request: GenerateRequest) -> None:
        """Put a request into the waiting queue; its end is ``request.done``."""
        self._inbox.put(lambda: self.waiting.append(request))

    # ---- below: scheduler thread only -----------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """``retract``: running requests go back to the front of the queue, cache dropped. ``in_place``: frozen.

        ``drain``: they go on, and none follows.
        """
        self.admits = False
        if mode == "drain":
            return
        self.paused = True
        if mode == "retract":
            for request in reversed(self.running):
                self._release(request)
                request.retractions += 1
                self.counters.retracted += 1
                self.waiting.appendleft(request)
            self.running.clear()

    def resume(self) -> None:
        """Go on generating."""
        self.paused, self.admits = False, True

    def abort(self, rid: str | None) -> None:
        """End requests whose id starts with ``rid`` (all for None) with the tokens they have."""
        for request in [r for r in [*self.running, *self.waiting] if rid is None or r.rid.startswith(rid)]:
            self._finish(request, {"type": "abort", "message": "Abort in waiting queue or while running"})
        self.counted = (len(self.running), len(self.waiting))

    def flush(self) -> bool:
        """Drop the cache: only when nothing runs and, unless paused, nothing waits."""
        return not self.running and (self.paused or not self.waiting)

    def _loop(self) -> None:
        try:
            while True:
                try:
                    idle = self.paused or not (self.running or (self.waiting and self.admits))
                    work = self._inbox.get(block=idle)
                except queue.Empty:
                    work = self._step
                if work is None:
                    return
                work()
                if not self.paused:
                    self.snapshot = (len(self.running), len(self.waiting))
        except Exception as error:
            log.exception("scheduler died")
            self._fatal(f"scheduler hit an exception: {error!r}")

    def _step(self) -> None:
        began = time.monotonic()
        fresh: list[GenerateRequest] = []
        while self.admits and self.waiting and self._free:
            request = self.waiting.popleft()
            request.slot = self._free.pop()
            fresh.append(request)
        if fresh:
            self._advance(fresh, [r.prompt + r.output for r in fresh], [0] * len(fresh))
            self.running.extend(r for r in fresh if r.slot is not None)
        else:
            batch = list(self.running)
            starts = [len(r.prompt) + len(r.output) - 1 for r in batch]
            self._advance(batch, [[r.output[-1] if r.output else r.prompt[-1]] for r in batch], starts)
            self.running = [r for r in self.running if r.slot is not None]
        self.counted = (len(self.running), len(self.waiting))
        spare = self._step_seconds - (time.monotonic() - began)
        if spare > 0:
            time.sleep(spare)

    def _advance(self, batch: list[GenerateRequest], new: list[list[int]], starts: list[int]) -> None:
        width = max(len(tokens) for tokens in new)
        tokens = np.zeros((len(batch), width), np.int64)
        for row, values in enumerate(new):
            tokens[row, : len(values)] = values
        lengths = np.array([len(values) for values in new], np.int64)
        slots = np.array([r.slot for r in batch], np.int64)
        self._touch()
        logits = self._model.forward(tokens, np.array(starts, np.int64), lengths, slots)
        for row, request in enumerate(batch):
            token, logprob = self._sample(logits[row].astype(np.float64), request)
            request.output.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            self.counters.generated_tokens += 1
            if token in request.sampling.stop_token_ids:
                self._finish(request, {"type": "stop", "matched": token})
            elif len(request.output) >= request.sampling.max_new_tokens:
                self._finish(request, {"type": "length", "length": len(request.output)})

    def _sample(self, logits: Any, request: GenerateRequest) -> tuple[int, float]:
        how = request.sampling
        scaled = logits / how.temperature if how.temperature > 0 else logits
        shifted = scaled - scaled.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        if how.temperature == 0:
            token = int(np.argmax(logprobs))
            return token, float(logprobs[token])
        probabilities = np.exp(logprobs)
        if how.top_p < 1:
            order = np.argsort(-probabilities)
            before = np.cumsum(probabilities[order]) - probabilities[order]
            probabilities[order[before >= how.top_p]] = 0
        if how.seed is not None and request.rng is None:
            request.rng = np.random.Generator(np.random.PCG64(how.seed))
        draw = (request.rng or self._rng).random() * probabilities.sum()
        token = int(min(np.searchsorted(np.cumsum(probabilities), draw, side="right"), len(probabilities) - 1))
        return token, float(logprobs[token])

    def _release(self, request: GenerateRequest) -> None:
        if request.slot is not None:
            self._free.append(request.slot)
            request.slot = None

    def _finish(self, request: GenerateRequest, reason: Mapping[str, Any]) -> None:
        self._release(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if reason["type"] == "abort":
            self.running = [r for r in self.running if r is not request]
            self.counters.aborted += 1
        self.counters.finished += 1
        request.done.set_result(dict(reason))
