"""Router adapters: add and remove an engine's URL, and know when it is really in or out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rlfleet.api.wire import RouterType
from rlfleet.router.adapter import Entry, Key, RouterAdapter, no_key, normal, usable_key
from rlfleet.router.sglang_router import SGLangRouterAdapter
from rlfleet.router.smg import SMGAdapter
from rlfleet.router.vllm_router import VLLMRouterAdapter

__all__ = [
    "Entry",
    "Key",
    "RouterAdapter",
    "SGLangRouterAdapter",
    "SMGAdapter",
    "VLLMRouterAdapter",
    "make_router",
    "no_key",
    "normal",
    "usable_key",
]

_ADAPTERS: Final[Mapping[str, Callable[[str, str | None, Key], RouterAdapter]]] = {
    RouterType.SGLANG_ROUTER: SGLangRouterAdapter,
    RouterType.SMG: SMGAdapter,
    RouterType.VLLM_ROUTER: VLLMRouterAdapter,
}


def make_router(kind: str, url: str, metrics: str | None = None, key: Key = no_key) -> RouterAdapter:
    """The adapter for a router type as EnginePool.spec.routers[].type spells it; ValueError for an unknown one.

    ``metrics``: base URL of the router's metrics, where its circuit breakers are told. ``key``: what it is shown with
    each call.
    """
    if kind not in _ADAPTERS:
        raise ValueError(f"router type {kind!r} is not known (known: {', '.join(RouterType)})")
    return _ADAPTERS[kind](url, metrics, key)
