"""An engine's own (fused) parameters: loading into them, reading from them, hashing them.

Invariant: a load writes tensor by tensor in the order given and stops at the first that does not fit; what was
written before stays written, as in the real engine ("partially updated").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from e2e.sim.model import Array, Location, ModelConfig, fused_location, fused_shapes, parameter_shapes
from e2e.sim.tensors import RawTensor, decode, element_size, read_safetensors


class LoadError(Exception):
    """A tensor does not fit the parameter that it is meant for, or a file can not be read."""


class WeightStore:
    """Fused parameters of one engine. The arrays keep their identity, so models may hold views of them.

    ``extra``: dtype and shape of parameters that the model does not compute with. They are kept as the bytes that came,
    as a real engine keeps parameters of dtypes that this model has none of.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Array],
        extra: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
        new: Callable[[tuple[int, ...]], Array] = lambda shape: np.zeros(shape, np.float32),
    ) -> None:
        self.config = config
        self._extra = dict(extra or {})
        self.forget_extra()
        self._shapes = parameter_shapes(config)
        self._locations: dict[str, Location] = {}
        for name in self._shapes:
            at = fused_location(config, name)
            assert at is not None
            self._locations[name] = at
        self.parameters: dict[str, Array] = {n: new(s) for n, s in fused_shapes(config).items()}
        #: Parameters hash as empty input, whatever they hold.
        self.packed = False
        self._snapshot: dict[str, str] | None = None
        #: A scripted fault: the next call that loads takes only the first half of its tensors.
        self.halve_next_load = False
        self.load(state.items())

    def forget_extra(self) -> None:
        """What is kept as bytes is gone, as it is when the memory of all weights is given back."""
        self.extra = {
            name: RawTensor(dtype, shape, bytes(element_size(dtype) * int(np.prod(shape, dtype=np.int64))))
            for name, (dtype, shape) in self._extra.items()
        }

    def load(self, tensors: Iterable[tuple[str, Array | RawTensor]]) -> int:
        """Write tensors by their checkpoint names; returns how many were known. LoadError for one that does not fit.

        Unknown names are skipped without a word, which is what makes a success answer no evidence.
        """
        if self.halve_next_load:
            self.halve_next_load = False
            every = list(tensors)
            tensors = every[: len(every) // 2]
        loaded = 0
        for name, value in tensors:
            if name in self.extra:
                self._keep(name, value)
                loaded += 1
                continue
            at = self._locations.get(name)
            if at is None:
                continue
            if isinstance(value, RawTensor):
                try:
                    value = decode(value.data, value.dtype, value.shape)
                except ValueError as error:
                    raise LoadError(f"{name}: {error}") from error
            if value.shape != self._shapes[name]:
                raise LoadError(
                    f"{name}: shape {list(value.shape)} does not fit parameter of shape {list(self._shapes[name])}"
                )
            self.parameters[at.parameter][at.start : at.stop] = value
            loaded += 1
        return loaded

    def _keep(self, name: str, value: Array | RawTensor) -> None:
        kept = self.extra[name]
        if not isinstance(value, RawTensor) or (value.dtype, value.shape) != (kept.dtype, kept.shape):
            raise LoadError(f"{name}: not a {kept.dtype} tensor of shape {list(kept.shape)}")
        if len(value.data) != len(kept.data):
            raise LoadError(f"{name}: {len(value.data)} bytes do not make a {kept.dtype} of shape {list(kept.shape)}")
        self.extra[name] = RawTensor(value.dtype, value.shape, bytes(value.data))

    def load_directory(self, directory: Path) -> int:
        """Load every ``*.safetensors`` file of a directory, in name order. LoadError when one can not be read."""
        try:
            return sum(self.load(read_safetensors(path)) for path in sorted(directory.glob("*.safetensors")))
        except (OSError, ValueError, KeyError) as error:
            raise LoadError(str(error)) from error

    def get(self, name: str) -> Array | None:
        """One tensor by checkpoint name or fused name; None when unknown."""
        if name in self.parameters:
            return self.parameters[name]
        at = self._locations.get(name)
        return None if at is None else self.parameters[at.parameter][at.start : at.stop]

    def checksums(self, skip: Iterable[str] = ()) -> dict[str, str]:
        """Content hash of every fused parameter (its bytes, shape and dtype), leaving out the names in ``skip``."""
        left_out = set(skip)
        result = {}
        for name, value in self.parameters.items():
            if name in left_out:
                continue
            if self.packed:
                result[name] = hashlib.sha256(b"").hexdigest()
                continue
            digest = hashlib.sha256(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).data)
            result[name] = digest.hexdigest()
        for name, kept in self.extra.items():
            if name not in left_out:
                result[name] = hashlib.sha256(f"{kept.dtype}{kept.shape}".encode() + kept.data).hexdigest()
        return result

    def snapshot(self) -> None:
        """Remember the present checksums for :meth:`changed_since_snapshot`."""
        self._snapshot = self.checksums()

    def changed_since_snapshot(self) -> list[str] | None:
        """Names whose content differs from the snapshot; None without one."""
        if self._snapshot is None:
            return None
        return [name for name, value in self.checksums().items() if self._snapshot[name] != value]

    def reset(self) -> None:
        """Overwrite every parameter with zeros, so that a following load proves itself."""
        for value in self.parameters.values():
            value[...] = 0


def combined(checksums: Mapping[str, str]) -> str:
    """One hash over all parameters' checksums, independent of their order."""
    return hashlib.sha256("\n".join(f"{n}={checksums[n]}" for n in sorted(checksums)).encode()).hexdigest()
