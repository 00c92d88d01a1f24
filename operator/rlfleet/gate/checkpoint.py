"""Reading a checkpoint that engines are to load from a shared path: every byte is hashed before an engine is paused.

Invariants:
- only directories below the gate's own checkpoint directory are read, which the engine mounts at the same path;
- ``Checked`` stands for bytes that were hashed and compared with the manifest that the order names, and for the files
  as they were then: a file that was written to or replaced since is noticed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rlfleet.api import checkpoint
from rlfleet.api.manifest import DTYPES, TensorEntry
from rlfleet.api.wire import ErrorReason
from rlfleet.gate.errors import GateError
from rlfleet.gate.hashing import TensorHasher

PIECE_BYTES = 4 * 2**20
#: The description of a bucket with 200,000 tensors stays far below.
MAX_HEADER_BYTES = 100 * 2**20
MAX_DESCRIPTOR_BYTES = 256 * 2**20

#: What of a file changes when it is written to or replaced: device, inode, size, time of the last change.
Print = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Checked:
    """A checkpoint whose bytes are the manifest's. ``path``: what the engine is told to load."""

    path: Path
    described: checkpoint.Descriptor
    prints: tuple[Print, ...]

    def changed(self) -> str | None:
        """The first file that is not the one that was hashed, or None."""
        for name, known in zip(self.described.files, self.prints, strict=True):
            try:
                now = _print(os.stat(self.path / name))
            except OSError as e:
                return f"{name}: {e.strerror or e}"
            if now != known:
                return f"{name} was written to or replaced"
        return None


def check(
    root: Path | None, directory: str, *, version: int, digest: str, until: float, unwanted: threading.Event
) -> Checked:
    """Read and hash the checkpoint in ``directory``, a path relative to ``root``. Blocks; GateError says what is wrong.

    ``until``: monotonic seconds after which it gives up. ``unwanted``: set when nobody wants it any more.
    """
    folder = _folder(root, directory)
    described = _described(folder, version, digest)
    strange = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.endswith(checkpoint.WEIGHT_SUFFIXES) and entry.name not in described.files
    )
    if strange:
        raise _bad(f"{folder}: {strange[0]} is not in its {checkpoint.MANIFEST_FILE}, and an engine would load it")
    buckets: list[list[TensorEntry]] = [[] for _ in described.files]
    for entry in described.manifest.tensors:
        buckets[entry.bucket].append(entry)
    prints = tuple(
        _check_file(folder / name, tuple(entries), size, until, unwanted)
        for name, entries, size in zip(described.files, buckets, described.manifest.bucket_bytes, strict=True)
    )
    return Checked(folder, described, prints)


def _bad(message: str) -> GateError:
    return GateError(ErrorReason.CHECKPOINT_INVALID, message)


def _folder(root: Path | None, directory: str) -> Path:
    if root is None:
        raise GateError(
            ErrorReason.CHECKPOINT_MISSING,
            "this gate has no checkpoint volume: set spec.gate.checkpointVolume of the EnginePool",
        )
    relative = PurePosixPath(directory)
    if relative.is_absolute() or ".." in relative.parts:
        raise GateError(ErrorReason.INVALID, f"directory: {directory[:200]!r} leaves the checkpoint volume")
    folder = root / relative
    if not folder.is_dir():
        raise GateError(
            ErrorReason.CHECKPOINT_MISSING,
            f"{folder} is no directory here: write the checkpoint there, on the volume that the engines mount",
        )
    return folder


def _described(folder: Path, version: int, digest: str) -> checkpoint.Descriptor:
    marker, described_by = folder / checkpoint.MARKER_FILE, folder / checkpoint.MANIFEST_FILE
    for file in (described_by, marker):
        if not file.is_file():
            raise GateError(
                ErrorReason.CHECKPOINT_MISSING,
                f"{file} is missing: the checkpoint is not complete, or was not written by rlfleet.sender.checkpoint",
            )
    try:
        if described_by.stat().st_size > MAX_DESCRIPTOR_BYTES:
            raise _bad(f"{described_by} is larger than {MAX_DESCRIPTOR_BYTES} bytes")
        marked = marker.read_bytes()[:128].decode("ascii", "replace").strip()
        described = checkpoint.parse(described_by.read_bytes())
    except (OSError, ValueError) as e:
        raise _bad(f"{described_by} can not be read: {e}") from e
    found = (described.version, described.manifest.digest)
    if found != (version, digest) or marked != digest:
        raise GateError(
            ErrorReason.HASH_MISMATCH,
            f"{folder} holds version {described.version} with {described.manifest.digest} (marker: {marked[:80]}), "
            f"the order names version {version} with {digest}",
        )
    return described


def _check_file(
    path: Path, entries: tuple[TensorEntry, ...], data_bytes: int, until: float, unwanted: threading.Event
) -> Print:
    """Compare a file's header with the manifest and hash its data, tensor by tensor."""
    try:
        with path.open("rb") as file:
            before = _print(os.fstat(file.fileno()))
            start = _check_header(path, file, entries)
            if before[2] != start + data_bytes:
                raise _bad(f"{path} has {before[2]} bytes, its manifest says {start + data_bytes}")
            _hash(path, file, entries, until, unwanted)
            return before
    except OSError as e:
        raise _bad(f"{path} can not be read: {e.strerror or e}") from e


def _check_header(path: Path, file: BinaryIO, entries: tuple[TensorEntry, ...]) -> int:
    """The header says what the manifest says; the bytes before the data."""
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise _bad(f"{path} is no safetensors file")
    try:
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        found = {n: (h["dtype"], tuple(h["shape"]), tuple(h["data_offsets"])) for n, h in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _bad(f"{path} is no safetensors file: {e}") from e
    wanted = {t.name: (DTYPES[t.dtype][1], t.shape, (t.offset, t.offset + t.nbytes)) for t in entries}
    if found != wanted:
        odd = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
        raise _bad(f"{path}: tensor {odd[0]!r} is not what the manifest says")
    return 8 + size


def _hash(
    path: Path, file: BinaryIO, entries: tuple[TensorEntry, ...], until: float, unwanted: threading.Event
) -> None:
    hasher = TensorHasher(entries)
    while True:
        if unwanted.is_set():
            raise GateError(ErrorReason.OTHER_OPERATION, "given up: other work has this engine now")
        if time.monotonic() >= until:
            raise GateError(ErrorReason.DEADLINE_EXCEEDED, f"{path} was not hashed in time; raise stagingSeconds")
        piece = file.read(PIECE_BYTES)
        if not piece:
            return
        try:
            hasher.update(piece)
        except GateError as e:
            raise GateError(e.reason, f"{path}: {e.message}") from e


def _print(status: os.stat_result) -> Print:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
