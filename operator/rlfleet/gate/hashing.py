"""Hashing a bucket's data region tensor by tensor, wherever it comes from.

Invariant: no byte passes whose tensor was not compared with the manifest once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from rlfleet.api.manifest import TensorEntry
from rlfleet.api.wire import ErrorReason
from rlfleet.gate.errors import GateError


class TensorHasher:
    """Hashes a bucket's data region tensor by tensor as it streams by."""

    def __init__(self, tensors: tuple[TensorEntry, ...]) -> None:
        self._tensors: Iterator[TensorEntry] = iter(tensors)
        self._hash = xxhash.xxh3_128()
        self._entry: TensorEntry | None = None
        self._left = 0
        self._next()

    def update(self, chunk: bytes) -> None:
        """Hash the next bytes; GateError at the first tensor whose hash is not the manifest's."""
        view = memoryview(chunk)
        while view and self._left:
            taken = view[: self._left]
            self._hash.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]
            if not self._left:
                self._check()
                self._next()

    def _next(self) -> None:
        for entry in self._tensors:
            self._entry = entry
            self._left = entry.nbytes
            self._hash.reset()
            if self._left:
                return
            self._check()
        self._entry = None

    def _check(self) -> None:
        entry = self._entry
        if entry is not None and self._hash.hexdigest() != entry.hash:
            raise GateError(
                ErrorReason.HASH_MISMATCH,
                f"tensor {entry.name!r} arrived with hash {self._hash.hexdigest()}, the manifest says {entry.hash}",
            )
