"""Getting a checkpoint ready for a load, which may take minutes while the engine serves.

Invariant: nobody waits for a checkpoint that nobody wants any more: hashing ends when other work fences the gate, when
its budget is spent, and with the gate itself.
"""

from __future__ import annotations

import asyncio
import threading
import time

from rlfleet.api.wire import PrepareOrder
from rlfleet.gate import checkpoint
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import GateError
from rlfleet.gate.staging import Staging

#: Seconds for reading and hashing where the order sets no budget.
CHECKPOINT_SECONDS = 600.0
#: Seconds between two looks at whether other work has fenced the gate.
LOOK_SECONDS = 0.2


async def read_checkpoint(ctx: GateContext, operation: str, staging: Staging, order: PrepareOrder) -> None:
    """Hash the checkpoint of ``operation``, unless that was done and its files are the same; link it for the engine."""
    if staging.checked is not None and await asyncio.to_thread(staging.checked.changed) is None:
        return
    staging.checked = None
    until = time.monotonic() + (order.budget_seconds or CHECKPOINT_SECONDS)
    unwanted = threading.Event()
    reading = asyncio.ensure_future(
        asyncio.to_thread(
            checkpoint.check,
            ctx.config.checkpoint_dir,
            order.directory or "",
            version=order.version,
            digest=order.manifest_digest,
            until=until,
            unwanted=unwanted,
        )
    )
    try:
        while not (await asyncio.wait({reading}, timeout=LOOK_SECONDS))[0]:
            if ctx.store.fence.operation != operation:
                unwanted.set()
        staging.checked = reading.result()
        ctx.area.point_to(staging.checked.path)
        staging.error = None
    except GateError as e:
        staging.error = e.body()
        raise
    finally:
        unwanted.set()
