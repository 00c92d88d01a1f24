"""EnginePool.spec about its pods: where they come from, the gate in them, when they are replaced or may be evicted.

Invariant: what only pods of our making can have (an image of the gate, a rolling update) is refused for adopted ones.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import (
    COUNT_OR_PERCENT,
    MAX_EXACT,
    UNIQUE,
    LabelSelector,
    ObjectName,
    Port,
    Spec,
    Url,
    immutable,
    rule,
    rules,
)
from rlfleet.api.v1alpha1.podtemplate import PodTemplate

NEW_POOL = "create another EnginePool"


class PullPolicy(StrEnum):
    """When the gate's image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Adopt(Spec):
    """Pods that somebody else makes: a StatefulSet, a LeaderWorkerSet, a RoleBasedGroup, a RayCluster, a person."""

    selector: LabelSelector = Field(
        description="Selects the pods, in the pool's namespace. Each must run the gate, in a container named gate. A "
        "pod that two pools select belongs to the older one.",
        json_schema_extra=immutable("source.adopt.selector", NEW_POOL),
    )


class DynamoService(Spec):
    """A Service in the pool's namespace."""

    name: ObjectName = Field(description="Name of the Service.")
    port: Port = Field(default=8001, description="Its port for discovery (DYN_RL_PORT of the frontend).")


class Dynamo(Spec):
    """Workers that a Dynamo frontend lists, in pods that somebody else makes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.service) != has(self.url)", "exactly one of service and url must be set"),
        )
    )

    service: DynamoService | None = Field(
        default=None, description="The frontend's discovery listener (GET /v1/rl/workers), as a Service."
    )
    url: Url | None = Field(
        default=None,
        description="Base URL of a discovery listener that is no Service of this namespace, for instance "
        "http://10.0.0.9:8001.",
    )
    selector: LabelSelector = Field(
        description="Selects the pods that may run workers, in the pool's namespace. Each must run the gate, in a "
        "container named gate. A pod whose worker is not listed stays an engine, and closed: what is not listed is "
        "not gone.",
        json_schema_extra=immutable("source.dynamo.selector", NEW_POOL),
    )
    components: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        default=(),
        max_length=16,
        description="Only workers of these Dynamo components count; empty: of all that the frontend lists.",
        json_schema_extra=UNIQUE,
    )


class Source(Spec):
    """Where engines come from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.template), has(self.adopt), has(self.dynamo)].filter(x, x).size() == 1",
                "exactly one of template, adopt and dynamo must be set",
            ),
            rule(
                "has(self.adopt) == has(oldSelf.adopt) && has(self.dynamo) == has(oldSelf.dynamo)",
                f"source can not change between template, adopt and dynamo; {NEW_POOL}",
            ),
        )
    )

    template: PodTemplate | None = Field(
        default=None,
        description="Engines are pods that the operator creates from this template. When running pods take over a "
        "change, updateStrategy says; condition TemplateOutdated says that some are older.",
    )
    adopt: Adopt | None = Field(
        default=None,
        description="Engines are pods that somebody else makes, with the gate in their own template. The operator "
        "never creates, deletes or resizes them.",
    )
    dynamo: Dynamo | None = Field(
        default=None,
        description="Engines are workers that a Dynamo frontend lists, driven by gates in their pods. The operator "
        "never creates, deletes or resizes the pods.",
    )


Quantity = Annotated[
    int | str,
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE]|[eE][0-9]+)?$",
            "maxLength": 32,
            "minimum": 0,
            "maximum": MAX_EXACT,
        }
    ),
]
ResourceName = Annotated[str, Field(max_length=317)]


class Resources(Spec):
    """Compute resources of the gate."""

    limits: dict[ResourceName, Quantity] = Field(
        default_factory=dict,
        max_length=8,
        description="Upper limits. Staged weights count against memory: it must hold stagingMiB and 256 MiB more.",
    )
    requests: dict[ResourceName, Quantity] = Field(
        default_factory=dict, max_length=8, description="Guaranteed amounts."
    )


class Gate(Spec):
    """The sidecar that drives the engine for the operator."""

    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] | None = Field(
        default=None,
        description="Container image with the rlfleet gate. Needed with source.template; pods that somebody else makes "
        "bring their own.",
    )
    image_pull_policy: PullPolicy | None = Field(
        default=None, description="When the image is pulled; absent: Kubernetes decides by the image's tag."
    )
    port: Port = Field(
        default=9440,
        description="Port of the gate. That of adopted pods must be the same.",
        json_schema_extra=immutable("gate.port", NEW_POOL),
    )
    staging_mi_b: int = Field(
        default=1024,
        ge=1,
        le=4_194_304,
        alias="stagingMiB",
        description="Size of the memory volume that receives serialized weights, in MiB. It must hold the whole model, "
        "or with transport.staging Bucket one bucket.",
    )
    checkpoint_volume: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None,
        description="Name of the volume of source.template that holds checkpoints "
        "(RLPipeline.spec.weights.checkpoint). The engine container must mount it; the gate mounts it at the "
        "same path, read-only.",
    )
    resources: Resources | None = Field(
        default=None,
        description="Compute resources of the gate container; absent: requests that fit stagingMiB, and no limits.",
    )


Unavailable = Annotated[int | str, Field(json_schema_extra=COUNT_OR_PERCENT)]


class UpdateType(StrEnum):
    """When pods take over a changed template."""

    ON_DELETE = "OnDelete"
    ROLLING_UPDATE = "RollingUpdate"


class UpdateStrategy(Spec):
    """When pods take over a changed template."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.type == 'RollingUpdate' || !has(self.maxUnavailable)",
                "maxUnavailable is for type RollingUpdate only",
                at=".maxUnavailable",
                reason="FieldValueForbidden",
            ),
        )
    )

    type: UpdateType = Field(
        default=UpdateType.ON_DELETE,
        description="OnDelete: a pod takes over a changed template when it is deleted and recreated. RollingUpdate: "
        "the operator replaces outdated pods, never while a round or other work owns the engines.",
    )
    max_unavailable: Unavailable | None = Field(
        default=None,
        description="RollingUpdate only: engines that may be out of service at the same time because of it, as a count "
        "or a percentage of spec.replicas, rounded up; at least 1. Absent: 1. Engines that are out of service for "
        "another reason count, too.",
    )


class DisruptionBudget(Spec):
    """The pool's PodDisruptionBudget, which has the pool's name and goes with it."""

    max_unavailable: Unavailable = Field(
        default=1,
        description="Engine pods that may be unavailable for an eviction to be allowed: a count, or a percentage. 0 "
        "refuses every eviction, 100% allows all.",
    )


_FOREIGN = "(has(self.source.adopt) || has(self.source.dynamo))"
#: Rules of the whole spec about whose pods the engines are. Only source.template has pods of the operator's making.
POD_RULES = (
    rule(
        "!has(self.source.template) || has(self.gate.image)",
        "source.template needs gate.image",
        at=".gate",
        reason="FieldValueRequired",
    ),
    *(
        rule(
            f"!{_FOREIGN} || !has(self.gate.{name})",
            f"gate.{name} is not for source.adopt and source.dynamo: the gate stands in the template of whoever "
            "makes the pods",
            at=f".gate.{name}",
            reason="FieldValueForbidden",
        )
        for name in ("image", "imagePullPolicy", "resources", "checkpointVolume")
    ),
    *(
        rule(
            f"!{_FOREIGN} || {absent}",
            f"engine.{name} is not for source.adopt and source.dynamo: command line and variables stand in the "
            "template of whoever makes the pods",
            at=f".engine.{name}",
            reason="FieldValueForbidden",
        )
        for name, absent in (
            ("args", "!has(self.engine.args)"),
            ("apiKeySecretRef", "!has(self.engine.apiKeySecretRef)"),
            ("allowUnknownVersion", "!self.engine.allowUnknownVersion"),
        )
    ),
    rule(
        f"!{_FOREIGN} || self.replicas == 1",
        "replicas is not for source.adopt and source.dynamo: whoever makes the pods scales them; leave it out",
        at=".replicas",
        reason="FieldValueForbidden",
    ),
    rule(
        f"!{_FOREIGN} || !has(self.shrink) || self.shrink == 'Offload'",
        "source.adopt and source.dynamo need shrink Offload: pods that somebody else makes are never deleted",
        at=".shrink",
    ),
    rule(
        f"!{_FOREIGN} || self.updateStrategy.type == 'OnDelete'",
        "updateStrategy RollingUpdate is not for source.adopt and source.dynamo: whoever makes the pods replaces them",
        at=".updateStrategy.type",
    ),
    rule(
        f"!{_FOREIGN} || (self.placement.mode == 'Scheduler' && !has(self.placement.nodes) && "
        "!has(self.placement.packDomain))",
        "placement is not for source.adopt and source.dynamo: whoever makes the pods places them",
        at=".placement",
        reason="FieldValueForbidden",
    ),
    rule(
        "has(self.source.dynamo) == (self.engine.type == 'Dynamo')",
        "source.dynamo and engine.type Dynamo need each other",
        at=".engine.type",
    ),
    rule(
        "!has(self.source.dynamo) || !has(self.routers) || self.routers.size() == 0",
        "routers are not for source.dynamo: workers register with their frontend by themselves",
        at=".routers",
        reason="FieldValueForbidden",
    ),
    rule(
        "!has(self.source.dynamo) || !has(self.active)",
        "active is not for source.dynamo: workers advertise no route by which they give memory back",
        at=".active",
        reason="FieldValueForbidden",
    ),
)
