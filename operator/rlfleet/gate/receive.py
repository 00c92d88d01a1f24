"""Receiving one bucket: bytes go straight from the socket into a file while every tensor is hashed.

Invariants:
- memory use does not depend on the bucket's size;
- a bucket counts only when it had exactly the announced length and every tensor had the manifest's hash; otherwise its
  file is deleted and the reason names the tensor;
- a newer attempt at the same bucket ends the older one, so a half-dead connection can not block a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

from aiohttp import StreamReader, web

from rlfleet.api.manifest import safetensors_header
from rlfleet.api.wire import ErrorReason
from rlfleet.gate.errors import GateError
from rlfleet.gate.hashing import TensorHasher
from rlfleet.gate.staging import Staging, StagingArea

#: Seconds without a byte after which a receive ends; the sender's own deadline is shorter or longer as it likes.
IDLE_SECONDS = 60.0
#: Seconds that a pushed bucket waits for the load which is to take it: the two are ordered at the same time.
LOAD_SECONDS = 15.0


async def receive_bucket(area: StagingArea, staging: Staging, index: int, request: web.Request) -> None:
    """Receive bucket ``index`` of ``staging`` from a request's body; GateError says what was wrong with it."""
    manifest = staging.manifest
    if manifest is None:
        raise GateError(ErrorReason.NOT_STAGED, "no manifest was received yet; PUT it before the buckets")
    if not 0 <= index < len(manifest.bucket_bytes):
        raise GateError(ErrorReason.NOT_FOUND, f"bucket {index} does not exist: there are {len(manifest.bucket_bytes)}")
    expected = manifest.bucket_bytes[index]
    if request.content_length is not None and request.content_length != expected:
        reason = ErrorReason.TOO_LARGE if request.content_length > expected else ErrorReason.INVALID
        raise GateError(reason, f"bucket {index} has {expected} bytes, the body has {request.content_length}")
    older = staging.receivers.get(index)
    if older is not None:
        older.cancel()
        await asyncio.gather(older, return_exceptions=True)
        if area.staging is not staging:
            # Whoever prepared anew has ended the receives that were there, and deletes their files just now.
            raise GateError(ErrorReason.NOT_STAGED, "the round was prepared anew meanwhile")
    receive = _pass_on if staging.is_streamed else _receive
    task = asyncio.create_task(receive(area, staging, index, request.content, expected))
    staging.receivers[index] = task
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()  # only has an effect when this handler itself was cancelled
        if staging.receivers.get(index) is task:
            del staging.receivers[index]
    if task.cancelled():
        raise GateError(ErrorReason.NOT_STAGED, f"receiving bucket {index} was ended by a newer order")
    task.result()


async def _receive(area: StagingArea, staging: Staging, index: int, body: StreamReader, expected: int) -> None:
    tensors = staging.buckets[index]
    # A bucket that is complete is only compared: the engine may be loading its file.
    path = None if index in staging.complete else area.incoming()
    try:
        with contextlib.ExitStack() as stack:
            handle = None if path is None else _create(path, stack)
            if handle is not None:
                _write(handle, safetensors_header(tensors))
            await _stream(body, TensorHasher(tensors), handle, index, expected)
        if path is not None:
            area.finish(staging, index, path)
            staging.error = None
    except GateError as e:
        staging.error = e.body()
        raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


async def _pass_on(area: StagingArea, staging: Staging, index: int, body: StreamReader, expected: int) -> None:
    """Mode Bucket: wait for the bucket's turn, receive and check it, and until the engine has loaded it."""
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await staging.opened.wait()
    except TimeoutError:
        raise GateError(ErrorReason.NOT_STAGED, f"bucket {index}: no load asked for it in {LOAD_SECONDS:g} s") from None
    stream = staging.stream
    assert stream is not None
    path = area.incoming()
    try:
        await stream.turn(index)
        with contextlib.ExitStack() as stack:
            handle = _create(path, stack)
            _write(handle, safetensors_header(staging.buckets[index]))
            await _stream(body, TensorHasher(staging.buckets[index]), handle, index, expected)
        area.place(staging, index, path)
        staging.error = None
        await stream.deliver(index)
    except GateError as e:
        staging.error = e.body()
        await stream.fail(GateError(ErrorReason.TRANSPORT_FAILED, f"bucket {index}: {e.message}"))
        raise
    except asyncio.CancelledError:
        await stream.fail(GateError(ErrorReason.TRANSPORT_FAILED, f"the push of bucket {index} was broken off"))
        raise
    finally:
        path.unlink(missing_ok=True)


def _create(path: Path, stack: contextlib.ExitStack) -> int:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    stack.callback(os.close, handle)
    return handle


async def _stream(body: StreamReader, hasher: TensorHasher, handle: int | None, index: int, expected: int) -> None:
    received = 0
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                chunk = await body.readany()
        except TimeoutError:
            raise GateError(
                ErrorReason.DEADLINE_EXCEEDED, f"bucket {index}: no byte for {IDLE_SECONDS:g} s after {received}"
            ) from None
        except (web.HTTPException, OSError, ConnectionError) as e:
            raise GateError(
                ErrorReason.INVALID, f"bucket {index}: the body broke off after {received} of {expected} bytes"
            ) from e
        if not chunk:
            break
        received += len(chunk)
        if received > expected:
            raise GateError(ErrorReason.TOO_LARGE, f"bucket {index} has {expected} bytes, the body goes on")
        hasher.update(chunk)
        if handle is not None:
            _write(handle, chunk)
    if received != expected:
        raise GateError(ErrorReason.INVALID, f"bucket {index}: {received} of {expected} bytes arrived")


def _write(handle: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GateError(
                ErrorReason.STAGING_TOO_LARGE,
                "the memory volume is full although the order's bytes should fit; raise spec.gate.stagingMiB",
            ) from e
        raise
