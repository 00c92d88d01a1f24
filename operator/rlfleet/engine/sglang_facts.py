"""What an SGLang server says of itself, read as facts, loads and checksums. Pure.

Invariant: what an answer does not say stays unknown; nothing is taken for zero, or for proven, because it is absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from rlfleet.api.wire import MemoryTag
from rlfleet.calls import Answer
from rlfleet.engine.adapter import Capability, Checksum, Facts
from rlfleet.engine.common import as_int

TYPE = "SGLang"
SESSION = "/begin_weight_update"
RELEASE = "/release_memory_occupation"
#: What SGLang calls the parts of its memory that it can give back.
TAGS = {MemoryTag.WEIGHTS: "weights", MemoryTag.KV_CACHE: "kv_cache", MemoryTag.CUDA_GRAPH: "cuda_graph"}

_READY = "/ready"
_NO_READY = "this SGLang has no /ready, so that a pause can not be proven: use 0.5.20 or later"
_BY_PATH = {
    "/update_weights_from_disk": Capability.SERIALIZED,
    "/update_weights_from_distributed": Capability.BROADCAST,
    "/weights_checker": Capability.CHECKSUM,
    "/update_weight_version": Capability.LABEL,
    "/pause_generation": Capability.PAUSE_RETRACT,
}
#: Paths by which versions differ.
PROBED = (*_BY_PATH, SESSION, RELEASE, _READY)
#: What must agree between two engines for their checksums to be comparable (names as in /server_info).
_LAYOUT_KEYS = ("model_path", "dtype", "quantization", "tp_size", "pp_size", "dp_size", "ep_size")


def read(info: dict[str, Any], paths: Collection[str]) -> Facts:
    """Facts from the body of /server_info, and those of PROBED that the server has."""
    capabilities = {Capability.PAUSE_ABORT, Capability.PAUSE_WAIT}
    capabilities |= {capability for path, capability in _BY_PATH.items() if path in paths}
    if RELEASE in paths and info.get("enable_memory_saver") is True:
        capabilities.add(Capability.OFFLOAD)
    if Capability.LABEL not in capabilities:
        # Without the label nothing could be published, so nothing may be loaded either.
        capabilities -= {Capability.SERIALIZED, Capability.BROADCAST}
    if Capability.SERIALIZED in capabilities:
        capabilities.add(Capability.PARTS)
    version = str(info.get("version") or "")
    agreed = {key: info.get(key) for key in _LAYOUT_KEYS} | {"version": version, "engine": TYPE}
    text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
    return Facts(
        version=version,
        world_size=(as_int(info.get("tp_size")) or 1) * (as_int(info.get("pp_size")) or 1),
        layout=hashlib.sha256(text.encode()).hexdigest()[:16],
        model=str(info.get("served_model_name") or info.get("model_path") or ""),
        capabilities=frozenset(capabilities),
        memory_tags=tuple(TAGS) if Capability.OFFLOAD in capabilities else (),
        refused=_refused(info) if _READY in paths else _NO_READY,
    )


def _refused(info: dict[str, Any]) -> str | None:
    """What this engine holds besides plain weights, or in another form, which a round would leave as it was."""
    quantized, draft = info.get("quantization"), info.get("speculative_algorithm")
    what = None
    if info.get("enable_lora") or info.get("lora_paths"):
        what = "LoRA adapters (--enable-lora, --lora-paths)"
    elif quantized:
        what = f"quantised weights (--quantization {quantized})"
    elif draft:
        what = f"a draft model (--speculative-algorithm {draft})"
    elif (as_int(info.get("ep_size")) or 1) > 1:
        what = f"experts spread over ranks (--ep-size {info['ep_size']})"
    elif (as_int(info.get("dp_size")) or 1) > 1:
        # SGLang itself asserts one replica for every way to load but the one from disk.
        what = f"data-parallel replicas (--dp-size {info['dp_size']})"
    return f"{what} can not be kept on the trainer's weights: start the engine without" if what else None


def counts(answer: Answer | None) -> tuple[int | None, int | None]:
    """Running and waiting requests over all replicas; None where the answer does not say."""
    if answer is None or answer.status != 200 or not isinstance(answer.body, dict):
        return None, None
    loads = answer.body.get("loads")
    if not isinstance(loads, list) or not loads or not all(isinstance(load, dict) for load in loads):
        return None, None
    running = [as_int(load.get("num_running_reqs")) for load in loads]
    waiting = [as_int(load.get("num_waiting_reqs")) for load in loads]
    return _sum(running), _sum(waiting)


def _sum(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def checksum(body: dict[str, Any]) -> Checksum | None:
    """One digest for the engine; versions differ in whether ``per_engine_checksum`` is one string or a list."""
    ranks = body.get("ranks")
    parts = [r.get("checksums") for r in ranks if isinstance(r, dict)] if isinstance(ranks, list) else []
    hashes = [h for part in parts if isinstance(part, dict) for h in part.values()]
    whole = body.get("per_engine_checksum")
    if isinstance(whole, str) and 0 < len(whole) <= 128:
        digest = whole
    elif whole or hashes:
        text = json.dumps(whole or parts, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
    else:
        return None
    # Parameters that are packed away hash as empty input: equal hashes everywhere say nothing about the weights.
    return Checksum(digest, meaningful=not hashes or len(hashes) == 1 or len(set(map(str, hashes))) > 1)
