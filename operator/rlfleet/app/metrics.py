"""What the operator's parts report, as Prometheus series (the table is api/metrics.py).

Invariant: label values come from closed lists or from objects that exist (an object's series go with it), so the
number of series is bounded; base units only (seconds, counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Gauge, ProcessCollector

from rlfleet import __version__
from rlfleet.api.metrics import OPERATOR
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.control.context import Metrics
from rlfleet.instruments import Instruments, OwnedSeries, set_or_remove
from rlfleet.plan.summary import RoundSummary, condition_numbers, engine_lag, pipeline_numbers, round_now

_STATES = tuple(s.value.lower() for s in EngineState)
Series = tuple[Gauge, tuple[str, ...]]


class OperatorMetrics(Metrics):
    """Implements what the parts report to: reconcilers, apiserver client, guard, elector, queue, Events, peers."""

    def __init__(self) -> None:
        made = Instruments(OPERATOR)
        self._made = made
        ProcessCollector(registry=made.registry)
        made.gauge("rlfleet_build_info").labels(__version__).set(1)
        self._owned = OwnedSeries()
        self._deleting: dict[tuple[str, str, str], float] = {}
        self._condition = made.gauge("rlfleet_pipeline_condition")
        self._pool_condition = made.gauge("rlfleet_pool_condition")
        self._fence = made.gauge("rlfleet_pipeline_fence_generation")
        self._committed = made.gauge("rlfleet_pipeline_committed_version")
        self._published = made.gauge("rlfleet_pipeline_published_version")
        self._lag = made.gauge("rlfleet_pipeline_version_lag")
        self._round_seconds = made.gauge("rlfleet_pipeline_round_seconds")
        self._round_start = made.gauge("rlfleet_round_start_timestamp_seconds")
        self._phase_start = made.gauge("rlfleet_round_phase_start_timestamp_seconds")
        self._engines = made.gauge("rlfleet_engines")
        self._desired = made.gauge("rlfleet_engines_desired")
        self._engine_lag = made.gauge("rlfleet_engine_version_lag")
        self._calls = made.counter("rlfleet_api_calls_total")
        self._call_time = made.histogram("rlfleet_api_call_seconds")
        self._peer_calls = made.counter("rlfleet_peer_calls_total")
        self._peer_time = made.histogram("rlfleet_peer_call_seconds")

    def render(self) -> bytes:
        """The text for /metrics."""
        return self._made.render()

    # control.context.Metrics

    def round_ended(self, namespace: str, pipeline: str, ended: RoundSummary) -> None:
        """A round ended."""
        made, outcome, kind = self._made, ended.outcome, ended.kind
        owner = ("counts", namespace, pipeline)
        labels = (namespace, pipeline, outcome, kind, ended.transport)
        self._owned.count(owner, made.counter("rlfleet_rounds_total"), labels)
        if ended.reason:
            made.counter("rlfleet_round_failures_total").labels(ended.reason, kind).inc()
        if ended.duration is not None:
            made.histogram("rlfleet_round_duration_seconds").labels(outcome, kind).observe(ended.duration)
        for part, seconds in ended.parts.items():
            made.histogram("rlfleet_round_phase_seconds").labels(part, outcome, kind).observe(seconds)
        for result, count in ended.members.items():
            made.counter("rlfleet_round_members_total").labels(result, kind).inc(count)
        if paused := ended.parts.get("paused"):
            counter = made.counter("rlfleet_paused_seconds_total")
            self._owned.count(owner, counter, (namespace, pipeline), paused)
        if kind == "Refresh":
            at = made.gauge("rlfleet_last_round_end_timestamp_seconds")
            key = at, (namespace, pipeline, outcome)
            self._owned.replace(("last", namespace, pipeline), {key: ended.ended_at})
        if kind == "Refresh" and ended.duration is not None:
            # A round that nobody claimed has no parts: those of the one before it stay.
            last = made.gauge("rlfleet_last_round_phase_seconds")
            parts: dict[Series, float] = {(last, (namespace, pipeline, p)): t for p, t in ended.parts.items()}
            self._owned.replace(("parts", namespace, pipeline), parts)

    def round_refused(self, reason: str) -> None:
        """A try to move a round was refused."""
        self._made.counter("rlfleet_round_refusals_total").labels(reason).inc()

    def round_taken_over(self, kind: str) -> None:
        """A round that somebody else had claimed is ours now."""
        self._made.counter("rlfleet_round_takeovers_total").labels(kind).inc()

    def round_moved(self, namespace: str, pipeline: str, obj: Mapping[str, Any] | None) -> None:
        """The round that runs, as last written; None: none runs."""
        wanted: dict[Series, float] = {}
        if obj is not None and (now := round_now(obj)) is not None:
            wanted[self._round_start, (namespace, pipeline, now.kind)] = now.started_ms / 1000
            wanted[self._phase_start, (namespace, pipeline, now.kind, now.phase)] = now.phase_ms / 1000
        self._owned.replace(("round", namespace, pipeline), wanted)

    def pipeline(self, namespace: str, name: str, obj: Mapping[str, Any] | None) -> None:
        """A pipeline as last read or written; None: it is gone."""
        if obj is None:
            for what in ("pipeline", "round", "last", "parts", "counts"):
                self._owned.replace((what, namespace, name), {})
            return
        numbers = pipeline_numbers(obj)
        wanted: dict[Series, float] = {
            (self._condition, (namespace, name, *key)): value for key, value in numbers.conditions.items()
        }
        for gauge, value in (
            (self._fence, numbers.fence),
            (self._committed, numbers.committed),
            (self._published, numbers.published),
            (self._lag, numbers.lag),
            (self._round_seconds, numbers.round_seconds),
        ):
            if value is not None:
                wanted[gauge, (namespace, name)] = value
        self._owned.replace(("pipeline", namespace, name), wanted)

    def pool(
        self, namespace: str, name: str, status: Mapping[str, Any] | None, desired: int, committed: int | None
    ) -> None:
        """A pool's status as it is now; None: the pool is gone."""
        wanted: dict[Series, float] = {}
        if status is not None:
            counts = status.get("counts") or {}
            for state in _STATES:
                wanted[self._engines, (namespace, name, state)] = counts.get(state, 0)
            for key, value in condition_numbers(status.get("conditions") or ()).items():
                wanted[self._pool_condition, (namespace, name, *key)] = value
            wanted[self._desired, (namespace, name)] = desired
            lag = engine_lag(status.get("versions") or (), committed)
            if lag is not None:
                wanted[self._engine_lag, (namespace, name)] = lag
        self._owned.replace(("pool", namespace, name), wanted)

    def quarantined(self, reason: str) -> None:
        """An engine was closed because what it holds is not proven."""
        self._made.counter("rlfleet_quarantines_total").labels(reason).inc()

    def claims_leaked(self, namespace: str, pipeline: str, count: int | None) -> None:
        """Leaked rendezvous ports of a pipeline; None: the pipeline is gone."""
        set_or_remove(self._made.gauge("rlfleet_rendezvous_claims_leaked"), (namespace, pipeline), count)

    def progress(self, namespace: str, pipeline: str, ratio: float | None) -> None:
        """Progress of a pipeline's rollouts; None: its trainer reports none, or the pipeline is gone."""
        set_or_remove(self._made.gauge("rlfleet_rollout_progress_ratio"), (namespace, pipeline), ratio)

    def write(self, resource: str) -> None:
        """A reconciler wrote."""
        self._made.counter("rlfleet_writes_total").labels(resource).inc()

    def deleting(self, kind: str, namespace: str, name: str, since: float | None) -> None:
        """A deletion waits for our finalizer since then (epoch seconds); None: it does not any more."""
        key = (kind, namespace, name)
        if since is None:
            self._deleting.pop(key, None)
        else:
            self._deleting[key] = since
        oldest = min((t for (k, _, _), t in self._deleting.items() if k == kind), default=None)
        set_or_remove(self._made.gauge("rlfleet_deletion_oldest_timestamp_seconds"), (kind,), oldest)

    def finalizer_ceiling(self, kind: str) -> None:
        """A finalizer of ours reached its ceiling."""
        self._made.counter("rlfleet_finalizer_ceiling_total").labels(kind).inc()

    def repair_rule_failed(self, rule: str) -> None:
        """A repair rule raised."""
        self._made.counter("rlfleet_repair_rule_failures_total").labels(rule).inc()

    # control.peers.PeerObserver

    def peer_call(self, peer: str, result: str, seconds: float | None) -> None:
        """A call to a gate or sender ended; ``seconds``: how long an answered one took, None for one that waits."""
        self._peer_calls.labels(peer, result).inc()
        if seconds is not None:
            self._peer_time.labels(peer).observe(seconds)

    # app.discovery.Observer

    def discovery_request(self, result: str, seconds: float) -> None:
        """A request for worker discovery ended."""
        self._made.counter("rlfleet_discovery_requests_total").labels(result).inc()
        if result == "Ok":
            self._made.histogram("rlfleet_discovery_request_seconds").observe(seconds)

    def probed(self, result: str) -> None:
        """A worker was asked for worker discovery."""
        self._made.counter("rlfleet_discovery_probes_total").labels(result).inc()

    # kube.client.ApiObserver and the limiter

    def api_call(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """A call to the apiserver ended."""
        self._calls.labels(verb, resource, str(code)).inc()
        if verb != "watch":
            self._call_time.labels(verb).observe(seconds)

    def throttled(self, seconds: float) -> None:
        """A call waited for its turn."""
        self._made.counter("rlfleet_api_throttle_seconds_total").inc(seconds)

    def view_reset(self, resource: str, reason: str) -> None:
        """A watch broke."""
        self._made.counter("rlfleet_view_resets_total").labels(resource, reason).inc()

    # kube.events.EventObserver

    def event_written(self, type_: str) -> None:
        """An Event was written."""
        self._made.counter("rlfleet_events_total").labels(type_).inc()

    def events_dropped(self, count: int) -> None:
        """So many Events were not written."""
        self._made.counter("rlfleet_events_dropped_total").inc(count)

    # kube.leader.LeaderObserver and kube.guard.GuardObserver

    def leading(self, leads: bool, transitions: int) -> None:
        """We lead, or stand by."""
        self._made.gauge("rlfleet_leader").set(leads)
        self._made.gauge("rlfleet_lease_transitions").set(max(0, transitions))

    def renewal_failed(self) -> None:
        """A renewal failed."""
        self._made.counter("rlfleet_lease_renewal_failures_total").inc()

    def mutation_refused(self, target: str) -> None:
        """The guard refused a mutation of ``target``: apiserver, peer or router."""
        self._made.counter("rlfleet_mutations_refused_total").labels(target).inc()

    # control.queue.QueueObserver

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """A reconcile ended."""
        self._made.counter("rlfleet_reconciles_total").labels(kind, result).inc()
        self._made.histogram("rlfleet_reconcile_seconds").labels(kind).observe(seconds)
        if result in ("Retry", "Error"):
            self._made.counter("rlfleet_queue_retries_total").labels(kind).inc()

    def queue_state(self, depth: int, running: int, oldest_seconds: float) -> None:
        """The queue changed."""
        self._made.gauge("rlfleet_queue_depth").set(depth)
        self._made.gauge("rlfleet_queue_running").set(running)
        self._made.gauge("rlfleet_queue_oldest_seconds").set(oldest_seconds)
