"""A fleet behind fault proxies, with everything that happens to it recorded and checked.

One pipeline with engines, a trainer and one operator process (or several), each behind a proxy of its own; a recorder
of all revisions, a prober of all engines, and one checker that all of them feed. Points of a sweep are successive
versions of one fleet, not new fleets.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.cluster.local import ClusterError, LocalCluster
from e2e.scenarios.adopting import example
from e2e.scenarios.kit import Fleet, Operator, operators, wait_until
from rlfleet.api import labels
from rlfleet.api.checkpoint import INCARNATION
from rlfleet.plan.adopt import selector_of
from rlfleet.sender import checkpoint
from tests.fault.calls import Journal
from tests.fault.history import Recorder
from tests.fault.invariants import Checker
from tests.fault.probe import Prober
from tests.fault.proxy import FaultProxy

DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 60}
#: Short, so that a takeover costs little; long enough for a busy machine.
LEASE = {"RLFLEET_LEASE_SECONDS": "8", "RLFLEET_LEASE_RENEW_SECONDS": "5", "RLFLEET_LEASE_RETRY_SECONDS": "1"}
#: No write for so long, with polls each second, is quiescence.
QUIET_SECONDS = 1.5
#: Where engines of a stand with checkpoints find a version.
CHECKPOINTS = "/checkpoints/{version}"


@dataclass
class Instance:
    """One operator process and its proxy."""

    operator: Operator
    proxy: FaultProxy | None = None
    restarts: int = 0

    @property
    def pid(self) -> int:
        """The pid of its process."""
        assert self.operator.process is not None
        return self.operator.process.pid

    def running(self) -> bool:
        """Its process runs (a stopped one too)."""
        process = self.operator.process
        return process is not None and process.poll() is None

    def kill(self) -> None:
        """SIGKILL; returns when it is dead. Also from a proxy's thread."""
        process = self.operator.process
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT; what its proxy held back goes on."""
        os.kill(self.pid, signal.SIGCONT)
        if self.proxy is not None:
            self.proxy.thaw()

    def restart(self, *, wait: bool = True) -> None:
        """A new process, without a fault."""
        if self.proxy is not None:
            self.proxy.rules = []
        self.operator.kill()
        self.restarts += 1
        self.operator.start(wait=wait)


@dataclass
class Stand:
    """Enter it to get a running fleet whose base is committed (with ``base``; else an empty namespace).

    ``instances``: operator processes; with more than one they elect a leader. ``keep``: remember all calls and
    revisions (a sweep needs them, a soak would grow by them).
    """

    cluster: LocalCluster
    folder: Path
    engines: int = 2
    backend: str = "numpy"
    instances: int = 1
    keep: bool = True
    base: bool = True
    routed: bool = False
    #: Its pods are made by hand and adopted, so their engines restart in place.
    adopted: bool = False
    #: No trainer: versions are written as checkpoints to a folder that the engines mount.
    checkpoints: bool = False
    pipeline: dict[str, Any] = field(default_factory=dict)
    pool: dict[str, Any] = field(default_factory=dict)
    operator_env: dict[str, str] = field(default_factory=dict)
    #: Seconds between two looks at every engine: a look costs the machine as much as some calls of the operator.
    probe_seconds: float = 0.3
    version: int = 0

    def __post_init__(self) -> None:
        self.namespace = f"t-{uuid.uuid4().hex[:10]}"
        self.journal = Journal(keep=self.keep)
        self.checker = Checker()
        self.operators: list[Instance] = []
        self.pods: list[dict[str, Any]] = []
        self.fleet = Fleet(self.cluster, self.namespace)
        self.router_url: str | None = None
        self._stack = ExitStack()

    # ------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _enter(self) -> None:
        cluster, enter = self.cluster, self._stack.enter_context
        cluster.kubectl("create", "namespace", self.namespace)
        self._stack.callback(self._clean_up)
        for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
            cluster.kubectl("wait", "--for=create", thing, f"--namespace={self.namespace}", "--timeout=180s")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recorder = Recorder(
            cluster.kubeconfig, self.journal, keep=self.keep, wanted=lambda namespace: namespace == self.namespace
        )
        self.recorder.observers.append(self.checker.revision)
        self.journal.observers.append(self.checker.call)
        enter(self.recorder)
        self.prober = enter(
            Prober(
                self.recorder,
                self.checker,
                every=self.probe_seconds,
                routed=self.routed,
                router=lambda: self.router_url,
            )
        )
        self.nursery = enter(operators())
        for number in range(self.instances):
            self.operators.append(self._instance(number))
        self.pushes = enter(
            FaultProxy(cluster.operator_kubeconfig, self.folder, self.kill_all, journal=self.journal, name="trainer")
        )
        for instance in self.operators:
            self._stack.callback(instance.operator.kill)
            instance.operator.start()
        if self.base:
            self.make_fleet()

    def _instance(self, number: int) -> Instance:
        operator = Operator(self.cluster, self.folder / f"operator-{number}")
        operator.nursery = self.nursery
        made = Instance(operator)
        proxy = self._stack.enter_context(
            FaultProxy(
                self.cluster.operator_kubeconfig,
                self.folder,
                made.kill,
                freeze=made.freeze,
                journal=self.journal,
                name=f"operator-{number}",
            )
        )
        made.proxy = proxy
        operator.env |= {
            "RLFLEET_KUBECONFIG": str(proxy.kubeconfig),
            "RLFLEET_PEER_PROXY": proxy.peer_url,
            "RLFLEET_WATCH_NAMESPACES": self.namespace,
            "RLFLEET_IDENTITY": proxy.name,
            # One instance that is killed shall not wait for its own lease.
            "RLFLEET_LEADER_ELECT": "true" if self.instances > 1 else "false",
            **(LEASE if self.instances > 1 else {}),
            **self.operator_env,
        }
        return made

    def make_fleet(self) -> None:
        """Pipeline, pool, trainer; the base is committed and every engine serves it."""
        fleet = self.fleet
        self.apply_pipeline()
        if self.checkpoints:
            fleet.pool(self.engines, backend=self.backend, checkpoints=self.folder / "checkpoints", **self.pool)
            fleet.incarnation = INCARNATION
        else:
            self.adopt() if self.adopted else fleet.pool(self.engines, backend=self.backend, **self.pool)
            self.make_trainer()
        self.pods = fleet.ready_engines(self.engines, 300)
        done = fleet.ended(self.order_next()) if self.checkpoints else fleet.sync(-1, seed=100)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        self.version = max(self.version, 0)

    def apply_pipeline(self, **changes: Any) -> None:
        """Create the pipeline, or change it to what this stand's is with these fields of the spec."""
        weights = {"weights": {"checkpoint": {"pathTemplate": CHECKPOINTS}}} if self.checkpoints else {}
        base = {"sync": {"deadlines": DEADLINES}, "historyLimit": 3, **weights}
        self.fleet.pipeline(**{**base, **self.pipeline, **changes})

    def adopt(self) -> None:
        """A pool that adopts pods of the guide's template, which bear an engine's labels for those who look at them."""
        workload, pool = example()
        self.fleet.apply("EnginePool", "e", pool["spec"])
        keys = wait_until(lambda: self.fleet.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")
        spec = workload["spec"]["template"]["spec"] | {"restartPolicy": "Always", "terminationGracePeriodSeconds": 1}
        for variable in spec["initContainers"][0]["env"]:
            if variable["name"] == "RLFLEET_PUBLIC_KEYS":
                del variable["valueFrom"]
                variable["value"] = json.dumps({k["kid"]: k["key"] for k in keys})
        for index in range(self.engines):
            marks = {labels.PIPELINE: "p", labels.POOL: "e", labels.ENGINE_INDEX: str(index)}
            meta = {"name": f"e-{index}", "namespace": self.namespace, "labels": marks | selector_of(pool)}
            self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})

    def order_next(self, **how: Any) -> str:
        """Have the trainer make the next version, and order its round; the round's name. ``how``: see the publisher."""
        version = self.next_version()
        if not self.checkpoints:
            self.fleet.publish(version, **how)
            return self.fleet.order(version)
        # Only here: torch is large, and most stands leave it to their trainer.
        from e2e.sim.model import MODELS
        from e2e.sim.model_torch import torch_state

        folder = f"{self.folder}/checkpoints/{{version}}"
        state = torch_state(MODELS["tiny"], 1000 + version)
        manifest = checkpoint.write(folder, version, state, bucket_bytes=40_000)
        return self.fleet.order(version, manifestDigest=manifest.digest)

    def make_trainer(self) -> None:
        """A trainer whose pushes go through a proxy."""
        self.fleet.trainer(RLFLEET_PEER_PROXY=self.pushes.peer_url)

    def _clean_up(self) -> None:
        for kind in ("rlpipelines", "enginepools", "syncrounds"):
            # No operator is left that would let them go.
            for obj in self.cluster.get(kind, "-n", self.namespace)["items"]:
                if obj["metadata"].get("finalizers"):
                    self.cluster.kubectl(
                        "patch", kind, obj["metadata"]["name"], "-n", self.namespace, "--type=merge",
                        "-p", '{"metadata":{"finalizers":null}}',
                    )  # fmt: skip
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false")
        self.cluster.kubectl("delete", "pods", "--all", f"--namespace={self.namespace}", "--wait=false")

    # ------------------------------------------------------------------------------------------ operators

    @property
    def operator(self) -> Operator:
        """The first (often only) operator process."""
        return self.operators[0].operator

    @property
    def proxy(self) -> FaultProxy:
        """The first operator's proxy."""
        found = self.operators[0].proxy
        assert found is not None
        return found

    def kill_all(self) -> None:
        """SIGKILL to every operator process."""
        for instance in self.operators:
            instance.kill()

    def restart(self) -> None:
        """A new process in place of the first operator, without a fault."""
        self.proxy.watch()
        self.pushes.rules = []
        self.operators[0].restart()

    # ------------------------------------------------------------------------------------------ seeing

    def next_version(self) -> int:
        """A version that nobody has published yet."""
        self.version += 1
        return self.version

    def writes(self) -> int:
        """Writes of all operators to the apiserver since the journal was reset; Events and leases apart."""
        return self.journal.written

    def wait_quiet(self, seconds: float = QUIET_SECONDS, limit: float = 60.0) -> bool:
        """Wait until no operator has written for ``seconds``; False when that did not come about."""
        end = time.monotonic() + limit
        count, since = self.writes(), time.monotonic()
        while time.monotonic() < since + seconds:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
            if (now := self.writes()) != count:
                count, since = now, time.monotonic()
        return True

    def violations(self) -> list[str]:
        """What the checker found, and what went wrong with the checking itself."""
        found = list(self.checker.violations)
        if self.prober.problem is not None:
            found.append(f"the prober failed: {self.prober.problem!r}")
        return found + self.recorder.problems

    def wait_steady(self, what: str, seconds: float = 180.0) -> None:
        """Wait until the pipeline is Ready, nothing is claimed, and ended rounds hold no finalizer."""
        wait_until(self._steady, what, seconds, every=0.1)

    def usable(self, seconds: float = 30.0) -> bool:
        """Everything runs, nothing was broken, and the fleet comes to rest with all its engines open."""
        if self.violations() or not all(i.running() for i in self.operators):
            return False
        try:
            self.wait_steady("the fleet to be steady", seconds)
            self.fleet.ready_engines(self.engines, seconds)
            return not any(self.fleet.paused(pod) for pod in self.fleet.engines())
        except (AssertionError, ClusterError, OSError):
            return False

    def _steady(self) -> bool:
        status = self.fleet.status("rlpipeline", "p")
        if status.get("activeOperation") or not any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or []
        ):
            return False
        rounds = self.cluster.get("syncrounds", "-n", self.namespace)["items"]
        return not any(r["metadata"].get("finalizers") for r in rounds)
