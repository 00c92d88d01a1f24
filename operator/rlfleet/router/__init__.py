"""Router adapters: add and remove an engine's URL, and know when it is really in or out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rlfleet.api.wire import RouterType
from rlfleet.router.adapter import Entry, RouterAdapter, normal
from rlfleet.router.sglang_router import SGLangRouterAdapter
from rlfleet.router.smg import SMGAdapter
from rlfleet.router.vllm_router import VLLMRouterAdapter

__all__ = [
    "Entry",
    "RouterAdapter",
    "SGLangRouterAdapter",
    "SMGAdapter",
    "VLLMRouterAdapter",
    "make_router",
    "normal",
]

_ADAPTERS: Final[Mapping[str, Callable[[str, str | None], RouterAdapter]]] = {
    RouterType.SGLANG_ROUTER: SGLangRouterAdapter,
    RouterType.SMG: SMGAdapter,
    RouterType.VLLM_ROUTER: VLLMRouterAdapter,
}


def make_router(kind: str, url: str, metrics: str | None = None) -> RouterAdapter:
    """The adapter for a router type as EnginePool.spec.routers[].type spells it; ValueError for an unknown one.

    ``metrics``: base URL of the router's metrics, where its circuit breakers are told.
    """
    if kind not in _ADAPTERS:
        raise ValueError(f"router type {kind!r} is not known (known: {', '.join(RouterType)})")
    return _ADAPTERS[kind](url, metrics)
