"""Refused tries to move a round are told: a row in its status, an Event, a counter, a log line.

Invariant: recording a refusal changes nothing but the list of tries, under the resourceVersion that was read, so even a
deposed operator may do it (decision 0017). It is tried, never insisted on: whoever was refused stops in any case.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.kube.errors import ApiError
from rlfleet.kube.resources import SYNCROUNDS
from rlfleet.plan.attempts import Presented, Rejected, append, row

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.kube.client import KubeClient

log = logging.getLogger(__name__)

#: Seconds for one call: a refusal is not worth waiting for.
SECONDS = 3.0
#: Writes tried: the owner may be writing at the same time.
TRIES = 3


async def record_refusal(
    ctx: Context, kube: KubeClient, obj: dict[str, Any], asked: Presented, refused: Rejected, why: str
) -> None:
    """Tell that ``asked`` was refused. ``obj``: the round as last read, or its pipeline where the round is gone."""
    meta = obj["metadata"]
    reason = Reason.parse(refused.reason.value)
    ctx.metrics.round_refused(reason.value)
    ctx.events.record(obj, "Warning", reason.value, f"{asked.op.value} refused: {why}", action=asked.op.value)
    log.warning(
        "%s refused: %s: %s",
        asked.op.value,
        reason.value,
        why,
        extra={"round": meta["name"], "roundUID": asked.round_uid, "generation": asked.generation},
    )
    if meta.get("uid") != asked.round_uid:
        return
    entry = row(asked, refused, rfc3339(ctx.now_ms()))
    for _ in range(TRIES):
        try:
            live = await kube.get(SYNCROUNDS, meta["namespace"], meta["name"], timeout=SECONDS)
            if live["metadata"]["uid"] != asked.round_uid:
                return
            rows = (live.get("status") or {}).get("attempts") or []
            wanted = append(rows, [entry])
            if wanted == rows:
                return
            await kube.patch_status(
                SYNCROUNDS,
                meta["namespace"],
                meta["name"],
                resource_version=live["metadata"]["resourceVersion"],
                status={"attempts": wanted},
                timeout=SECONDS,
            )
            return
        except ApiError as e:
            # The log line and the counter have said it. (NotLeader is no ApiError: it ends the reconcile, as it must.)
            log.info("refusal not recorded: %s", e, extra={"round": meta["name"]})
