"""Every metric of operator, gate and sender: name, type, labels, meaning.

The code makes its instruments from this table, docs/reference/metrics.md is generated from it, and alerts and
dashboards are checked against it.

Invariants: a label's values come from a closed list, or from objects whose series are removed with them; base units
only, named in the metric; counters end in ``_total``. What is not here cannot be exported (rlfleet.instruments).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlfleet.api.conditions import PipelineCondition, PoolCondition, Reason
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.v1alpha1.syncround_status import TERMINAL_PHASES, MemberOutcome, RefusalReason, RoundPhase
from rlfleet.api.wire import ErrorReason, OperationState


class Type(StrEnum):
    """How a metric's values behave."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Component(StrEnum):
    """Whose /metrics has it."""

    OPERATOR = "operator"
    GATE = "gate"
    SENDER = "sender"


@dataclass(frozen=True, slots=True)
class Label:
    """One label. ``values``: its closed list; without one ``of`` says which objects or words bound it."""

    name: str
    of: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``buckets``: upper bounds of a histogram, in its unit."""

    name: str
    type: Type
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()


def _closed(name: str, of: str, values: type[StrEnum] | tuple[str, ...]) -> Label:
    return Label(name, of, values if isinstance(values, tuple) else tuple(v.value for v in values))


NAMESPACE = Label("namespace", "namespaces with such an object")
PIPELINE = Label("pipeline", "RLPipelines; the series goes with its object")
POOL = Label("pool", "EnginePools; the series goes with its object")
_OUTCOMES = tuple(p.value for p in RoundPhase if p in TERMINAL_PHASES)
OUTCOME = _closed("outcome", "how the round ended", _OUTCOMES)
ROUND_KIND = _closed("kind", "kinds of rounds", ("Refresh", "CatchUp"))
#: Parts of a round, in their order; ``paused`` is the time from the first pause to the last resume.
PARTS = ("plan", "stage", "quiesce", "transfer", "verify", "publish", "reopen", "paused")
PART = _closed("phase", "parts of a round, as in SyncRound.status.timings", PARTS)
OPEN_PHASE = _closed(
    "phase", "phases of a round that has not ended", tuple(p.value for p in RoundPhase if p not in TERMINAL_PHASES)
)
TRANSPORT = _closed("transport", "how weights travelled", ("Serialized", "Broadcast", "Mixed", "Checkpoint", "None"))
REASON = _closed("reason", "[reasons](conditions.md#reasons)", Reason)
OBJECT_KIND = _closed("kind", "kinds of objects with our finalizer", ("RLPipeline", "EnginePool", "SyncRound"))
QUEUE_KIND = _closed("kind", "what is reconciled", ("Pipeline", "Pool", "Deletion"))
RESOURCE = Label("resource", "the resources that the operator works with")
VERB = _closed("verb", "calls of the client", ("get", "list", "watch", "create", "apply", "update", "patch", "delete"))

_ROUND_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_CALL_SECONDS = (0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_OPERATION_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)

C, G, H = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM

OPERATOR: tuple[Metric, ...] = (
    Metric("rlfleet_build_info", G, "Always 1; the label is the operator's version.", (Label("version", "one"),)),
    # rounds
    Metric("rlfleet_rounds_total", C, "Rounds that ended.", (NAMESPACE, PIPELINE, OUTCOME, ROUND_KIND, TRANSPORT)),
    Metric("rlfleet_round_failures_total", C, "Rounds that ended without success, by reason.", (REASON, ROUND_KIND)),
    Metric(
        "rlfleet_round_duration_seconds",
        H,
        "From the claim of a round to its end.",
        (OUTCOME, ROUND_KIND),
        _ROUND_SECONDS,
    ),
    Metric(
        "rlfleet_round_phase_seconds",
        H,
        "Duration of the parts of rounds that ended.",
        (PART, OUTCOME, ROUND_KIND),
        _ROUND_SECONDS,
    ),
    Metric(
        "rlfleet_round_members_total",
        C,
        "What became of the members of rounds that ended.",
        (_closed("result", "results of members", MemberOutcome), ROUND_KIND),
    ),
    Metric(
        "rlfleet_round_refusals_total",
        C,
        "Refused tries to claim, advance or settle a round.",
        (_closed("reason", "in the order in which they are checked", RefusalReason),),
    ),
    Metric("rlfleet_round_takeovers_total", C, "Rounds that were taken over from an earlier holder.", (ROUND_KIND,)),
    Metric(
        "rlfleet_pipeline_round_seconds",
        G,
        "Seconds that spec.sync gives a claimed round: stagingSeconds, pausedSeconds and drain. Holding has no end.",
        (NAMESPACE, PIPELINE),
    ),
    Metric(
        "rlfleet_round_start_timestamp_seconds",
        G,
        "When the round that runs was first claimed; absent when none runs.",
        (NAMESPACE, PIPELINE, ROUND_KIND),
    ),
    Metric(
        "rlfleet_round_phase_start_timestamp_seconds",
        G,
        "When the phase was written that the running round is in; absent when none runs.",
        (NAMESPACE, PIPELINE, ROUND_KIND, OPEN_PHASE),
    ),
    Metric(
        "rlfleet_last_round_end_timestamp_seconds",
        G,
        "When the last Refresh ended; absent before the first.",
        (NAMESPACE, PIPELINE, OUTCOME),
    ),
    Metric(
        "rlfleet_last_round_phase_seconds",
        G,
        "Duration of the parts of the last Refresh that was claimed and ended.",
        (NAMESPACE, PIPELINE, PART),
    ),
    Metric(
        "rlfleet_paused_seconds_total",
        C,
        "Time for which engines were paused by rounds: per round from the first pause to the last resume.",
        (NAMESPACE, PIPELINE),
    ),
    # pipelines
    Metric(
        "rlfleet_pipeline_condition",
        G,
        "Conditions of RLPipelines: 1 True, 0 False, -1 Unknown; one series per condition, with its reason.",
        (NAMESPACE, PIPELINE, _closed("condition", "condition types of RLPipeline", PipelineCondition), REASON),
    ),
    Metric("rlfleet_pipeline_fence_generation", G, "Highest fence generation claimed.", (NAMESPACE, PIPELINE)),
    Metric(
        "rlfleet_pipeline_committed_version",
        G,
        "Committed version; absent before the first round.",
        (NAMESPACE, PIPELINE),
    ),
    Metric(
        "rlfleet_pipeline_published_version",
        G,
        "Newest complete version at the sender; absent while no sender is ready.",
        (NAMESPACE, PIPELINE),
    ),
    Metric(
        "rlfleet_pipeline_version_lag",
        G,
        "Published minus committed version: how far the fleet is behind the trainer.",
        (NAMESPACE, PIPELINE),
    ),
    Metric(
        "rlfleet_rollout_progress_ratio",
        G,
        "Completed of wanted trajectories over all streams that the trainer reports.",
        (NAMESPACE, PIPELINE),
    ),
    Metric(
        "rlfleet_rendezvous_claims_leaked",
        G,
        "Rendezvous ports that are used by nobody until their sender answers or is gone.",
        (NAMESPACE, PIPELINE),
    ),
    # pools
    Metric(
        "rlfleet_pool_condition",
        G,
        "Conditions of EnginePools: 1 True, 0 False, -1 Unknown; one series per condition, with its reason.",
        (NAMESPACE, POOL, _closed("condition", "condition types of EnginePool", PoolCondition), REASON),
    ),
    Metric(
        "rlfleet_engines",
        G,
        "Engines by state.",
        (
            NAMESPACE,
            POOL,
            _closed("state", "states of engines, in lower case", tuple(s.value.lower() for s in EngineState)),
        ),
    ),
    Metric("rlfleet_engines_desired", G, "Engines that the pool should have.", (NAMESPACE, POOL)),
    Metric(
        "rlfleet_engine_version_lag",
        G,
        "Committed version minus the lowest that an engine of the pool holds; 0 when all hold it, absent when unknown.",
        (NAMESPACE, POOL),
    ),
    Metric("rlfleet_quarantines_total", C, "Engines that were closed because what they hold is not proven.", (REASON,)),
    # deletion
    Metric(
        "rlfleet_finalizer_ceiling_total",
        C,
        "Finalizers removed after 300 s although what they wait for had not happened.",
        (OBJECT_KIND,),
    ),
    Metric(
        "rlfleet_deletion_oldest_timestamp_seconds",
        G,
        "When the deletion was asked for that waits longest for our finalizer; absent when none waits.",
        (OBJECT_KIND,),
    ),
    # gates and senders, as the operator sees them
    Metric(
        "rlfleet_peer_calls_total",
        C,
        "Calls to gates and senders by result; NoAnswer: none came in time, or not of the protocol.",
        (
            _closed("peer", "who was called", ("gate", "sender")),
            _closed(
                "result", "Ok, NoAnswer, or why it was refused", ("Ok", "NoAnswer", *(r.value for r in ErrorReason))
            ),
        ),
    ),
    Metric(
        "rlfleet_peer_call_seconds",
        H,
        "Time of answered calls to gates and senders, those that wait for an operation's end apart.",
        (_closed("peer", "who was called", ("gate", "sender")),),
        _CALL_SECONDS,
    ),
    # worker discovery
    Metric(
        "rlfleet_discovery_requests_total",
        C,
        "Requests for worker discovery. Failed: nothing was known (HTTP 500). Denied: no such path, or the reader may "
        "not see it. Busy: too many readers. Gone: the reader hung up, or did not take its answer.",
        (_closed("result", "how they were answered", ("Ok", "Failed", "Denied", "Busy", "Gone")),),
    ),
    Metric(
        "rlfleet_discovery_request_seconds",
        H,
        "Time of answered requests for worker discovery, until the reader had all of it.",
        (),
        _CALL_SECONDS,
    ),
    Metric(
        "rlfleet_discovery_probes_total",
        C,
        "Gates asked for worker discovery. Error: it did not answer, refused, or its engine can not be used.",
        (_closed("result", "what came of the probe", ("Ok", "Error")),),
    ),
    # queue and reconciles
    Metric(
        "rlfleet_reconciles_total",
        C,
        "Reconciles by result.",
        (
            QUEUE_KIND,
            _closed("result", "what came of it", ("Done", "After", "Retry", "Terminal", "Error", "Cancelled")),
        ),
    ),
    Metric(
        "rlfleet_reconcile_seconds",
        H,
        "Time of one reconcile; that of a pipeline lasts as long as its round.",
        (QUEUE_KIND,),
        _ROUND_SECONDS,
    ),
    Metric("rlfleet_queue_depth", G, "Objects that are due and wait for a worker."),
    Metric("rlfleet_queue_running", G, "Objects being reconciled."),
    Metric("rlfleet_queue_oldest_seconds", G, "How long the longest waiting object is due."),
    Metric("rlfleet_queue_retries_total", C, "Reconciles that must be repeated.", (QUEUE_KIND,)),
    Metric("rlfleet_repair_rule_failures_total", C, "Repair rules that raised.", (Label("rule", "the repair rules"),)),
    # apiserver
    Metric(
        "rlfleet_api_calls_total",
        C,
        "Calls to the apiserver; code 0: no answer.",
        (VERB, RESOURCE, Label("code", "HTTP status codes")),
    ),
    Metric("rlfleet_api_call_seconds", H, "Time of calls to the apiserver, watches apart.", (VERB,), _CALL_SECONDS),
    Metric("rlfleet_api_throttle_seconds_total", C, "Time that calls waited for the operator's own rate limit."),
    Metric("rlfleet_writes_total", C, "Writes to the apiserver by reconcilers.", (RESOURCE,)),
    Metric("rlfleet_view_resets_total", C, "Broken watches.", (RESOURCE, Label("reason", "kinds of errors"))),
    Metric("rlfleet_events_total", C, "Events written.", (_closed("type", "types of Events", ("Normal", "Warning")),)),
    Metric("rlfleet_events_dropped_total", C, "Events not written: over the rate limit, or the apiserver was away."),
    # leadership
    Metric("rlfleet_leader", G, "1 while this process leads, 0 while it stands by."),
    Metric("rlfleet_lease_transitions", G, "Holders that the Lease has had, as last seen."),
    Metric("rlfleet_lease_renewal_failures_total", C, "Renewals of the Lease that failed."),
    Metric(
        "rlfleet_mutations_refused_total",
        C,
        "Mutations not sent because this process does not lead.",
        (_closed("target", "what would have been changed", ("apiserver", "peer", "router")),),
    ),
)

GATE: tuple[Metric, ...] = (
    Metric("rlfleet_gate_build_info", G, "Always 1; the label is the gate's version.", (Label("version", "one"),)),
    Metric(
        "rlfleet_gate_operations_total",
        C,
        "Operations that ended.",
        (Label("kind", "the gate's orders"), _closed("state", "how they ended", OperationState)),
    ),
    Metric(
        "rlfleet_gate_operation_seconds",
        H,
        "Duration of operations.",
        (Label("kind", "the gate's orders"),),
        _OPERATION_SECONDS,
    ),
    Metric(
        "rlfleet_gate_refusals_total",
        C,
        "Requests refused.",
        (_closed("reason", "reasons of the protocol", ErrorReason),),
    ),
    Metric("rlfleet_gate_staged_bytes", G, "Checked bytes in the memory volume."),
    Metric("rlfleet_gate_received_bytes_total", C, "Bytes of buckets received and checked."),
    Metric("rlfleet_gate_fence_generation", G, "Fence generation held."),
    Metric("rlfleet_gate_engine_paused", G, "1 paused, 0 not paused, -1 unknown; as last observed."),
    Metric("rlfleet_gate_engine_version", G, "Version that the engine is proven to hold; absent while none is proven."),
    Metric("rlfleet_gate_uncertain", G, "1 while an operation has no recorded end."),
    Metric(
        "rlfleet_gate_shunning_routers",
        G,
        "Routers that list the engine and send it no requests: unhealthy to them, or their circuit breaker is open.",
    ),
)

SENDER: tuple[Metric, ...] = (
    Metric("rlfleet_sender_version", G, "Newest complete version that the sender holds."),
    Metric("rlfleet_sender_weights_bytes", G, "Bytes of the newest weights."),
    Metric("rlfleet_sender_nan_tensors", G, "Tensors of the newest weights that contain NaN."),
    Metric("rlfleet_sender_publishes_total", C, "Versions published."),
    Metric("rlfleet_sender_build_seconds_total", C, "Time spent copying and hashing weights."),
    Metric(
        "rlfleet_sender_operations_total",
        C,
        "Operations that ended.",
        (Label("kind", "the sender's orders"), _closed("state", "how they ended", OperationState)),
    ),
    Metric(
        "rlfleet_sender_moved_bytes_total",
        C,
        "Bytes that gates acknowledged (Push) or that were broadcast once to all (Broadcast).",
        (Label("kind", "the sender's orders"),),
    ),
    Metric(
        "rlfleet_sender_sample_staleness_versions",
        H,
        "Newest published version minus the oldest that a sample's tokens came from (WeightSender.observe_sample).",
        (),
        _VERSIONS,
    ),
)

TABLES: dict[Component, tuple[Metric, ...]] = {
    Component.OPERATOR: OPERATOR,
    Component.GATE: GATE,
    Component.SENDER: SENDER,
}


def find(name: str) -> Metric | None:
    """The metric that a series of this name belongs to (``_bucket``, ``_sum`` and ``_count`` are a histogram's)."""
    known = {m.name: m for table in TABLES.values() for m in table}
    if name in known:
        return known[name]
    for suffix in ("_bucket", "_sum", "_count"):
        metric = known.get(name.removesuffix(suffix))
        if name.endswith(suffix) and metric is not None and metric.type is Type.HISTOGRAM:
            return metric
    return None
