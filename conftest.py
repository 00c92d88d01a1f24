"""Fixtures that tests/ and e2e/scenarios share: defined once, so that a full run starts one cluster."""

import asyncio

pytest_plugins = ["e2e.cluster.fixtures"]

# pytest-asyncio asks for "the current loop" around each test; without this Python makes one that nobody ever closes,
# and a run whose last test is asynchronous ends with a warning (an error here) about it.
asyncio.set_event_loop(None)
