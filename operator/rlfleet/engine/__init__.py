"""Engine adapters: one control protocol in, an engine's own HTTP surface out, per flavour and version."""

from __future__ import annotations

from rlfleet.calls import CallError, NoAnswer, NotSent, Refused
from rlfleet.engine.adapter import Bucket, Capability, Checksum, EngineAdapter, Facts, View
from rlfleet.engine.sglang import SGLangAdapter

__all__ = [
    "Bucket",
    "CallError",
    "Capability",
    "Checksum",
    "EngineAdapter",
    "Facts",
    "NoAnswer",
    "NotSent",
    "Refused",
    "SGLangAdapter",
    "View",
    "make_adapter",
]


def make_adapter(kind: str, url: str, *, api_key: str | None, admin_key: str | None) -> EngineAdapter:
    """The adapter for an engine type as EnginePool.spec.engine.type spells it; ValueError for one we do not know."""
    if kind == "SGLang":
        return SGLangAdapter(url, api_key=api_key, admin_key=admin_key)
    raise ValueError(f"engine type {kind!r} is not known (known: SGLang)")
