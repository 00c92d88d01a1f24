"""The sidecar in every engine pod: the only thing that drives the engine's control endpoints (docs/reference/gate.md)."""
