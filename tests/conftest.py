"""Settings of all tests.

Property tests have no deadline, because a busy machine is no failure. The main thread starts without an event loop:
pytest-asyncio would otherwise ask for one before its first test, which makes one that nobody closes.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings

settings.register_profile("rlfleet", deadline=None)
settings.load_profile("rlfleet")

asyncio.set_event_loop(None)
