"""How long nobody acts on a round when its operator goes: from the signal to the next holder's first CAS.

Two operators under election with the default Lease; a round is in Transferring. Killed: SIGKILL to the leader; budget:
the Lease's duration + 2 s. Stopped: SIGTERM; budget: 2 s. Baseline, in the same run: one operator without election is
killed and started again at once, which costs a process start instead of a Lease. The first CAS is the claim in
RLPipeline.status, seen by polling the apiserver every 10 ms. Usage: takeover.py [repetitions]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from bench.machine import describe  # noqa: E402
from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster  # noqa: E402
from e2e.scenarios.kit import Fleet, Operator, wait_until  # noqa: E402

LEASE_SECONDS = 15
NAMESPACE = "takeover"
#: The engines' load takes longer than any takeover, so the round is under way all the time.
LOAD_SECONDS = LEASE_SECONDS + 8


class Bench:
    """A fleet of two engines with its base committed."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.fleet = Fleet(cluster, NAMESPACE)
        self.version = 0

    def operator(self, name: str, *, elected: bool) -> Operator:
        """A process that is ready."""
        one = Operator(self.cluster, self.folder / name, RLFLEET_LEADER_ELECT=str(elected).lower())
        one.start()
        return one

    def make_fleet(self) -> None:
        """Namespace, pipeline, engines, trainer; an operator must run."""
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
            self.cluster.kubectl("wait", "--for=create", thing, f"--namespace={NAMESPACE}", "--timeout=60s")
        deadlines = {"pendingSeconds": 120, "stagingSeconds": 120, "pausedSeconds": 300}
        self.fleet.pipeline(sync={"deadlines": deadlines})
        self.fleet.pool(2)
        self.fleet.trainer()
        self.fleet.ready_engines(2)
        assert self.fleet.sync(-1)["status"]["phase"] == "Succeeded"

    def time(self, strike: Callable[[], None]) -> float:
        """Seconds from ``strike`` in the middle of a round to the claim of another holder; the round then ends well."""
        self.version += 1
        for pod in self.fleet.engines():
            how = {"action": "delay", "seconds": LOAD_SECONDS, "times": 1, "when": "before"}
            self.fleet.fault(pod, "update_weights_from_disk", **how)
        self.fleet.publish(self.version)
        name = self.fleet.order(self.version)
        wait_until(lambda: self.fleet.phase(name) == "Transferring", "Transferring")
        before = self.fleet.status("rlpipeline", "p")["activeOperation"]["holder"]
        started = time.perf_counter()
        strike()
        wait_until(
            lambda: (self.fleet.status("rlpipeline", "p").get("activeOperation") or {}).get("holder") != before,
            "the next holder",
            every=0.01,
        )
        taken = time.perf_counter() - started
        done = self.fleet.ended(name)["status"]
        assert done["phase"] == "Succeeded", done
        return taken

    def leader(self, operators: list[Operator]) -> Operator:
        """Who holds the Lease; the operator's folder is in no identity, so by its log."""
        holder = self.cluster.get("lease", "rlfleet-operator", "-n", OPERATOR_NAMESPACE)["spec"]["holderIdentity"]
        return next(o for o in operators if f"started as {holder}" in o.log.read_text())

    def elected(self, repetitions: int, stop: Callable[[Operator], None]) -> list[float]:
        """Times with two operators under election; whoever was struck starts again as the standby."""
        pair = [self.operator(f"elected-{i}", elected=True) for i in (1, 2)]
        found = []
        try:
            for _ in range(repetitions):
                leader = self.leader(pair)
                found.append(self.time(lambda one=leader: stop(one)))
                leader.kill()
                leader.start()
        finally:
            for one in pair:
                one.stop()
        return found

    def restarted(self, repetitions: int) -> list[float]:
        """Times of one operator that is killed and started again at once."""
        one = self.operator("alone", elected=False)

        def again() -> None:
            one.kill()
            one.start()

        try:
            return [self.time(again) for _ in range(repetitions)]
        finally:
            one.stop()


def terminate(one: Operator) -> None:
    """SIGTERM, without waiting."""
    assert one.process is not None
    one.process.terminate()


def show(what: str, seconds: list[float], baseline: float, budget: float) -> None:
    """One line."""
    middle = statistics.median(seconds)
    print(
        f"  {what:9} {middle:6.2f} s (range {min(seconds):.2f}-{max(seconds):.2f}), {middle / LEASE_SECONDS:.2f} of "
        f"the Lease, {middle / baseline:.2f} of a restart, {max(seconds) / budget:.2f} of the {budget:g} s allowed"
    )


def main() -> None:
    """Run all three."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(describe())
    with tempfile.TemporaryDirectory() as name, LocalCluster(Path(name) / "cluster", nodes=2) as cluster:
        bench = Bench(cluster, Path(name))
        first = bench.operator("first", elected=False)
        try:
            bench.make_fleet()
        finally:
            first.stop()
        alone = bench.restarted(repetitions)
        killed = bench.elected(repetitions, lambda one: one.process.kill() if one.process else None)
        stopped = bench.elected(repetitions, terminate)
    baseline = statistics.median(alone)
    print(f"takeover in mid-round: {repetitions} repetitions each, Lease of {LEASE_SECONDS} s")
    print(f"  baseline  {baseline:6.2f} s (range {min(alone):.2f}-{max(alone):.2f}): restart without election")
    show("killed", killed, baseline, LEASE_SECONDS + 2)
    show("stopped", stopped, baseline, 2)


if __name__ == "__main__":
    main()
