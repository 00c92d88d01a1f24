"""The pod template of an EnginePool: a core/v1 PodSpec, of which the schema spells out only what our rules look at.

Invariant: whatever Kubernetes knows of a pod passes through unchanged; the apiserver checks it when a pod is created.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rlfleet.api.v1alpha1.common import LabelKey, LabelValue, Spec, keyed_by, rule, rules

ENGINE_CONTAINER = "engine"
GATE_CONTAINER = "gate"


class TemplateMetadata(Spec):
    """Labels and annotations of the pods."""

    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Labels of the pods. Ours (rlfleet.dev/...) win over these.",
    )
    annotations: dict[LabelKey, Annotated[str, Field(max_length=65_536)]] = Field(
        default_factory=dict, max_length=64, description="Annotations of the pods."
    )


def _containers(description: str) -> dict[str, Any]:
    return {
        "type": "array",
        "description": description,
        "maxItems": 32,
        "items": {
            "type": "object",
            "description": "A core/v1 Container.",
            "x-kubernetes-preserve-unknown-fields": True,
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "description": "Name of the container.", "minLength": 1, "maxLength": 63}
            },
        },
        **keyed_by("name"),
    }


#: Only what our own rules look at is spelled out: the whole of core/v1 PodSpec would make the CRD ten times larger,
#: and the apiserver checks it anyway when the pod is created.
_POD_SPEC_SCHEMA: dict[str, Any] = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "required": ["containers"],
    "properties": {
        "containers": _containers("Containers of the pod; the one named engine runs the inference server."),
        "initContainers": _containers("Containers that run before the others."),
    },
    **rules(
        rule(
            f"self.containers.exists(c, c.name == '{ENGINE_CONTAINER}')",
            f"a container named {ENGINE_CONTAINER} is required: the gate drives that one",
            at=".containers",
            reason="FieldValueRequired",
        ),
        rule(
            f"self.containers.all(c, c.name != '{GATE_CONTAINER}') && "
            f"(!has(self.initContainers) || self.initContainers.all(c, c.name != '{GATE_CONTAINER}'))",
            f"the container name {GATE_CONTAINER} is reserved for the gate that is added to every pod",
            reason="FieldValueForbidden",
        ),
    ),
}


class PodTemplate(Spec):
    """The pod of one engine."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="Labels and annotations of the pods.")
    spec: Annotated[dict[str, Any], WithJsonSchema(_POD_SPEC_SCHEMA)] = Field(
        description="A core/v1 PodSpec with a container named engine. Identity, probes, volumes and the gate are "
        "added; restartPolicy becomes Never, because an engine that restarts in place would serve stale weights.",
    )
