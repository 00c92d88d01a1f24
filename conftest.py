"""Fixtures that tests/ and e2e/scenarios share: defined once, so that a full run starts one cluster."""

pytest_plugins = ["e2e.cluster.fixtures"]
