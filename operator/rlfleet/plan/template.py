"""What an EnginePool's spec says about its pods: ports, placement, what it may not contain, and its hash.

Invariants:
- what the schema cannot see is refused here with the field's name, before a pod is made of it;
- what shapes a pod is hashed under a versioned function that stays as it is, so a newer operator does not take the
  pods of an older one for outdated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api import naming
from rlfleet.api.wire import DEFAULT_GATE_PORT

ENGINE: Final = "engine"
GATE: Final = "gate"
STATE_VOLUME: Final = "rlfleet-state"
STAGING_VOLUME: Final = "rlfleet-staging"
TLS_VOLUME: Final = "rlfleet-tls"
ROUTER_KEYS_VOLUME: Final = "rlfleet-router-keys"
#: Package rlfleet_vllm, brought beside a vLLM engine by an init container of the same name.
PLUGIN_VOLUME: Final = "rlfleet-vllm"
STATE_DIR: Final = "/var/lib/rlfleet/state"
STAGING_DIR: Final = "/var/lib/rlfleet/staging"
TLS_DIR: Final = "/var/run/rlfleet/tls"
ROUTER_KEYS_DIR: Final = "/var/run/rlfleet/router-keys"
PLUGIN_DIR: Final = "/var/lib/rlfleet/vllm"
#: How a pod of a Claims pool calls its ResourceClaim.
DEVICE_CLAIM: Final = "rlfleet-devices"
GPU_RESOURCE: Final = "nvidia.com/gpu"
VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
DEFAULT_ENGINE_PORT: Final = 30000
DEFAULT_STAGING_MIB: Final = 1024
#: Where an engine says that its process is up and its model is loaded, by engine type.
STARTED_PATH: Final[Mapping[str, str]] = {"SGLang": "/model_info", "VLLM": "/health"}

#: The type of a router in spec.routers that is no program: the readiness of the engine's pod.
READINESS: Final = "Readiness"
#: The same, by a label of the engine's pod.
INFERENCE_POOL: Final = "InferencePool"
#: Types of routers that are no program to call: requests follow from what the pod says.
BY_THE_POD: Final = frozenset({READINESS, INFERENCE_POOL})
#: Tells a gate where its certificate lies; a pod without it has a gate that speaks plain HTTP.
TLS_DIR_ENV: Final = "RLFLEET_TLS_DIR"
#: Folder of the gate with one file for each router that demands a key, called as the router is.
ROUTER_KEYS_DIR_ENV: Final = "RLFLEET_ROUTER_KEYS_DIR"
#: The key of one pod's engine for its control paths, for the engine's own arguments to refer to: SGLang takes
#: ``--admin-api-key=$(RLFLEET_ENGINE_ADMIN_KEY)``.
ADMIN_KEY_ENV: Final = "RLFLEET_ENGINE_ADMIN_KEY"
#: The key that users of the engine present, from spec.engine.apiKeySecretRef.
API_KEY_ENV: Final = "RLFLEET_ENGINE_API_KEY"

_RESERVED_PREFIX = "RLFLEET_"
_VOLUMES = (STATE_VOLUME, STAGING_VOLUME, TLS_VOLUME, ROUTER_KEYS_VOLUME, PLUGIN_VOLUME)
_FOLDERS = tuple(f"{folder}/" for folder in (STATE_DIR, STAGING_DIR, TLS_DIR, ROUTER_KEYS_DIR, PLUGIN_DIR))
_INIT_CONTAINERS = (GATE, PLUGIN_VOLUME)


class InvalidPool(Exception):
    """The pool's spec cannot become pods; the message names the field and what to do."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Placement Pinned: the node and the devices of one engine."""

    node: str
    devices: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it stands in the pod's annotation."""
        return f"{self.node}/{','.join(self.devices)}"


# -------------------------------------------------------------------------------------------- reading the spec


def engine_port(pool: Mapping[str, Any]) -> int:
    """The port on which the pool's engines listen."""
    return int(engine_of(pool).get("port") or DEFAULT_ENGINE_PORT)


def gate_port(pool: Mapping[str, Any]) -> int:
    """The port on which the pool's gates listen."""
    return int((pool["spec"].get("gate") or {}).get("port") or DEFAULT_GATE_PORT)


def gpus_per_engine(pool: Mapping[str, Any]) -> int:
    """GPUs that one engine takes; 1 where the spec does not say."""
    value = engine_of(pool).get("gpusPerEngine")
    return 1 if value is None else int(value)


def is_pinned(pool: Mapping[str, Any]) -> bool:
    """Whether engines go to the devices that the spec lists."""
    return (pool["spec"].get("placement") or {}).get("mode") == "Pinned"


def is_claims(pool: Mapping[str, Any]) -> bool:
    """Whether engines take slots of train blocks."""
    return (pool["spec"].get("placement") or {}).get("mode") == "Claims"


def assignments(pool: Mapping[str, Any]) -> list[Assignment]:
    """Placement Pinned: who gets which devices, by engine index.

    Devices are handed out in the order of the list, ``gpusPerEngine`` at a time; an engine never spans two nodes, so
    what is left over on a node stays free.
    """
    size = gpus_per_engine(pool)
    result = []
    for entry in (pool["spec"].get("placement") or {}).get("devices") or []:
        devices = list(entry.get("devices") or [])
        for start in range(0, len(devices) - size + 1, size):
            result.append(Assignment(str(entry["node"]), tuple(sorted(devices[start : start + size]))))
    return result


def by_readiness(pool: Mapping[str, Any]) -> bool:
    """Whether pods are Ready only while their engine serves the committed version."""
    return any(r.get("type") == READINESS for r in pool["spec"].get("routers") or [])


def router_keys(pool: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Where the keys of its routers lie, by the router's name: ``name`` of a Secret, ``key`` in it."""
    named = pool["spec"].get("routers") or []
    return {r["name"]: dict(ref) for r in named if (ref := r.get("adminKeySecretRef"))}


def by_label(pool: Mapping[str, Any]) -> bool:
    """Whether pods bear the label ``rlfleet.dev/serving`` while their engine serves the committed version."""
    return any(r.get("type") == INFERENCE_POOL for r in pool["spec"].get("routers") or [])


def staging_mib(pool: Mapping[str, Any]) -> int:
    """Size of the memory volume in MiB."""
    return int((pool["spec"].get("gate") or {}).get("stagingMiB") or DEFAULT_STAGING_MIB)


def engine_of(pool: Mapping[str, Any]) -> Mapping[str, Any]:
    """``spec.engine``."""
    return pool["spec"].get("engine") or {}


def template_of(pool: Mapping[str, Any]) -> Mapping[str, Any]:
    """``spec.source.template``."""
    return (pool["spec"].get("source") or {}).get("template") or {}


def checkpoint_mounts(pool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engine container's mount of ``spec.gate.checkpointVolume``, as a list; empty where none is named."""
    volume = (pool["spec"].get("gate") or {}).get("checkpointVolume")
    containers = (template_of(pool).get("spec") or {}).get("containers") or []
    engine: Mapping[str, Any] = next((c for c in containers if c.get("name") == ENGINE), {})
    return [m for m in engine.get("volumeMounts") or [] if volume and m.get("name") == volume]


# -------------------------------------------------------------------------------------------- validation


def validate(pool: Mapping[str, Any]) -> None:
    """Raise InvalidPool for what the schema cannot see."""
    name = pool["metadata"]["name"]
    if len(name) > naming.MAX_POOL_NAME:
        raise InvalidPool(
            f"metadata.name has {len(name)} characters; names of its pods leave room for {naming.MAX_POOL_NAME}"
        )
    kind = engine_of(pool).get("type")
    if kind not in STARTED_PATH:
        raise InvalidPool(f"spec.engine.type {kind!r} is not supported; use one of {', '.join(STARTED_PATH)}")
    if gpus_per_engine(pool) < 1:
        raise InvalidPool("spec.engine.gpusPerEngine must be at least 1")
    if not (pool["spec"].get("gate") or {}).get("image"):
        raise InvalidPool("spec.gate.image is missing")
    if gate_port(pool) == engine_port(pool):
        raise InvalidPool(f"spec.gate.port and spec.engine.port are both {gate_port(pool)}")
    where = "spec.source.template.spec"
    spec = template_of(pool).get("spec")
    if not isinstance(spec, Mapping):
        raise InvalidPool(f"{where} is missing")
    _validate_spec(pool, spec, where)


def _validate_spec(pool: Mapping[str, Any], spec: Mapping[str, Any], where: str) -> None:
    containers = _named(spec, "containers", where)
    inits = _named(spec, "initContainers", where)
    engines = [c for c in containers if c["name"] == ENGINE]
    if len(engines) != 1:
        names = ", ".join(c["name"] for c in containers) or "none"
        raise InvalidPool(f"{where}.containers needs exactly one container named {ENGINE!r} (found: {names})")
    for container in [*containers, *inits]:
        if container["name"] in _INIT_CONTAINERS:
            raise InvalidPool(f"{where}: the container name {container['name']!r} is the operator's")
    if any(c.get("name") == DEVICE_CLAIM for c in _named(spec, "resourceClaims", where)):
        raise InvalidPool(f"{where}.resourceClaims: the name {DEVICE_CLAIM!r} is the operator's")
    for i, volume in enumerate(spec.get("volumes") or []):
        if volume.get("name") in _VOLUMES:
            raise InvalidPool(f"{where}.volumes[{i}].name {volume['name']!r} is the operator's")
    volume = (pool["spec"].get("gate") or {}).get("checkpointVolume")
    if volume and len(checkpoint_mounts(pool)) != 1:
        raise InvalidPool(
            f"spec.gate.checkpointVolume: container {ENGINE!r} must mount volume {volume!r} exactly once: the gate "
            "reads checkpoints at the same path as the engine"
        )
    for field in ("restartPolicy", "restartPolicyRules"):
        if field in engines[0]:
            # A container's own policy goes before the pod's Never, and an engine that restarts in place is stale.
            raise InvalidPool(f"{where}: container {ENGINE!r}: {field} is the operator's")
    for container in [*containers, *inits]:
        at = f"{where}: container {container['name']!r}"
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") in _VOLUMES:
                raise InvalidPool(f"{at}: volumeMounts of {mount['name']!r} are the operator's")
            path = str(mount.get("mountPath") or "").rstrip("/") + "/"
            if path.startswith(_FOLDERS):
                raise InvalidPool(f"{at}: mountPath {path!r} is the operator's")
        for env in container.get("env") or []:
            key = str(env.get("name") or "")
            if key.startswith(_RESERVED_PREFIX):
                raise InvalidPool(f"{at}: environment variables named {_RESERVED_PREFIX}* are the operator's ({key})")
            if key == VISIBLE_DEVICES and container["name"] == ENGINE and is_pinned(pool):
                raise InvalidPool(f"{at}: with placement Pinned the operator sets {VISIBLE_DEVICES}")
    if is_pinned(pool) and asks_gpu(engines[0]):
        raise InvalidPool(f"{where}: with placement Pinned the engine must not also ask for {GPU_RESOURCE}")


def gate_variable(pod: Mapping[str, Any], name: str) -> str | None:
    """A variable of a pod's gate, as the pod was made; None where it has no such value."""
    # Adopted pods may run it as an ordinary container.
    spec: Mapping[str, Any] = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    gate: Mapping[str, Any] = next((c for c in containers if c.get("name") == GATE), {})
    found: Mapping[str, Any] = next((e for e in gate.get("env") or [] if e.get("name") == name), {})
    return found.get("value") or None


def _named(spec: Mapping[str, Any], field: str, where: str) -> list[Mapping[str, Any]]:
    items = spec.get(field) or []
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise InvalidPool(f"{where}.{field} must be a list")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str) or not item["name"]:
            raise InvalidPool(f"{where}.{field}[{i}] needs a name")
    return list(items)


def asks_gpu(container: Mapping[str, Any]) -> bool:
    """Whether the container itself asks for GPUs of the scheduler."""
    resources = container.get("resources") or {}
    return any(GPU_RESOURCE in (resources.get(part) or {}) for part in ("requests", "limits"))


def asks_claims(container: Mapping[str, Any]) -> bool:
    """Whether the container uses ResourceClaims."""
    return bool((container.get("resources") or {}).get("claims"))


# -------------------------------------------------------------------------------------------- template hash


def _hash_v1(pool: Mapping[str, Any]) -> str:
    """Version 1: engine, template and gate settings. Frozen: a change of what is hashed is a new version."""
    engine, gate = engine_of(pool), pool["spec"].get("gate") or {}
    placement = pool["spec"].get("placement") or {}
    shape = {
        "engine": {
            "type": engine.get("type"),
            "port": engine_port(pool),
            "gpusPerEngine": gpus_per_engine(pool),
            "model": engine.get("model"),
            # Left out where they are not set, so that pods from before these fields existed keep their hash.
            **{key: engine[key] for key in ("args", "apiKeySecretRef", "allowUnknownVersion") if engine.get(key)},
        },
        "template": {
            "labels": (template_of(pool).get("metadata") or {}).get("labels") or {},
            "annotations": (template_of(pool).get("metadata") or {}).get("annotations") or {},
            "spec": template_of(pool).get("spec"),
        },
        "gate": {
            "image": gate.get("image"),
            "imagePullPolicy": gate.get("imagePullPolicy"),
            "port": gate_port(pool),
            "stagingMiB": staging_mib(pool),
            "resources": gate.get("resources"),
            # Left out where it is not set, so pools from before it was there keep their hash.
            **({"checkpointVolume": gate["checkpointVolume"]} if gate.get("checkpointVolume") else {}),
        },
        "placement": placement.get("mode") or "Scheduler",
        **({"readiness": True} if by_readiness(pool) else {}),
        **({"routerKeys": router_keys(pool)} if router_keys(pool) else {}),
        # Left out where they are not set, so that pods from before these fields existed keep their hash.
        **{key: placement[key] for key in ("nodes", "packDomain") if placement.get(key)},
    }
    text = json.dumps(shape, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_HASHES: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {"v1": _hash_v1}
_CURRENT: Final = "v1"


def template_hash(pool: Mapping[str, Any]) -> str:
    """``<version of the hash>-<hash>`` of the parts of the spec that shape a pod, whichever engine it is."""
    return f"{_CURRENT}-{_HASHES[_CURRENT](pool)}"


def is_outdated(
    pool: Mapping[str, Any], pod_hash: str, pod_assignment: str, index: int, slots: Sequence[str] = ()
) -> bool:
    """Whether a pod with this hash label and devices or slot annotation would look different if made now.

    ``slots``: placement Claims: what the annotation would be, by engine index.

    A hash of a version that this operator does not know is left alone: it cannot tell.
    """
    version, _, digest = pod_hash.partition("-")
    function = _HASHES.get(version)
    if function is not None and function(pool) != digest:
        return True
    if is_pinned(pool):
        slots = [a.text for a in assignments(pool)]
    elif not is_claims(pool):
        return bool(pod_assignment)
    return index < len(slots) and slots[index] != pod_assignment
