"""One condition of one object, written when it says something new.

Invariant: the write carries the resourceVersion of what was read; an object that moved on meanwhile is left as it is,
and whoever looks next says what is true then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlfleet.api.condition_list import set_condition
from rlfleet.api.conditions import ConditionStatus, ConditionType, Reason
from rlfleet.api.timestamps import rfc3339
from rlfleet.kube.errors import Conflict, NotFound
from rlfleet.kube.resources import Resource

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.kube.client import KubeClient

Obj = dict[str, Any]


def with_condition(
    ctx: Context, obj: Obj, kind: ConditionType, status: ConditionStatus, reason: Reason, message: str
) -> list[Obj] | None:
    """The object's conditions with this one set; None: that is what they say already."""
    meta, known = obj["metadata"], (obj.get("status") or {}).get("conditions") or []
    generation = int(meta.get("generation") or 0)
    wanted = set_condition(known, kind, status, reason, message, generation, rfc3339(ctx.now_ms()))
    return None if wanted == known else wanted


async def say(
    ctx: Context,
    kube: KubeClient,
    res: Resource,
    obj: Obj,
    kind: ConditionType,
    status: ConditionStatus,
    reason: Reason,
    message: str,
    **more: Any,
) -> None:
    """Write this condition of an object, and ``more`` status fields with it, if it says something new."""
    conditions = with_condition(ctx, obj, kind, status, reason, message)
    if conditions is None:
        return
    meta = obj["metadata"]
    try:
        await kube.patch_status(
            res,
            meta["namespace"],
            meta["name"],
            resource_version=meta["resourceVersion"],
            status={**more, "conditions": conditions},
            timeout=ctx.settings.api_timeout,
        )
    except (Conflict, NotFound):
        return  # it moved on; the next look says what is true then
    ctx.metrics.write(res.plural)
