"""Generates crds/, charts/rlfleet/crds/ and the reference pages from the models.

``python -m rlfleet.api.crdgen --write`` writes them, ``--check`` fails when a file differs from what would be written.
Invariant: the output depends on the models only, so a difference always means that somebody forgot ``--write``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rlfleet.api import generated, labels, naming, reference
from rlfleet.api.schema import structural_schema
from rlfleet.api.v1alpha1 import (
    EnginePool,
    EnginePoolSpec,
    EnginePoolStatus,
    RLPipeline,
    RLPipelineSpec,
    RLPipelineStatus,
    SyncRound,
    SyncRoundSpec,
    SyncRoundStatus,
    TrainerDemand,
    TrainerDemandSpec,
)
from rlfleet.api.v1alpha1.common import DNS_LABEL, KubernetesObject, rule

HEADER = "# Generated from operator/rlfleet/api/v1alpha1 by `make generate`; do not edit.\n"


@dataclass(frozen=True, slots=True)
class Column:
    """One printer column; priority 1 shows with ``-o wide`` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def manifest(self) -> dict[str, Any]:
        """As it stands in the CRD."""
        made: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return made | ({"priority": 1} if self.wide else {})


def _condition(type: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{type}")].{field}'


AGE = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a CRD says beside its schema."""

    model: type[KubernetesObject]
    spec: type[BaseModel]
    status: type[BaseModel] | None
    plural: str
    short: str
    max_name: int
    name_reason: str
    columns: tuple[Column, ...]
    scale: bool = False

    @property
    def name(self) -> str:
        """The kind."""
        return self.model.__name__

    @property
    def file(self) -> str:
        """File name of its CRD."""
        return f"{labels.GROUP}_{self.plural}.yaml"


KINDS: tuple[Kind, ...] = (
    Kind(
        model=RLPipeline,
        spec=RLPipelineSpec,
        status=RLPipelineStatus,
        plural="rlpipelines",
        short="rlp",
        max_name=naming.MAX_NAME,
        name_reason="it becomes a label of pods and rounds",
        columns=(
            Column("Sender", _condition("SenderReady")),
            Column("Ready", _condition("Ready")),
            Column("Version", ".status.committed.version", "integer"),
            Column("Active", ".status.engines.active", "integer"),
            Column("Engines", ".status.engines.total", "integer"),
            Column("Operation", ".status.activeOperation.name"),
            Column("Progress", ".status.progress.percent", "integer"),
            Column("Transport", ".spec.transport.mode", wide=True),
            Column("Published", ".status.cacheReady.version", "integer", wide=True),
            Column("Fence", ".status.fence", "integer", wide=True),
            Column("Reason", _condition("Ready", "reason"), wide=True),
            AGE,
        ),
    ),
    Kind(
        model=EnginePool,
        spec=EnginePoolSpec,
        status=EnginePoolStatus,
        plural="enginepools",
        short="epool",
        max_name=naming.MAX_POOL_NAME,
        name_reason="its pods append an index and five digits",
        columns=(
            Column("Pipeline", ".spec.pipeline"),
            Column("Desired", ".spec.replicas", "integer"),
            Column("Active", ".status.counts.active", "integer"),
            Column("Asleep", ".status.counts.offloaded", "integer"),
            Column("Version", ".status.versions[0].version", "integer"),
            Column("Open", _condition("AdmissionOpen")),
            Column("Ready", _condition("Ready")),
            Column("Pods", ".status.replicas", "integer", wide=True),
            Column("Ceiling", ".spec.active", "integer", wide=True),
            Column("Loading", ".status.counts.loading", "integer", wide=True),
            Column("Draining", ".status.counts.draining", "integer", wide=True),
            Column("Quarantined", ".status.counts.quarantined", "integer", wide=True),
            Column("Failed", ".status.counts.failed", "integer", wide=True),
            Column("Outdated", _condition("TemplateOutdated"), wide=True),
            Column("Fencing", ".status.fencing", wide=True),
            Column("Admission", ".status.admissionGuarantee", wide=True),
            Column("Reason", _condition("Ready", "reason"), wide=True),
            AGE,
        ),
        scale=True,
    ),
    Kind(
        model=SyncRound,
        spec=SyncRoundSpec,
        status=SyncRoundStatus,
        plural="syncrounds",
        short="sr",
        max_name=naming.MAX_NAME,
        name_reason="it is shown as the operation of pipelines and gates",
        columns=(
            Column("Pipeline", ".spec.pipeline"),
            Column("Kind", ".spec.kind"),
            Column("Version", ".spec.version", "integer"),
            Column("Phase", ".status.phase"),
            Column("Serialized", ".status.plan.serialized", "integer"),
            Column("Broadcast", ".status.plan.broadcast", "integer"),
            Column("Paused-ms", ".status.timings.pausedMs", "integer"),
            Column("Total-ms", ".status.timings.totalMs", "integer"),
            Column("Committed", ".status.committed", "boolean", wide=True),
            Column("Attempt", ".spec.attempt", "integer", wide=True),
            Column("Bytes", ".status.bytes", "integer", wide=True),
            Column("Generation", ".status.lease.generation", "integer", wide=True),
            Column("Reason", ".status.failure.reason", wide=True),
            AGE,
        ),
    ),
    Kind(
        model=TrainerDemand,
        spec=TrainerDemandSpec,
        status=None,
        plural="trainerdemands",
        short="td",
        max_name=naming.MAX_NAME,
        name_reason="it is the name of its RLPipeline",
        columns=(
            Column("Trainer", ".spec.trainer.podName"),
            Column("Wants", ".spec.requests[*].cluster"),
            Column("Step", ".spec.requests[0].step", "integer"),
            Column("Streams", ".spec.streams[*].key", wide=True),
            AGE,
        ),
    ),
)


def schema(kind: Kind) -> dict[str, Any]:
    """The whole object's schema."""
    return {
        "description": (kind.model.__doc__ or "").strip(),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Version of this API.", "type": "string"},
            "kind": {"description": f"{kind.name}.", "type": "string"},
            # Named so that the rule below can point at it.
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural_schema(kind.spec, defaults=True),
            **({} if kind.status is None else {"status": structural_schema(kind.status, defaults=False)}),
        },
        "x-kubernetes-validations": [
            rule(
                f"self.metadata.name.size() <= {kind.max_name} && self.metadata.name.matches('{DNS_LABEL}')",
                f"the name of {kind.name} may have {kind.max_name} characters at most, of a-z, 0-9 and '-', "
                f"without '-' at either end: {kind.name_reason}",
                at=".metadata.name",
            )
        ],
    }


def crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    subresources: dict[str, Any] = {} if kind.status is None else {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{labels.GROUP}"},
        "spec": {
            "group": labels.GROUP,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": [labels.CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": labels.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [column.manifest() for column in kind.columns],
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": schema(kind)},
                }
            ],
        },
    }


class _Plain(yaml.SafeDumper):
    """Writes a part of a schema that is used twice out twice: tools that read CRDs need not know anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_yaml(kind: Kind) -> str:
    """The CRD as it stands in its file."""
    return HEADER + yaml.dump(crd(kind), Dumper=_Plain, sort_keys=False, width=116, allow_unicode=True)


def files() -> dict[str, str]:
    """Every generated file: path below the repository's root, and content."""
    made: dict[str, str] = {}
    for kind in KINDS:
        text = crd_yaml(kind)
        made[f"crds/{kind.file}"] = text
        made[f"charts/rlfleet/crds/{kind.file}"] = text
    made["docs/reference/crds.md"] = reference.crds_page(
        [(kind.name, kind.plural, kind.short, schema(kind)) for kind in KINDS]
    )
    made["docs/reference/conditions.md"] = reference.conditions_page()
    made["docs/reference/metrics.md"] = reference.metrics_page()
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0 when everything is written or equal, 1 when --check finds a difference."""
    chosen = generated.arguments(
        "rlfleet crds", "Generate CRDs and reference pages from the models.", argv, root=Path()
    )
    return generated.write_or_check(files(), chosen, "the models")


if __name__ == "__main__":
    sys.exit(main())
