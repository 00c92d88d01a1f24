"""Where the weights of a pipeline come from: ``RLPipeline.spec.weights``.

Invariant: exactly one source, and each names how its bytes are told apart.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import LabelSelector, Port, Spec, Url, rule, rules


class SenderSource(Spec):
    """The weight sender inside the trainer."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.podSelector) != has(self.url)",
                "exactly one of podSelector and url must be set",
            ),
            rule(
                "!has(self.url) || self.port == 9450",
                "port applies to podSelector only: put the port into url",
                at=".port",
                reason="FieldValueForbidden",
            ),
        )
    )

    pod_selector: LabelSelector | None = Field(
        default=None,
        description="Selects the one pod that runs the sender. Preferred over url: it proves which pod is meant.",
    )
    url: Url | None = Field(
        default=None,
        description="Base URL of a sender outside the cluster, for instance http://10.0.0.7:9450. "
        "Its pod UID is taken from its own report.",
    )
    port: Port = Field(default=9450, description="Port of the sender in the selected pod.")


class CheckpointSource(Spec):
    """Checkpoints on a volume that engines and their gates mount."""

    path_template: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Absolute path of a version's directory, with {version} in it, for instance "
        "/checkpoints/run-7/{version}. It must lie below the mount path of spec.gate.checkpointVolume of every "
        "EnginePool. What is there was written by rlfleet.sender.checkpoint: safetensors files, manifest.json, and a "
        "marker that says that all of it is there.",
        json_schema_extra=rules(
            rule(
                "self.startsWith('/') && self.contains('{version}') && !self.matches('(^|/)[.][.](/|$)')",
                "pathTemplate must be absolute, contain {version}, and have no part ..",
            ),
        ),
    )


class Weights(Spec):
    """Where complete weights come from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.sender) != has(self.checkpoint)", "exactly one of sender and checkpoint must be set"),
        )
    )

    sender: SenderSource | None = Field(
        default=None, description="Weights come from the sender library in the trainer."
    )
    checkpoint: CheckpointSource | None = Field(
        default=None,
        description="Weights come from a path that engines load by themselves; there is no sender. A round names the "
        "bytes that it brings by version and manifest digest, and its senderIncarnation is checkpoint. Gates hash the "
        "files before any engine is paused.",
    )
