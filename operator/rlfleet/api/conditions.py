"""The one vocabulary of status, events and metrics: condition types and reasons, with what each means.

Invariant: a reason that is not in this file is never written. Reasons are CamelCase, stable, and safe to match on in
scripts and alerts; messages are for people and may change. ``Reason`` contains every reason that a gate or a sender
can answer with (``wire.ErrorReason``), so such an answer always has a word in status.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Documented(StrEnum):
    """A string enum whose members carry a sentence that says what they mean (used in the reference pages)."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @classmethod
    def parse(cls, text: str) -> Self:
        """The member with this value; ValueError when the closed list has no such word."""
        for member in cls:
            if member.value == text:
                return member
        raise ValueError(f"{text!r} is not a {cls.__name__}")


class ConditionStatus(StrEnum):
    """Status of a condition; Unknown is a verdict of its own, never a mild False."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"

    @classmethod
    def of(cls, value: bool | None) -> ConditionStatus:
        """True, False, or Unknown for None."""
        return cls.UNKNOWN if value is None else cls.TRUE if value else cls.FALSE


class PipelineCondition(_Documented):
    """Condition types of RLPipeline."""

    SENDER_READY = "SenderReady", "the weight sender answers, speaks our protocol and holds complete weights"
    READY = "Ready", "every engine that should serve holds the committed version and is open"
    PROGRESSING = "Progressing", "a round or a repair is running"
    DEGRADED = "Degraded", "something is wrong that a person should look at; the reason says what"
    TOPOLOGY_VALID = "TopologyValid", "the transport can reach every engine from where trainer and engines are placed"


class PoolCondition(_Documented):
    """Condition types of EnginePool."""

    READY = "Ready", "all engines that should be awake are active"
    PROGRESSING = "Progressing", "engines are being created, loaded, replaced or removed"
    VERSION_CONSISTENT = "VersionConsistent", "all open engines hold one version with one digest"
    ADMISSION_OPEN = "AdmissionOpen", "at least one engine accepts requests through every router of the pool"
    DEGRADED = "Degraded", "something is wrong that a person should look at; the reason says what"
    TEMPLATE_OUTDATED = "TemplateOutdated", "some pods were made from an earlier pod template; delete them to update"
    STUCK_LOADING = (
        "StuckLoading",
        "engines hold device memory and do not get on to serving; the message says what to do",
    )
    RESIDUAL_MEMORY_HIGH = (
        "ResidualMemoryHigh",
        "engines sleep, but more of a device's memory is in use than spec.residualMemoryGiB allows",
    )
    HETEROGENEOUS_STATES = (
        "HeterogeneousStates",
        "engines are neither asleep nor awake: part of their memory is released",
    )


class RoundCondition(_Documented):
    """Condition types of SyncRound."""

    COMPLETE = "Complete", "the round succeeded: its version is committed and its engines serve it"
    FAILED = "Failed", "the round failed or expired; committed says whether its version took effect all the same"
    PROGRESSING = "Progressing", "the round is neither complete nor failed; the reason says what it waits for"
    CANCEL_REQUESTED = "CancelRequested", "a cancel came when weights were moving, so what engines hold decides"


ConditionType = PipelineCondition | PoolCondition | RoundCondition


class Reason(_Documented):
    """Why: reasons of conditions, failures, member results and events."""

    # nothing to report
    AS_EXPECTED = "AsExpected", "nothing is wrong"
    IDLE = "Idle", "nothing is being done"
    INVALID_NAME = "InvalidName", "the object's name cannot be used to name its pods and labels"
    INVALID_SPEC = "InvalidSpec", "the spec cannot be carried out; the message names the field"
    TERMINATING = "Terminating", "the object is being deleted"

    # sender
    SENDER_READY = "SenderReady", "the sender is ready"
    SENDER_ABSENT = "SenderAbsent", "no running pod matches the sender's selector"
    SENDER_AMBIGUOUS = "SenderAmbiguous", "more than one running pod matches the sender's selector"
    SENDER_TOO_OLD = "SenderTooOld", "the sender's protocol version or capabilities do not suffice; upgrade the trainer"
    SENDER_UNREACHABLE = "SenderUnreachable", "the sender did not answer in time"
    SENDER_NOT_READY = "SenderNotReady", "the sender answers but has published no complete weights yet"
    SENDER_INCARNATION_GONE = "SenderIncarnationGone", "the sender process that the round names is no longer the one"
    VERSION_NOT_HELD = "VersionNotHeld", "the sender does not hold the version or digest that the round names"
    VERSION_GOES_BACKWARDS = "VersionGoesBackwards", "the version is below the committed one and no rollback was asked"
    COMMITTED_MISMATCH = "CommittedMismatch", "spec.expectedCommitted is not the version that is committed"
    NAN_WEIGHTS = "NaNWeights", "published weights contain NaN; legal, but most likely not meant"

    # checkpoints
    CHECKPOINT_SOURCE = "CheckpointSource", "weights come from checkpoints that rounds name; there is no sender"
    CHECKPOINT_MISSING = "CheckpointMissing", "no complete checkpoint lies at the path, as an engine's gate sees it"
    CHECKPOINT_INVALID = "CheckpointInvalid", "the checkpoint's files are not what its manifest says"
    CHECKPOINT_NOT_MOUNTED = "CheckpointNotMounted", "an engine does not mount the volume of the checkpoints' path"
    DIGEST_REQUIRED = "DigestRequired", "with checkpoints a round must name the manifest digest of what it brings"

    # gates, routers, topology
    PIPELINE_NOT_FOUND = "PipelineNotFound", "the RLPipeline that spec.pipeline names does not exist"
    PIPELINE_DELETING = "PipelineDeleting", "the RLPipeline is being deleted: it takes no rounds and its engines close"
    COMMITTED_UNKNOWN = (
        "CommittedUnknown",
        "engines serve proven weights, but the record of what is committed was lost; the next round writes it anew",
    )
    STATUS_LOST = "StatusLost", "a status was lost or set back: gates prove that more had happened than it says"
    FINALIZER_CEILING = (
        "FinalizerCeiling",
        "a finalizer was removed although what it waits for had not happened in time",
    )
    GATE_TOO_OLD = "GateTooOld", "a gate is of a release that this operator can not order about; replace its pod"
    GATES_UNREACHABLE = "GatesUnreachable", "more gates are silent than maxUnavailable allows"
    ROUTER_UNREACHABLE = "RouterUnreachable", "a router does not answer, so its entries are unknown"
    ROUTER_AMBIGUOUS = "RouterAmbiguous", "more than one running pod matches a router's selector"
    ENGINES_SHUNNED = (
        "EnginesShunned",
        "a router lists engines and sends them no requests: its health check or circuit breaker holds them for ill",
    )
    TOPOLOGY_KNOWN = "TopologyKnown", "the devices of trainer and engines are known and fit the transport"
    TOPOLOGY_NOT_NEEDED = "TopologyNotNeeded", "transport CPUSerialize works wherever trainer and engines are placed"
    TOPOLOGY_UNKNOWN = (
        "TopologyUnknown",
        "devices of the trainer or of an engine are unknown, so no transport is chosen",
    )
    ENGINES_ON_TRAIN_DEVICES = (
        "EnginesOnTrainDevices",
        "Broadcast is impossible: engines share devices with the trainer",
    )
    MIXED_TRANSPORT_IMPOSSIBLE = (
        "MixedTransportImpossible",
        "assertMixed is set, but engines do not fall in both classes",
    )
    DEVICE_SOURCES_DISAGREE = (
        "DeviceSourcesDisagree",
        "two sources contradict each other about the devices of the trainer or of an engine; the message names both",
    )
    DEVICE_LISTED_TWICE = "DeviceListedTwice", "a device list names one UUID on two nodes"
    ENGINE_SIZE_MISMATCH = "EngineSizeMismatch", "an engine's devices are not as many as spec.engine.gpusPerEngine"
    TWO_DEVICE_BOOKS = "TwoDeviceBooks", "a pool asks for GPUs of a device plugin and of ResourceClaims as well"
    ENGINE_SPANS_PODS = "EngineSpansPods", "engine arguments spread one engine over several pods"
    ENGINE_DATA_PARALLEL = "EngineDataParallel", "engine arguments make several replicas in one engine"
    ENGINE_DISAGGREGATED = "EngineDisaggregated", "engine arguments make an engine that prefills or decodes only"
    ENGINE_LORA = "EngineLora", "engine arguments serve LoRA adapters, which a round would leave over other weights"
    ENGINE_QUANTIZED = (
        "EngineQuantized",
        "engine arguments quantise weights; rounds bring them as the trainer has them",
    )
    ENGINE_DRAFT_MODEL = "EngineDraftModel", "engine arguments name a draft model, which rounds bring no weights to"
    ENGINE_EXPERT_PARALLEL = "EngineExpertParallel", "engine arguments spread experts over ranks"
    STAGING_OVER_LIMIT = "StagingOverLimit", "the gate's memory limit is too small for its staging volume"
    MODELS_DIFFER = "ModelsDiffer", "pools of one pipeline name different models"
    DEVICES_SHARED_BY_POOLS = "DevicesSharedByPools", "two Pinned pools list the same devices"
    BLOCK_NOT_FOUND = "BlockNotFound", "a pool uses a train block that its RLPipeline does not have"
    BLOCKS_SHARED_BY_POOLS = "BlocksSharedByPools", "two pools use one train block"
    BLOCK_CLAIM_TAKEN = (
        "BlockClaimTaken",
        "a ResourceClaim of a train block's name exists and is not the pipeline's",
    )
    BLOCK_CLAIM_PENDING = "BlockClaimPending", "engines wait for the ResourceClaim of their train block"
    BLOCK_MOVED = (
        "BlockMoved",
        "a train block was allocated anew, on other devices; the next round knows",
    )
    PARTIAL_OVERLAP = "PartialOverlap", "engines stand on some of the trainer's devices and not on all of them"
    PORTS_EXHAUSTED = "PortsExhausted", "no port of transport.rendezvousPorts is free at the sender"
    PORT_CLAIM_LEAKED = (
        "PortClaimLeaked",
        "a sender never said how a broadcast ended, so its rendezvous port is not used again until it is gone",
    )

    # rounds: waiting and phases
    WAITING_FOR_ENGINES = "WaitingForEngines", "engines are still starting; the round waits for their gates"
    ROUND_IN_PROGRESS = "RoundInProgress", "a round runs"
    PLANNED = "Planned", "members and transports are decided"
    STAGING = "Staging", "bytes travel into the gates' memory while engines serve"
    QUIESCING = "Quiescing", "engines are being paused"
    TRANSFERRING = "Transferring", "engines take over the new weights"
    HOLDING = "Holding", "too many members are missing: nothing opens until they are healed"
    COMMITTED = "Committed", "the version is committed and engines are being reopened"
    SUCCEEDED = "Succeeded", "the round ended as it should"
    ALREADY_COMMITTED = "AlreadyCommitted", "this version with these bytes is committed already"
    NO_MEMBERS = "NoMembers", "there was no engine to update; the version is committed for those that will come"

    # rounds: ends
    SUPERSEDED = "Superseded", "a newer round takes this one's place"
    CANCELLED = "Cancelled", "spec.cancel was set or the round was deleted"
    CANCEL_TOO_LATE = "CancelTooLate", "a cancel or deletion that came after weights began to move changes no verdict"
    PENDING_DEADLINE = "PendingDeadline", "pendingSeconds passed before the round could start"
    STAGING_DEADLINE = "StagingDeadline", "stagingSeconds passed before all bytes were delivered"
    PAUSED_DEADLINE = "PausedDeadline", "pausedSeconds passed while engines were paused"
    STAGING_FAILED = "StagingFailed", "bytes could not be delivered to more engines than maxUnavailable allows"
    QUIESCE_FAILED = "QuiesceFailed", "engines could not be paused"
    TRANSFER_FAILED = "TransferFailed", "engines did not take over the weights"
    VERIFY_FAILED = "VerifyFailed", "engines do not prove that they hold the weights"
    PUBLISH_FAILED = "PublishFailed", "the version label could not be written to engines or did not read back"
    PROBE_FAILED = "ProbeFailed", "a resumed engine did not generate the token that it should"
    ROUTING_DEGRADED = "RoutingDegraded", "the version is committed, but engines could not be reopened or routed"
    NOT_ALL_FENCED = "NotAllFenced", "a live engine has not stored this round's generation, so nothing may be committed"
    QUIESCE_UNSUPPORTED = "QuiesceUnsupported", "an engine can not be paused in the mode that spec.sync.quiesce names"
    VERIFY_UNSUPPORTED = "VerifyUnsupported", "verify is Required, but an engine has no usable checksum to compare"
    DELIVERED_UNCONFIRMED = (
        "DeliveredUnconfirmed",
        "bytes are proven delivered; no engine checksum could confirm the load",
    )
    OPERATOR_RESTARTED = (
        "OperatorRestarted",
        "the operator restarted in this round; the resume rule decided its members",
    )
    LOST = "Lost", "the member's pod is gone, or another engine process stands in its place"
    ROUND_GONE = "RoundGone", "the object of a claimed round vanished; its engines were settled by the resume rule"
    HOLDING_NEEDS_ACTION = "HoldingNeedsAction", "a held round can not heal by itself: a person must act"
    POISONED = "Poisoned", "a load began and its end is not proven, so the member stays closed"
    DROPPED = "Dropped", "the member was taken out of the round on purpose"

    # rounds: refused tries to move one (SyncRound.status.attempts)
    UNKNOWN_ROUND = "UnknownRound", "the round does not exist any more, or another one bears its name"
    NOT_OPEN = "NotOpen", "the round has ended, so nobody can move it"
    NOT_OWNER = "NotOwner", "another operator owns the round"
    ALREADY_SETTLED = "AlreadySettled", "the round has ended with another outcome"
    EXCLUDED = "Excluded", "another operation owns the pipeline"
    ROUND_ABANDONED = (
        "RoundAbandoned",
        "no claim named the round any more (a status that was lost or restored); its engines are repaired",
    )

    # repair
    REPAIRING = "Repairing", "engines are resumed, routed or closed between rounds"
    REPAIRED = "Repaired", "engines were resumed, routed or closed between rounds"
    REPAIR_FAILED = "RepairFailed", "engines are not as they should be and repair did not help; it goes on, ever slower"
    REPAIR_RULE_FAILED = "RepairRuleFailed", "a repair rule raised an error; the message names it, the others still run"

    QUARANTINE_REQUESTED = (
        "QuarantineRequested",
        "a person keeps the engine out of service, by the annotation rlfleet.dev/quarantine on its pod",
    )
    QUARANTINE_FAILED = "QuarantineFailed", "a quarantined engine could not be closed; it is tried again"

    # sleeping and waking, demands of the trainer
    OFFLOADING = "Offloading", "engines are being put to sleep: closed, idle, paused, their memory released"
    WAKING = "Waking", "sleeping engines take their memory back; a CatchUp opens them"
    ENGINES_OFFLOADED = "EnginesOffloaded", "engines sleep, as spec.active or a demand of the trainer wants it"
    ENGINES_BUSY = (
        "EnginesBusy",
        "engines still run requests past the time for it; they stay closed and are tried again",
    )
    HALF_RELEASED = "HalfReleased", "part of an engine's memory is released: it neither sleeps nor can be loaded"
    OFFLOAD_FAILED = "OffloadFailed", "engines could not be put to sleep; they stay closed and are tried again"
    WAKE_FAILED = "WakeFailed", "engines could not be woken; they are tried again"
    LOADING_NORMALLY = "LoadingNormally", "no engine has been loading for longer than a sync may take"
    STUCK_LOADING = "StuckLoading", "an engine has been awake and closed for longer than a sync may take"
    RESIDUAL_MEMORY_HIGH = "ResidualMemoryHigh", "a device whose engines sleep has more memory in use than allowed"
    RESIDUAL_MEMORY_LOW = "ResidualMemoryLow", "devices whose engines sleep are as free as they should be"
    MEMORY_UNREADABLE = "MemoryUnreadable", "nobody can read how much of a device's memory is in use"
    STATES_AGREE = "StatesAgree", "every engine is either asleep or awake"
    ENGINES_AWAKE = "EnginesAwake", "engines on the demanded devices are neither Offloaded nor gone yet"
    DEVICES_HELD = "DevicesHeld", "another demand of the same trainer has been granted these devices"
    GRANTED = "Granted", "the devices are free for the trainer"

    # engines and pods
    ALL_ENGINES_ACTIVE = "AllEnginesActive", "every engine is active"
    ENGINES_NOT_ACTIVE = "EnginesNotActive", "some engines are not active; counts say in which state they are"
    NO_ENGINES = "NoEngines", "there are no engines; legal, for instance with replicas 0"
    AWAITING_ROUND = (
        "AwaitingRound",
        "engines are closed and the sender can not give them the committed version: the next Refresh takes them along",
    )
    CATCH_UP_PENDING = "CatchUpPending", "engines are up and closed until a CatchUp brings them the committed version"
    CATCH_UP_EXHAUSTED = (
        "CatchUpExhausted",
        "an engine's catch-up attempts are spent; delete its pod, or let the next Refresh take it along",
    )
    CATCH_UP_FAILED = "CatchUpFailed", "a CatchUp left engines closed; it is tried again after a while"
    NOTHING_COMMITTED = "NothingCommitted", "no version is committed yet; the first round opens the engines"
    VERSIONS_AGREE = "VersionsAgree", "all open engines hold the committed version"
    VERSIONS_DIFFER = "VersionsDiffer", "open engines hold different versions"
    ENGINES_OPEN = "EnginesOpen", "engines accept requests"
    ENGINES_CLOSED = "EnginesClosed", "no engine accepts requests"
    NO_ROUTERS = "NoRouters", "the pool has no router; open means that engines are not paused"
    ENGINES_KEEP_FAILING = (
        "EnginesKeepFailing",
        "engines end, or have to be replaced, again and again before they serve; the message names the node",
    )
    ENGINES_QUARANTINED = (
        "EnginesQuarantined",
        "engines are closed because what they hold is not proven, or because a person keeps them out of service",
    )
    POD_FAILED = "PodFailed", "an engine's pod failed and is replaced"
    POD_LOST = "PodLost", "an engine's pod vanished without our deleting it"
    POD_PENDING = "PodPending", "an engine's pod is not scheduled or its containers do not start"
    DISRUPTED = "Disrupted", "the member's pod was evicted, preempted or drained by others, so the round dropped it"
    GATE_MISSING = "GateMissing", "a selected pod has no container named gate, so it is no engine"
    DISCOVERY_UNREACHABLE = (
        "DiscoveryUnreachable",
        "a Dynamo frontend gave no whole list of its workers, so nothing is known of them; engines stay as they are",
    )
    DISCOVERY_REFUSED = (
        "DiscoveryRefused",
        "a Dynamo frontend lists its workers in a protocol version that this operator does not know",
    )
    WORKER_NOT_LISTED = (
        "WorkerNotListed",
        "a Dynamo worker runs, and its frontend does not list it, or not as healthy: it is closed and kept out",
    )
    WORKER_NOT_JOINED = (
        "WorkerNotJoined",
        "a listed Dynamo worker and a pod do not fit: no pod with a gate has it, or they contradict each other",
    )
    ROUTES_MISSING = "RoutesMissing", "a Dynamo worker does not advertise a route that its gate needs"
    SELECTORS_OVERLAP = "SelectorsOverlap", "two EnginePools want the same pod; the older one has it"
    NOT_REPLACED = "NotReplaced", "an adopted engine would be replaced if its pod were ours; somebody else must do it"
    BUDGET_FAILED = (
        "BudgetFailed",
        "the pool's PodDisruptionBudget could not be written; see the message",
    )
    BUDGET_NAME_TAKEN = "BudgetNameTaken", "a PodDisruptionBudget of the pool's name exists and is not the pool's"
    POD_CREATED = "PodCreated", "an engine's pod was created"
    POD_DELETED = "PodDeleted", "an engine's pod was deleted"
    POD_CREATE_FAILED = "PodCreateFailed", "an engine's pod could not be created; the message has the API's answer"
    NOT_ENOUGH_DEVICES = "NotEnoughDevices", "placement Pinned lists fewer devices than the engines need"
    TEMPLATE_CHANGED = "TemplateChanged", "the pod template changed after some pods were made"
    UPDATING = "Updating", "pods of an earlier template are being replaced, as spec.updateStrategy says"
    TEMPLATE_CURRENT = "TemplateCurrent", "all pods were made from the present template"
    SCALING_UP = "ScalingUp", "engines are being added"
    SCALING_DOWN = "ScalingDown", "engines are being removed"
    REPLACING = "Replacing", "failed or lost engines are being replaced"

    # answers of gates and senders (wire.ErrorReason) that are not named above
    UNAUTHENTICATED = "Unauthenticated", "a gate or sender refused our token"
    FORBIDDEN = "Forbidden", "a gate or sender refused what our token allows"
    INVALID = "Invalid", "a gate or sender could not read our request: it is of another release"
    TOO_LARGE = "TooLarge", "a request was over a limit of size or count"
    NOT_FOUND = "NotFound", "a gate or sender does not know the operation"
    STALE_FENCE = "StaleFence", "a higher generation is held"
    OTHER_OPERATION = "OtherOperation", "the generation belongs to another operation"
    OTHER_PIPELINE = "OtherPipeline", "the gate or sender belongs to another pipeline"
    FENCE_POISONED = "FencePoisoned", "the generation is too far ahead of the gate's clock"
    IDENTITY_MISMATCH = "IdentityMismatch", "pod UID or incarnation is not the one that was planned with"
    NOT_ENROLLED = "NotEnrolled", "the gate has not been told its pipeline yet"
    BUSY = "Busy", "another operation runs at the gate"
    OPERATION_CONFLICT = "OperationConflict", "the operation id is known with another order"
    UNCERTAIN = "Uncertain", "an operation at the gate has no recorded end"
    NOT_PROVEN = "NotProven", "the gate has no proof that the engine holds these weights"
    NOT_STAGED = "NotStaged", "the gate has not received all bytes"
    STAGING_TOO_LARGE = "StagingTooLarge", "the weights do not fit in the gate's memory volume"
    UNSUPPORTED = "Unsupported", "an engine or sender lacks the capability"
    OFFLOADED = "Offloaded", "the engine's device memory is released, so it must be woken first"
    INSUFFICIENT_MEMORY = "InsufficientMemory", "a device lacks the memory to wake the engine; others use it"
    ENGINE_UNREACHABLE = "EngineUnreachable", "the engine process does not answer its gate"
    ENGINE_REFUSED = "EngineRefused", "the engine refused a call of its gate"
    HASH_MISMATCH = "HashMismatch", "delivered bytes are not those of the manifest"
    CHECKSUM_UNCHANGED = "ChecksumUnchanged", "the engine's checksum did not move although the weights differ"
    DIGEST_MISMATCH = "DigestMismatch", "the engine's checksum is not the one that its peers agree on"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout", "not all ranks joined the broadcast group in time"
    TRANSPORT_FAILED = "TransportFailed", "the transfer broke off"
    DEADLINE_EXCEEDED = "DeadlineExceeded", "a call or operation did not end in time, so its effect is unknown"
    INTERNAL = "Internal", "a gate or sender failed in a way that it has no word for"
