"""Router adapters: add and remove an engine's URL, and know when it is really in or out."""

from __future__ import annotations

from rlfleet.api.wire import RouterType
from rlfleet.router.adapter import RouterAdapter, normal
from rlfleet.router.sglang_router import SGLangRouterAdapter

__all__ = ["RouterAdapter", "SGLangRouterAdapter", "make_router", "normal"]


def make_router(kind: str, url: str) -> RouterAdapter:
    """The adapter for a router type as EnginePool.spec.routers[].type spells it; ValueError for an unknown one."""
    if kind == RouterType.SGLANG_ROUTER:
        return SGLangRouterAdapter(url)
    raise ValueError(f"router type {kind!r} is not known (known: {', '.join(RouterType)})")
