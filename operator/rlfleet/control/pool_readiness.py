"""Writes the readiness of engine pods in pools whose router it is.

Invariant: one write per engine that changes sides, none otherwise; a write that fails is planned anew from what is
there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlfleet.api import labels
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.context import Context
from rlfleet.control.pool_pods import Outcome
from rlfleet.kube.client import Obj
from rlfleet.kube.errors import ApiError, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.readiness import Readiness, changes
from rlfleet.router.readiness import pod_condition

log = logging.getLogger(__name__)


async def write_readiness(ctx: Context, pool: Obj, rows: Sequence[Row], out: Outcome, *, operating: bool) -> None:
    """Apply what ``plan.readiness`` finds: all withdrawals, and when they are done all admissions."""
    planned = changes(rows, operating=operating)
    if not planned:
        return
    namespace = pool["metadata"]["namespace"]
    kube = ctx.kube.at(Priority.SCALE, field_manager=labels.READINESS_MANAGER)

    async def one(wanted: Readiness) -> bool:
        body = pod_condition(namespace, wanted, rfc3339(ctx.now_ms()))
        try:
            written = await kube.apply(
                PODS, namespace, wanted.name, body, timeout=ctx.settings.api_timeout, subresource="status"
            )
        except NotFound:
            return True  # no pod, no endpoint
        except ApiError as e:
            out.retry = True
            log.warning("readiness of pod %s/%s: %s", namespace, wanted.name, e)
            return False
        ctx.pods.observe(written)
        ctx.metrics.write("pods/status")
        return True

    withdrawn = await asyncio.gather(*(one(w) for w in planned if not w.current))
    if all(withdrawn):
        await asyncio.gather(*(one(w) for w in planned if w.current))
