"""``make soak``: random faults over hollow nodes for as long as you like, with the invariants checked all the time.

Rounds run one after the other, users ask through a real router, and every few seconds something is killed, frozen, cut
off or scaled; the seed is printed, so that the same faults can be asked for again. Every few minutes the faults stop:
then the fleet must come to rest by itself, a plain round must succeed, and nothing may be written any more. These
moments are also when memory and the number of objects are measured.

Exit code 0: no violation, memory and objects flat. The last lines are the totals.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import ClusterError, LocalCluster
from e2e.scenarios.kit import TERMINAL, condition, wait_until
from e2e.scenarios.routers import ROUTER_PORT, router_pod
from tests.fault.proxy import Fault, FaultProxy, Rule, Watching
from tests.fault.scenarios import DISK
from tests.fault.stand import Stand

#: Seconds of faults between two moments of rest, and the longest that coming to rest may take.
STORM_SECONDS = 100.0
CALM_SECONDS = 300.0
#: In the middle third of a soak operators are let live, so that their memory can be followed: one that has rested at
#: least four times may have grown by so much between its second rest (it is warm then) and its last.
GROWTH_MIB = 20.0
#: And the budget of its resident memory.
RSS_MIB = 250.0
#: Objects of ours at rest: the pipeline, the pool, and of each kind of round the history limit's and the newest.
HISTORY = 5
MOST_OBJECTS = 2 + 2 * (HISTORY + 1)
SIZES = (2, 3, 4)
#: Faults after which an operator process ends, or may.
_ENDS_OPERATORS = frozenset({"kill operator", "freeze operator", "kill apiserver", "kill etcd", "apiserver outage"})


@dataclass
class Totals:
    """What a soak did and found."""

    seed: int
    rounds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rests: int = 0
    starts: int = 0
    answers: int = 0
    refusals: int = 0
    samples: int = 0
    checks: int = 0
    minutes: float = 0.0
    #: Per operator process (its number and pid): (seconds since the start of the soak, MiB), one per rest.
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    objects: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Soak:
    """One soak. ``run`` returns the totals."""

    def __init__(self, cluster: LocalCluster, folder: Path, *, minutes: float, seed: int, operators: int) -> None:
        self.cluster = cluster
        self.minutes = minutes
        self.random = random.Random(seed)
        self.totals = Totals(seed)
        self.started = time.monotonic()
        self.stand = Stand(
            cluster,
            folder,
            engines=3,
            instances=operators,
            keep=False,
            probe_seconds=1.0,  # it leaves the machine to others
            base=False,
            routed=True,
        )
        self.size = 3
        self._pause = threading.Event()
        self._rounds_stopped = threading.Event()
        self._end = threading.Event()
        self._behind: list[Callable[[], None]] = []
        #: Operator processes that a fault keeps down until then; others that ended are started at once.
        self._down: dict[int, float] = {}

    # ------------------------------------------------------------------------------------------ run

    def run(self) -> Totals:
        """From the empty namespace to the totals."""
        with self.stand:
            self._set_up()
            self.started = time.monotonic()  # minutes of faults, not of building
            trainer = threading.Thread(target=self._train, daemon=True)
            supervisor = threading.Thread(target=self._supervise, daemon=True)
            trainer.start()
            supervisor.start()
            try:
                end = self.started + 60 * self.minutes
                while True:
                    self._storm(min(end, time.monotonic() + STORM_SECONDS))
                    if not self._rest() or time.monotonic() >= end:
                        break
            finally:
                self._end.set()
                self._pause.clear()
                trainer.join(60)
                supervisor.join(60)
            self._judge()
        return self.totals

    def _set_up(self) -> None:
        stand, fleet = self.stand, self.stand.fleet
        deadlines = {"pendingSeconds": 30, "stagingSeconds": 20, "pausedSeconds": 20}
        fleet.pipeline(sync={"deadlines": deadlines}, historyLimit=HISTORY)
        self._router()
        router = {"name": "main", "type": "SGLangRouter", "podSelector": {"matchLabels": {"app": "router"}}}
        fleet.pool(self.size, routers=[router | {"port": ROUTER_PORT}])
        stand.make_trainer()
        fleet.ready_engines(self.size, 300)
        done = fleet.sync(-1, seed=100)
        assert done["status"]["phase"] == "Succeeded", done["status"]
        self._say(f"fleet is up in {stand.namespace}, {self.size} engines")

    def _router(self) -> None:
        fleet = self.stand.fleet
        fleet.cluster.apply(router_pod(fleet.namespace))
        wait_until(lambda: condition(fleet.pod("router"), "Ready") == "True", "the router to be Ready", 120)
        self.stand.router_url = f"http://{fleet.pod('router')['status']['podIP']}:{ROUTER_PORT}"

    def _supervise(self) -> None:
        """Start operators that have ended, as a Deployment does: killed ones, and deposed leaders, which end."""
        while not self._end.wait(0.5):
            for number, one in enumerate(self.stand.operators):
                if not one.running() and time.monotonic() > self._down.get(number, 0.0):
                    one.restart(wait=False)
                    self.totals.starts += 1

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def _violate(self, text: str) -> None:
        self._say(f"VIOLATION {text}")
        self.totals.violations.append(text)

    # ------------------------------------------------------------------------------------------ rounds

    def _train(self) -> None:
        """Publish and sync, version after version, as a training loop does; pauses while the fleet rests."""
        while not self._end.is_set():
            if self._pause.is_set():
                self._rounds_stopped.set()
                time.sleep(0.2)
                continue
            self._rounds_stopped.clear()
            with suppress(OSError, ClusterError, AssertionError, KeyError, ValueError):
                self._one_round()
            time.sleep(1.0)
        self._rounds_stopped.set()

    def _one_round(self) -> str:
        fleet = self.stand.fleet
        version = self.stand.next_version()
        fleet.publish(version)
        name = fleet.order(version)
        end = time.monotonic() + 240

        def phase() -> str | None:
            if self._pause.is_set() and time.monotonic() > end:
                return "Unfinished"
            with suppress(ClusterError):
                found = fleet.phase(name)
                return found if found in TERMINAL else None
            return None

        try:
            outcome = wait_until(phase, f"round {name}", 600, every=0.3)
        except AssertionError:
            outcome = "Unfinished"
        self.totals.rounds[outcome] += 1
        return outcome

    # ------------------------------------------------------------------------------------------ faults

    def _storm(self, until: float) -> None:
        """Faults at random moments until then."""
        self._pause.clear()
        menu: list[tuple[int, str, Callable[[], None]]] = [
            (6, "kill operator", self._kill_operator),
            (4, "freeze operator", self._freeze_operator),
            (4, "kill gate", lambda: self._crash("gate")),
            (3, "freeze gate", lambda: self._freeze("gate")),
            (3, "kill engine", lambda: self._crash("engine")),
            (2, "freeze engine", lambda: self._freeze("engine")),
            (2, "fail a load", self._fail_load),
            (1, "kill trainer", self._kill_trainer),
            (1, "kill router", self._kill_router),
            (1, "kill apiserver", lambda: self.cluster.restart("kube-apiserver")),
            (1, "kill etcd", lambda: self.cluster.restart("etcd")),
            (3, "apiserver outage", self._outage),
            (8, "strike calls", self._strike),
            (3, "watches", self._watches),
            (2, "scale", self._scale),
            (1, "delete a pod", self._delete_pod),
        ]
        while time.monotonic() < until and not self._end.is_set():
            time.sleep(self.random.uniform(0.5, 6.0))
            spared = 1 / 3 < (time.monotonic() - self.started) / (60 * self.minutes) < 2 / 3
            weights = [0 if spared and name in _ENDS_OPERATORS else weight for weight, name, _ in menu]
            _, name, act = self.random.choices(menu, weights)[0]
            try:
                act()
            except (HollowError, ClusterError, AssertionError, KeyError, OSError) as error:
                self._say(f"{name}: could not ({str(error)[:120]})")
                continue
            self._say(name)
            self.totals.faults[name] += 1
            self._new_violations()

    def _new_violations(self) -> None:
        for text in self.stand.violations():
            if text not in self.totals.violations:
                self._violate(text)

    def _engine(self) -> str:
        return str(self.random.choice(self.stand.fleet.engines())["metadata"]["name"])

    def _kill_operator(self) -> None:
        number = self.random.randrange(len(self.stand.operators))
        self._down[number] = time.monotonic() + self.random.uniform(0, 4)
        self.stand.operators[number].kill()

    def _freeze_operator(self) -> None:
        one = self.random.choice(self.stand.operators)
        if one.running():
            one.freeze()
            time.sleep(self.random.choice([1, 3, 20]))
            one.thaw()

    def _crash(self, container: str) -> None:
        self.cluster.hollow.crash(self.stand.namespace, self._engine(), container)

    def _freeze(self, container: str) -> None:
        pod = self._engine()
        self.cluster.hollow.freeze(self.stand.namespace, pod, container)
        time.sleep(self.random.choice([1, 4, 12]))
        with suppress(HollowError):  # replaced meanwhile
            self.cluster.hollow.thaw(self.stand.namespace, pod, container)

    def _fail_load(self) -> None:
        pod = self.random.choice(self.stand.fleet.engines())
        ways: list[dict[str, Any]] = [
            {"action": "http500", "when": "before"},
            {"action": "http500", "when": "after"},
            {"action": "hang"},
            {"action": "delay", "seconds": 3, "when": "before"},
        ]
        how = self.random.choice(ways)
        self.stand.fleet.fault(pod, DISK, times=1, **how)

    def _kill_trainer(self) -> None:
        fleet = self.stand.fleet
        self.cluster.hollow.crash(fleet.namespace, "trainer", "trainer")
        self._again("trainer", self.stand.make_trainer)

    def _kill_router(self) -> None:
        self.cluster.hollow.crash(self.stand.namespace, "router", "router")
        self.stand.router_url = None
        self._again("router", self._router)

    def _again(self, pod: str, make: Callable[[], None]) -> None:
        """A new pod under the name of one that ended."""
        flags = ("--force", "--grace-period=0", "--timeout=180s", "--ignore-not-found")
        self.cluster.kubectl("delete", "pod", pod, "-n", self.stand.namespace, *flags)
        self._behind.append(make)
        make()
        self._behind.remove(make)

    def _proxies(self) -> list[FaultProxy]:
        return [i.proxy for i in self.stand.operators if i.proxy is not None]

    def _outage(self) -> None:
        proxy = self.random.choice(self._proxies())
        proxy.outage(True)
        time.sleep(self.random.choice([1, 4, 12]))
        proxy.outage(False)

    def _strike(self) -> None:
        """The next few calls of one kind are refused, lost or late."""
        lane = self.random.choice(["api", "peer"])
        faults = [Fault.RESET, Fault.DROP, Fault.TRUNCATE, Fault.DELAY, Fault.BUSY, Fault.TIMEOUT, Fault.ERROR]
        if lane == "api":
            faults += [Fault.CONFLICT, Fault.THROTTLED]
        rule = Rule(
            lambda call: call.lane == lane and call.counted,
            self.random.choice(faults),
            times=self.random.choice([1, 2, 5]),
            skip=self.random.randrange(6),
            seconds=self.random.choice([0.5, 2.0, 6.0]),
        )
        proxy = self.random.choice([*self._proxies(), self.stand.pushes])
        proxy.rules = [rule]

    def _watches(self) -> None:
        proxy = self.random.choice(self._proxies())
        mode = self.random.choice([Watching.HOLD, Watching.CLOSE, Watching.GONE])
        kinds = self.random.choice([("pods",), ("syncrounds", "rlpipelines"), ("enginepools",)])
        proxy.set_watching(mode, *kinds)
        time.sleep(self.random.choice([1, 5, 15]) if mode is Watching.HOLD else 0.5)
        proxy.set_watching(Watching.PASS, *kinds)

    def _scale(self) -> None:
        self.size = self.random.choice([n for n in SIZES if n != self.size])
        self._resize()

    def _resize(self) -> None:
        self.cluster.kubectl(
            "patch", "enginepool", "e", "-n", self.stand.namespace, "--type=merge",
            "-p", json.dumps({"spec": {"replicas": self.size}}),
        )  # fmt: skip

    def _delete_pod(self) -> None:
        flags = self.random.choice([("--wait=false",), ("--force", "--grace-period=0")])
        self.cluster.kubectl("delete", "pod", self._engine(), "-n", self.stand.namespace, *flags)

    # ------------------------------------------------------------------------------------------ rest

    def _rest(self) -> bool:
        """Faults stop: everything must come to rest, and a plain round must succeed. False when it did not."""
        self._end_faults()
        began = time.monotonic()
        self._pause.set()
        self._say("faults stop")
        if not self._rounds_stopped.wait(CALM_SECONDS):
            self._violate(f"liveness: a round is not over {CALM_SECONDS:g} s after the faults stopped")
            return False
        try:
            wait_until(self._calm, "the fleet to be calm", CALM_SECONDS, every=0.5)
        except AssertionError:
            self._violate(f"liveness: not at rest {CALM_SECONDS:g} s after the faults stopped: {self._unrest()}")
            return False
        if not self.stand.wait_quiet():
            self._violate("I9: operators go on writing although nothing happens")
        self._measure()
        self._new_violations()
        self.totals.rests += 1
        self._say(
            f"at rest after {time.monotonic() - began:.0f} s; {sum(self.totals.rounds.values())} rounds, "
            f"{sum(self.totals.faults.values())} faults, {len(self.totals.violations)} violations"
        )
        return True

    def _end_faults(self) -> None:
        stand = self.stand
        for make in list(self._behind):
            make()
            self._behind.remove(make)
        for proxy in [*self._proxies(), stand.pushes]:
            proxy.rules = []
            proxy.outage(False)
            proxy.set_watching(Watching.PASS, "pods", "syncrounds", "rlpipelines", "enginepools")
        self._down.clear()
        self._resize()  # an earlier try may have met a dead apiserver

    def _calm(self) -> bool:
        """Rounds until every engine has the newest version and takes requests; then true."""
        with suppress(ClusterError, OSError, KeyError, ValueError):
            if self._unrest():
                if not self.stand.fleet.status("rlpipeline", "p").get("activeOperation"):
                    self._one_round()
                return False
            return True
        return False

    def _unrest(self) -> str:
        fleet, stand = self.stand.fleet, self.stand
        status = fleet.status("rlpipeline", "p")
        if status.get("activeOperation"):
            return f"{status['activeOperation']} is claimed"
        engines = fleet.engines()
        if len(engines) != self.size:
            return f"{len(engines)} engines instead of {self.size}"
        version = str((status.get("committed") or {}).get("version"))
        if version != str(stand.version):
            return f"committed is {version}, not {stand.version}"
        for pod in engines:
            name = pod["metadata"]["name"]
            if condition(pod, "Ready") != "True":
                return f"{name} is not Ready"
            if fleet.paused(pod) or fleet.label(pod) != version:
                return f"{name} is {'closed' if fleet.paused(pod) else 'open'} at {fleet.label(pod)}"
        return ""

    def _measure(self) -> None:
        at = int(time.monotonic() - self.started)
        for number, one in enumerate(self.stand.operators):
            with suppress(psutil.Error, AssertionError):
                mib = psutil.Process(one.pid).memory_info().rss / 2**20
                self.totals.memory.setdefault(f"{number}/{one.pid}", []).append((at, round(mib, 1)))
        kinds = ("rlpipelines", "enginepools", "syncrounds")
        found = sum(len(self.cluster.get(kind, "-n", self.stand.namespace)["items"]) for kind in kinds)
        self.totals.objects.append(found)

    # ------------------------------------------------------------------------------------------ end

    def _judge(self) -> None:
        totals, stand = self.totals, self.stand
        self._new_violations()
        for process, samples in totals.memory.items():
            top = max(mib for _, mib in samples)
            if top > RSS_MIB:
                self._violate(f"memory: operator {process} had {top} MiB, more than {RSS_MIB:g}")
            growth = samples[-1][1] - samples[1][1] if len(samples) >= 4 else 0.0
            if growth > GROWTH_MIB:
                self._violate(f"memory: operator {process} grew by {growth:.1f} MiB, more than {GROWTH_MIB:g}")
        if totals.objects and max(totals.objects) > MOST_OBJECTS:
            self._violate(f"objects: {max(totals.objects)} of ours at rest, more than {MOST_OBJECTS}")
        totals.answers, totals.refusals = stand.prober.answers, stand.prober.refusals
        totals.samples, totals.checks = stand.prober.samples, stand.checker.checked
        totals.minutes = round((time.monotonic() - self.started) / 60, 1)


def report(totals: Totals) -> str:
    """The totals for people."""
    longest = max(totals.memory.values(), key=len, default=[])
    return "\n".join(
        [
            f"soak of {totals.minutes} minutes, seed {totals.seed}",
            f"rounds     {sum(totals.rounds.values())}: {dict(totals.rounds)}",
            f"faults     {sum(totals.faults.values())}: {dict(sorted(totals.faults.items()))}",
            f"rests      {totals.rests}, {totals.starts} starts of operators",
            f"objects    of ours at rest: {totals.objects[:1]} to {totals.objects[-1:]}",
            f"users      {totals.answers} answers, {totals.refusals} refused or failed",
            f"checks     {totals.checks} of revisions, calls and samples; {totals.samples} samples of engines",
            f"memory     operator that rested most often: {longest[:1]} to {longest[-1:]} (seconds, MiB)",
            f"violations {len(totals.violations)}",
            *(f"  {text}" for text in totals.violations),
        ]
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--operators", type=int, default=2, help="processes that elect a leader among them")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--report", type=Path, default=None, help="write the totals as JSON to this file, too")
    arguments = parser.parse_args()
    # An end from outside cleans up as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"soak: {arguments.minutes:g} minutes, seed {seed} (SEED={seed} asks for the same faults)", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rlfleet-soak-"))
    try:
        with LocalCluster(folder / "cluster", nodes=arguments.nodes, say=print, nursery=True) as cluster:
            soak = Soak(cluster, folder / "stand", minutes=arguments.minutes, seed=seed, operators=arguments.operators)
            try:
                totals = soak.run()
            except BaseException:
                for one in soak.stand.operators:
                    print(one.operator.tail(60))
                raise
    finally:
        if (folder / "stand").exists():
            print(f"logs of the operators: {keep_logs(folder)}")
        shutil.rmtree(folder, ignore_errors=True)
    print(report(totals))
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(asdict(totals), indent=1))
    return 1 if totals.violations else 0


def keep_logs(folder: Path) -> Path:
    """Copy the operators' logs to a folder of their own, which is left."""
    kept = Path(tempfile.mkdtemp(prefix="rlfleet-soak-logs-"))
    for log in (folder / "stand").rglob("*.log"):
        shutil.copy(log, kept / f"{log.parent.name}.log")
    return kept


if __name__ == "__main__":
    sys.exit(main())
