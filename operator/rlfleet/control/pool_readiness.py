"""Writes the readiness, or the label, of engine pods in pools whose router it is.

Invariant: one write per engine that changes sides, none otherwise; a write that fails is planned anew from what is
there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rlfleet.api import labels
from rlfleet.api.timestamps import rfc3339
from rlfleet.control.context import Context
from rlfleet.control.pool_pods import Outcome
from rlfleet.kube.client import Obj
from rlfleet.kube.errors import ApiError, Conflict, Invalid, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.readiness import Readiness, changes, label_changes
from rlfleet.plan.template import by_label
from rlfleet.router.readiness import pod_condition

log = logging.getLogger(__name__)

Write = Callable[[Readiness], Awaitable[Obj]]


async def write_readiness(ctx: Context, pool: Obj, rows: Sequence[Row], out: Outcome, *, operating: bool) -> None:
    """Apply what ``plan.readiness`` finds: all withdrawals, and when they are done all admissions."""
    namespace = pool["metadata"]["namespace"]
    kube = ctx.kube.at(Priority.SCALE, field_manager=labels.READINESS_MANAGER)
    seconds = ctx.settings.api_timeout

    async def condition(wanted: Readiness) -> Obj:
        body = pod_condition(namespace, wanted, rfc3339(ctx.now_ms()))
        return await kube.apply(PODS, namespace, wanted.name, body, timeout=seconds, subresource="status")

    async def label(wanted: Readiness) -> Obj:
        marks = {labels.SERVING: "true" if wanted.current else None}
        return await kube.label(PODS, namespace, wanted.name, uid=wanted.uid, labels=marks, timeout=seconds)

    async def one(wanted: Readiness, write: Write, resource: str) -> bool:
        try:
            written = await write(wanted)
        except NotFound:
            return True  # no pod, no endpoint
        except ApiError as e:
            out.retry = True
            # A pod of another UID is there: the view has not shown it yet.
            if not isinstance(e, Conflict | Invalid):
                log.warning("readiness of pod %s/%s: %s", namespace, wanted.name, e)
            return False
        ctx.pods.observe(written)
        ctx.metrics.write(resource)
        return True

    async def each(planned: Sequence[Readiness], write: Write, resource: str) -> None:
        withdrawn = await asyncio.gather(*(one(w, write, resource) for w in planned if not w.current))
        if all(withdrawn):
            await asyncio.gather(*(one(w, write, resource) for w in planned if w.current))

    await each(changes(rows, operating=operating), condition, "pods/status")
    await each(label_changes(rows, operating=operating, by_label=by_label(pool)), label, "pods")
