"""vLLM's way of replacing weights: layer by layer, through a state in which parameters hold nothing.

Invariants, all the real engine's (0.32), with the sessions of our plug-in (rlfleet_vllm):
- from the first load on no parameter can be read, and a step that uses one ends the engine; a load that fails leaves it
  so. Opening a session touches nothing, and an update that fails ends it;
- a session ends well only if every parameter was loaded in it; if not, it stays open. ``reload_weights`` does not look:
  of a fused parameter that got some of its tensors the others become garbage, and one that got none keeps what it held;
- the next whole load repairs what a session left. What ``reload_weights`` left, it does not: parts that came before it
  failed are still there.

Everything here runs in the scheduler's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from e2e.sim.model import Array, fused_location, parameter_shapes
from e2e.sim.tensors import RawTensor, decode, read_safetensors

from .weights import LoadError, WeightStore

EMPTY = hashlib.sha256(b"").hexdigest()


class WorkerError(Exception):
    """A worker raised: the engine answers 500 with these words."""


class LayerwiseLoads:
    """One engine's parameters as its worker loads them."""

    def __init__(self, store: WeightStore, *, fatal: Callable[[str], None]) -> None:
        self._store = store
        self._fatal = fatal
        self._shapes = parameter_shapes(store.config)
        self._buffered: dict[str, Array | RawTensor] = {}
        self._touched = False
        #: ``reload_weights`` broke off, and what it had loaded in part lies in the way of every later one.
        self._spoiled = False
        self.active = False
        #: Parameters hold nothing.
        self.loading = False

    def touch(self) -> None:
        """Say that weights are about to be used."""
        if self.loading:
            self._fatal("EngineCore encountered an issue: Cannot copy out of meta tensor; no data!")

    def start(self) -> None:
        """Open a session."""
        if self.active:
            raise WorkerError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        self.active, self._touched = True, False

    def demand_session(self) -> None:
        """An update needs a session."""
        if not self.active:
            raise WorkerError("start_weight_update must be called before update_weights.")

    def update(self, tensors: Iterable[tuple[str, Array | RawTensor]]) -> None:
        """Take some tensors; a failure ends the session, and parameters still hold nothing."""
        self.demand_session()
        self.loading = self._touched = True
        try:
            self._take(tensors)
        except WorkerError as error:
            self.drop()
            raise WorkerError(f"rlfleet: the load broke off, weights are incomplete now: {error}") from error

    def drop(self) -> None:
        """An update failed: the session is over, and what came in it is forgotten."""
        self.active = self._touched = False
        self._buffered.clear()

    def finish(self) -> None:
        """Close the session, if every parameter came."""
        if not self.active:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        every = self._shapes.keys() | self._store.extra.keys()
        missing = sorted(every - self._buffered.keys()) if self._touched else []
        if missing:
            self._touched = False
            self._buffered.clear()
            raise WorkerError(
                f"rlfleet: {len(missing)} of {len(every)} parameters were not sent or not whole, weights are "
                f"incomplete now: {', '.join(missing[:4])}"
            )
        if not self._touched and self.loading:
            raise WorkerError("rlfleet: nothing was loaded in this session, and an earlier one left weights incomplete")
        self.active = False
        if self._touched:
            self._touched = self._spoiled = False
            self._write()

    def reload(self, directory: Path) -> None:
        """``reload_weights``: a session of its own, which nothing checks."""
        self.loading = True
        files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
        if not files:
            raise WorkerError(f"Cannot find an appropriate cached snapshot folder for {directory}")
        try:
            if self._spoiled:
                raise WorkerError("The size of tensor a must match the size of tensor b (0) at dimension 1")
            self._take(pair for path in files for pair in self._read(path))
        except WorkerError:
            self._spoiled = True
            self._buffered.clear()
            raise
        self._write()

    def directory(self, directory: Path) -> None:
        """One update with every file of a directory, as our plug-in reads it."""
        self.demand_session()
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            self.drop()
            raise WorkerError(f"rlfleet: nothing was loaded, weights are as before: {directory} holds no file")
        self.update(pair for path in files for pair in self._read(path))

    def checksums(self) -> dict[str, str]:
        """Content hash of every parameter; of packed layers only embeddings and norms hash as what they hold."""
        if self.loading:
            raise WorkerError("Cannot copy out of meta tensor; no data!")
        packed, self._store.packed = self._store.packed, False
        try:
            sums = self._store.checksums()
        finally:
            self._store.packed = packed
        if packed:
            sums = {n: h if "embed" in n or "norm" in n else EMPTY for n, h in sums.items()}
        return {f"dp0:pp0:pcp0:tp0:{name}": value for name, value in sums.items()}

    @staticmethod
    def _read(path: Path) -> list[tuple[str, RawTensor]]:
        try:
            return list(read_safetensors(path))
        except (OSError, ValueError, KeyError) as error:
            raise WorkerError(f"Error while deserializing {path}: {error}") from error

    def _take(self, tensors: Iterable[tuple[str, Array | RawTensor]]) -> None:
        every = list(tensors)
        if self._store.halve_next_load:
            self._store.halve_next_load = False
            every = every[: len(every) // 2]
        for name, value in every:
            wanted = self._shapes.get(name)
            if wanted is None and name not in self._store.extra:
                raise WorkerError(f"There is no module or parameter named {name!r} in ReferenceModel")
            if wanted is not None and tuple(value.shape) != tuple(wanted):
                raise WorkerError(f"start (0) + length ({wanted[0]}) exceeds dimension size ({value.shape[0]}).")
            self._buffered[name] = value

    def _write(self) -> None:
        came, self._buffered = self._buffered, {}
        touched = {self._parameter(name) for name in came if name in self._shapes}
        for name, shape in self._shapes.items():
            if name not in came and self._parameter(name) in touched:
                came[name] = np.zeros(shape, np.float32)  # whatever lay in the memory that it was given
        try:
            self._store.load((name, self._decoded(name, value)) for name, value in came.items())
        except LoadError as error:
            raise WorkerError(str(error)) from error
        self.loading = False

    def _parameter(self, name: str) -> str:
        at = fused_location(self._store.config, name)
        assert at is not None
        return at.parameter

    def _decoded(self, name: str, value: Array | RawTensor) -> Array | RawTensor:
        if name not in self._shapes or not isinstance(value, RawTensor):
            return value
        try:
            return decode(value.data, value.dtype, value.shape)
        except ValueError as error:
            raise WorkerError(f"{name}: {error}") from error
