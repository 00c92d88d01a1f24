"""The engine pod: the user's template, our settings, the identity of one engine, and its gate.

Invariants:
- identity wins over the template, and the template object is never changed;
- every path that a container uses is told to it by its environment.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlfleet.api import labels, naming
from rlfleet.plan.blocks import Slot
from rlfleet.plan.owners import controlled_by
from rlfleet.plan.placing import place_pod
from rlfleet.plan.presets import PRESETS, command_line, fills, has_plugin, wants_admin_key
from rlfleet.plan.presets import validate as validate_engine
from rlfleet.plan.template import (
    ADMIN_KEY_ENV,
    API_KEY_ENV,
    ENGINE,
    GATE,
    GPU_RESOURCE,
    PLUGIN_DIR,
    PLUGIN_VOLUME,
    ROUTER_KEYS_DIR,
    ROUTER_KEYS_DIR_ENV,
    ROUTER_KEYS_VOLUME,
    STAGING_DIR,
    STAGING_VOLUME,
    STARTED_PATH,
    STATE_DIR,
    STATE_VOLUME,
    TLS_DIR,
    TLS_DIR_ENV,
    TLS_VOLUME,
    VISIBLE_DEVICES,
    Assignment,
    InvalidPool,
    asks_claims,
    asks_gpu,
    assignments,
    by_readiness,
    checkpoint_mounts,
    engine_of,
    engine_port,
    gate_port,
    gpus_per_engine,
    is_claims,
    is_pinned,
    router_keys,
    staging_mib,
    template_hash,
    template_of,
    validate,
)

Obj = dict[str, Any]

#: Tells a gate where its engine listens; the address under which routers list it.
ENGINE_URL_ENV: Final = "RLFLEET_ENGINE_URL"
#: Tells a gate where checkpoints lie, in its file system and the engine's.
CHECKPOINT_DIR_ENV: Final = "RLFLEET_CHECKPOINT_DIR"
#: Tells a gate that it is not ready before its engine's first weights came.
READY_WHEN_PROVEN_ENV: Final = "RLFLEET_READY_WHEN_PROVEN"
#: Ask tools that empty nodes to save money to leave this pod's node alone.
KEEP_NODE: Final = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
GATE_COMMAND: Final = ("python", "-m", "rlfleet.gate")
PLUGIN_COMMAND: Final = ("python", "-m", "rlfleet_vllm", "install")
#: Tells a gate to drive an engine of a version that it does not know.
UNKNOWN_VERSION_ENV: Final = "RLFLEET_ENGINE_ALLOW_UNKNOWN_VERSION"
#: What a namespace that enforces the restricted Pod Security Standard asks of every container; the gate needs no more.
_GATE_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
#: User and group of the images that this project builds.
OUR_USER: Final = 65532
#: A start may read hundreds of gigabytes: probes wait an hour before they give up on a container.
ENGINE_START_PERIOD: Final = 2
ENGINE_START_FAILURES: Final = 1800
#: Longer than the gate waits for the engine's loop.
ENGINE_LIVE_TIMEOUT: Final = 15
GATE_START_FAILURES: Final = 3600


def build_pod(
    pool: Mapping[str, Any],
    index: int,
    name: str,
    *,
    public_keys: Mapping[str, str],
    slots: Sequence[Slot] = (),
    tls_secret: str = "",
    admin_key: str = "",
) -> Obj:
    """The pod of engine ``index``, to be created as ``name``. Raises InvalidPool.

    ``slots``: placement Claims: who gets which slot of a train block, by engine index. ``tls_secret``: the Secret with
    the gate's certificate; empty: its gate speaks plain HTTP. ``admin_key``: this pod's own, given to engine and gate
    where the template refers to it.
    """
    validate(pool)
    validate_engine(pool)
    meta = pool["metadata"]
    assignment = None
    if is_pinned(pool):
        pins = assignments(pool)
        if index >= len(pins):
            raise InvalidPool(f"spec.placement.devices has room for {len(pins)} engines, not for index {index}")
        assignment = pins[index]
    template = template_of(pool)
    spec: Obj = copy.deepcopy(dict(template["spec"]))
    spec["restartPolicy"] = "Never"
    # Neither engine nor gate talks to the apiserver; a token in the pod would only be there to be stolen.
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    identity = _identity(pool, index)
    if admin_key and wants_admin_key(pool):
        identity.append(_value(ADMIN_KEY_ENV, admin_key))
    secret = engine_of(pool).get("apiKeySecretRef")
    if secret:
        identity.append({"name": API_KEY_ENV, "valueFrom": {"secretKeyRef": dict(secret)}})
    for container in spec["containers"]:
        if container["name"] == ENGINE:
            _engine_container(pool, container, identity, assignment, tls=bool(tls_secret))
    staging = staging_mib(pool)
    spec["initContainers"] = [
        *(spec.get("initContainers") or []),
        *([_plugin_container(pool)] if has_plugin(pool) else []),
        # Last: its promise (our address is in no router) is then as fresh as can be when the engine starts.
        _gate_container(pool, identity, assignment, staging, public_keys, tls=bool(tls_secret)),
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": STATE_VOLUME, "emptyDir": {}},
        {"name": STAGING_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{staging}Mi"}},
        *([{"name": TLS_VOLUME, "secret": {"secretName": tls_secret}}] if tls_secret else []),
        *([_router_keys_volume(keys)] if (keys := router_keys(pool)) else []),
        *([{"name": PLUGIN_VOLUME, "emptyDir": {}}] if has_plugin(pool) else []),
    ]
    if by_readiness(pool):
        spec["readinessGates"] = [*(spec.get("readinessGates") or []), {"conditionType": labels.WEIGHTS_CURRENT}]
    placed = place_pod(spec, pool, index, assignment=assignment, slots=slots)
    template_meta = template.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": {
                **{k: v for k, v in (template_meta.get("labels") or {}).items() if k != labels.SERVING},
                labels.PIPELINE: pool["spec"]["pipeline"],
                labels.POOL: meta["name"],
                labels.ENGINE_INDEX: str(index),
                labels.TEMPLATE_HASH: template_hash(pool),
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
            },
            "annotations": {
                # A node drained for cost would take an engine, and with it a member of a round. Set once, whatever
                # rounds do; what the template says goes before it.
                **KEEP_NODE,
                **(template_meta.get("annotations") or {}),
                **placed,
            },
            "ownerReferences": controlled_by("EnginePool", meta),
        },
        "spec": spec,
    }


def _identity(pool: Mapping[str, Any], index: int) -> list[Obj]:
    name = pool["metadata"]["name"]
    model = engine_of(pool).get("model")
    return [
        _field("RLFLEET_POD_IP", "status.podIP"),
        _field("RLFLEET_POD_UID", "metadata.uid"),
        _value("RLFLEET_PIPELINE", pool["spec"]["pipeline"]),
        _value("RLFLEET_POOL", name),
        _value("RLFLEET_ENGINE_NAME", naming.engine_name(name, index)),
        _value("RLFLEET_ENGINE_INDEX", str(index)),
        _value("RLFLEET_STAGING_DIR", STAGING_DIR),
        *([_value("RLFLEET_MODEL", model)] if model else []),
    ]


def _engine_container(
    pool: Mapping[str, Any], container: Obj, identity: list[Obj], assignment: Assignment | None, *, tls: bool
) -> None:
    devices = [_value(VISIBLE_DEVICES, ",".join(assignment.devices))] if assignment is not None else []
    preset, plugin = PRESETS[engine_of(pool)["type"]], has_plugin(pool)
    if fills(pool):
        container["command"], container["args"] = command_line(pool)
    given = [*(container.get("env") or [])]
    usual = {**preset.needs, **preset.usual}
    # Ours first, so that the user's variables and arguments may refer to them.
    container["env"] = [
        *copy.deepcopy(identity),
        *devices,
        *(_value(name, text) for name, text in usual.items() if not any(e.get("name") == name for e in given)),
        *(_with_plugin(given) if plugin else given),
    ]
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": STAGING_VOLUME, "mountPath": STAGING_DIR, "readOnly": True},
        *([{"name": PLUGIN_VOLUME, "mountPath": PLUGIN_DIR, "readOnly": True}] if plugin else []),
    ]
    if plugin or fills(pool):
        # Asked of the gate, which knows when the loop is busy on its behalf. Neither engine has a path of its own that
        # crosses the loop and survives a pause. Five minutes: a gate that restarts must not cost an engine.
        container.setdefault(
            "livenessProbe",
            {**_probe("/enginez", gate_port(pool), tls, period=15, failures=20), "timeoutSeconds": ENGINE_LIVE_TIMEOUT},
        )
    container.setdefault("startupProbe", _started(pool, keyed=preset.start_is_keyed, tls=tls))
    if assignment is None and not is_claims(pool) and not asks_gpu(container) and not asks_claims(container):
        resources = container["resources"] = dict(container.get("resources") or {})
        for part in ("requests", "limits"):
            resources[part] = {**(resources.get(part) or {}), GPU_RESOURCE: str(gpus_per_engine(pool))}


def _started(pool: Mapping[str, Any], *, keyed: bool, tls: bool) -> Obj:
    """Asks the engine itself whether it is up; its gate where the path ``keyed`` is closed to who has no key."""
    if keyed and engine_of(pool).get("apiKeySecretRef"):
        probe = _probe("/enginez", gate_port(pool), tls, period=ENGINE_START_PERIOD, failures=ENGINE_START_FAILURES)
        return {**probe, "timeoutSeconds": ENGINE_LIVE_TIMEOUT}
    return {
        "httpGet": {"path": STARTED_PATH[engine_of(pool)["type"]], "port": engine_port(pool)},
        "periodSeconds": ENGINE_START_PERIOD,
        "timeoutSeconds": 5,
        "failureThreshold": ENGINE_START_FAILURES,
    }


def _with_plugin(given: list[Obj]) -> list[Obj]:
    """The user's variables, with the plug-in's folder in front of what Python looks through."""
    if not any(e.get("name") == "PYTHONPATH" for e in given):
        return [_value("PYTHONPATH", PLUGIN_DIR), *given]
    return [
        {**e, "value": f"{PLUGIN_DIR}:{e.get('value', '')}".rstrip(":")} if e.get("name") == "PYTHONPATH" else e
        for e in given
    ]


def _plugin_container(pool: Mapping[str, Any]) -> Obj:
    gate = pool["spec"]["gate"]
    return {
        "name": PLUGIN_VOLUME,
        "image": gate["image"],
        **({"imagePullPolicy": gate["imagePullPolicy"]} if gate.get("imagePullPolicy") else {}),
        "command": [*PLUGIN_COMMAND, PLUGIN_DIR],
        # The gate's, which runs after it: a quota that wants limits gets them, and the pod asks for no more.
        "resources": copy.deepcopy(gate.get("resources")) or {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "securityContext": _our_security(pool),
        "volumeMounts": [{"name": PLUGIN_VOLUME, "mountPath": PLUGIN_DIR}],
    }


def _gate_container(
    pool: Mapping[str, Any],
    identity: list[Obj],
    assignment: Assignment | None,
    staging: int,
    public_keys: Mapping[str, str],
    *,
    tls: bool,
) -> Obj:
    gate = pool["spec"]["gate"]
    port = gate_port(pool)
    resources = copy.deepcopy(gate.get("resources")) or {
        # The memory volume is charged to whoever writes it: the gate.
        "requests": {"cpu": "100m", "memory": f"{staging + 256}Mi"}
    }
    # Without a limit the downward API would give the whole node's memory, which is no limit of ours.
    limit = (
        {"valueFrom": {"resourceFieldRef": {"containerName": GATE, "resource": "limits.memory", "divisor": "1"}}}
        if "memory" in (resources.get("limits") or {})
        else {"value": "0"}
    )
    env = [
        *copy.deepcopy(identity),
        _field("RLFLEET_POD_NAME", "metadata.name"),
        _field("RLFLEET_POD_NAMESPACE", "metadata.namespace"),
        _field("RLFLEET_NODE_NAME", "spec.nodeName"),
        _value("RLFLEET_GATE_PORT", str(port)),
        _value("RLFLEET_STATE_DIR", STATE_DIR),
        _value("RLFLEET_ENGINE_TYPE", engine_of(pool)["type"]),
        _value(ENGINE_URL_ENV, f"http://$(RLFLEET_POD_IP):{engine_port(pool)}"),
        _value("RLFLEET_STAGING_LIMIT_BYTES", str(staging * 2**20)),
        {"name": "RLFLEET_MEMORY_LIMIT_BYTES", **limit},
        _value("RLFLEET_PUBLIC_KEYS", json.dumps(dict(public_keys), sort_keys=True)),
    ]
    if assignment is not None:
        # Declared, and shown to it by the container runtime: the gate reads the memory of just these.
        env += [_value(name, ",".join(assignment.devices)) for name in ("RLFLEET_DEVICES", VISIBLE_DEVICES)]
    if tls:
        env.append(_value(TLS_DIR_ENV, TLS_DIR))
    if keys := router_keys(pool):
        env.append(_value(ROUTER_KEYS_DIR_ENV, ROUTER_KEYS_DIR))
    if engine_of(pool).get("allowUnknownVersion"):
        env.append(_value(UNKNOWN_VERSION_ENV, "true"))
    if by_readiness(pool):
        env.append(_value(READY_WHEN_PROVEN_ENV, "true"))
    checkpoints = checkpoint_mounts(pool)
    if checkpoints:
        env.append(_value(CHECKPOINT_DIR_ENV, str(checkpoints[0]["mountPath"])))
    return {
        "name": GATE,
        "image": gate["image"],
        **({"imagePullPolicy": gate["imagePullPolicy"]} if gate.get("imagePullPolicy") else {}),
        "command": list(GATE_COMMAND),
        "restartPolicy": "Always",
        "env": env,
        "ports": [{"name": "gate", "containerPort": port}],
        "resources": resources,
        "securityContext": _our_security(pool),
        "volumeMounts": [
            {"name": STATE_VOLUME, "mountPath": STATE_DIR},
            {"name": STAGING_VOLUME, "mountPath": STAGING_DIR},
            *([{"name": TLS_VOLUME, "mountPath": TLS_DIR, "readOnly": True}] if tls else []),
            *([{"name": ROUTER_KEYS_VOLUME, "mountPath": ROUTER_KEYS_DIR, "readOnly": True}] if keys else []),
            *({**copy.deepcopy(mount), "readOnly": True} for mount in checkpoints),
        ],
        "startupProbe": _probe("/startupz", port, tls, period=1, failures=GATE_START_FAILURES),
        "readinessProbe": _probe("/readyz", port, tls, period=2, failures=3),
        "livenessProbe": _probe("/livez", port, tls, period=10, failures=6),
    }


def _our_security(pool: Mapping[str, Any]) -> Obj:
    """The security context of our containers. A template that runs its containers as root does not mean these, which
    the kubelet would refuse to start as root: they keep their image's user then."""
    found: Obj = copy.deepcopy(dict(_GATE_SECURITY))
    if (template_of(pool)["spec"].get("securityContext") or {}).get("runAsUser") == 0:
        found |= {"runAsUser": OUR_USER, "runAsGroup": OUR_USER}
    return found


def _router_keys_volume(keys: Mapping[str, Mapping[str, str]]) -> Obj:
    """One file per router. A missing Secret keeps no pod from starting: the gate says which router refuses it."""
    sources = [
        {"secret": {"name": ref["name"], "items": [{"key": ref["key"], "path": router}], "optional": True}}
        for router, ref in keys.items()
    ]
    return {"name": ROUTER_KEYS_VOLUME, "projected": {"sources": sources}}


def _probe(path: str, port: int, tls: bool, *, period: int, failures: int) -> Obj:
    return {
        # The kubelet does not look at the certificate.
        "httpGet": {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _value(name: str, value: str) -> Obj:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Obj:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
