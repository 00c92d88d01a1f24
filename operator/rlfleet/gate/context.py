"""What every operation of a gate works with."""

from __future__ import annotations

from dataclasses import dataclass

from rlfleet.devices import Devices
from rlfleet.gate.config import GateConfig
from rlfleet.gate.links import EngineLink, Routers
from rlfleet.gate.metrics import GateMetrics
from rlfleet.gate.staging import StagingArea
from rlfleet.gate.store import Store


@dataclass(frozen=True, slots=True)
class GateContext:
    """The gate's durable store, memory volume, neighbours, devices and metrics."""

    config: GateConfig
    store: Store
    area: StagingArea
    engine: EngineLink
    routers: Routers
    devices: Devices
    metrics: GateMetrics
