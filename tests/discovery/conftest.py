"""Fixtures of worker discovery's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.discovery.kit import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    one = Site()
    await one.server.start()
    yield one
    await one.server.stop()
