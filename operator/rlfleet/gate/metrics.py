"""Prometheus metrics of one gate. Labels are bounded: kinds and outcomes only."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GateMetrics:
    """All metrics, in a registry of their own so that two gates in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operations = Counter(
            "rlfleet_gate_operations", "Operations ended, by kind and state", ["kind", "state"], registry=self.registry
        )
        self.seconds = Histogram(
            "rlfleet_gate_operation_seconds",
            "Duration of operations",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.refusals = Counter(
            "rlfleet_gate_refusals", "Requests refused, by reason", ["reason"], registry=self.registry
        )
        self.staged_bytes = Gauge(
            "rlfleet_gate_staged_bytes", "Checked bytes in the memory volume", registry=self.registry
        )
        self.received_bytes = Counter(
            "rlfleet_gate_received_bytes", "Bytes of buckets received and checked", registry=self.registry
        )
        self.fence = Gauge("rlfleet_gate_fence_generation", "Fence generation held", registry=self.registry)
        self.paused = Gauge(
            "rlfleet_gate_engine_paused", "1 paused, 0 not paused, -1 unknown; as last observed", registry=self.registry
        )
        self.paused.set(-1)
        self.uncertain = Gauge(
            "rlfleet_gate_uncertain", "1 while an operation has no recorded end", registry=self.registry
        )

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
