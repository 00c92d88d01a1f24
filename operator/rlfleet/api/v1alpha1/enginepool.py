"""EnginePool: identical engines of one pipeline, their placement, gate and routers.

Invariant: what a running pod was built with and the operator still relies on (pipeline, ports, GPUs per engine, kind
of placement) is immutable; everything else takes effect when a pod is next replaced, or at once where it does not
concern pods.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import (
    ATOMIC,
    UNIQUE,
    KubernetesObject,
    LabelSelector,
    NodeDevices,
    NodeName,
    ObjectName,
    Port,
    Spec,
    Url,
    immutable,
    keyed_by,
    rule,
    rules,
)
from rlfleet.api.v1alpha1.enginepool_pods import NEW_POOL, POD_RULES, DisruptionBudget, Gate, Source, UpdateStrategy
from rlfleet.api.v1alpha1.enginepool_status import EnginePoolStatus
from rlfleet.api.wire import RouterType


class EngineType(StrEnum):
    """Inference servers that a gate can drive."""

    SGLANG = "SGLang"
    VLLM = "VLLM"
    DYNAMO = "Dynamo"


class PlacementMode(StrEnum):
    """Who assigns GPUs."""

    SCHEDULER = "Scheduler"
    CLAIMS = "Claims"
    PINNED = "Pinned"


class Shrink(StrEnum):
    """What becomes of an engine that is to give its GPUs up for a while."""

    OFFLOAD = "Offload"
    DELETE = "Delete"


class SecretKey(Spec):
    """One key of a Secret in the pool's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the Secret."
    )
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        description="Key within the Secret."
    )


class EngineSpec(Spec):
    """The inference server in each pod."""

    type: EngineType = Field(
        description="Inference server that the gate drives.", json_schema_extra=immutable("engine.type", NEW_POOL)
    )
    port: Port = Field(
        default=30000,
        description="Port of the engine's HTTP server; also the port under which routers know it. Dynamo: of the "
        "worker's system server (DYN_SYSTEM_PORT).",
        json_schema_extra=immutable("engine.port", NEW_POOL),
    )
    gpus_per_engine: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs of one engine. Scheduler: the engine container asks for this many nvidia.com/gpu, unless the "
        "template asks itself. Pinned: this many of the listed devices go to each engine.",
        json_schema_extra=immutable("engine.gpusPerEngine", NEW_POOL),
    )
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Model name or path, given to the engine container as environment variable RLFLEET_MODEL. With it, "
        "an engine container without command and args gets the command line of its type.",
    )
    args: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        default=(),
        max_length=64,
        description="Arguments after those of the engine type's own command line; not beside command or args of the "
        "template's engine container.",
        json_schema_extra=ATOMIC,
    )
    api_key_secret_ref: SecretKey | None = Field(
        default=None,
        description="The key that users of the engine present (Authorization: Bearer). Engine and gate get it as "
        "variable RLFLEET_ENGINE_API_KEY; the type's own command line demands it. Absent: none is demanded.",
    )
    allow_unknown_version: bool = Field(
        default=False,
        description="Whether gates drive an engine of a version that they do not know. False: they refuse it and name "
        "those that they know.",
    )


class Placement(Spec):
    """Which GPUs the engines get."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.mode != 'Pinned' || has(self.devices)",
                "mode Pinned needs devices",
                at=".devices",
                reason="FieldValueRequired",
            ),
            rule(
                "self.mode == 'Pinned' || !has(self.devices)",
                "devices are for mode Pinned only",
                at=".devices",
                reason="FieldValueForbidden",
            ),
            rule(
                "self.mode != 'Claims' || has(self.blocks)",
                "mode Claims needs blocks: names of the RLPipeline's spec.trainer.blocks",
                at=".blocks",
                reason="FieldValueRequired",
            ),
            rule(
                "self.mode == 'Claims' || !has(self.blocks)",
                "blocks are for mode Claims only",
                at=".blocks",
                reason="FieldValueForbidden",
            ),
            rule(
                "self.mode != 'Pinned' || !has(self.nodes)",
                "nodes are not for mode Pinned: devices name the nodes",
                at=".nodes",
                reason="FieldValueForbidden",
            ),
            rule(
                "self.mode != 'Pinned' || !has(self.packDomain)",
                "packDomain is not for mode Pinned: devices name the nodes",
                at=".packDomain",
                reason="FieldValueForbidden",
            ),
        )
    )

    mode: PlacementMode = Field(
        default=PlacementMode.SCHEDULER,
        description="Scheduler: the Kubernetes scheduler decides; the gate reports which GPUs it got. "
        "Claims: each engine gets a slot of a train block, whose GPUs it shares with the trainer. "
        "Pinned: each engine gets the next gpusPerEngine listed devices of one node, through NVIDIA_VISIBLE_DEVICES; "
        "the pods ask for no GPU resource.",
        json_schema_extra=immutable("placement.mode", NEW_POOL),
    )
    devices: tuple[NodeDevices, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Devices to hand out in this order; only with mode Pinned. One engine's devices lie on one node.",
        json_schema_extra=keyed_by("node"),
    )
    blocks: tuple[ObjectName, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Train blocks of the pipeline whose slots the engines take, in this order; only with mode Claims. "
        "No two pools may use one block.",
        json_schema_extra=UNIQUE,
    )
    nodes: tuple[NodeName, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Nodes that engines may run on; absent: any. Not with mode Pinned.",
        json_schema_extra=UNIQUE,
    )
    pack_domain: Annotated[str, Field(min_length=1, max_length=317)] | None = Field(
        default=None,
        description="Label of nodes, for instance nvidia.com/gpu.clique: all engines of the pool run on nodes with one "
        "value of it. Not with mode Pinned.",
    )


class RouterKind(StrEnum):
    """How an engine is taken out of the way of requests.

    SGLangRouter, SMG, VLLMRouter: its gate adds it to that router's list of workers and removes it there. Readiness:
    by its pod's readiness; Services, and whatever else reads EndpointSlices, follow. InferencePool: by a label of its
    pod; an InferencePool of the Gateway API, and whatever else selects pods by labels, follows.
    """

    SGLANG_ROUTER = RouterType.SGLANG_ROUTER.value
    SMG = RouterType.SMG.value
    VLLM_ROUTER = RouterType.VLLM_ROUTER.value
    READINESS = "Readiness"
    INFERENCE_POOL = "InferencePool"


class Router(Spec):
    """One router that sends requests to the engines."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.type in ['Readiness', 'InferencePool'] || has(self.podSelector) != has(self.url)",
                "exactly one of podSelector and url must be set",
            ),
            rule(
                "!(self.type in ['Readiness', 'InferencePool']) || !(has(self.podSelector) || has(self.url) || "
                "has(self.port) || has(self.metricsPort))",
                "types Readiness and InferencePool take neither podSelector nor url nor ports: Services and "
                "InferencePools select the engines' pods",
                at=".type",
            ),
            rule(
                "!has(self.adminKeySecretRef) || self.type in ['SGLangRouter', 'SMG']",
                "adminKeySecretRef is for types SGLangRouter and SMG: no other router demands a key on its API",
                at=".adminKeySecretRef",
                reason="FieldValueForbidden",
            ),
            rule(
                "!has(self.podSelector) || has(self.port)",
                "podSelector needs port",
                at=".port",
                reason="FieldValueRequired",
            ),
            rule(
                "!has(self.url) || !has(self.port)",
                "port applies to podSelector only: put the port into url",
                at=".port",
                reason="FieldValueForbidden",
            ),
        )
    )

    name: ObjectName = Field(description="Name of the router within this pool.")
    type: RouterKind = Field(
        description="The router's API. Readiness: none; pods of this pool become Ready only while their engine serves "
        "the committed version (readiness gate rlfleet.dev/weights-current), and Services follow. Adding or removing "
        "it changes pods, so they become outdated. InferencePool: none; pods of this pool bear the label "
        'rlfleet.dev/serving: "true" only while their engine serves the committed version, for the selector of an '
        "InferencePool. Not for adopted pods."
    )
    pod_selector: LabelSelector | None = Field(default=None, description="Selects the one pod that runs the router.")
    port: Port | None = Field(default=None, description="Port of the router in the selected pod.")
    url: Url | None = Field(
        default=None,
        description="Base URL of a router that is no pod of this namespace, for instance http://10.0.0.9:30001.",
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Port of the router's metrics (--prometheus-port), on the host of its API. With it gates also see "
        "circuit breakers that are open, which routers tell nowhere else; without it only failed health checks.",
    )
    admin_key_secret_ref: SecretKey | None = Field(
        default=None,
        description="The key that the router demands on its API: its --api-key, or one of --control-plane-api-keys "
        "with the role admin. Mounted into the gates of new pods, which follow changes of the Secret; naming another "
        "Secret changes pods, so they become outdated. The operator reads it, too, for engines that are gone: it must "
        "be allowed to (chart value routerKeySecrets). Types SGLangRouter and SMG. Absent: none is demanded.",
    )


class EnginePoolSpec(Spec):
    """What the user wants of a pool."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.engine.gpusPerEngine < 1 || self.placement.mode != 'Pinned' || !has(self.placement.devices) || "
                "self.replicas <= "
                "self.placement.devices.map(n, n.devices.size() / self.engine.gpusPerEngine).sum()",
                "placement.devices has too few devices: each replica takes engine.gpusPerEngine devices of one node",
                at=".replicas",
            ),
            rule(
                "self.placement.mode != 'Pinned' || !has(self.placement.devices) || "
                "self.placement.devices.all(n, n.devices.size() % self.engine.gpusPerEngine == 0)",
                "placement.devices must be a multiple of engine.gpusPerEngine on each node: an engine lies on one node",
                at=".placement.devices",
            ),
            rule(
                "self.placement.mode != 'Claims' || !has(self.shrink) || self.shrink == 'Offload'",
                "placement Claims needs shrink Offload: without its pods a train block may move to other GPUs",
                at=".shrink",
            ),
            *POD_RULES,
            rule(
                "!has(self.source.adopt) || !has(self.routers) || self.routers.all(r, r.type != 'InferencePool')",
                "routers of type InferencePool need source.template: labels of adopted pods are their owner's",
                at=".routers",
            ),
            rule(
                "self.gate.port != self.engine.port",
                "gate.port and engine.port must differ: both listen on the pod's address",
                at=".gate.port",
            ),
        )
    )

    pipeline: ObjectName = Field(
        description="Name of the RLPipeline, in the same namespace, whose weights the engines serve.",
        json_schema_extra=immutable("pipeline", NEW_POOL),
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="How many engines there should be, awake or asleep. 0 is legal; kubectl scale changes it. Not with "
        "source.adopt or source.dynamo.",
    )
    active: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None,
        description="Ceiling of engines that are awake at the same time; absent: all of them. The others sleep (shrink "
        "Offload) or have no pod (shrink Delete). Of the engines that are awake the one with the highest index goes "
        "first, of those that sleep the one with the lowest comes back first. 0 is legal: engines boot, sleep, and are "
        "neither routed nor synced before they are woken.",
    )
    shrink: Shrink | None = Field(
        default=None,
        description="How an engine gives its GPUs up, for spec.active or for a trainer that demands them. Offload: its "
        "process stays and releases its device memory. Delete: its pod is deleted. Absent: Delete with placement "
        "Scheduler (the GPU goes back to the scheduler), else Offload. Adopted pods always Offload.",
    )
    residual_memory_gi_b: float = Field(
        default=13.0,
        ge=0.001,
        le=4096,
        alias="residualMemoryGiB",
        description="Memory in GiB that may be in use on a device, by whomever, once its engines sleep: above it, "
        "condition ResidualMemoryHigh is True and no trainer gets the device.",
        # The apiserver cuts a minimum to a whole number where it meets one: 0 would pass.
        json_schema_extra=rules(rule("self >= 0.001", "residualMemoryGiB must be at least 0.001")),
    )
    engine: EngineSpec = Field(description="The inference server in each pod.")
    source: Source = Field(description="Where engines come from.")
    placement: Placement = Field(default=Placement(), description="Which GPUs the engines get.")
    routers: tuple[Router, ...] = Field(
        default=(),
        max_length=16,
        description="Routers that each gate adds its own engine to. None is legal: then clients call engines directly.",
        json_schema_extra=keyed_by("name"),
    )
    gate: Gate = Field(default=Gate(), description="The sidecar that drives the engine for the operator.")
    update_strategy: UpdateStrategy = Field(
        default=UpdateStrategy(), description="When pods take over a changed template."
    )
    disruption_budget: DisruptionBudget | None = Field(
        default=None,
        description="How many engines others may evict at the same time. Absent: one engine of source.template, and no "
        "limit of ours for adopted pods, whose owner may have set one.",
    )


class EnginePool(KubernetesObject):
    """Identical engines of one pipeline: how many, from which pod template, on which GPUs, behind which routers."""

    spec: EnginePoolSpec
    status: EnginePoolStatus = EnginePoolStatus()
