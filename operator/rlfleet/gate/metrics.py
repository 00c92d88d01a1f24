"""Prometheus metrics of one gate (the table is api/metrics.py). Labels are bounded: kinds and outcomes only."""

from __future__ import annotations

import math

from rlfleet import __version__
from rlfleet.api.metrics import GATE
from rlfleet.instruments import Instruments


class GateMetrics:
    """All metrics, in a registry of their own so that two gates in one process do not collide."""

    def __init__(self) -> None:
        made = Instruments(GATE)
        self.render = made.render
        made.gauge("rlfleet_gate_build_info").labels(__version__).set(1)
        self.operations = made.counter("rlfleet_gate_operations_total")
        self.seconds = made.histogram("rlfleet_gate_operation_seconds")
        self.refusals = made.counter("rlfleet_gate_refusals_total")
        self.staged_bytes = made.gauge("rlfleet_gate_staged_bytes")
        self.received_bytes = made.counter("rlfleet_gate_received_bytes_total")
        self.fence = made.gauge("rlfleet_gate_fence_generation")
        self.paused = made.gauge("rlfleet_gate_engine_paused")
        self.paused.set(-1)
        self.uncertain = made.gauge("rlfleet_gate_uncertain")
        self.shunned = made.gauge("rlfleet_gate_shunning_routers")
        self._version = made.gauge("rlfleet_gate_engine_version")
        self.holds(None)

    def holds(self, version: int | None) -> None:
        """The version that the engine is proven to hold; None: none is proven."""
        self._version.set(math.nan if version is None else version)
