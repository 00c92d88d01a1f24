"""What the real apiserver accepts, what it refuses, and in which words.

One table row per rule: an object (or a change) that breaks it, and the exact answer. ``test_no_rule_is_untested`` keeps
the tables complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlfleet.api import crdgen
from rlfleet.api.reference import rules_of

pytestmark = pytest.mark.cluster

Example = Callable[..., dict[str, Any]]
RLP, EP, SR, TD = "RLPipeline", "EnginePool", "SyncRound", "TrainerDemand"
ENGINE, GATE = {"name": "engine", "image": "x"}, {"name": "gate", "image": "x"}
ROUTER = {"name": "main", "type": "SGLangRouter"}
ROUTER_KEY = {"name": "keys", "key": "main"}
SELECTOR = {"matchLabels": {"app": "router"}}
CONTAINERS = "spec.source.template.spec.containers"


def gpus(*nodes: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"node": node, "devices": [f"GPU-{node}-{i}" for i in range(count)]} for node, count in nodes]


CHECKPOINT = {"checkpoint": {"pathTemplate": "/checkpoints/{version}"}}

ADOPTED = {"spec.source": {"adopt": {"selector": SELECTOR}}, "spec.replicas": None, "spec.gate": None}


def dynamo(**source: Any) -> dict[str, Any]:
    """A pool of Dynamo workers; ``source`` replaces members of spec.source.dynamo."""
    whole = {"url": "http://10.0.0.9:8001", "selector": SELECTOR, **source}
    return {
        "spec.source": {"dynamo": {k: v for k, v in whole.items() if v is not None}},
        "spec.engine": {"type": "Dynamo", "port": 8081},
        "spec.replicas": None,
        "spec.gate": None,
        "spec.routers": None,
    }


BLOCK = {
    "name": "a",
    "deviceClassName": "gpu.nvidia.com",
    "slots": 4,
    "devicesPerSlot": 2,
    "matchAttributes": ["resource.kubernetes.io/pcieRoot"],
}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (RLP, {}),
    (RLP, {"spec.trainer": None, "spec.transport": None}),
    (RLP, {"spec.weights.sender": {"url": "http://10.0.0.7:9450"}}),
    (RLP, {"spec.weights.sender": {"url": "https://sender.example:9000/base"}}),
    (RLP, {"spec.transport": {"mode": "Auto", "assertMixed": True, "backend": "gloo"}}),
    (RLP, {"spec.weights": CHECKPOINT, "spec.transport": None}),
    (RLP, {"spec.weights": {"checkpoint": {"pathTemplate": "/a..b/{version}"}}, "spec.transport.mode": "CPUSerialize"}),
    (RLP, {"spec.transport.rendezvousPorts": {"first": 40000, "last": 40000}}),
    (RLP, {"spec.sync.maxUnavailable": 0}),
    (RLP, {"spec.sync.maxUnavailable": "0%"}),
    (RLP, {"spec.sync.maxUnavailable": "100%"}),
    (RLP, {"metadata.name": "p" * 63}),
    (EP, {}),
    (EP, {"spec.replicas": 0, "spec.routers": None}),
    (EP, {"spec.replicas": 1024}),
    (EP, {"spec.active": 0, "spec.shrink": "Offload", "spec.residualMemoryGiB": 0.5}),
    (EP, {"spec.active": 9, "spec.shrink": "Delete"}),  # above replicas: all of them
    (EP, {"spec.routers.0": {**ROUTER, "url": "http://10.0.0.9:30001"}}),
    (EP, {"spec.routers.0": {**ROUTER, "url": "http://10.0.0.9:1/at/@home", "adminKeySecretRef": ROUTER_KEY}}),
    (EP, {"spec.routers": [{"name": "service", "type": "Readiness"}, {"name": "gateway", "type": "InferencePool"}]}),
    (EP, {"spec.routers": [{**ROUTER, "type": t, "url": "http://10.0.0.9:30001"} for t in ("SMG",)]}),
    (EP, {"spec.routers": [{**ROUTER, "type": "VLLMRouter", "url": "http://r:1", "metricsPort": 29000}]}),
    (EP, {"spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 2), ("n2", 2))}}),
    (
        EP,
        {
            "spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 4), ("n2", 2))},
            "spec.engine.gpusPerEngine": 2,
            "spec.replicas": 2,
        },
    ),
    (EP, {"spec.gate.checkpointVolume": "checkpoints"}),
    (EP, ADOPTED),
    (EP, ADOPTED | {"spec.active": 1, "spec.shrink": "Offload", "spec.disruptionBudget": {"maxUnavailable": "50%"}}),
    (EP, {"spec.updateStrategy": {"type": "RollingUpdate", "maxUnavailable": "25%"}, "spec.disruptionBudget": {}}),
    (
        EP,
        {"spec.placement": {"mode": "Claims", "blocks": ["b", "a"], "nodes": ["n1"], "packDomain": "example.com/rack"}},
    ),
    (EP, {"spec.placement": {"mode": "Scheduler", "nodes": ["n1", "n2"], "packDomain": "nvidia.com/gpu.clique"}}),
    (RLP, {"spec.trainer": {"blocks": [BLOCK]}}),
    (RLP, {"spec.trainer": {"blocks": [BLOCK, {**BLOCK, "name": "b"}], "gpus": gpus(("n1", 1))}}),
    (EP, {"spec.gate.resources.limits": {"memory": "5Gi", "cpu": 2, "ephemeral-storage": "1e9"}}),
    (EP, {"metadata.name": "p" * 52}),
    (SR, {}),
    (SR, {"spec.version": -1}),
    (SR, {"spec.version": 3, "spec.allowRollback": True, "spec.expectedCommitted": 12}),
    (SR, {"spec.manifestDigest": "sha256:" + "0a" * 32, "spec.attempt": 1000}),
    (SR, {"metadata.name": "r" * 63}),
    (TD, {}),
    (TD, {"spec.requests": None, "spec.streams": None, "spec.trainer": {"podUID": "outside"}}),
    (TD, {"spec.requests.0.devices": gpus(("n1", 2)), "spec.requests.0.priority": None, "spec.requests.0.id": "a1"}),
    (EP, dynamo()),
    (
        EP,
        dynamo(url=None, service={"name": "f"}, components=["backend"]),
    ),
]


@pytest.mark.parametrize(("kind", "edits"), ACCEPTED, ids=[f"{k}-{i}" for i, (k, _) in enumerate(ACCEPTED)])
def test_accepted(kind: str, edits: dict[str, Any], example: Example, shared_server: Any) -> None:
    assert shared_server.create(example(kind, edits), dry=True)["kind"] == kind


def bad_name(kind: str, limit: int, why: str) -> str:
    return (
        f'metadata.name: Invalid value: "object": the name of {kind} may have {limit} characters at most, of a-z, 0-9 '
        f"and '-', without '-' at either end: {why}"
    )


LABELLED = bad_name(RLP, 63, "it becomes a label of pods and rounds")
PODDED = bad_name(EP, 52, "its pods append an index and five digits")
SHOWN = bad_name(SR, 63, "it is shown as the operation of pipelines and gates")
OF_PIPELINE = bad_name(TD, 63, "it is the name of its RLPipeline")
ONE_OF = 'Invalid value: "object": exactly one of podSelector and url must be set'
EITHER = 'Invalid value: "object": exactly one of template, adopt and dynamo must be set'
PORT_IN_URL = "Forbidden: port applies to podSelector only: put the port into url"
TOO_FEW = (
    'spec.replicas: Invalid value: "object": placement.devices has too few devices: each replica takes '
    "engine.gpusPerEngine devices of one node"
)
RESERVED = (
    "spec.source.template.spec: Forbidden: the container name gate is reserved for the gate that is added to every pod"
)
NO_ENGINE = "a container named engine is required: the gate drives that one"
PERCENT = "maxUnavailable must be a number of engines, or a percentage from 0% to 100%"


def below(path: str, value: int, least: int) -> str:
    return f"{path}: Invalid value: {value}: {path} in body should be greater than or equal to {least}"


def above(path: str, value: int, most: int) -> str:
    return f"{path}: Invalid value: {value}: {path} in body should be less than or equal to {most}"


def unknown(path: str, value: str, *supported: str) -> str:
    return f'{path}: Unsupported value: "{value}": supported values: ' + ", ".join(f'"{s}"' for s in supported)


DIGEST = "sha256:" + "0a" * 32
CATCH_UP = {"spec.kind": "CatchUp", "spec.engines": ["e-0-1"], "spec.manifestDigest": DIGEST}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # RLPipeline: rules
    (RLP, {"metadata.name": "p" * 64}, LABELLED),
    (RLP, {"metadata.name": "p" * 300}, LABELLED),
    (RLP, {"metadata.name": "p" * 300}, "must be no more than 253 characters"),
    (RLP, {"metadata.name": "with.dots"}, LABELLED),
    (
        RLP,
        {"spec.weights.checkpoint": CHECKPOINT["checkpoint"], "spec.transport": None},
        'spec.weights: Invalid value: "object": exactly one of sender and checkpoint must be set',
    ),
    (RLP, {"spec.weights": {}}, "exactly one of sender and checkpoint must be set"),
    *(
        (
            RLP,
            {"spec.weights": {"checkpoint": {"pathTemplate": bad}}, "spec.transport": None},
            "pathTemplate must be absolute, contain {version}, and have no part ..",
        )
        for bad in ("run/{version}", "/run", "/run/../{version}")
    ),
    (
        RLP,
        {"spec.weights": CHECKPOINT, "spec.transport.mode": "Auto"},
        "spec.transport.mode: Forbidden: transport.mode is about a sender: leave it out with weights.checkpoint",
    ),
    (RLP, {"spec.weights.sender": {}}, f"spec.weights.sender: {ONE_OF}"),
    (RLP, {"spec.weights.sender.url": "http://10.0.0.7:9450"}, f"spec.weights.sender: {ONE_OF}"),
    (
        RLP,
        {"spec.weights.sender": {"url": "http://10.0.0.7", "port": 9000}},
        f"spec.weights.sender.port: {PORT_IN_URL}",
    ),
    (
        RLP,
        {"spec.transport": {"mode": "Broadcast", "assertMixed": True}},
        'spec.transport.assertMixed: Invalid value: "object": assertMixed needs mode Auto: no other mode mixes '
        "transports",
    ),
    (
        RLP,
        {"spec.transport.rendezvousPorts": {"first": 29501, "last": 29500}},
        'spec.transport.rendezvousPorts.first: Invalid value: "object": first must not be above last',
    ),
    *((RLP, {"spec.sync.maxUnavailable": bad}, PERCENT) for bad in ("101%", "10", "ten%", "-1%", "1.5%", "")),
    # RLPipeline: bounds
    (RLP, {"spec.sync.maxUnavailable": -1}, below("spec.sync.maxUnavailable", -1, 0)),
    (
        RLP,
        {"spec.transport.mode": "broadcast"},
        unknown("spec.transport.mode", "broadcast", "CPUSerialize", "Broadcast", "Auto"),
    ),
    (RLP, {"spec.transport.backend": "mpi"}, unknown("spec.transport.backend", "mpi", "nccl", "gloo")),
    (
        RLP,
        {"spec.sync.quiesce.mode": "Drain"},
        unknown("spec.sync.quiesce.mode", "Drain", "Retract", "Keep", "Abort", "Wait"),
    ),
    (RLP, {"spec.sync.verify": "On"}, unknown("spec.sync.verify", "On", "IfSupported", "Required", "Off")),
    (RLP, {"spec.sync.onFailure": "Retry"}, unknown("spec.sync.onFailure", "Retry", "Replace", "Hold")),
    (RLP, {"spec.sync.deadlines.pausedSeconds": 0}, below("spec.sync.deadlines.pausedSeconds", 0, 1)),
    (RLP, {"spec.sync.drainSeconds": -1}, below("spec.sync.drainSeconds", -1, 0)),
    (RLP, {"spec.historyLimit": 0}, below("spec.historyLimit", 0, 1)),
    (RLP, {"spec.weights": None}, "spec.weights: Required value"),
    (
        RLP,
        {"spec.weights.sender.podSelector.matchLabels": {}},
        "spec.weights.sender.podSelector.matchLabels in body should have at least 1 properties",
    ),
    (RLP, {"spec.weights.sender": {"url": "ftp://x"}}, "spec.weights.sender.url in body should match"),
    (RLP, {"spec.trainer.gpus": gpus(("n1", 1), ("n1", 1))}, 'spec.trainer.gpus[1]: Duplicate value: {"node":"n1"}'),
    (
        RLP,
        {"spec.trainer.gpus.0.devices": ["GPU-1", "GPU-1"]},
        'spec.trainer.gpus[0].devices[1]: Duplicate value: "GPU-1"',
    ),
    (RLP, {"spec.transport.bucketMB": 512}, 'unknown field "spec.transport.bucketMB"'),
    # EnginePool: rules
    (EP, {"metadata.name": "p" * 53}, PODDED),
    (EP, {"metadata.name": "p" * 300}, PODDED),
    (
        EP,
        {CONTAINERS: [{"name": "server", "image": "x"}]},
        f"{CONTAINERS}: Required value: {NO_ENGINE}",
    ),
    (EP, {CONTAINERS: [ENGINE, GATE]}, RESERVED),
    (EP, {"spec.source.template.spec.initContainers": [GATE]}, RESERVED),
    # Of the wrong kind: Kubernetes would only say it when a pod is made, and the operator reads it before.
    (EP, {f"{CONTAINERS}.0.env": "A=b"}, f"{CONTAINERS}[0].env in body must be of type array"),
    (EP, {f"{CONTAINERS}.0.args": "--tp 2"}, f"{CONTAINERS}[0].args in body must be of type array"),
    (EP, {f"{CONTAINERS}.0.resources": ["gpu"]}, f"{CONTAINERS}[0].resources in body must be of type object"),
    (EP, {"spec.source.template.spec.volumes": "a"}, "spec.source.template.spec.volumes in body must be of"),
    (EP, {"spec.placement.mode": "Pinned"}, "spec.placement.devices: Required value: mode Pinned needs devices"),
    (
        EP,
        {"spec.placement": {"mode": "Scheduler", "devices": gpus(("n1", 8))}},
        "spec.placement.devices: Forbidden: devices are for mode Pinned only",
    ),
    (EP, {"spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 3))}}, TOO_FEW),
    (
        EP,
        {
            "spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 2), ("n2", 2))},
            "spec.engine.gpusPerEngine": 2,
            "spec.replicas": 3,
        },
        TOO_FEW,
    ),
    (
        EP,
        {
            "spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 3), ("n2", 3))},
            "spec.engine.gpusPerEngine": 2,
            "spec.replicas": 2,
        },
        'spec.placement.devices: Invalid value: "object": placement.devices must be a multiple of engine.gpusPerEngine '
        "on each node: an engine lies on one node",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Claims"}},
        "spec.placement.blocks: Required value: mode Claims needs blocks: names of the RLPipeline's "
        "spec.trainer.blocks",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Claims", "blocks": ["a"]}, "spec.shrink": "Delete"},
        'spec.shrink: Invalid value: "object": placement Claims needs shrink Offload: without its pods a train block '
        "may move to other GPUs",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Scheduler", "blocks": ["a"]}},
        "spec.placement.blocks: Forbidden: blocks are for mode Claims only",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 8)), "nodes": ["n1"]}},
        "spec.placement.nodes: Forbidden: nodes are not for mode Pinned: devices name the nodes",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 8)), "packDomain": "rack"}},
        "spec.placement.packDomain: Forbidden: packDomain is not for mode Pinned: devices name the nodes",
    ),
    (
        EP,
        {"spec.placement": {"mode": "Claims", "blocks": ["a", "a"]}},
        'spec.placement.blocks[1]: Duplicate value: "a"',
    ),
    (
        RLP,
        {"spec.trainer": {}},
        'spec.trainer: Invalid value: "object": gpus or blocks must be set; leave trainer out where its devices are '
        "not known",
    ),
    (
        RLP,
        {"spec.trainer": {"blocks": [{**BLOCK, "slots": 17}]}},
        'spec.trainer.blocks[0].slots: Invalid value: "object": slots times devicesPerSlot must not exceed 32: a '
        "ResourceClaim holds no more devices",
    ),
    (RLP, {"spec.trainer": {"blocks": [BLOCK, BLOCK]}}, 'spec.trainer.blocks[1]: Duplicate value: {"name":"a"}'),
    (
        RLP,
        {"spec.trainer": {"blocks": [{**BLOCK, "matchAttributes": ["pcieRoot"]}]}},
        "spec.trainer.blocks[0].matchAttributes[0] in body should match",
    ),
    (EP, {"spec.routers": [ROUTER]}, f"spec.routers[0]: {ONE_OF}"),
    (
        EP,
        {"spec.routers": [{**ROUTER, "url": "http://me:secret@10.0.0.9:1"}]},
        "the url must hold no user name or password: it is repeated in status, Events and logs; write the address "
        "alone",
    ),
    (
        EP,
        dynamo() | {"spec.source.dynamo.url": "http://me@10.0.0.9:1", "spec.source.dynamo.service": None},
        "no user name",
    ),
    (RLP, {"spec.weights": {"sender": {"url": "https://me:secret@10.0.0.7:9450/a"}}}, "no user name or password"),
    (
        EP,
        {"spec.routers": [{**ROUTER, "type": "VLLMRouter", "url": "http://r:1", "adminKeySecretRef": ROUTER_KEY}]},
        "spec.routers[0].adminKeySecretRef: Forbidden: adminKeySecretRef is for types SGLangRouter and SMG: no other "
        "router demands a key on its API",
    ),
    (
        EP,
        {"spec.routers": [{"name": "service", "type": "Readiness", "adminKeySecretRef": ROUTER_KEY}]},
        "spec.routers[0].adminKeySecretRef: Forbidden: adminKeySecretRef is for types SGLangRouter and SMG",
    ),
    (
        EP,
        {"spec.routers": [{"name": "service", "type": "Readiness", "url": "http://10.0.0.9:1"}]},
        'spec.routers[0].type: Invalid value: "object": types Readiness and InferencePool take neither podSelector '
        "nor url nor ports: Services and InferencePools select the engines' pods",
    ),
    (
        EP,
        {"spec.routers": [{"name": "gateway", "type": "InferencePool", "metricsPort": 29000}]},
        "types Readiness and InferencePool take neither podSelector nor url nor ports",
    ),
    (
        EP,
        ADOPTED | {"spec.routers": [{"name": "gateway", "type": "InferencePool"}]},
        "routers of type InferencePool need source.template: labels of adopted pods are their owner's",
    ),
    (EP, {"spec.routers.0.url": "http://10.0.0.9:1"}, f"spec.routers[0]: {ONE_OF}"),
    (
        EP,
        {"spec.routers": [{**ROUTER, "podSelector": SELECTOR}]},
        "spec.routers[0].port: Required value: podSelector needs port",
    ),
    (EP, {"spec.routers": [{**ROUTER, "url": "http://10.0.0.9", "port": 1}]}, f"spec.routers[0].port: {PORT_IN_URL}"),
    (
        EP,
        {"spec.gate.port": 30000},
        'spec.gate.port: Invalid value: "object": gate.port and engine.port must differ: both listen on the '
        "pod's address",
    ),
    # EnginePool: pods of its own and adopted ones
    (EP, {"spec.source": {}}, f"spec.source: {EITHER}"),
    (EP, {"spec.source.adopt": {"selector": SELECTOR}}, f"spec.source: {EITHER}"),
    (EP, {"spec.source": {"adopt": {}}}, "spec.source.adopt.selector: Required value"),
    (
        EP,
        ADOPTED | {"spec.replicas": 2},
        "spec.replicas: Forbidden: replicas is not for source.adopt and source.dynamo: whoever makes the pods scales "
        "them; leave it out",
    ),
    (
        EP,
        ADOPTED | {"spec.shrink": "Delete"},
        'spec.shrink: Invalid value: "object": source.adopt and source.dynamo need shrink Offload: pods '
        "that somebody else makes are never deleted",
    ),
    (
        EP,
        ADOPTED | {"spec.updateStrategy": {"type": "RollingUpdate"}},
        'spec.updateStrategy.type: Invalid value: "object": updateStrategy RollingUpdate is not for source.adopt and '
        "source.dynamo: whoever makes the pods replaces them",
    ),
    (
        EP,
        ADOPTED
        | {
            "spec.source": {
                "adopt": {"selector": SELECTOR},
                "dynamo": {"url": "http://10.0.0.9:8001", "selector": SELECTOR},
            }
        },
        f"spec.source: {EITHER}",
    ),
    (
        EP,
        dynamo(service={"name": "frontend"}),
        'spec.source.dynamo: Invalid value: "object": exactly one of service and url must be set',
    ),
    (EP, dynamo(url=None), "exactly one of service and url must be set"),
    (EP, dynamo(selector=None), "spec.source.dynamo.selector: Required value"),
    (
        EP,
        dynamo() | {"spec.replicas": 2},
        "spec.replicas: Forbidden: replicas is not for source.adopt and source.dynamo",
    ),
    (
        EP,
        dynamo() | {"spec.engine": {"type": "SGLang"}},
        'spec.engine.type: Invalid value: "object": source.dynamo and engine.type Dynamo need each other',
    ),
    (EP, ADOPTED | {"spec.engine": {"type": "Dynamo"}}, "source.dynamo and engine.type Dynamo need each other"),
    (
        EP,
        dynamo() | {"spec.routers": [{"name": "r", "type": "SGLangRouter", "url": "http://10.0.0.9:30001"}]},
        "spec.routers: Forbidden: routers are not for source.dynamo: workers register with their frontend by "
        "themselves",
    ),
    (
        EP,
        dynamo() | {"spec.active": 1},
        "spec.active: Forbidden: active is not for source.dynamo: workers advertise no route by which they give memory "
        "back",
    ),
    *(
        (
            EP,
            ADOPTED | {"spec.placement": placement},
            "spec.placement: Forbidden: placement is not for source.adopt and source.dynamo: whoever makes the pods "
            "places them",
        )
        for placement in (
            {"mode": "Pinned", "devices": gpus(("n1", 4))},
            {"nodes": ["n1"]},
            {"packDomain": "example.com/rack"},
        )
    ),
    *(
        (
            EP,
            ADOPTED | {f"spec.gate.{field}": value},
            f"spec.gate.{field}: Forbidden: gate.{field} is not for source.adopt and source.dynamo: the gate stands in "
            "the template of whoever makes the pods",
        )
        for field, value in (
            ("image", "rlfleet:1"),
            ("imagePullPolicy", "Never"),
            ("resources", {"limits": {"cpu": 1}}),
            ("checkpointVolume", "checkpoints"),
        )
    ),
    *(
        (
            EP,
            ADOPTED | {f"spec.engine.{field}": value},
            f"spec.engine.{field}: Forbidden: engine.{field} is not for source.adopt and source.dynamo: command "
            "line and variables stand in the template of whoever makes the pods",
        )
        for field, value in (
            ("args", ["--tp-size=2"]),
            ("apiKeySecretRef", {"name": "keys", "key": "user"}),
            ("allowUnknownVersion", True),
        )
    ),
    (EP, {"spec.engine.apiKeySecretRef": {"name": "keys"}}, "spec.engine.apiKeySecretRef.key: Required value"),
    (EP, {"spec.engine.args": [""]}, "spec.engine.args[0] in body should be at least 1 chars long"),
    (
        EP,
        {"spec.updateStrategy": {"maxUnavailable": 1}},
        "spec.updateStrategy.maxUnavailable: Forbidden: maxUnavailable is for type RollingUpdate only",
    ),
    # EnginePool: bounds
    *(
        (
            EP,
            {f"{where}.maxUnavailable": "101%"},
            "maxUnavailable must be a number of engines, or a percentage from 0% to 100%",
        )
        for where in ("spec.disruptionBudget", "spec.updateStrategy")
    ),
    (
        EP,
        {"spec.routers": [{**ROUTER, "url": "http://10.0.0.9:1"}, {**ROUTER, "url": "http://10.0.0.9:2"}]},
        'spec.routers[1]: Duplicate value: {"name":"main"}',
    ),
    (EP, {"spec.engine.gpusPerEngine": 0}, below("spec.engine.gpusPerEngine", 0, 1)),
    (EP, {"spec.replicas": -1}, below("spec.replicas", -1, 0)),
    (EP, {"spec.replicas": 1025}, above("spec.replicas", 1025, 1024)),
    (EP, {"spec.active": -1}, below("spec.active", -1, 0)),
    (EP, {"spec.shrink": "Sleep"}, unknown("spec.shrink", "Sleep", "Offload", "Delete")),
    (EP, {"spec.residualMemoryGiB": 0}, "residualMemoryGiB must be at least 0.001"),
    (EP, {"spec.engine.type": "vLLM"}, unknown("spec.engine.type", "vLLM", "SGLang", "VLLM")),
    (EP, {"spec.routers.0.type": "nginx"}, unknown("spec.routers[0].type", "nginx", "SGLangRouter")),
    (
        EP,
        {"spec.updateStrategy.type": "Recreate"},
        unknown("spec.updateStrategy.type", "Recreate", "OnDelete", "RollingUpdate"),
    ),
    (EP, {"spec.placement.mode": "pinned"}, unknown("spec.placement.mode", "pinned", "Scheduler", "Claims", "Pinned")),
    (
        EP,
        {"spec.gate.imagePullPolicy": "no"},
        unknown("spec.gate.imagePullPolicy", "no", "Always", "IfNotPresent", "Never"),
    ),
    (EP, {"spec.gate.stagingMiB": 0}, below("spec.gate.stagingMiB", 0, 1)),
    (EP, {"spec.gate.resources.limits.memory": "much"}, "spec.gate.resources.limits.memory in body should match"),
    (EP, {"spec.gate.image": None}, "spec.gate: Required value: source.template needs gate.image"),
    (EP, {"spec.source": None}, "spec.source: Required value"),
    (EP, {"spec.pipeline": "No Such"}, "spec.pipeline in body should match"),
    # SyncRound: rules
    (TD, {"metadata.name": "r" * 64}, OF_PIPELINE),
    (TD, {"spec.trainer": None}, "spec.trainer: Required value"),
    (TD, {"spec.streams.0.collected": -1}, below("spec.streams[0].collected", -1, 0)),
    (TD, {"spec.streams.0.collected": None}, "spec.streams[0].collected: Required value"),
    (TD, {"spec.streams.0.remaining": 3}, 'unknown field "spec.streams[0].remaining"'),
    (TD, {"spec.requests.0.step": -2}, below("spec.requests[0].step", -2, -1)),
    (TD, {"spec.requests.0.cluster": "Actor Train"}, "spec.requests[0].cluster in body should match"),
    (SR, {"metadata.name": "r" * 64}, SHOWN),
    (SR, {"metadata.name": "r" * 300}, SHOWN),
    (
        SR,
        {"spec.allowRollback": True},
        "spec.expectedCommitted: Required value: allowRollback needs expectedCommitted: the version that you know to "
        "be committed",
    ),
    (
        SR,
        {"spec.expectedCommitted": 3},
        "spec.expectedCommitted: Forbidden: expectedCommitted is for allowRollback only",
    ),
    (
        SR,
        {"spec.engines": ["e-0-1"]},
        "spec.engines: Forbidden: engines are for kind CatchUp only: a Refresh always takes the whole pipeline",
    ),
    (
        SR,
        CATCH_UP | {"spec.engines": None},
        "spec.engines: Required value: kind CatchUp needs engines: the names of the pods to bring to the committed "
        "version",
    ),
    (
        SR,
        CATCH_UP | {"spec.manifestDigest": None},
        "spec.manifestDigest: Required value: kind CatchUp needs manifestDigest: the digest of the committed version",
    ),
    (
        SR,
        CATCH_UP | {"spec.allowRollback": True, "spec.expectedCommitted": 3},
        "spec.allowRollback: Forbidden: kind CatchUp commits nothing, so there is nothing to roll back",
    ),
    # SyncRound: bounds
    (SR, {"spec.version": -2}, below("spec.version", -2, -1)),
    (SR, {"spec.attempt": 0}, below("spec.attempt", 0, 1)),
    (SR, {"spec.kind": "Rollback"}, unknown("spec.kind", "Rollback", "Refresh", "CatchUp")),
    (SR, CATCH_UP | {"spec.engines": []}, "spec.engines in body should have at least 1 items"),
    (SR, CATCH_UP | {"spec.engines": ["e-0-1"] * 2}, 'spec.engines[1]: Duplicate value: "e-0-1"'),
    (SR, CATCH_UP | {"spec.engines": [f"e-{i}" for i in range(65)]}, "spec.engines: Too many: 65"),
    (SR, CATCH_UP | {"spec.engines": ["E 0"]}, "spec.engines[0] in body should match"),
    (SR, {"spec.manifestDigest": "md5:00"}, "spec.manifestDigest in body should match '^sha256:[0-9a-f]{64}$'"),
    (SR, {"spec.senderIncarnation": None}, "spec.senderIncarnation: Required value"),
]


@pytest.mark.parametrize(("kind", "edits", "answer"), REFUSED, ids=[f"{k}-{i}" for i, (k, *_) in enumerate(REFUSED)])
def test_refused(kind: str, edits: dict[str, Any], answer: str, example: Example, shared_server: Any) -> None:
    assert answer in shared_server.answer(lambda: shared_server.create(example(kind, edits), dry=True))


POOL = "create another EnginePool"
ROUND = "create another SyncRound"
PINNED = {"spec.placement": {"mode": "Pinned", "devices": gpus(("n1", 4))}}
ROLLBACK = {"spec.allowRollback": True, "spec.expectedCommitted": 9}

#: kind, edits of the stored object, patch of its spec, answer
FROZEN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (EP, {}, {"pipeline": "other"}, f"pipeline is immutable: {POOL}"),
    (EP, {}, {"engine": {"type": "VLLM"}}, f"engine.type is immutable: {POOL}"),
    (EP, {}, {"engine": {"port": 30009}}, f"engine.port is immutable: {POOL}"),
    (EP, {}, {"engine": {"gpusPerEngine": 2}}, f"engine.gpusPerEngine is immutable: {POOL}"),
    (EP, {}, {"gate": {"port": 9441}}, f"gate.port is immutable: {POOL}"),
    (EP, PINNED, {"placement": {"mode": "Scheduler", "devices": None}}, f"placement.mode is immutable: {POOL}"),
    (
        EP,
        ADOPTED,
        {"source": {"adopt": {"selector": {"matchLabels": {"app": "other"}}}}},
        f"source.adopt.selector is immutable: {POOL}",
    ),
    (
        EP,
        dynamo(),
        {"source": {"dynamo": {"selector": {"matchLabels": {"app": "other"}}}}},
        f"source.dynamo.selector is immutable: {POOL}",
    ),
    (
        EP,
        ADOPTED,
        {"source": {"adopt": None, "template": {"spec": {"containers": [ENGINE]}}}, "gate": {"image": "rlfleet:1"}},
        f"source can not change between template, adopt and dynamo; {POOL}",
    ),
    (
        RLP,
        {"spec.trainer": {"blocks": [BLOCK]}},
        {"trainer": {"blocks": [{**BLOCK, "slots": 2}]}},
        "a train block is immutable, as its ResourceClaim is: remove it and add one under another name",
    ),
    (SR, {}, {"pipeline": "other"}, f"pipeline is immutable: {ROUND}"),
    (SR, {}, {"version": 2}, f"version is immutable: {ROUND}"),
    (SR, {}, {"senderIncarnation": "other"}, f"senderIncarnation is immutable: {ROUND}"),
    (SR, {}, {"attempt": 2}, f"attempt is immutable: {ROUND}"),
    (SR, {}, {"manifestDigest": DIGEST}, f"manifestDigest is immutable: {ROUND}"),
    (SR, {"spec.manifestDigest": DIGEST}, {"manifestDigest": None}, f"manifestDigest is immutable: {ROUND}"),
    (
        SR,
        {"spec.manifestDigest": DIGEST},
        {"manifestDigest": DIGEST.replace("a", "b")},
        f"manifestDigest is immutable: {ROUND}",
    ),
    (SR, {}, {"allowRollback": True, "expectedCommitted": 3}, f"allowRollback is immutable: {ROUND}"),
    (SR, ROLLBACK, {"expectedCommitted": 8}, f"expectedCommitted is immutable: {ROUND}"),
    (SR, {}, {"kind": "CatchUp", "engines": ["e-0-1"], "manifestDigest": DIGEST}, f"kind is immutable: {ROUND}"),
    (SR, CATCH_UP, {"engines": ["e-0-1", "e-1-2"]}, f"engines is immutable: {ROUND}"),
    (SR, CATCH_UP, {"engines": None}, f"engines is immutable: {ROUND}"),
    (SR, {"spec.cancel": True}, {"cancel": False}, f"cancel cannot be undone: {ROUND}"),
    (SR, {"spec.cancel": True}, {"cancel": None}, f"cancel cannot be undone: {ROUND}"),
]


@pytest.mark.parametrize(
    ("kind", "edits", "patch", "answer"),
    FROZEN,
    ids=[f"{k}-{'-'.join(p)}-{i}" for i, (k, _, p, _) in enumerate(FROZEN)],
)
def test_immutable(
    kind: str,
    edits: dict[str, Any],
    patch: dict[str, Any],
    answer: str,
    example: Example,
    shared_server: Any,
    own_name: dict[str, str],
) -> None:
    stored = shared_server.create(example(kind, edits | own_name))
    assert answer in shared_server.answer(lambda: shared_server.patch(stored, {"spec": patch}))


MUTABLE: list[tuple[str, dict[str, Any]]] = [
    (SR, {"cancel": True}),
    (EP, {"replicas": 7, "engine": {"model": "other"}, "gate": {"image": "rlfleet:0.2.0"}, "routers": []}),
    (EP, {"source": {"template": {"metadata": {"labels": {"app": "changed"}}}}}),
    (RLP, {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "other"}}, "port": 9451}}}),
    (RLP, {"transport": {"mode": "CPUSerialize"}, "historyLimit": 3}),
    (RLP, {"trainer": {"gpus": None, "blocks": [BLOCK]}}),
]


@pytest.mark.parametrize(("kind", "patch"), MUTABLE, ids=[f"{k}-{'-'.join(p)}" for k, p in MUTABLE])
def test_what_may_change_can_change(
    kind: str, patch: dict[str, Any], example: Example, shared_server: Any, own_name: dict[str, str]
) -> None:
    stored = shared_server.create(example(kind, own_name))
    changed = shared_server.patch(stored, {"spec": patch})
    assert changed["spec"] != stored["spec"]
    assert changed["metadata"]["generation"] == 2


LEASE = {"holder": "a", "generation": 100}
#: kind, status that is stored, change of it, answer
STATUS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (RLP, {"fence": 100}, {"fence": 99}, 'status.fence: Invalid value: "integer": fence never decreases'),
    (SR, {"lease": LEASE}, {"lease": {"generation": 99}}, "lease.generation never decreases"),
    (SR, {"committed": True}, {"committed": False}, "committed cannot be taken back"),
    *(
        (
            SR,
            {"phase": end},
            {"phase": "Holding"},
            "the round has ended: its phase cannot change",
        )
        for end in ("Succeeded", "Failed", "Superseded", "Cancelled", "Expired")
    ),
    (SR, {"phase": "Staging"}, {"phase": "Waiting"}, 'status.phase: Unsupported value: "Waiting"'),
]


@pytest.mark.parametrize(("kind", "before", "change", "answer"), STATUS, ids=[f"{k}-{b}" for k, b, *_ in STATUS])
def test_status_never_goes_back(
    kind: str,
    before: dict[str, Any],
    change: dict[str, Any],
    answer: str,
    example: Example,
    shared_server: Any,
    own_name: dict[str, str],
) -> None:
    stored = shared_server.create(example(kind, own_name))
    shared_server.patch(stored, {"status": before}, "--subresource=status")
    assert answer in shared_server.answer(
        lambda: shared_server.patch(stored, {"status": change}, "--subresource=status")
    )
    # Written again as it is: a repeated write is no step back.
    assert shared_server.patch(stored, {"status": before}, "--subresource=status")["status"] == before


def test_no_rule_is_untested() -> None:
    answers = [row[-1] for row in (*REFUSED, *FROZEN, *STATUS)]
    for kind in crdgen.KINDS:
        for _, message in rules_of(crdgen.schema(kind)):
            assert any(answer.endswith(message) for answer in answers), message
