"""What a publish does once its tensors are named: admit, build, install.

Invariants: one publish at a time; a version is visible only when it is complete; a publish that fails leaves what was
visible as it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlfleet.api.manifest import Manifest
from rlfleet.sender import cache
from rlfleet.sender.errors import LayoutChanged, PublishTimeout, SenderClosed, VersionGoesBackwards
from rlfleet.sender.layout import Layout, difference
from rlfleet.sender.metrics import Metrics
from rlfleet.sender.slots import Slots

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Publisher:
    """The publishing side of one sender.

    ``bucket_bytes``: bytes per bucket. ``cuda``: remember the publisher's CUDA device, for broadcasts over NCCL.
    """

    def __init__(self, slots: Slots, metrics: Metrics, *, bucket_bytes: int, cuda: bool) -> None:
        self.bucket_bytes = bucket_bytes
        self._slots = slots
        self._metrics = metrics
        self._cuda = cuda
        self._publishing = threading.Lock()
        self._first: Layout | None = None
        self._closed = False

    def close(self) -> None:
        """Refuse every publish from now on; one that waits raises SenderClosed."""
        self._closed = True
        self._slots.close()

    @contextmanager
    def exclusively(self, version: int, timeout: float | None) -> Iterator[float | None]:
        """The block is the only publish; yields when to give up (monotonic seconds, None: never).

        ValueError for what is no version; PublishTimeout when another publish takes longer than ``timeout`` seconds.
        """
        if isinstance(version, bool) or not isinstance(version, int) or not -1 <= version <= 2**53:
            raise ValueError(f"version must be an integer from -1 (the base) to 2**53, not {version!r}")
        give_up = None if timeout is None else time.monotonic() + timeout
        if not self._publishing.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise PublishTimeout(f"version {version}: another publish has run for {timeout:g} s")
        try:
            yield give_up
        finally:
            self._publishing.release()

    def admit(self, version: int, layout: Layout, *, allow_rollback: bool, allow_layout_change: bool) -> bool:
        """Refuse what could not become visible, before a byte is copied; whether the layout is another than at first.

        Raises SenderClosed, VersionGoesBackwards, LayoutChanged.
        """
        if self._closed:
            raise SenderClosed("the sender was closed")
        newest = self._slots.newest()
        if newest is not None and version < newest.version and not allow_rollback:
            raise VersionGoesBackwards(
                f"version {version} is below version {newest.version}, which this sender holds; "
                "publish with allow_rollback=True if that is meant"
            )
        changed = None if self._first is None else difference(self._first, layout)
        if changed is not None and not allow_layout_change:
            raise LayoutChanged(
                f"version {version}: tensors differ from the first publish, and engines cannot take that over "
                f"({changed}). Restart the engines with a model of the new layout and publish with "
                "allow_layout_change=True"
            )
        return changed is not None

    def build(
        self, version: int, layout: Layout, fetch: Callable[[str], torch.Tensor], *, layout_changed: bool
    ) -> cache.Weights:
        """Copy all tensors into buckets (see ``cache.build``); nothing of it is visible yet."""
        return cache.build(
            version,
            layout,
            fetch,
            layout_changed=layout_changed,
            bucket_bytes=self.bucket_bytes,
            spare=self._slots.spare,
            cuda=self._cuda,
        )

    def install(self, weights: cache.Weights, layout: Layout, give_up: float | None) -> Manifest:
        """Make complete weights the newest, waiting for a round that holds what they replace until ``give_up``."""
        newest = self._slots.newest()
        if newest is not None and newest.version == weights.version:
            if newest.digest == weights.digest:
                self._slots.spare.give(weights.buckets)
                return newest.manifest
            log.warning(
                "version %d is published again with other bytes: it was %s and is %s now",
                weights.version,
                newest.digest,
                weights.digest,
            )
        if weights.nan_tensors:
            log.warning(
                "version %d contains NaN in %d of %d tensors, for instance %s",
                weights.version,
                len(weights.nan_tensors),
                len(weights.manifest.tensors),
                weights.nan_tensors[0],
            )
        try:
            self._slots.put(weights, give_up)
        except PublishTimeout:
            self._slots.spare.give(weights.buckets)
            raise
        self._first = self._first or layout
        self._metrics.published(weights)
        log.info(
            "version %d is ready: %s, %d bytes in %d buckets, %d ms",
            weights.version,
            weights.digest,
            weights.manifest.total_bytes,
            len(weights.buckets),
            weights.build_ms,
        )
        return weights.manifest
