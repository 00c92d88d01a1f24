"""Worker discovery's answer, ``GET /v1/rl/workers``, in the form that clients of NVIDIA Dynamo read.

Invariant: names and types of every member but ``rlfleet`` are Dynamo's (protocol version 1, snake_case); what is not
known is left out of the JSON, never null.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

#: There is no negotiation: clients refuse another one.
PROTOCOL_VERSION: Final = 1


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def json_bytes(self, *, leaving_out: set[str] | None = None) -> bytes:
        """The JSON text, without what is not known and without these members."""
        return self.model_dump_json(exclude_none=True, exclude=leaving_out).encode()


class OwnFacts(_Answer):
    """What rlfleet adds to an entry. Of a worker that did not answer: only what the apiserver tells."""

    namespace: str = Field(description="its Kubernetes namespace")
    pipeline: str = Field(description="its RLPipeline")
    pod: str = Field(description="name of its pod")
    pod_uid: str = Field(description="UID of its pod: another pod, another worker")
    instance: str | None = Field(
        default=None, description="what the engine calls its own process; of a Dynamo worker: Dynamo's instance id"
    )
    engine_url: str | None = Field(default=None, description="where the engine serves")
    version: int | None = Field(
        default=None, description="version that the engine is proven to hold, -1: the base; absent: none is proven"
    )
    manifest_digest: str | None = Field(default=None, description="digest of exactly those weights")
    fence: int | None = Field(default=None, description="highest generation that the gate has stored")
    open: bool | None = Field(
        default=None,
        description="serves proven weights, and every router that its gate knows lists it; absent: not known",
    )
    paused: bool | None = Field(default=None, description="takes no requests up; absent: not known")


class RLWorker(_Answer):
    """One live engine pod."""

    namespace: str = Field(description="as the operator is told (DYN_NAMESPACE); no Kubernetes namespace")
    component: str = Field(description="name of the EnginePool")
    endpoint: str = Field(description="as the operator is told (DYN_RL_ENDPOINT)")
    instance_id: int = Field(
        ge=0, lt=2**64, description="head of the SHA-256 of the pod's UID: unsigned 64 bits, often above 2^63 - 1"
    )
    transport: dict[str, str] = Field(description="http: the gate's URL")
    request_plane_url: str = Field(description="dyn://namespace.component.endpoint; nobody listens there")
    system_url: str | None = Field(default=None, description="the gate's URL; absent when it did not answer")
    model: str | None = Field(default=None, description="name of the model that the engine serves")
    routes: tuple[str, ...] = Field(default=(), description="paths below system_url/engine/, sorted: none")
    world_size: int | None = Field(default=None, gt=0, description="ranks that the engine takes in a broadcast group")
    error: str | None = Field(default=None, description="why nothing is known of this worker now: do not use it")
    rlfleet: OwnFacts | None = Field(default=None, description="left out below /strict")


class RLWorkers(_Answer):
    """The workers, sorted by (namespace, component, endpoint, instance_id), each once."""

    protocol_version: Literal[1] = PROTOCOL_VERSION
    namespace: str
    workers: tuple[RLWorker, ...]


class DiscoveryProblem(_Answer):
    """Every answer outside 2xx."""

    error: str = Field(description="discovery_failed: nothing is known; denied, not_served, busy")
    message: str
