"""What every reconciler works with: the apiserver, the view of pods, the peers, keys, time, and the queue's entrance.

Invariant: reconcilers reach the outside only through this, so a test can give them another clock or another cluster;
nothing here holds a decision.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlfleet.discovery.client import Frontends
from rlfleet.kube.client import KubeClient
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.guard import Guard
from rlfleet.kube.limiter import Priority
from rlfleet.kube.reflector import Reflector
from rlfleet.plan.summary import RoundSummary

from .claim_memory import ClaimMemory
from .elastic.memory import ElasticMemory
from .queue import Kind, QueueKey
from .repair.memory import RepairMemories
from .rounds.memory import GateMemory
from .workers import WorkerMemory

if TYPE_CHECKING:
    from .keys import SigningKeys
    from .peers import Peers


class Clock(Protocol):
    """This machine's time. Decisions use ``monotonic`` only; what is persisted is dated by ``Context.now_ms``."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""


class SystemClock:
    """The running loop's clock (so virtual time in tests reaches it), and the machine's wall clock."""

    def monotonic(self) -> float:
        """Seconds of the loop's clock."""
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000


class Metrics:
    """What reconcilers report. This reports it nowhere (a dry run); app/metrics.py has it with Prometheus.

    Labels come from closed lists.
    """

    def round_ended(self, namespace: str, pipeline: str, ended: RoundSummary) -> None:
        """A SyncRound reached a terminal phase."""

    def round_refused(self, reason: str) -> None:
        """A try to move a round was refused (plan.attempts)."""

    def round_taken_over(self, kind: str) -> None:
        """A round that had been claimed before is ours now."""

    def round_moved(self, namespace: str, pipeline: str, obj: Mapping[str, Any] | None) -> None:
        """The SyncRound that owns the pipeline, as last read or written; None: none does."""

    def pipeline(self, namespace: str, name: str, obj: Mapping[str, Any] | None) -> None:
        """An RLPipeline as last read or written; None: it is gone."""

    def pool(
        self, namespace: str, name: str, status: Mapping[str, Any] | None, desired: int, committed: int | None
    ) -> None:
        """An EnginePool's status as it is now (written or about to be); None: the pool is gone."""

    def quarantined(self, reason: str) -> None:
        """An engine became Quarantined."""

    def claims_leaked(self, namespace: str, pipeline: str, count: int | None) -> None:
        """How many rendezvous ports of a pipeline are leaked; None: the pipeline is gone."""

    def progress(self, namespace: str, pipeline: str, ratio: float | None) -> None:
        """Completed of wanted trajectories, 0 to 1, as the trainer reports; None: it reports none."""

    def write(self, resource: str) -> None:
        """One write to the apiserver was made by a reconciler."""

    def deleting(self, kind: str, namespace: str, name: str, since: float | None) -> None:
        """A deletion waits for our finalizer since ``since`` (epoch seconds); None: not any more."""

    def finalizer_ceiling(self, kind: str) -> None:
        """A finalizer of ours was removed from an object of this kind because its ceiling was reached."""

    def repair_rule_failed(self, rule: str) -> None:
        """A repair rule (control.repair.rules.RuleName) raised; the others ran."""


class Traces:
    """Where the parts of rounds are told as they end. This tells nobody; app/tracing.py has it with OpenTelemetry."""

    def part(self, obj: Mapping[str, Any], part: str, seconds: float, ended_ms: int) -> None:
        """A part of this SyncRound took so long and ended then (epoch milliseconds)."""

    def round_ended(self, obj: Mapping[str, Any]) -> None:
        """This SyncRound ended; its status is terminal."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings that reconcilers read. Seconds, unless the name says otherwise."""

    namespace: str = "rlfleet-system"
    """The operator's own namespace (signing key, leader lease)."""
    identity: str = "rlfleet-operator"
    """Name of this process, shown as the holder of a round."""
    api_timeout: float = 10.0
    """Deadline of one apiserver call."""
    router_timeout: float = 5.0
    """Deadline of one call to a router."""
    poll_seconds: float = 5.0
    """How often gates and senders are asked when nothing else happens."""
    boot_poll_seconds: float = 1.0
    """How often gates of booting engines are asked."""
    create_parallel: int = 16
    """Most pods of one pool that are created at the same time."""
    gate_parallel: int = 64
    """Most gates of one pool that are asked at the same time."""
    namespaces: tuple[str, ...] = ()
    """Namespaces that this operator serves; none: all."""
    tls_secret: str = ""
    """Secret of each served namespace with its gates' certificate; empty: gates and senders speak plain HTTP."""


class Enqueue(Protocol):
    """The queue's entrance."""

    def __call__(self, key: QueueKey, *, after: float = 0.0, priority: Priority = Priority.SCALE) -> None:
        """Have ``key`` reconciled, at the earliest after ``after`` seconds."""


@dataclass(slots=True)
class Context:
    """Given to every reconciler."""

    kube: KubeClient
    pods: Reflector
    peers: Peers
    keys: SigningKeys
    events: EventRecorder
    enqueue: Enqueue
    guard: Guard
    settings: ControlSettings = field(default_factory=ControlSettings)
    clock: Clock = field(default_factory=SystemClock)
    raised: set[str] = field(default_factory=set)
    """UIDs of pipelines whose fence this process has raised: its calls are above those of every earlier leader."""
    metrics: Metrics = field(default_factory=Metrics)
    traces: Traces = field(default_factory=Traces)
    gates: GateMemory = field(default_factory=GateMemory)
    claims: ClaimMemory = field(default_factory=ClaimMemory)
    repairs: RepairMemories = field(default_factory=RepairMemories)
    elastic: ElasticMemory = field(default_factory=ElasticMemory)
    frontends: Frontends = field(default_factory=Frontends)
    """Dynamo frontends that pools name; closed by whoever made this."""
    workers: WorkerMemory = field(default_factory=WorkerMemory)

    def now_ms(self) -> int:
        """Milliseconds since the epoch by the apiserver's clock: the one that all operators share.

        Everything persisted, and everything compared with what is persisted, is dated with it. Before the apiserver's
        first answer it is this machine's clock: nothing can have been persisted by then.
        """
        return self.kube.now_ms or self.clock.wall_ms()


__all__ = [
    "Clock",
    "Context",
    "ControlSettings",
    "Enqueue",
    "Kind",
    "Metrics",
    "Priority",
    "QueueKey",
    "SystemClock",
    "Traces",
]
