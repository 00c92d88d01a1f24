"""What a vLLM server publishes of itself, read as facts. Pure.

Invariant: nothing is inferred from a path that merely exists; what an engine can do follows from its published paths
together with what it was started with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlfleet.api.wire import MemoryTag, PauseMode
from rlfleet.engine.adapter import Capability, Facts
from rlfleet.engine.common import as_int

TYPE = "VLLM"
#: Name of our weight transfer plug-in in --weight-transfer-config.
PLUGIN = "rlfleet"
#: Where our middleware (rlfleet_vllm) tells what the engine was started with, in the form of /server_info.
SETUP = "/rlfleet/setup"
#: Asks all workers of the engine, past its scheduler.
WORKERS = "/collective_rpc"
#: What vLLM calls the parts of its memory that it can give back.
TAGS = {MemoryTag.WEIGHTS: "weights", MemoryTag.KV_CACHE: "kv_cache"}

_PAUSING = {"/pause", "/is_paused", "/reset_prefix_cache"}
#: What must agree between two engines for their checksums to be comparable.
_MODEL_KEYS = ("model", "dtype", "quantization")
_PARALLEL_KEYS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "enable_expert_parallel",
)


def read(
    version: Mapping[str, Any], openapi: Mapping[str, Any], info: Mapping[str, Any], world: Mapping[str, Any]
) -> tuple[Facts, bool]:
    """Facts from the bodies of /version, /openapi.json, /rlfleet/setup or /server_info, and /get_world_size.

    The second value: weights can travel through our weight transfer plug-in.
    """
    config, paths = _part(info, "vllm_config"), _part(openapi, "paths")
    model, parallel = _part(config, "model_config"), _part(config, "parallel_config")
    plugin = _part(config, "weight_transfer_config").get("backend") == PLUGIN
    told = str(version.get("version") or "")
    agreed = {key: model.get(key) for key in _MODEL_KEYS} | {key: parallel.get(key) for key in _PARALLEL_KEYS}
    text = json.dumps(agreed | {"version": told, "engine": TYPE}, sort_keys=True, separators=(",", ":"))
    capabilities = _capabilities(set(paths), plugin=plugin, sleeps=model.get("enable_sleep_mode") is True)
    size = as_int(world.get("world_size"))
    if not size or size < 1:
        # Ranks of a group would be laid out around a guess.
        capabilities.discard(Capability.BROADCAST)
    name = model.get("served_model_name")
    return Facts(
        version=told,
        world_size=size or 1,
        layout=hashlib.sha256(text.encode()).hexdigest()[:16],
        model=str((name[0] if isinstance(name, list) and name else name) or model.get("model") or ""),
        capabilities=frozenset(capabilities),
        memory_tags=tuple(TAGS) if Capability.OFFLOAD in capabilities else (),
        refused=_refused(config),
    ), plugin


def _capabilities(paths: set[str], *, plugin: bool, sleeps: bool) -> set[Capability]:
    found = set()
    if paths >= _PAUSING:
        found |= {Capability.of_pause(mode) for mode in PauseMode}
    if "/weight_checker" in paths:
        found.add(Capability.CHECKSUM)
    if "/update_weight_version" in paths:
        # Without the label nothing could be published, so nothing may be loaded either.
        found.add(Capability.LABEL)
        if WORKERS in paths:
            found.add(Capability.SERIALIZED)
        if plugin and {"/start_weight_update", "/update_weights", "/finish_weight_update"} <= paths:
            found |= {Capability.BROADCAST, Capability.PARTS}
    if sleeps and WORKERS in paths:
        found.add(Capability.OFFLOAD)
    return found


def _refused(config: Mapping[str, Any]) -> str | None:
    """What the engine was started with that a load of new weights would leave stale, with the argument to drop."""
    quantised, parallel = _part(config, "model_config").get("quantization"), _part(config, "parallel_config")
    what = None
    if config.get("lora_config") is not None:
        what = "LoRA adapters (--enable-lora)"
    elif quantised is not None:
        what = f"quantised weights (--quantization {quantised})"
    elif config.get("speculative_config") is not None:
        what = "a draft model (--speculative-config)"
    elif parallel.get("enable_expert_parallel"):
        what = "experts spread over ranks (--enable-expert-parallel)"
    elif (as_int(parallel.get("data_parallel_size")) or 1) > 1:
        what = f"data-parallel replicas (--data-parallel-size {parallel['data_parallel_size']})"
    return f"{what} can not be kept on the trainer's weights: start the engine without" if what else None


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}
