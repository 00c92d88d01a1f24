"""What a person does about a reason, in one sentence: for ``rlfleet doctor``, ``rlfleet round show`` and the reference.

Invariant: every reason that tells of trouble has a remedy, also where the operator mends it by itself and the remedy is
to wait; those that report nothing wrong have none. The message beside a reason names the object that this is about.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlfleet.api.conditions import Reason

_AGAIN = "start another round"
_OPERATOR_GOES_ON = "nothing: the operator goes on by itself"
_LOOK_AT_SENDER = "look at the trainer's log and at the NetworkPolicies between operator and trainer"
_LOOK_AT_ENGINE = "look at the engine's log (container engine of the pod)"

REMEDIES: Mapping[Reason, str] = {
    Reason.INVALID_NAME: "create the object anew under a name that the message allows",
    Reason.INVALID_SPEC: "mend the field that the message names: kubectl edit",
    # sender
    Reason.SENDER_ABSENT: "start the trainer, or make spec.weights.sender.podSelector match its labels",
    Reason.SENDER_AMBIGUOUS: "end all trainers but one, or make spec.weights.sender.podSelector match one alone",
    Reason.SENDER_TOO_OLD: "upgrade rlfleet in the trainer's image to the operator's release",
    Reason.SENDER_UNREACHABLE: (
        f"does WeightSender listen on the pod's address and spec.weights.sender.port? {_LOOK_AT_SENDER}"
    ),
    Reason.SENDER_NOT_READY: "let the trainer publish: WeightSender.publish(version, state_dict)",
    Reason.SENDER_INCARNATION_GONE: f"the trainer restarted: let it publish, and {_AGAIN}",
    Reason.VERSION_NOT_HELD: (
        f"publish that version (the sender keeps only the newest) and {_AGAIN}, or name the one that it holds"
    ),
    Reason.VERSION_GOES_BACKWARDS: "use a higher version, or set spec.allowRollback of the round if that is meant",
    Reason.COMMITTED_MISMATCH: f"read the pipeline's status.committed, decide anew, and {_AGAIN}",
    Reason.NAN_WEIGHTS: "look at the training run: engines got what the trainer published",
    # checkpoints
    Reason.CHECKPOINT_MISSING: (
        "write the checkpoint with rlfleet.sender.checkpoint.write, to the path that the message names"
    ),
    Reason.CHECKPOINT_INVALID: "write the checkpoint anew under a new version: somebody changed its files",
    Reason.CHECKPOINT_NOT_MOUNTED: "mount the volume into gate and engine of the pool's template, at the path's folder",
    Reason.DIGEST_REQUIRED: "name spec.manifestDigest in the round; rlfleet.sender.checkpoint.write returns it",
    # gates, routers, topology
    Reason.PIPELINE_NOT_FOUND: "create the RLPipeline, or name another one in spec.pipeline",
    Reason.PIPELINE_DELETING: (
        "wait until it is gone, then create it anew; kubectl get rlpipeline NAME -o yaml says what it waits for"
    ),
    Reason.COMMITTED_UNKNOWN: "send the trainer's present version: rlfleet sync PIPELINE",
    Reason.STATUS_LOST: "nothing for the fleet; find out who wrote or restored the status (audit log, backup job)",
    Reason.FINALIZER_CEILING: "look for what the message names: it may still exist outside of Kubernetes' sight",
    Reason.GATE_TOO_OLD: "delete the pods that the message names: their successors have the operator's gate",
    Reason.GATES_UNREACHABLE: (
        "look at the gates (container gate) of the engines that the message names, their nodes, and NetworkPolicies"
    ),
    Reason.ROUTER_UNREACHABLE: "does the router run, and may gates reach the URL of spec.routers?",
    Reason.ROUTER_AMBIGUOUS: "end all but one router, or list each in spec.routers by URL",
    Reason.ENGINES_SHUNNED: "look at the router's health check and circuit breaker; restarting the router resets both",
    Reason.TOPOLOGY_UNKNOWN: (
        "declare spec.trainer.gpus, use placement Claims or Pinned, or set spec.transport.mode to CPUSerialize"
    ),
    Reason.ENGINES_ON_TRAIN_DEVICES: "use transport Auto or CPUSerialize, or place the pool on other devices",
    Reason.MIXED_TRANSPORT_IMPOSSIBLE: (
        "wait until all engines are up; else place some on the trainer's devices and some not, or drop assertMixed"
    ),
    Reason.DEVICE_SOURCES_DISAGREE: (
        "correct spec.trainer.gpus or the pool's device list to what the other source in the message says"
    ),
    Reason.DEVICE_LISTED_TWICE: "mend the device list: a UUID is on one node",
    Reason.ENGINE_SIZE_MISMATCH: "make spec.engine.gpusPerEngine and the template's GPUs the same number",
    Reason.TWO_DEVICE_BOOKS: "ask for GPUs in one way: drop the device plugin's resource limit, or the ResourceClaims",
    Reason.ENGINE_SPANS_PODS: "drop the arguments for several nodes: one engine is one pod",
    Reason.ENGINE_DATA_PARALLEL: "drop the data-parallel arguments and raise spec.replicas instead",
    Reason.ENGINE_DISAGGREGATED: "drop the arguments that split prefill and decode",
    Reason.ENGINE_LORA: "drop the LoRA arguments",
    Reason.ENGINE_QUANTIZED: "drop the quantisation arguments, or train in the format that engines serve",
    Reason.ENGINE_DRAFT_MODEL: "drop the draft model's arguments",
    Reason.ENGINE_EXPERT_PARALLEL: "drop the expert-parallel arguments",
    Reason.STAGING_OVER_LIMIT: "raise the gate's memory limit above its staging volume's size (docs/guides/memory.md)",
    Reason.MODELS_DIFFER: "name one model in all pools of the pipeline, or make a pipeline of each model",
    Reason.DEVICES_SHARED_BY_POOLS: "give each Pinned pool devices of its own",
    Reason.BLOCK_NOT_FOUND: "add the block to spec.trainer.blocks of the pipeline, or name another in the pool",
    Reason.BLOCKS_SHARED_BY_POOLS: "give each pool a train block of its own",
    Reason.BLOCK_CLAIM_TAKEN: "delete or rename the ResourceClaim that the message names, or rename the block",
    Reason.BLOCK_CLAIM_PENDING: (
        "start the trainer, whose pod brings the claim its devices; kubectl describe resourceclaim says what it lacks"
    ),
    Reason.PARTIAL_OVERLAP: "place engines on all of the trainer's devices or on none of them",
    Reason.PORTS_EXHAUSTED: "widen spec.transport.rendezvousPorts, or end what listens on them at the trainer",
    Reason.PORT_CLAIM_LEAKED: "nothing while ports remain; restarting the trainer frees it",
    # rounds
    Reason.WAITING_FOR_ENGINES: "wait; if it lasts, look at the pods that are not ready",
    Reason.HOLDING: "wait for the healing; rlfleet round show names what is missing",
    Reason.PENDING_DEADLINE: (
        f"see to what the round waited for, then {_AGAIN}; or raise spec.sync.deadlines.pendingSeconds"
    ),
    Reason.STAGING_DEADLINE: (
        "raise spec.sync.deadlines.stagingSeconds, or look at the network between trainer and engines"
    ),
    Reason.PAUSED_DEADLINE: "raise spec.sync.deadlines.pausedSeconds, or see which engine was slow: rlfleet round show",
    Reason.STAGING_FAILED: "see each member's failure in rlfleet round show: memory volume, network, or gate",
    Reason.QUIESCE_FAILED: f"{_LOOK_AT_ENGINE}; one that can not be paused is best replaced: delete its pod",
    Reason.TRANSFER_FAILED: f"see each member's failure in rlfleet round show; {_LOOK_AT_ENGINE}",
    Reason.VERIFY_FAILED: (
        "do the published names and shapes fit the served model? rlfleet round show has the checksums"
    ),
    Reason.PUBLISH_FAILED: f"{_LOOK_AT_ENGINE}: it does not keep the version label",
    Reason.PROBE_FAILED: f"{_LOOK_AT_ENGINE}: it holds the weights and does not generate with them",
    Reason.ROUTING_DEGRADED: (
        "the version stands, do not send it again; look at the routers that the message names, the operator tries on"
    ),
    Reason.NOT_ALL_FENCED: "look at the gate that the message names; deleting its pod ends the wait",
    Reason.QUIESCE_UNSUPPORTED: "set spec.sync.quiesce.mode to one that all engines know",
    Reason.VERIFY_UNSUPPORTED: "set spec.sync.verify to IfSupported, or use an engine with checksums",
    Reason.DELIVERED_UNCONFIRMED: "use an engine with checksums where that must be proven (spec.sync.verify: Required)",
    Reason.LOST: "nothing: its successor is caught up",
    Reason.ROUND_GONE: f"{_AGAIN} if its version is still wanted; let nobody delete rounds with force",
    Reason.HOLDING_NEEDS_ACTION: (
        "do what the message says: restart the engine or trainer that it names, or delete the pod"
    ),
    Reason.POISONED: "nothing at first: a CatchUp heals it; else delete its pod",
    Reason.ROUND_ABANDONED: f"{_AGAIN} if its version is still wanted",
    Reason.CANCEL_TOO_LATE: (
        "nothing: bring the earlier weights by a round with a version and allowRollback, if that is meant"
    ),
    # repair
    Reason.REPAIR_FAILED: f"{_LOOK_AT_ENGINE} that the message names; deleting its pod replaces it",
    Reason.REPAIR_RULE_FAILED: (
        "look at the operator's log for the rule's error; rights and unreachable APIs are the usual causes"
    ),
    Reason.QUARANTINE_REQUESTED: "rlfleet release POD, once you are done with it",
    Reason.QUARANTINE_FAILED: f"{_OPERATOR_GOES_ON}; if it lasts, look at the pod's gate",
    # sleeping and waking
    Reason.ENGINES_BUSY: "wait for long requests to end, or abort them at the router",
    Reason.HALF_RELEASED: f"{_OPERATOR_GOES_ON}; if it lasts, delete the pod",
    Reason.OFFLOAD_FAILED: f"{_OPERATOR_GOES_ON}; if it lasts: {_LOOK_AT_ENGINE}",
    Reason.WAKE_FAILED: f"{_OPERATOR_GOES_ON}; does somebody else use the device's memory? rlfleet topology",
    Reason.STUCK_LOADING: "do what the message says; rlfleet status shows the engine, deleting its pod replaces it",
    Reason.RESIDUAL_MEMORY_HIGH: (
        "end the processes that the message names, or raise spec.residualMemoryGiB if that use is normal"
    ),
    Reason.MEMORY_UNREADABLE: "give the gate NVML (the GPU runtime's libraries) so that it can read the device",
    Reason.ENGINES_AWAKE: "wait until they sleep; rlfleet status shows which do not",
    Reason.DEVICES_HELD: "let the trainer end its earlier demand: after_train_step, or delete that TrainerDemand",
    # engines and pods
    Reason.ENGINES_NOT_ACTIVE: "wait; if it lasts, rlfleet status shows each engine's state and why",
    Reason.AWAITING_ROUND: "let the trainer sync: rlfleet sync PIPELINE",
    Reason.CATCH_UP_PENDING: "wait: the operator opens a CatchUp by itself",
    Reason.NO_ENGINES: "raise spec.replicas, if engines are wanted",
    Reason.CATCH_UP_EXHAUSTED: "delete the pod, or let the next round take it along",
    Reason.CATCH_UP_FAILED: f"{_OPERATOR_GOES_ON}; the CatchUp's members say why: rlfleet rounds, rlfleet round show",
    Reason.NOTHING_COMMITTED: "let the trainer sync its first version: rlfleet sync PIPELINE",
    Reason.VERSIONS_DIFFER: "nothing during a round; else look at the engines that rlfleet status marks",
    Reason.ENGINES_CLOSED: "see why in rlfleet status: no round yet, a round that holds, or engines that sleep",
    Reason.ENGINES_KEEP_FAILING: (
        f"{_LOOK_AT_ENGINE} before it ends (kubectl logs --previous) and at the node that the message names"
    ),
    Reason.ENGINES_QUARANTINED: (
        "rlfleet release POD where a person did it; else delete the pod, or send another version"
    ),
    Reason.POD_FAILED: f"{_LOOK_AT_ENGINE}: kubectl logs --previous",
    Reason.POD_LOST: "find out who deletes pods of the pool; it was replaced",
    Reason.POD_PENDING: "kubectl describe pod: it waits for a node, a device, an image or a volume",
    Reason.DISRUPTED: (
        "nothing: its successor is caught up; spec.updateStrategy and the PodDisruptionBudget limit how many at once"
    ),
    Reason.GATE_MISSING: "add the gate to the template of these pods (docs/guides/adopt.md), or narrow source.adopt",
    Reason.DISCOVERY_UNREACHABLE: (
        "does the frontend answer GET /v1/rl/workers at source.dynamo.service? DYN_ENABLE_RL turns it on"
    ),
    Reason.DISCOVERY_REFUSED: "upgrade rlfleet, or use a Dynamo release that docs/guides/dynamo.md names",
    Reason.WORKER_NOT_LISTED: "look at the worker's log: it has not registered, or its health check fails",
    Reason.WORKER_NOT_JOINED: (
        "make the worker's advertised address its pod's (DYN_SYSTEM_PORT, host), and give the pod a gate"
    ),
    Reason.ROUTES_MISSING: "start the worker with the options that docs/guides/dynamo.md names",
    Reason.SELECTORS_OVERLAP: "narrow source.adopt of one of the two pools",
    Reason.NOT_REPLACED: "delete or restart the pod at its owner: rlfleet does not delete adopted pods",
    Reason.BUDGET_FAILED: "give the operator the rights on poddisruptionbudgets that the chart gives",
    Reason.BUDGET_NAME_TAKEN: "delete or rename that PodDisruptionBudget, or rename the pool",
    Reason.POD_CREATE_FAILED: (
        "the message has the API's answer: a quota, an admission policy, or the template is the cause"
    ),
    Reason.NOT_ENOUGH_DEVICES: "list more devices in placement, or lower spec.replicas",
    Reason.TEMPLATE_CHANGED: "delete the old pods when it suits, or set spec.updateStrategy to RollingUpdate",
    # answers of gates and senders
    Reason.UNAUTHENTICATED: (
        "compare the pipeline's status.publicKeys with what trainer and gates were given; clocks: rlfleet doctor"
    ),
    Reason.FORBIDDEN: "upgrade operator, gates and trainer to one release",
    Reason.INVALID: "upgrade operator, gates and trainer to one release",
    Reason.TOO_LARGE: "the message names the limit: fewer or smaller tensors, or fewer members",
    Reason.NOT_FOUND: f"{_AGAIN}: the gate or trainer restarted in between",
    Reason.STALE_FENCE: "nothing, if a newer operator leads; else look for a second one: kubectl get lease -A",
    Reason.OTHER_OPERATION: "look for a second operator without leader election: kubectl get lease,pods -A",
    Reason.OTHER_PIPELINE: "delete the pod: it belongs to a pipeline that was deleted, or to another one",
    Reason.FENCE_POISONED: "set the clock that was ahead right, then restart the pod or trainer that the message names",
    Reason.IDENTITY_MISMATCH: f"nothing: it restarted in between; {_AGAIN} if its version is still wanted",
    Reason.NOT_ENROLLED: f"{_OPERATOR_GOES_ON}; if it lasts, look at the NetworkPolicies between operator and gates",
    Reason.BUSY: "wait: it ends by its own deadline",
    Reason.OPERATION_CONFLICT: "look for a second operator without leader election: kubectl get lease,pods -A",
    Reason.UNCERTAIN: f"{_OPERATOR_GOES_ON}; if it lasts, delete the pod",
    Reason.NOT_PROVEN: "nothing: the next CatchUp or round proves it",
    Reason.NOT_STAGED: f"look at the network between trainer and gates, then {_AGAIN}",
    Reason.STAGING_TOO_LARGE: (
        "raise the staging volume's sizeLimit and the gate's memory limit (docs/guides/memory.md), or use staging "
        "Bucket"
    ),
    Reason.UNSUPPORTED: "use an engine release that docs/reference/engines.md names, or another transport or mode",
    Reason.OFFLOADED: "wake it: rlfleet wake POOL, or let the trainer end its demand",
    Reason.INSUFFICIENT_MEMORY: "end what else uses the device: rlfleet topology names who holds it",
    Reason.ENGINE_UNREACHABLE: f"{_LOOK_AT_ENGINE}; its liveness probe restarts one that hangs",
    Reason.ENGINE_REFUSED: f"{_LOOK_AT_ENGINE}; the message has its answer",
    Reason.HASH_MISMATCH: f"{_AGAIN}; if it comes again, look for a proxy or a faulty network card on the way",
    Reason.CHECKSUM_UNCHANGED: (
        "do the published tensor names fit the served model? Engines ignore names that they do not know"
    ),
    Reason.DIGEST_MISMATCH: (
        "delete the pod of the engine that differs; if all differ, do their arguments (dtype, tensor parallelism)?"
    ),
    Reason.RENDEZVOUS_TIMEOUT: (
        "may engines reach the trainer's rendezvousPorts (NetworkPolicy), and is NCCL_SOCKET_IFNAME right?"
    ),
    Reason.TRANSPORT_FAILED: f"see the member's failure in rlfleet round show, then {_AGAIN}",
    Reason.DEADLINE_EXCEEDED: f"see which call was slow in rlfleet round show; {_LOOK_AT_ENGINE}",
    Reason.INTERNAL: "look at the log of the gate or trainer that the message names, and report it",
}


def remedy(reason: str) -> str:
    """What to do about a reason; empty where nothing is wrong, or for a word of a newer release."""
    try:
        return REMEDIES.get(Reason.parse(reason), "")
    except ValueError:
        return ""
