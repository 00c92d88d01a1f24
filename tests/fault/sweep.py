"""Runs a scenario undisturbed, then once for each point and fault, and compares how it ends.

A point is a call (see ``calls``): a write to the apiserver, or a call to a gate or the sender. Polls count once per
label: how often one is repeated depends on the machine. What was tried is kept in a report file, so that a sweep that
was cut short goes on where it was. A sweep mostly waits, so it has several stands, each in a namespace of its own with
an operator of its own; they share the control plane and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster.local import ClusterError
from e2e.scenarios.kit import wait_until
from tests.fault.proxy import Fault, Rule, at
from tests.fault.scenarios import Scenario, State
from tests.fault.stand import Stand

#: A run that has not come to its end by then never will.
LIMIT_SECONDS = 240.0
KILLS = (Fault.KILL_BEFORE, Fault.KILL_AFTER)
#: Writes that one fault may cost beyond those of the undisturbed run: the one that is repeated, a new claim with the
#: barrier's writes, the phases of a round that starts over, and those of the CatchUp for whom that round left behind.
EXTRA_WRITES = 40
#: A scenario's sweep that made so many stands in vain is given up: what it finds is one and the same trouble.
MOST_BAD = 8


@dataclass(frozen=True, slots=True)
class Try:
    """One fault at one point. ``number``: which of several times."""

    point: str
    fault: Fault
    number: int = 1

    @property
    def name(self) -> str:
        """In reports."""
        return f"{self.fault.value} {self.point}" + (f" ({self.number})" if self.number > 1 else "")


@dataclass(slots=True)
class Outcome:
    """How a disturbed run ended. ``direct``: as the undisturbed one; else so after the trainer's next version.

    ``reached`` is False when the run came to its end without the point.
    """

    name: str
    reached: bool = True
    converged: bool = False
    direct: bool = False
    failure: str = ""
    writes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing to complain of."""
        return self.converged and not self.problems


class Report:
    """Outcomes by scenario, in a file that a later run reads (``path`` None: in memory only). Thread-safe."""

    def __init__(self, path: Path | None, commit: str = "") -> None:
        """``commit``: what is tested, noted beside each outcome."""
        self.path = path
        self.commit = commit
        self.scenarios: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if path is not None and path.exists():
            self.scenarios = json.loads(path.read_text())

    def known(self, scenario: str, name: str) -> bool:
        """It was tried, and well."""
        found = self.scenarios.get(scenario, {}).get("outcomes", {}).get(name)
        return bool(found and found["converged"] and not found["problems"])

    def plan(self, scenario: str, points: int, tries: int) -> None:
        """How many points a scenario has, and how many tries of them this report's shard is to make."""
        with self._lock:
            entry = self.scenarios.setdefault(scenario, {"outcomes": {}})
            entry["points"], entry["tries"] = points, tries
            self._write()

    def add(self, scenario: str, outcome: Outcome) -> None:
        """One more."""
        with self._lock:
            entry = self.scenarios.setdefault(scenario, {"outcomes": {}})
            entry["outcomes"][outcome.name] = asdict(outcome) | {"commit": self.commit}
            self._write()

    def merge(self, other: Report) -> None:
        """What another shard tried, too."""
        for name, entry in other.scenarios.items():
            mine = self.scenarios.setdefault(name, {"points": 0, "tries": 0, "outcomes": {}})
            mine["points"] = max(mine["points"], entry.get("points", 0))
            mine["tries"] += entry.get("tries", 0)
            mine["outcomes"] |= entry["outcomes"]

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, text in (
            (self.path, json.dumps(self.scenarios, indent=1)),
            (self.path.with_suffix(".txt"), "\n".join(self.lines()) + "\n"),
        ):
            new = path.with_name(path.name + ".new")
            new.write_text(text)
            os.replace(new, path)

    def lines(self) -> Iterator[str]:
        """The report for people: totals, each scenario, and each try that is not good."""
        total = {"tries": 0, "tried": 0, "converged": 0, "violations": 0}
        lines = []
        for name, entry in self.scenarios.items():
            outcomes = list(entry["outcomes"].values())
            converged = sum(o["converged"] for o in outcomes)
            direct = sum(o["direct"] for o in outcomes)
            reached = sum(o["reached"] for o in outcomes)
            broken = sum(len(o["problems"]) for o in outcomes)
            seconds = sum(o["seconds"] for o in outcomes)
            tries = entry.get("tries", 0)
            for key, value in (("tries", tries), ("tried", len(outcomes)), ("converged", converged)):
                total[key] += value
            total["violations"] += broken
            lines.append(
                f"{name}: {entry.get('points', 0)} points, {len(outcomes)} of {tries} tries made ({reached} reached "
                f"their point), {converged} converged ({direct} at once, {converged - direct} with the next version), "
                f"{broken} violations, {seconds / max(1, len(outcomes)):.1f} s each, "
                f"of {', '.join(sorted({o.get('commit') or 'an unknown commit' for o in outcomes}))}"
            )
            for o in outcomes:
                if not o["converged"] or o["problems"]:
                    lines.append(f"  {o['name']}: {o['failure'] or 'converged'} {'; '.join(o['problems'])}")
        yield (
            f"points tried: {total['tried']} of {total['tries']}, converged: {total['converged']}, "
            f"violations: {total['violations']}"
        )
        yield from lines


class Sweep:
    """One scenario on one stand."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.stand: Stand = scenario.stand
        self.expected: State = {}
        self.points: list[str] = []
        self.writes = 0

    # ------------------------------------------------------------------------------------------ runs

    def learn(self) -> None:
        """Two undisturbed runs, which must end alike; points are what both had in common."""
        ends, found = [], []
        for _ in range(2):
            self._clear()
            self.scenario.prepare()
            self._clear()
            self.scenario.begin(self._clear)
            self._finish()
            ends.append(self.scenario.end_state())
            self.writes = max(self.writes, self.stand.writes())
            calls = [c for c in self.stand.journal.calls if c.counted and (not c.read or c.occurrence == 1)]
            found.append(list(dict.fromkeys(c.point for c in calls)))
        assert ends[0] == ends[1], f"undisturbed runs end differently: {difference(ends[0], ends[1])}"
        assert not self.stand.violations(), self.stand.violations()
        self.expected = ends[0]
        self.points = [point for point in found[1] if point in set(found[0])]

    def know(self, other: Sweep) -> None:
        """Take over what another stand has learned."""
        self.expected, self.points, self.writes = other.expected, other.points, other.writes

    def tries(self, faults: Iterable[Fault], accept: Callable[[str], bool] = lambda point: True) -> list[Try]:
        """Every fault at every point that is accepted, in the order of the run."""
        faults = tuple(faults)
        return [Try(point, fault) for point in self.points if accept(point) for fault in faults]

    def run(self, what: Try) -> Outcome:
        """One disturbed run."""
        stand, outcome = self.stand, Outcome(what.name)
        before, started = len(stand.violations()), time.monotonic()
        rule = Rule(at(what.point), what.fault, seconds=2.0)

        def arm() -> None:
            self._clear()
            for proxy in (stand.proxy, stand.pushes):
                proxy.rules = [rule]

        try:
            self._clear()
            self.scenario.prepare()
            self.scenario.begin(arm)
            self._finish(rule)
            outcome.writes = stand.writes()
            outcome.reached = rule.struck > 0
            ended = self.scenario.end_state()
            outcome.direct = ended == self.expected
            # A fault whose point was not reached must not strike the trainer's next version: nobody would restart its
            # victim.
            self._clear()
            if not outcome.direct:
                outcome.failure = f"ended with {difference(self.expected, ended)}"
                self.scenario.next_step()
                after = self.scenario.end_state()
                outcome.converged = healthy(after)
                if not outcome.converged:
                    outcome.problems.append(f"and after the next version: {difference(self.expected, after)}")
            else:
                outcome.converged = True
        except (AssertionError, ClusterError, OSError) as e:
            outcome.failure = "; ".join(part for part in (outcome.failure, str(e)[:2000]) if part)
            status = {name: self._status(kind, name) for kind, name in (("rlpipeline", "p"), ("enginepool", "e"))}
            outcome.failure += f"; {json.dumps(status)[:3000]}; {stand.operator.tail(15)[-4000:]}"
        finally:
            self._clear()
        outcome.problems += stand.violations()[before:]
        if outcome.writes > self.writes + EXTRA_WRITES:
            outcome.problems.append(f"I12: {outcome.writes} writes, {self.writes} undisturbed")
        outcome.seconds = round(time.monotonic() - started, 2)
        return outcome

    def _status(self, kind: str, name: str) -> Any:
        try:
            return self.stand.fleet.status(kind, name)
        except ClusterError as e:
            return str(e)

    def _clear(self) -> None:
        self.stand.proxy.watch()
        self.stand.pushes.rules = []
        self.stand.pushes.fired.clear()

    def _finish(self, rule: Rule | None = None) -> None:
        """To the end of the scenario and to quiescence; an operator that was killed is started anew on the way."""
        first, stand = self.stand.operators[0], self.stand
        seen, looked = -1, 0.0

        def look() -> bool:
            nonlocal seen, looked
            if not first.running():
                for proxy in (stand.proxy, stand.pushes):
                    proxy.rules = [] if rule is None else [r for r in proxy.rules if not r.struck]
                first.operator.kill()
                first.operator.start()
            # Looking costs the machine more than the operator does: only when something has changed, or now and then.
            count, now = len(stand.recorder.revisions), time.monotonic()
            if count == seen and now < looked + 0.5:
                return False
            seen, looked = count, now
            self.scenario.drive()
            return self.scenario.over()

        while True:
            wait_until(look, f"{self.scenario.name} to come to its end", LIMIT_SECONDS, every=0.2)
            assert stand.wait_quiet(), "I9: writes do not cease"
            if first.running():
                return
            # It died of the last call: what is quiet without an operator is not at its end.


def difference(expected: Any, found: Any, where: str = "") -> str:
    """Where two canonical states differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        parts = [
            difference(expected.get(k), found.get(k), f"{where}.{k}" if where else str(k))
            for k in sorted({*expected, *found})
            if expected.get(k) != found.get(k)
        ]
        return "; ".join(parts)
    return f"{where}: {found!r} instead of {expected!r}"


def healthy(state: State) -> bool:
    """Everybody serves the newest version and nothing is claimed."""
    if "engines" not in state:
        return not state["left"]
    engines = state["engines"].values()
    return (
        state["newestIsCommitted"]
        and not state.get("left")
        and not state["claimed"]
        and not state["finalizers"]
        and all(e["takesRequests"] and e["atCommitted"] for e in engines)
    )


def sample(tries: list[Try], count: int) -> list[Try]:
    """``count`` of them, evenly spread: the same ones in every run with the same points."""
    if count >= len(tries):
        return tries
    return [tries[i * len(tries) // count] for i in range(count)]


def in_shard(name: str, shard: str) -> bool:
    """Whether this part of the tries (``2/3``: the second of three; empty: all) has the one of this name."""
    if not shard:
        return True
    part, _, parts = shard.partition("/")
    return zlib.crc32(name.encode()) % int(parts) == int(part) - 1


def swept(
    report: Report, kind: type[Scenario], stand: Stand, tries: Callable[[Sweep], list[Try]], *, title: str = ""
) -> list[Outcome]:
    """Learn the scenario and run what ``tries`` chooses and the report does not know yet; the outcomes."""
    title = title or kind.name
    sweep = Sweep(kind(stand))
    sweep.learn()
    chosen = tries(sweep)
    report.plan(title, len(sweep.points), len(chosen))
    outcomes = []
    for one in chosen:
        if report.known(title, one.name):
            continue
        outcome = sweep.run(one)
        outcomes.append(outcome)
        report.add(title, outcome)
        if not outcome.converged:
            # What comes after would start from a fleet that nobody knows.
            break
    sweep.scenario.leave()
    return outcomes


class Crew:
    """Several stands that share the tries of one scenario; each thread has a stand of its own.

    ``make`` gives the stand of a thread, and a new one after a try that was not good. ``until``: monotonic time after
    which no try is begun (``left`` says how many remain).
    """

    def __init__(
        self,
        report: Report,
        kind: type[Scenario],
        make: Callable[[], AbstractContextManager[Stand]],
        tries: Callable[[Sweep], list[Try]],
        *,
        title: str = "",
        until: float = float("inf"),
    ) -> None:
        self.report = report
        self.kind = kind
        self.title = title or kind.name
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self._make = make
        self._tries = tries
        self._until = until
        self._queue: queue.SimpleQueue[Try] = queue.SimpleQueue()
        self._learned: Sweep | None = None
        self._ready = threading.Event()

    @property
    def left(self) -> int:
        """Tries that nobody made."""
        return self._queue.qsize()

    def run(self, stands: int) -> None:
        """Make all tries that the report does not know yet; raises what broke a thread."""
        threads = [threading.Thread(target=self._guard, args=(n == 0,), name=f"stand-{n}") for n in range(stands)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            # Before the cluster goes down below them: a try that loses it would be reported as one that failed.
            self._until = 0.0
            for thread in threads:
                thread.join()
            raise
        if self.problems:
            raise AssertionError("\n".join(self.problems))

    def _guard(self, first: bool) -> None:
        try:
            self._work(first)
        except Exception as e:  # noqa: BLE001  the thread's end: run() raises it
            self.problems.append(f"{threading.current_thread().name}: {e!r}")
        finally:
            if first:
                self._ready.set()

    def _work(self, first: bool) -> None:
        # A process that a thread starts ends with it (kit.Operator), so a thread makes its stands itself.
        while True:
            with self._make() as stand:
                sweep = Sweep(self.kind(stand))
                if first and self._learned is None:
                    self._learn(sweep)
                self._ready.wait()
                if self._learned is None or self._used_up(sweep):
                    return

    def _learn(self, sweep: Sweep) -> None:
        sweep.learn()
        chosen = self._tries(sweep)
        self.report.plan(self.title, len(sweep.points), len(chosen))
        # In an order that has nothing to do with the run's: what was cut short has tried a bit of everything.
        for one in sorted(chosen, key=lambda t: zlib.crc32(t.name.encode()[::-1])):
            if not self.report.known(self.title, one.name):
                self._queue.put(one)
        self._learned = sweep
        self._ready.set()

    def _used_up(self, sweep: Sweep) -> bool:
        """Tries on this stand; False when it must be replaced by another one."""
        assert self._learned is not None
        sweep.know(self._learned)
        while time.monotonic() < self._until and sum(not o.good for o in self.outcomes) < MOST_BAD:
            try:
                one = self._queue.get_nowait()
            except queue.Empty:
                break
            outcome = sweep.run(one)
            self.outcomes.append(outcome)
            self.report.add(self.title, outcome)
            if not outcome.good:
                return False
        return True


if __name__ == "__main__":
    # python -m tests.fault.sweep .fault/*.json: the report of all shards.
    merged = Report(None)
    for name in sys.argv[1:]:
        merged.merge(Report(Path(name)))
    print("\n".join(merged.lines()))
