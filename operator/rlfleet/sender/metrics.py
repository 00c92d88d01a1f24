"""The sender's metrics (GET /metrics; the table is api/metrics.py).

Invariant: label values are few and fixed, never a version or a tensor's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlfleet.api import wire
from rlfleet.api.metrics import SENDER
from rlfleet.instruments import Instruments
from rlfleet.sender.cache import Weights


class Metrics:
    """One registry per sender, so that several can live in a process."""

    def __init__(self) -> None:
        made = Instruments(SENDER)
        self.render = made.render
        self._newest: int | None = None
        self._version = made.gauge("rlfleet_sender_version")
        self._version.set(math.nan)
        self._bytes = made.gauge("rlfleet_sender_weights_bytes")
        self._nan = made.gauge("rlfleet_sender_nan_tensors")
        self._publishes = made.counter("rlfleet_sender_publishes_total")
        self._build = made.counter("rlfleet_sender_build_seconds_total")
        self._operations = made.counter("rlfleet_sender_operations_total")
        self._moved = made.counter("rlfleet_sender_moved_bytes_total")
        self._staleness = made.histogram("rlfleet_sender_sample_staleness_versions")

    def published(self, weights: Weights) -> None:
        """Count a publish."""
        self._newest = weights.version
        self._version.set(weights.version)
        self._bytes.set(weights.manifest.total_bytes)
        self._nan.set(len(weights.nan_tensors))
        self._publishes.inc()
        self._build.inc(weights.build_ms / 1000)

    def operation_ended(self, record: wire.OperationRecord) -> None:
        """Count an operation's end."""
        self._operations.labels(record.kind, record.state.value).inc()
        self._moved.labels(record.kind).inc(int(record.result.get("bytes", 0)))

    def sample(self, meta_info: Mapping[str, Any]) -> int | None:
        """Count a sample's staleness in versions and return it; None: its engine reported no version of ours."""
        spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version")}]
        try:
            oldest = min(int(span["version"]) for span in spans)
        except (KeyError, TypeError, ValueError):
            return None  # an engine without spans, or one that nobody has given a version yet ("default")
        if self._newest is None:
            return None
        stale = max(0, self._newest - oldest)
        self._staleness.observe(stale)
        return stale
