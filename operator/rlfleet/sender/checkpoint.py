"""Writing a checkpoint that engines may load: for pipelines without a sender (RLPipeline.spec.weights.checkpoint).

    manifest = checkpoint.write("/checkpoints/run-7/{version}", step, model.state_dict())
    client.sync(step, manifest_digest=manifest.digest)

Invariants: everything is written and flushed in a directory of another name, the marker last, and then renamed, so no
reader ever sees half of a checkpoint under its own name; what lies there already is never changed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlfleet.api import checkpoint
from rlfleet.api.manifest import Manifest, safetensors_header
from rlfleet.sender import cache, layout
from rlfleet.sender.errors import CheckpointExists

#: Bytes handed to the file system at a time.
_PIECE_BYTES = 64 * 2**20


def write(
    path_template: str,
    version: int,
    state_dict: Mapping[str, Any],
    *,
    bucket_bytes: int = cache.DEFAULT_BUCKET_BYTES,
) -> Manifest:
    """Write ``state_dict`` as version ``version`` and return its manifest, whose digest the round must name.

    ``path_template``: as in ``spec.weights.checkpoint.pathTemplate``: absolute, with ``{version}``. ``bucket_bytes``:
    size of a file; a larger tensor gets one of its own. All bytes are copied in memory once.

    The same bytes under the same version are left as they are. Raises InvalidStateDict, CheckpointExists when the path
    holds anything else, ValueError for a template without ``{version}``, and OSError.
    """
    if not path_template.startswith("/") or checkpoint.VERSION_FIELD not in path_template:
        raise ValueError(f"path_template {path_template!r} must be absolute and contain {checkpoint.VERSION_FIELD}")
    if isinstance(version, bool) or not isinstance(version, int) or not -1 <= version <= 2**53:
        raise ValueError(f"version must be an integer from -1 (the base) to 2**53, not {version!r}")
    weights = cache.build(
        version,
        layout.check(state_dict),
        state_dict.__getitem__,
        layout_changed=False,
        bucket_bytes=bucket_bytes,
        spare=cache.SpareBuffers(),
    )
    target = Path(checkpoint.directory(path_template, version))
    if target.exists():
        return _same(target, weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    making = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    making.mkdir()
    try:
        _fill(making, weights)
        try:
            # A directory is only replaced by rename when it is empty, and one with a checkpoint is not.
            making.rename(target)
        except OSError:
            if not target.exists():
                raise
            return _same(target, weights)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return weights.manifest


def _fill(folder: Path, weights: cache.Weights) -> None:
    count = len(weights.buckets)
    files = tuple(checkpoint.file_name(index, count) for index in range(count))
    for index, name in enumerate(files):
        _write(folder / name, safetensors_header(weights.manifest.bucket(index)), weights.view(index))
    described = checkpoint.Descriptor(version=weights.version, files=files, manifest=weights.manifest)
    _write(folder / checkpoint.MANIFEST_FILE, described.model_dump_json(by_alias=True).encode())
    # The files' names must be there before the marker says that they are.
    _sync_directory(folder)
    _write(folder / checkpoint.MARKER_FILE, f"{weights.digest}\n".encode())
    _sync_directory(folder)


def _same(target: Path, weights: cache.Weights) -> Manifest:
    """What lies there is a complete checkpoint of these bytes, or CheckpointExists."""
    try:
        described = checkpoint.parse((target / checkpoint.MANIFEST_FILE).read_bytes())
        marker = (target / checkpoint.MARKER_FILE).read_text().strip()
    except (OSError, ValueError) as e:
        raise CheckpointExists(f"{target} exists and is no complete checkpoint ({e}): remove it first") from e
    if (described.version, marker) != (weights.version, weights.digest):
        raise CheckpointExists(
            f"{target} holds version {described.version} with {marker[:19]}…, not version {weights.version} with "
            f"{weights.digest[:19]}…: a version is written once; publish other bytes under another version"
        )
    return described.manifest


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("xb") as file:
        for part in parts:
            view = memoryview(part)
            for at in range(0, len(view), _PIECE_BYTES):
                file.write(view[at : at + _PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
