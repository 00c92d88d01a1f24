"""The sender's metrics (GET /metrics).

Invariant: label values are few and fixed, never a version or a tensor's name.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from rlfleet.api import wire
from rlfleet.sender.cache import Weights


class Metrics:
    """One registry per sender, so that several can live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._version = Gauge(
            "rlfleet_sender_version", "Newest complete version that the sender holds.", registry=self.registry
        )
        self._bytes = Gauge("rlfleet_sender_weights_bytes", "Bytes of the newest weights.", registry=self.registry)
        self._nan = Gauge(
            "rlfleet_sender_nan_tensors", "Tensors of the newest weights that contain NaN.", registry=self.registry
        )
        self._publishes = Counter("rlfleet_sender_publishes", "Versions published.", registry=self.registry)
        self._build = Counter(
            "rlfleet_sender_build_seconds", "Seconds spent copying and hashing weights.", registry=self.registry
        )
        self._operations = Counter(
            "rlfleet_sender_operations", "Operations that ended.", ["kind", "state"], registry=self.registry
        )
        self._moved = Counter(
            "rlfleet_sender_moved_bytes",
            "Bytes that gates acknowledged (Push) or that were broadcast once to all (Broadcast).",
            ["kind"],
            registry=self.registry,
        )

    def published(self, weights: Weights) -> None:
        """Count a publish."""
        self._version.set(weights.version)
        self._bytes.set(weights.manifest.total_bytes)
        self._nan.set(len(weights.nan_tensors))
        self._publishes.inc()
        self._build.inc(weights.build_ms / 1000)

    def operation_ended(self, record: wire.OperationRecord) -> None:
        """Count an operation's end."""
        self._operations.labels(record.kind, record.state.value).inc()
        self._moved.labels(record.kind).inc(int(record.result.get("bytes", 0)))
