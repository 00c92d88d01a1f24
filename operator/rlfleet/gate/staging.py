"""Bytes received for one round, in the pod's memory volume, and the directory that the engine loads.

Invariants:
- a file in the load directory is complete and every tensor in it had the manifest's hash when it was moved there, so
  the directory never shows the engine a byte that was not checked;
- file names are made from indexes and counts only; no text from a request becomes part of a path;
- one round's bytes at a time: what an earlier round staged is deleted before room for the next is promised;
- with staging Bucket there is at most one bucket, and it is deleted before the next may come.

Files in memory survive a restart of the gate (the volume belongs to the pod). What was complete is found again; what
was being received is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfleet.api.manifest import Manifest, TensorEntry, safetensors_header
from rlfleet.api.wire import ErrorBody, ErrorReason, PrepareOrder, StagedReport, StagingMode, Transport
from rlfleet.gate.checkpoint import Checked
from rlfleet.gate.errors import GateError
from rlfleet.gate.stream import BucketStream

#: Headers, directories and page rounding beside the tensors' bytes.
MARGIN_BYTES = 2**20
#: Name of the load directory. SGLang calls its model by the path that it loaded last, so the path must not change.
CURRENT = "current"
_RECEIVING = "receiving"
_MANIFEST = "manifest.json"


@dataclass(slots=True)
class Staging:
    """What one Prepare expects, and what of it is here. ``complete`` holds the indexes of finished buckets."""

    operation: str
    version: int
    manifest_digest: str
    transport: Transport
    total_bytes: int
    sender: str | None = None
    """The sender process whose pushes are taken; None: any that has a token."""
    directory: str | None = None
    """Checkpoint only: where it lies, below the checkpoint directory."""
    checked: Checked | None = None
    """Checkpoint only: what was read and hashed there. It is not durable: a restarted gate reads again."""
    manifest: Manifest | None = None
    complete: set[int] = field(default_factory=set)
    error: ErrorBody | None = None
    receivers: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    buckets: list[tuple[TensorEntry, ...]] = field(default_factory=list)
    mode: StagingMode = StagingMode.FULL
    stream: BucketStream | None = None
    """Mode Bucket, while a load runs: where the push and the load meet."""
    generation: int = 0
    """Of the load that the stream feeds."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is a stream."""

    def take(self, manifest: Manifest) -> None:
        """Remember the manifest, with its tensors grouped once: looking them up per bucket would be quadratic."""
        groups: list[list[TensorEntry]] = [[] for _ in manifest.bucket_bytes]
        for tensor in manifest.tensors:
            groups[tensor.bucket].append(tensor)
        self.buckets = [tuple(group) for group in groups]
        self.manifest = manifest

    @classmethod
    def of(cls, operation: str, order: PrepareOrder) -> Staging:
        """What a Prepare order expects."""
        return cls(
            operation,
            order.version,
            order.manifest_digest,
            order.transport,
            order.total_bytes,
            sender=order.sender_incarnation,
            mode=order.staging,
            directory=order.directory,
        )

    @property
    def is_streamed(self) -> bool:
        """Bytes pass through while the engine loads; only the manifest is staged."""
        return self.transport is Transport.SERIALIZED and self.mode is StagingMode.BUCKET

    def open_stream(self, generation: int) -> BucketStream:
        """A load begins under this generation: let buckets come, from the first one."""
        self.stream, self.generation = BucketStream(len(self.buckets)), generation
        self.opened.set()
        return self.stream

    def close_stream(self) -> None:
        """The load has ended: what is pushed now waits for another one."""
        self.stream = None
        self.opened.clear()

    def same(self, other: Staging) -> bool:
        """Whether both expect the same bytes for the same work, so that what is here can be kept."""
        return (self.operation, self.manifest_digest, self.transport, self.total_bytes, self.mode, self.directory) == (
            other.operation,
            other.manifest_digest,
            other.transport,
            other.total_bytes,
            other.mode,
            other.directory,
        )

    @property
    def received_bytes(self) -> int:
        """Bytes of the buckets that are complete, or of the checkpoint that was hashed."""
        if self.checked is not None:
            return self.checked.described.manifest.total_bytes
        return 0 if self.manifest is None else sum(self.manifest.bucket_bytes[i] for i in self.complete)

    @property
    def is_complete(self) -> bool:
        """Everything that a load needs is here and checked."""
        if self.transport is Transport.CHECKPOINT:
            return self.checked is not None
        if self.manifest is None:
            return False
        if self.transport is Transport.BROADCAST or self.is_streamed:
            return True
        return len(self.complete) == len(self.manifest.bucket_bytes)

    def report(self) -> StagedReport:
        """For the gate's status."""
        return StagedReport(
            operation=self.operation,
            version=self.version,
            manifest_digest=self.manifest_digest,
            transport=self.transport,
            manifest_received=self.manifest is not None or self.checked is not None,
            received_bytes=self.received_bytes,
            total_bytes=self.total_bytes or self.received_bytes,
            staging=self.mode,
            complete=self.is_complete,
            error=self.error,
        )

    def durable(self) -> dict[str, Any]:
        """What the store remembers of it."""
        return {
            "operation": self.operation,
            "version": self.version,
            "manifestDigest": self.manifest_digest,
            "transport": self.transport.value,
            "totalBytes": self.total_bytes,
            "sender": self.sender,
            "staging": self.mode.value,
            "directory": self.directory,
        }


class StagingArea:
    """The memory volume: reserving, receiving files, handing the directory to the engine, deleting."""

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        self._root = root
        self.capacity_bytes = capacity_bytes
        self.usable_bytes = max(0, capacity_bytes - MARGIN_BYTES)
        self.staging: Staging | None = None
        self._sequence = 0
        root.mkdir(parents=True, exist_ok=True)

    @property
    def directory(self) -> Path:
        """The directory that the engine loads."""
        return self._root / CURRENT

    def recover(self, durable: dict[str, Any] | None) -> None:
        """After a restart: find complete files again, delete everything else."""
        self._delete(self._root / _RECEIVING)
        if durable is None:
            self._wipe()
            return
        staging = Staging(
            str(durable["operation"]),
            int(durable["version"]),
            str(durable["manifestDigest"]),
            Transport(durable["transport"]),
            int(durable["totalBytes"]),
            sender=durable.get("sender"),
            mode=StagingMode(durable.get("staging") or StagingMode.FULL),
            directory=durable.get("directory"),
        )
        try:
            manifest = Manifest.model_validate_json((self._root / _MANIFEST).read_bytes())
        except (OSError, ValueError):
            manifest = None  # not received yet, or cut short: the sender pushes it again
        if manifest is None or manifest.digest != staging.manifest_digest:
            self._wipe()
        else:
            staging.take(manifest)
            if staging.is_streamed:
                self.drop_loaded()
            for index, bucket in enumerate(staging.buckets):
                header = len(safetensors_header(bucket))
                with contextlib.suppress(FileNotFoundError):
                    if self._final(index, manifest).stat().st_size == header + manifest.bucket_bytes[index]:
                        staging.complete.add(index)
        self._make_directories()
        self.staging = staging

    def _make_directories(self) -> None:
        for name in (CURRENT, _RECEIVING):
            (self._root / name).mkdir(parents=True, exist_ok=True)

    async def prepare(self, staging: Staging) -> None:
        """Expect these bytes; refuse what does not fit. Keeps what is here only when it is the same work."""
        if self.staging is not None and self.staging.same(staging):
            self.staging.error = None
            self.staging.sender = staging.sender
            return
        await self.discard()
        whole = staging.transport is Transport.SERIALIZED and not staging.is_streamed
        if whole and staging.total_bytes > self.usable_bytes:
            raise GateError(
                ErrorReason.STAGING_TOO_LARGE,
                f"{staging.total_bytes} bytes do not fit: {self.usable_bytes} may be staged here; raise "
                "spec.gate.stagingMiB and the gate's memory limit, or use spec.transport.staging Bucket",
            )
        self._make_directories()
        self.staging = staging

    async def discard(self) -> None:
        """End every receive and delete all staged bytes."""
        staging, self.staging = self.staging, None
        if staging is not None:
            tasks = list(staging.receivers.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._wipe)

    def accept_manifest(self, staging: Staging, manifest: Manifest) -> None:
        """Take the manifest of the expected digest; GateError when it describes other bytes."""
        if staging.transport is Transport.CHECKPOINT:
            raise GateError(ErrorReason.NOT_STAGED, "a checkpoint is read where it lies, nothing is pushed")
        if manifest.digest != staging.manifest_digest:
            raise GateError(
                ErrorReason.HASH_MISMATCH, f"manifest {manifest.digest} is not the expected {staging.manifest_digest}"
            )
        if manifest.total_bytes != staging.total_bytes:
            raise GateError(
                ErrorReason.INVALID,
                f"manifest has {manifest.total_bytes} bytes, the Prepare order announced {staging.total_bytes}",
            )
        if staging.manifest is not None:
            if manifest.bucket_bytes != staging.manifest.bucket_bytes or manifest.tensors != staging.manifest.tensors:
                # Same policy, cut into other buckets: what is here does not fit the new cut.
                raise GateError(
                    ErrorReason.OPERATION_CONFLICT, "a manifest with other buckets was received already; Prepare again"
                )
            return
        staging.take(manifest)
        if staging.is_streamed:
            self._refuse_large_bucket(staging)
        headers = sum(len(safetensors_header(bucket)) for bucket in staging.buckets)
        if (
            not staging.is_streamed
            and staging.transport is Transport.SERIALIZED
            and staging.total_bytes + headers > self.capacity_bytes
        ):
            staging.manifest = None
            raise GateError(
                ErrorReason.STAGING_TOO_LARGE,
                f"{staging.total_bytes} bytes and {headers} bytes of headers do not fit into {self.capacity_bytes}; "
                "raise spec.gate.stagingMiB and the gate's memory limit",
            )
        temporary = self._root / (_MANIFEST + ".part")
        temporary.write_bytes(manifest.model_dump_json(by_alias=True).encode())
        temporary.replace(self._root / _MANIFEST)

    def _refuse_large_bucket(self, staging: Staging) -> None:
        for index, bucket in enumerate(staging.buckets):
            needed = sum(t.nbytes for t in bucket) + len(safetensors_header(bucket))
            if needed > self.capacity_bytes:
                staging.manifest = None
                what = f"tensor {bucket[0].name!r} alone" if len(bucket) == 1 else f"bucket {index}"
                raise GateError(
                    ErrorReason.STAGING_TOO_LARGE,
                    f"{what} needs {needed} bytes of the memory volume, which has {self.capacity_bytes}; raise "
                    "spec.gate.stagingMiB and the gate's memory limit, or lower spec.transport.bucketMiB",
                )

    def drop_loaded(self) -> None:
        """Delete what the engine was given to load, so that the next bucket has room."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def place(self, staging: Staging, index: int, path: Path) -> None:
        """Move one checked bucket to where the engine loads it, by itself."""
        assert staging.manifest is not None
        path.replace(self._final(index, staging.manifest))

    def incoming(self) -> Path:
        """A new name for a file that is being received."""
        self._sequence += 1
        return self._root / _RECEIVING / f"{self._sequence}.part"

    def finish(self, staging: Staging, index: int, path: Path) -> None:
        """Move a checked file to where the engine loads it."""
        assert staging.manifest is not None
        self.place(staging, index, path)
        staging.complete.add(index)

    def _final(self, index: int, manifest: Manifest) -> Path:
        count = len(manifest.bucket_bytes)
        return self.directory / f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def _wipe(self) -> None:
        for name in (CURRENT, _RECEIVING):
            self._delete(self._root / name)
        for name in (_MANIFEST, _MANIFEST + ".part"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / name)

    def point_to(self, folder: Path) -> None:
        """Have the load directory be ``folder``: an engine calls its model by the path, so that stays the same."""
        self._delete(self.directory)
        self.directory.symlink_to(folder, target_is_directory=True)

    @staticmethod
    def _delete(path: Path) -> None:
        if path.is_symlink():
            path.unlink()
            return
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
