"""The sidecar in every engine pod: all that drives the engine's control endpoints (docs/reference/gate.md)."""
