"""Prometheus metrics of the operator.

Invariant: label values come from closed lists or from objects that exist (a pool's series go with the pool), so the
number of series is bounded; base units only (seconds, counts).
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rlfleet import __version__
from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.api.v1alpha1.syncround_status import RefusalReason

_PHASE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_CALL_BUCKETS = (0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_STATES = tuple(s.value.lower() for s in EngineState)


class OperatorMetrics:
    """Implements what the parts report to: reconcilers, apiserver client, guard, elector, queue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        info = Gauge("rlfleet_build_info", "The operator's version.", ["version"], registry=r)
        info.labels(__version__).set(1)
        self._rounds = Counter("rlfleet_rounds", "Rounds that ended, by outcome.", ["outcome", "kind"], registry=r)
        self._refusals = Counter(
            "rlfleet_round_refusals",
            "Refused tries to claim, advance or settle a round, by reason.",
            ["reason"],
            registry=r,
        )
        for reason in RefusalReason:
            self._refusals.labels(reason.value)  # an alert on an increase needs the zero before it
        self._phases = Histogram(
            "rlfleet_round_phase_seconds",
            "Time of each phase of a round.",
            ["phase", "kind"],
            buckets=_PHASE_BUCKETS,
            registry=r,
        )
        self._engines = Gauge("rlfleet_engines", "Engines by state.", ["namespace", "pool", "state"], registry=r)
        self._leaks = Gauge(
            "rlfleet_rendezvous_claims_leaked",
            "Rendezvous ports that are used by nobody until their sender answers or is gone.",
            ["namespace", "pipeline"],
            registry=r,
        )
        self._progress = Gauge(
            "rlfleet_rollout_progress_ratio",
            "Completed of wanted trajectories over all streams that the trainer reports.",
            ["namespace", "pipeline"],
            registry=r,
        )
        self._reconciles = Counter("rlfleet_reconciles", "Reconciles by result.", ["kind", "result"], registry=r)
        self._reconcile_time = Histogram(
            "rlfleet_reconcile_seconds", "Time of one reconcile.", ["kind"], buckets=_PHASE_BUCKETS, registry=r
        )
        self._depth = Gauge("rlfleet_queue_depth", "Objects that are due and wait for a worker.", registry=r)
        self._running = Gauge("rlfleet_queue_running", "Objects being reconciled.", registry=r)
        self._oldest = Gauge("rlfleet_queue_oldest_seconds", "How long the longest waiting object is due.", registry=r)
        self._retries = Counter("rlfleet_queue_retries", "Reconciles that must be repeated.", ["kind"], registry=r)
        self._calls = Counter(
            "rlfleet_api_calls", "Calls to the apiserver; code 0: no answer.", ["verb", "resource", "code"], registry=r
        )
        self._call_time = Histogram(
            "rlfleet_api_call_seconds", "Time of calls to the apiserver.", ["verb"], buckets=_CALL_BUCKETS, registry=r
        )
        self._throttled = Counter(
            "rlfleet_api_throttle_seconds", "Time that calls waited for the operator's own rate limit.", registry=r
        )
        self._writes = Counter("rlfleet_writes", "Writes to the apiserver by reconcilers.", ["resource"], registry=r)
        self._leader = Gauge("rlfleet_leader", "1 while this process leads, 0 while it stands by.", registry=r)
        self._transitions = Gauge(
            "rlfleet_lease_transitions", "Holders that the Lease has had, as last seen.", registry=r
        )
        self._renewals = Counter("rlfleet_lease_renewal_failures", "Renewals of the Lease that failed.", registry=r)
        self._refused = Counter(
            "rlfleet_mutations_refused",
            "Mutations not sent because this process does not lead.",
            ["target"],
            registry=r,
        )
        self._ceilings = Counter(
            "rlfleet_finalizer_ceiling",
            "Finalizers removed after 300 s although what they wait for had not happened.",
            ["kind"],
            registry=r,
        )
        self._rule_failures = Counter(
            "rlfleet_repair_rule_failures", "Repair rules that raised, by rule.", ["rule"], registry=r
        )
        self._resets = Counter("rlfleet_view_resets", "Broken watches, by error.", ["resource", "reason"], registry=r)

    def render(self) -> bytes:
        """The text for /metrics."""
        return generate_latest(self.registry)

    # control.context.Metrics

    def round_finished(self, outcome: str, kind: str = "Refresh") -> None:
        """A round of this kind ended."""
        self._rounds.labels(outcome, kind).inc()

    def round_refused(self, reason: str) -> None:
        """A try to move a round was refused."""
        self._refusals.labels(reason).inc()

    def round_phase(self, phase: str, seconds: float, kind: str = "Refresh") -> None:
        """A phase of a round of this kind took this long."""
        self._phases.labels(phase, kind).observe(seconds)

    def engines(self, namespace: str, pool: str, counts: Mapping[str, int]) -> None:
        """Engines of a pool by state; no counts: the pool is gone."""
        for state in _STATES:
            _set(self._engines, (namespace, pool, state), counts.get(state, 0) if counts else None)

    def claims_leaked(self, namespace: str, pipeline: str, count: int | None) -> None:
        """Leaked rendezvous ports of a pipeline; None: the pipeline is gone."""
        _set(self._leaks, (namespace, pipeline), count)

    def progress(self, namespace: str, pipeline: str, ratio: float | None) -> None:
        """Progress of a pipeline's rollouts; None: its trainer reports none, or the pipeline is gone."""
        _set(self._progress, (namespace, pipeline), ratio)

    def write(self, resource: str) -> None:
        """A reconciler wrote."""
        self._writes.labels(resource).inc()

    def finalizer_ceiling(self, kind: str) -> None:
        """A finalizer of ours reached its ceiling."""
        self._ceilings.labels(kind).inc()

    def repair_rule_failed(self, rule: str) -> None:
        """A repair rule raised."""
        self._rule_failures.labels(rule).inc()

    # kube.client.ApiObserver and the limiter

    def api_call(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """A call to the apiserver ended."""
        self._calls.labels(verb, resource, str(code)).inc()
        if verb != "watch":
            self._call_time.labels(verb).observe(seconds)

    def throttled(self, seconds: float) -> None:
        """A call waited for its turn."""
        self._throttled.inc(seconds)

    def view_reset(self, resource: str, reason: str) -> None:
        """A watch broke."""
        self._resets.labels(resource, reason).inc()

    # kube.leader.LeaderObserver and kube.guard.GuardObserver

    def leading(self, leads: bool, transitions: int) -> None:
        """We lead, or stand by."""
        self._leader.set(leads)
        self._transitions.set(max(0, transitions))

    def renewal_failed(self) -> None:
        """A renewal failed."""
        self._renewals.inc()

    def mutation_refused(self, target: str) -> None:
        """The guard refused a mutation of ``target``: apiserver, peer or router."""
        self._refused.labels(target).inc()

    # control.queue.QueueObserver

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """A reconcile ended."""
        self._reconciles.labels(kind, result).inc()
        self._reconcile_time.labels(kind).observe(seconds)
        if result in ("Retry", "Error"):
            self._retries.labels(kind).inc()

    def queue_state(self, depth: int, running: int, oldest_seconds: float) -> None:
        """The queue changed."""
        self._depth.set(depth)
        self._running.set(running)
        self._oldest.set(oldest_seconds)


def _set(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set one series; None removes it, whether it was there or not."""
    if value is not None:
        gauge.labels(*labels).set(value)
        return
    try:
        gauge.remove(*labels)
    except KeyError:
        pass  # whose series never was
