"""Settings of all tests.

Property tests have no deadline, because a busy machine is no failure. The main thread starts without an event loop:
pytest-asyncio would otherwise ask for one before its first test, which makes one that nobody closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.starting import starting

settings.register_profile("rlfleet", deadline=None)
settings.load_profile("rlfleet")

asyncio.set_event_loop(None)


@pytest.fixture(scope="session", autouse=True)
def starter() -> Iterator[None]:
    """What ``tests.starting`` has started ends with the test run."""
    with starting():
        yield
