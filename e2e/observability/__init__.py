"""Prometheus for tests, and the dashboards' source: nothing of this is in the wheel."""
