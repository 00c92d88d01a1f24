"""Engine adapters: one control protocol in, an engine's own HTTP surface out, per flavour and version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rlfleet.calls import CallError, NoAnswer, NotSent, Refused
from rlfleet.engine.adapter import Bucket, Capability, Checksum, EngineAdapter, Facts, View
from rlfleet.engine.dynamo import DynamoAdapter
from rlfleet.engine.sglang import SGLangAdapter
from rlfleet.engine.vllm import VLLMAdapter

__all__ = [
    "ADAPTERS",
    "Bucket",
    "CallError",
    "Capability",
    "Checksum",
    "DynamoAdapter",
    "EngineAdapter",
    "Facts",
    "NoAnswer",
    "NotSent",
    "Refused",
    "SGLangAdapter",
    "VLLMAdapter",
    "View",
    "make_adapter",
]


#: Adapters by engine type, as EnginePool.spec.engine.type and the gate's RLFLEET_ENGINE_TYPE spell it. Each takes the
#: engine's URL, the users' key and the key of its control paths (None where the engine was given none).
ADAPTERS: Final[Mapping[str, Callable[[str, str | None, str | None], EngineAdapter]]] = {
    "Dynamo": lambda url, _, __: DynamoAdapter(url),
    "SGLang": lambda url, api_key, admin_key: SGLangAdapter(url, api_key=api_key, admin_key=admin_key),
    "VLLM": lambda url, api_key, admin_key: VLLMAdapter(url, api_key=api_key, admin_key=admin_key),
}


def make_adapter(kind: str, url: str, *, api_key: str | None, admin_key: str | None) -> EngineAdapter:
    """The adapter for an engine type of ADAPTERS; ValueError for one that we do not know."""
    make = ADAPTERS.get(kind)
    if make is None:
        raise ValueError(f"engine type {kind!r} is not known (known: {', '.join(sorted(ADAPTERS))})")
    return make(url, api_key, admin_key)
