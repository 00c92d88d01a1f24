"""TrainerDemand: what a pipeline's trainer reports and asks for, in an object that only the trainer writes.

It is an object of its own because counters that move all the time would otherwise bump the generation of the
RLPipeline and lie under every conditional write of its fence.

Invariant: it holds wishes and absolute counters, never results; what became of a request stands in RLPipeline.status.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlfleet.api.v1alpha1.common import (
    KubernetesObject,
    NodeDevices,
    ObjectName,
    Spec,
    Uid,
    WeightVersion,
    WholeNumber,
    keyed_by,
)
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority

PodName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")]


class DemandingTrainer(Spec):
    """The trainer process that demands."""

    pod_uid: Uid = Field(
        alias="podUID",
        description="UID of its pod, or any name of its own for a trainer outside the cluster. Another value means "
        "another trainer.",
    )
    pod_name: PodName | None = Field(
        default=None,
        description="Name of its pod, in the same namespace. With it the operator can prove that the trainer is gone: "
        "all of this object is void then. Without it, what is demanded stands until it is withdrawn.",
    )


class ProgressStream(Spec):
    """Absolute counters of one stream of rollouts."""

    key: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")] = Field(
        description="Name of the stream, for instance actor_train:my-adapter."
    )
    batch: WholeNumber = Field(default=0, description="Number of the batch that the counters are about.")
    target: WholeNumber = Field(description="Trajectories wanted for this batch; 0 counts as 1.")
    collected: WholeNumber = Field(description="Trajectories collected so far; those beyond target do not count.")


class DeviceRequest(Spec):
    """GPUs that the trainer wants for a step. Engines on them go to sleep; RLPipeline.status.grants says when to go."""

    cluster: ObjectName = Field(description="Which part of the trainer wants them, in its own words.")
    priority: DemandPriority = Field(
        default=DemandPriority.ACTOR_TRAINING, description="What for. Earlier ones are served first."
    )
    step: WeightVersion = Field(description="Training step that they are for. Another step is another request.")
    id: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = Field(
        default="",
        description="Told in the grant, so that the grant of an earlier request for the same step, which is being "
        "taken back, is not mistaken for this one's.",
    )
    devices: tuple[NodeDevices, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The GPUs; absent: the whole train pool.",
        json_schema_extra=keyed_by("node"),
    )


class TrainerDemandSpec(Spec):
    """What the trainer reports and asks for."""

    trainer: DemandingTrainer = Field(description="Who writes this.")
    streams: tuple[ProgressStream, ...] = Field(
        default=(),
        max_length=64,
        description="Progress of the rollouts. A stream that is left out is over.",
        json_schema_extra=keyed_by("key"),
    )
    requests: tuple[DeviceRequest, ...] = Field(
        default=(),
        max_length=64,
        description="GPUs wanted now. A request that is left out is withdrawn, and its GPUs go back to the engines.",
        json_schema_extra=keyed_by("cluster"),
    )


class TrainerDemand(KubernetesObject):
    """What the trainer of the RLPipeline of the same name reports and asks for; only the trainer writes it."""

    spec: TrainerDemandSpec
