"""Names that objects carry for us: API group, labels, finalizers and field managers.

Invariant: each of these strings is spelled in this file only. A selector that spells a label another way than the
writer did selects nothing and reports no error.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "rlfleet.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
#: `kubectl get rlfleet` lists every kind of this category.
CATEGORY: Final = "rlfleet"

#: On pods and SyncRounds: name of the RLPipeline that they belong to.
PIPELINE: Final = f"{GROUP}/pipeline"
#: On pods: name of the EnginePool that they belong to.
POOL: Final = f"{GROUP}/pool"
#: On pods: index of the engine in its pool, 0 to replicas - 1.
ENGINE_INDEX: Final = f"{GROUP}/engine-index"
#: On pods: hash of the pod template that they were made from, with the version of the hash itself.
TEMPLATE_HASH: Final = f"{GROUP}/template-hash"
#: Annotation on pods of a Pinned pool: "<node>/<device>,<device>" that this engine was given.
DEVICES: Final = f"{GROUP}/devices"
#: Annotation on pods of a Claims pool: "<ResourceClaim>/<request>" that this engine was given.
SLOT: Final = f"{GROUP}/slot"
#: Annotation on the ResourceClaim of a train block: hash of the block that it was made from.
BLOCK_HASH: Final = f"{GROUP}/block-hash"
#: Annotation on engine pods, by a person: keep this engine out of service; the value says why.
QUARANTINE: Final = f"{GROUP}/quarantine"
#: Characters of it that are shown.
MAX_QUARANTINE_REASON: Final = 200
#: Condition of engine pods in pools with a Readiness router, and the readiness gate that waits for it: the engine
#: serves the committed version.
WEIGHTS_CURRENT: Final = f"{GROUP}/weights-current"
#: On engine pods in pools with an InferencePool router, "true" while the engine serves the committed version; on no
#: other pod.
SERVING: Final = f"{GROUP}/serving"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE: Final = "rlfleet"

#: Held by an EnginePool until its engines are in no router.
POOL_FINALIZER: Final = f"{GROUP}/pool"
#: Held by a SyncRound from claim to settle; deleting the round cancels it.
ROUND_FINALIZER: Final = f"{GROUP}/round"
#: Held by an RLPipeline from its first claim until its rounds are settled and its engines are closed.
PIPELINE_FINALIZER: Final = f"{GROUP}/pipeline"

#: Field managers, one per controller, so that one controller's apply never drops another's fields.
READINESS_MANAGER: Final = "rlfleet-readiness"
PIPELINE_MANAGER: Final = "rlfleet-pipeline"
POOL_MANAGER: Final = "rlfleet-pool"
ROUND_MANAGER: Final = "rlfleet-round"
#: The trainer's SDK, which creates SyncRounds.
CLIENT_MANAGER: Final = "rlfleet-client"
#: A person at the command line.
CLI_MANAGER: Final = "rlfleet-cli"
