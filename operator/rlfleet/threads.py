"""Blocking work beside an event loop, in threads that never keep the process alive.

asyncio's own executor does: a process that ends waits for it, and a rendezvous or a driver may block for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


async def in_daemon(work: Callable[[], T], name: str) -> T:
    """Run ``work`` in a daemon thread and answer what it returns or raises. Cancelling does not stop the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(give: Callable[[], None]) -> None:
        if not done.done():
            give()

    def run() -> None:
        give: Callable[[], None]
        try:
            value = work()
        except BaseException as e:  # noqa: BLE001 handed to the waiter
            # Without its traceback, whose frames would keep alive whatever the work was about.
            error = e.with_traceback(None)
            give = lambda: done.set_exception(error)  # noqa: E731
        else:
            give = lambda: done.set_result(value)  # noqa: E731
        try:
            loop.call_soon_threadsafe(settle, give)
        except RuntimeError:
            log.info("%s ended after its event loop", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
