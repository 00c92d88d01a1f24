"""What the dashboards show: the one source of their JSON, of the checks of their queries, and of their pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

#: What every query may be narrowed to. ``$__rate_interval`` is Grafana's own.
NAMESPACE = 'namespace=~"$namespace"'
PIPELINE = f'{NAMESPACE},pipeline=~"$pipeline"'
POOL = f'{NAMESPACE},pool=~"$pool"'


class Kind(StrEnum):
    """How a panel draws its series."""

    STAT = "stat"
    LINES = "lines"
    STACKED = "stacked"
    STATES = "states"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``queries``: expression and legend; ``unit`` in Grafana's words; ``width`` of 24."""

    title: str
    kind: Kind
    queries: tuple[tuple[str, str], ...]
    help: str
    unit: str = "short"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. ``variables``: name and the metric whose label of that name lists its values."""

    uid: str
    title: str
    help: str
    variables: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> Iterator[Panel]:
        """All panels, in their order."""
        for _, panels in self.rows:
            yield from panels


S, L, A, T = Kind.STAT, Kind.LINES, Kind.STACKED, Kind.STATES


def quantile(q: float, metric: str, by: str = "", matchers: str = "") -> str:
    """A quantile of a histogram over the panel's rate interval."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket{{{matchers}}}[$__rate_interval])))"


FLEET = Board(
    uid="rlfleet-fleet",
    title="rlfleet / Fleet",
    help="All pipelines and pools, and how the operator does.",
    variables=(("namespace", "rlfleet_pipeline_condition"),),
    rows=(
        (
            "Now",
            (
                Panel(
                    "Pipelines ready",
                    S,
                    (
                        (f'sum(rlfleet_pipeline_condition{{{NAMESPACE},condition="Ready"}} == bool 1)', "ready"),
                        (f'count(rlfleet_pipeline_condition{{{NAMESPACE},condition="Ready"}})', "of"),
                    ),
                    "Pipelines all of whose engines that should serve are open with the committed version.",
                    width=4,
                ),
                Panel(
                    "Engines active",
                    S,
                    (
                        (f'sum(rlfleet_engines{{{NAMESPACE},state="active"}})', "active"),
                        (f"sum(rlfleet_engines_desired{{{NAMESPACE}}})", "of"),
                    ),
                    "Engines that serve the committed version, and how many there should be.",
                    width=4,
                ),
                Panel(
                    "Rounds that succeeded",
                    S,
                    (
                        (
                            f'sum(increase(rlfleet_rounds_total{{{NAMESPACE},kind="Refresh",outcome="Succeeded"}}[1h]))'
                            f' / sum(increase(rlfleet_rounds_total{{{NAMESPACE},kind="Refresh"}}[1h]))',
                            "in the last hour",
                        ),
                    ),
                    "Share of Refresh rounds; superseded and cancelled ones count as not succeeded.",
                    "percentunit",
                    4,
                ),
                Panel("Leaders", S, (("sum(rlfleet_leader)", "leaders"),), "One per installation.", width=4),
                Panel(
                    "Degraded",
                    S,
                    (
                        (f'sum(rlfleet_pipeline_condition{{{NAMESPACE},condition="Degraded"}} == bool 1)', "pipelines"),
                        (f'sum(rlfleet_pool_condition{{{NAMESPACE},condition="Degraded"}} == bool 1)', "pools"),
                    ),
                    "Objects whose condition Degraded says what a person should look at.",
                    width=4,
                ),
                Panel(
                    "Refused under an old fence",
                    S,
                    (('sum(increase(rlfleet_round_refusals_total{reason=~"StaleFence|NotOwner"}[1h]))', "last hour"),),
                    "More than a few: two operators act on the same pipelines.",
                    width=4,
                ),
            ),
        ),
        (
            "Weights",
            (
                Panel(
                    "Engines by state",
                    A,
                    ((f"sum by (state) (rlfleet_engines{{{NAMESPACE}}})", "{{state}}"),),
                    "All pools.",
                ),
                Panel(
                    "Rounds per minute by outcome",
                    A,
                    (
                        (
                            f"sum by (outcome) (rate(rlfleet_rounds_total{{{NAMESPACE}}}[$__rate_interval])) * 60",
                            "{{outcome}}",
                        ),
                    ),
                    "Refresh and CatchUp.",
                ),
                Panel(
                    "Behind the trainer",
                    L,
                    ((f"rlfleet_pipeline_version_lag{{{NAMESPACE}}}", "{{namespace}}/{{pipeline}}"),),
                    "Published minus committed version.",
                ),
                Panel(
                    "Duration of rounds",
                    L,
                    (
                        (quantile(0.5, "rlfleet_round_duration_seconds", "kind"), "{{kind}} p50"),
                        (quantile(0.99, "rlfleet_round_duration_seconds", "kind"), "{{kind}} p99"),
                    ),
                    "From the claim to the end.",
                    "s",
                ),
                Panel(
                    "Share of time paused",
                    L,
                    (
                        (
                            f"sum by (namespace, pipeline) (rate(rlfleet_paused_seconds_total{{{NAMESPACE}}}"
                            "[$__rate_interval]))",
                            "{{namespace}}/{{pipeline}}",
                        ),
                    ),
                    "From the first pause to the last resume of each round.",
                    "percentunit",
                ),
                Panel(
                    "Failures by reason",
                    A,
                    (("sum by (reason) (increase(rlfleet_round_failures_total[$__rate_interval]))", "{{reason}}"),),
                    "Rounds that ended without success.",
                ),
            ),
        ),
        (
            "Operator",
            (
                Panel(
                    "Calls to gates and senders",
                    A,
                    (
                        (
                            "sum by (peer, result) (rate(rlfleet_peer_calls_total[$__rate_interval]))",
                            "{{peer}} {{result}}",
                        ),
                    ),
                    "By result.",
                    "reqps",
                ),
                Panel(
                    "Calls to the apiserver",
                    A,
                    (("sum by (verb, code) (rate(rlfleet_api_calls_total[$__rate_interval]))", "{{verb}} {{code}}"),),
                    "Code 0: no answer.",
                    "reqps",
                ),
                Panel(
                    "Time of calls, p99",
                    L,
                    (
                        (quantile(0.99, "rlfleet_api_call_seconds", "verb"), "apiserver {{verb}}"),
                        (quantile(0.99, "rlfleet_peer_call_seconds", "peer"), "{{peer}}"),
                    ),
                    "Answered calls.",
                    "s",
                ),
                Panel(
                    "Queue",
                    L,
                    (
                        ("sum(rlfleet_queue_depth)", "due"),
                        ("sum(rlfleet_queue_running)", "running"),
                        ("max(rlfleet_queue_oldest_seconds)", "oldest (s)"),
                    ),
                    "A round takes a worker until it ends.",
                ),
                Panel(
                    "Reconciles by result",
                    A,
                    (("sum by (result) (rate(rlfleet_reconciles_total[$__rate_interval]))", "{{result}}"),),
                    "Error: an answer of the apiserver that helps nobody, or a defect.",
                    "ops",
                ),
                Panel(
                    "Memory",
                    L,
                    (('process_resident_memory_bytes{job=~".*operator.*"}', "{{instance}}"),),
                    "Resident memory of operator processes.",
                    "bytes",
                ),
            ),
        ),
    ),
)

ROUNDS = Board(
    uid="rlfleet-pipeline",
    title="rlfleet / Pipeline",
    help="One pipeline's rounds: versions, phase timing, pauses, outcome.",
    variables=(("namespace", "rlfleet_pipeline_condition"), ("pipeline", "rlfleet_pipeline_condition")),
    rows=(
        (
            "Now",
            (
                Panel(
                    "Version",
                    S,
                    (
                        (f"rlfleet_pipeline_committed_version{{{PIPELINE}}}", "committed"),
                        (f"rlfleet_pipeline_published_version{{{PIPELINE}}}", "published"),
                    ),
                    "Committed: what engines may serve. Published: the newest that the sender holds.",
                    width=6,
                ),
                Panel(
                    "Last round ended",
                    S,
                    ((f"time() - rlfleet_last_round_end_timestamp_seconds{{{PIPELINE}}}", "{{outcome}}"),),
                    "How long ago, and how.",
                    "s",
                    6,
                ),
                Panel(
                    "Round that runs",
                    S,
                    (
                        (
                            f"time() - rlfleet_round_phase_start_timestamp_seconds{{{PIPELINE}}}",
                            "{{kind}} in {{phase}}",
                        ),
                    ),
                    "How long it is in its phase; nothing when no round runs.",
                    "s",
                    6,
                ),
                Panel(
                    "Rollout progress",
                    S,
                    ((f"rlfleet_rollout_progress_ratio{{{PIPELINE}}}", "{{pipeline}}"),),
                    "As the trainer reports it.",
                    "percentunit",
                    6,
                ),
            ),
        ),
        (
            "Rounds",
            (
                Panel(
                    "Phase timing",
                    A,
                    ((f'rlfleet_last_round_phase_seconds{{{PIPELINE},phase!="paused"}}', "{{phase}}"),),
                    "Parts of the last Refresh that ended; a step is a new round.",
                    "s",
                    12,
                ),
                Panel(
                    "Paused per round",
                    L,
                    ((f'rlfleet_last_round_phase_seconds{{{PIPELINE},phase="paused"}}', "paused"),),
                    "From the first pause to the last resume of the last Refresh.",
                    "s",
                    12,
                ),
                Panel(
                    "Versions",
                    L,
                    (
                        (f"rlfleet_pipeline_committed_version{{{PIPELINE}}}", "committed"),
                        (f"rlfleet_pipeline_published_version{{{PIPELINE}}}", "published"),
                    ),
                    "The distance is the lag.",
                ),
                Panel(
                    "Rounds by outcome",
                    A,
                    (
                        (
                            f"sum by (kind, outcome, transport) (rlfleet_rounds_total{{{PIPELINE}}})",
                            "{{kind}} {{outcome}} {{transport}}",
                        ),
                    ),
                    "Since the operator started.",
                ),
                Panel(
                    "Time paused",
                    L,
                    ((f"rate(rlfleet_paused_seconds_total{{{PIPELINE}}}[$__rate_interval])", "{{pipeline}}"),),
                    "Share of time.",
                    "percentunit",
                ),
                Panel(
                    "All pipelines: parts of rounds, p95",
                    L,
                    ((quantile(0.95, "rlfleet_round_phase_seconds", "phase", 'kind="Refresh"'), "{{phase}}"),),
                    "To compare this pipeline with.",
                    "s",
                    12,
                ),
                Panel(
                    "All pipelines: members by result",
                    A,
                    (("sum by (result) (increase(rlfleet_round_members_total[$__rate_interval]))", "{{result}}"),),
                    "Unknown: neither proven whole nor proven untouched, so it stays closed.",
                    width=12,
                ),
            ),
        ),
        (
            "State",
            (
                Panel(
                    "Conditions",
                    T,
                    ((f"rlfleet_pipeline_condition{{{PIPELINE}}}", "{{condition}} {{reason}}"),),
                    "1 True, 0 False, -1 Unknown.",
                    width=24,
                ),
            ),
        ),
    ),
)

ENGINES = Board(
    uid="rlfleet-engines",
    title="rlfleet / Engines",
    help="Pools, gates and senders.",
    variables=(("namespace", "rlfleet_engines"), ("pool", "rlfleet_engines")),
    rows=(
        (
            "Pools",
            (
                Panel(
                    "Engines by state",
                    A,
                    ((f"sum by (state) (rlfleet_engines{{{POOL}}})", "{{state}}"),),
                    "As EnginePool.status.counts.",
                ),
                Panel(
                    "Active of desired",
                    L,
                    (
                        (f'rlfleet_engines{{{POOL},state="active"}}', "{{pool}} active"),
                        (f"rlfleet_engines_desired{{{POOL}}}", "{{pool}} desired"),
                    ),
                    "Engines that sleep on purpose are desired and not active.",
                ),
                Panel(
                    "Versions behind",
                    L,
                    ((f"rlfleet_engine_version_lag{{{POOL}}}", "{{pool}}"),),
                    "Committed version minus the lowest that an engine holds.",
                ),
                Panel(
                    "Conditions",
                    T,
                    ((f"rlfleet_pool_condition{{{POOL}}}", "{{pool}} {{condition}} {{reason}}"),),
                    "1 True, 0 False, -1 Unknown.",
                    width=16,
                ),
                Panel(
                    "Quarantines by reason",
                    A,
                    (("sum by (reason) (increase(rlfleet_quarantines_total[$__rate_interval]))", "{{reason}}"),),
                    "All pools.",
                ),
            ),
        ),
        (
            "Gates",
            (
                Panel(
                    "Versions that engines hold",
                    A,
                    ((f'count_values("version", rlfleet_gate_engine_version{{{POOL}}})', "{{version}}"),),
                    "NaN: none is proven.",
                ),
                Panel(
                    "Paused and uncertain",
                    L,
                    (
                        (f"sum(rlfleet_gate_engine_paused{{{POOL}}} == bool 1)", "paused"),
                        (f"sum(rlfleet_gate_engine_paused{{{POOL}}} == bool -1)", "unknown"),
                        (f"sum(rlfleet_gate_uncertain{{{POOL}}})", "operation without an end"),
                    ),
                    "Engines, as their gates last saw them.",
                ),
                Panel(
                    "Operations, p95",
                    L,
                    ((quantile(0.95, "rlfleet_gate_operation_seconds", "kind", POOL), "{{kind}}"),),
                    "By kind.",
                    "s",
                ),
                Panel(
                    "Bytes received",
                    L,
                    ((f"sum(rate(rlfleet_gate_received_bytes_total{{{POOL}}}[$__rate_interval]))", "received"),),
                    "Checked bytes of buckets.",
                    "Bps",
                ),
                Panel(
                    "Bytes staged",
                    L,
                    ((f"sum(rlfleet_gate_staged_bytes{{{POOL}}})", "staged"),),
                    "What lies in the gates' memory volumes.",
                    "bytes",
                ),
                Panel(
                    "Operations that did not succeed",
                    A,
                    (
                        (
                            "sum by (kind, state) (increase(rlfleet_gate_operations_total"
                            f'{{{POOL},state!="Succeeded"}}[$__rate_interval]))',
                            "{{kind}} {{state}}",
                        ),
                    ),
                    "Failed ones and those of unknown end.",
                ),
                Panel(
                    "Refusals by reason",
                    A,
                    (
                        (
                            f"sum by (reason) (increase(rlfleet_gate_refusals_total{{{POOL}}}[$__rate_interval])) > 0",
                            "{{reason}}",
                        ),
                    ),
                    "Unauthenticated or Forbidden: somebody who is not the operator tried.",
                ),
            ),
        ),
        (
            "Senders",
            (
                Panel(
                    "Newest version",
                    L,
                    ((f"rlfleet_sender_version{{{NAMESPACE}}}", "{{instance}}"),),
                    "Complete weights at the sender.",
                ),
                Panel(
                    "Bytes moved",
                    L,
                    (
                        (
                            f"sum by (kind) (rate(rlfleet_sender_moved_bytes_total{{{NAMESPACE}}}[$__rate_interval]))",
                            "{{kind}}",
                        ),
                    ),
                    "Push: acknowledged by gates. Broadcast: once to all.",
                    "Bps",
                ),
                Panel(
                    "Staleness of samples",
                    L,
                    (
                        (quantile(0.5, "rlfleet_sender_sample_staleness_versions", "", NAMESPACE), "p50"),
                        (quantile(0.99, "rlfleet_sender_sample_staleness_versions", "", NAMESPACE), "p99"),
                    ),
                    "Versions between a sample's oldest token and the newest weights.",
                ),
            ),
        ),
    ),
)

BOARDS: tuple[Board, ...] = (FLEET, ROUNDS, ENGINES)
