"""The pod template of an EnginePool: a core/v1 PodSpec, of which the schema spells out only what our rules look at.

Invariant: whatever Kubernetes knows of a pod passes through unchanged; the apiserver checks it when a pod is created.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rlfleet.api.v1alpha1.common import ATOMIC, LabelKey, LabelValue, Spec, keyed_by, rule, rules

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


def _object(description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Whatever Kubernetes knows of it, and of these fields at least their kind."""
    return {
        "type": "object",
        "description": description,
        "x-kubernetes-preserve-unknown-fields": True,
        **({"properties": properties} if properties else {}),
    }


def _list(description: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "description": description, "maxItems": 4096, "items": items, **ATOMIC}


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    """Left out, or empty in YAML, which is the same to Kubernetes."""
    return {**schema, "nullable": True}


def _text(description: str, longest: int) -> dict[str, Any]:
    return {"type": "string", "description": description, "maxLength": longest}


_NAME = {"type": "string", "description": "Its name.", "minLength": 1, "maxLength": 253}
_NAMED = {**_object("As core/v1 has it.", name=_NAME), "required": ["name"]}
_VARIABLE = {**_object("A core/v1 EnvVar.", name=_text("Its name.", 4096)), "required": ["name"]}
_WORDS = _text("One word.", 65_536)
_AMOUNTS = _optional(_object("Amounts by resource."))


def _containers(description: str) -> dict[str, Any]:
    container = _object(
        "A core/v1 Container.",
        name={"type": "string", "description": "Name of the container.", "minLength": 1, "maxLength": 63},
        command=_optional(_list("Its program.", _WORDS)),
        args=_optional(_list("Its arguments, one by one.", _WORDS)),
        env=_optional(_list("Its variables, as a list of names and values.", _VARIABLE)),
        resources=_optional(
            _object(
                "What it asks for.",
                limits=_AMOUNTS,
                requests=_AMOUNTS,
                claims=_optional(_list("ResourceClaims of the pod that it uses.", _NAMED)),
            )
        ),
        volumeMounts=_optional(
            _list(
                "Where it mounts volumes.",
                {
                    **_object("A mount.", name=_NAME, mountPath=_text("Where.", 4096)),
                    "required": ["name", "mountPath"],
                },
            )
        ),
    )
    return {
        "type": "array",
        "description": description,
        "maxItems": 32,
        "items": {**container, "required": ["name"]},
        **keyed_by("name"),
    }


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_TERM = _object("A term.", matchExpressions=_optional(_list("What nodes are to match.", _object("As core/v1 has it."))))
_NODE_RULE = _object("Nodes that count.", nodeSelectorTerms=_optional(_list("One of these.", _TERM)))
_POD_RULES = _list("Pods that count.", _object("As core/v1 has it."))

#: Only what is looked at here is spelled out: the whole of core/v1 PodSpec would make the CRD ten times larger, and the
#: apiserver checks it anyway when the pod is created. All that the operator reads or adds to is, by its kind: a list
#: where a word stands would otherwise end every look at the pool, and at its pipeline.
_POD_SPEC_SCHEMA: dict[str, Any] = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "required": ["containers"],
    "properties": {
        "containers": _containers("Containers of the pod; the one named engine runs the inference server."),
        "initContainers": _containers("Containers that run before the others."),
        "volumes": _optional(_list("Volumes of the pod.", _NAMED)),
        "resourceClaims": _optional(_list("ResourceClaims of the pod.", _NAMED)),
        "readinessGates": _optional(_list("Conditions that the pod waits for.", _object("As core/v1 has it."))),
        "securityContext": _optional(_object("Of the pod as a whole.")),
        "affinity": _optional(
            _object(
                "Where the pod runs.",
                nodeAffinity=_optional(_object("By nodes.", **{_REQUIRED: _optional(_NODE_RULE)})),
                podAffinity=_optional(_object("By pods.", **{_REQUIRED: _optional(_POD_RULES)})),
            )
        ),
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
