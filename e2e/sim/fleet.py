"""The trainer's side of the fleet: the weight sender and the sync client, behind the one call that the loop needs.

Invariant: a version counts as synced only when the client's round says so for exactly the bytes just published
(sender incarnation and manifest digest go with the request).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rlfleet.client import Client, ClientError
from rlfleet.sender import SenderError, WeightSender

from .device.ledger import Account, visible
from .loop import SyncError

#: What the trainer takes of each of its (simulated) GPUs for a step: more than is free beside an engine that is awake.
TRAIN_BYTES = 60 << 30


class Fleet:
    """Context manager that serves weights on ``host``:``port`` and syncs them as the named RLPipeline.

    ``base_timeout`` and ``timeout``: seconds the first sync (engines are still starting) and each later one may take.
    """

    def __init__(
        self,
        *,
        namespace: str,
        pipeline: str,
        host: str,
        port: int,
        pod_uid: str,
        kubeconfig: str | None,
        bucket_bytes: int,
        base_timeout: float,
        timeout: float,
    ) -> None:
        self._client = Client(namespace, pipeline, kubeconfig=kubeconfig)
        self._memory = Account(visible(os.environ), "trainer")
        self._sender = WeightSender(
            host, port, pod_uid=pod_uid, public_keys=self._client.public_keys, bucket_bytes=bucket_bytes
        )
        self._base_timeout = base_timeout
        self._timeout = timeout

    def __enter__(self) -> Fleet:
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._client.close()

    def publish(self, version: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Publish ``state`` and sync it into every engine. SyncError carries the round's own failure."""
        timeout = self._base_timeout if version < 0 else self._timeout
        began = time.monotonic()
        try:
            manifest = self._sender.publish(version, state, timeout=timeout)
            published = time.monotonic()
            result = self._client.sync(
                version,
                sender_incarnation=self._sender.incarnation,
                manifest_digest=manifest.digest,
                timeout=timeout,
            )
        except (SenderError, ClientError) as error:
            raise SyncError(f"version {version}: {type(error).__name__}: {error}") from error
        return {
            "round": result.round,
            "manifestDigest": manifest.digest,
            "publishMs": round((published - began) * 1000),
            "timings": dict(result.timings),
            "transports": dict(result.transports),
            "bytes": result.bytes,
        }

    @contextmanager
    def train_gpus(self, step: int) -> Iterator[None]:
        """GPUs that engines use too, for one step: the engines sleep, the trainer really takes the memory.

        DeviceOutOfMemory when an engine still has it.
        """
        with self._client.train_gpus(step, timeout=self._timeout):
            self._memory.add(TRAIN_BYTES)
            try:
                yield
            finally:
                self._memory.add(-TRAIN_BYTES)
