"""One training run on the stage: its router, its trainer, what the trainer reports, and the load beside it.

Invariant: the load runs from the first committed version until the trainer has finished, without a gap, so that every
round happens under requests.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.demo.follow import Follower
from e2e.demo.stage import MANIFESTS, NAMESPACE, DemoError, Obj, Say, Stage

ROUTER_PORT = 30001
_ROUTER_SECONDS = 60.0
_TRAINER_SECONDS = 60.0
_BASE_SECONDS = 200.0
_LEG_SECONDS = 400.0
_BOOKS_SECONDS = 90.0


@dataclass
class Leg:
    """What a training run reported."""

    name: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    books: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None

    @property
    def curve(self) -> list[float]:
        """Mean reward per version, in order."""
        return [float(line["meanReward"]) for line in self.lines if "meanReward" in line]

    @property
    def logprob_difference(self) -> float | None:
        """The largest difference between engines' and recomputed log-probabilities; None without samples."""
        found = [float(line["logprobMaxDiff"]) for line in self.lines if "logprobMaxDiff" in line]
        found += [float(line["carried"]["logprobMaxDiff"]) for line in self.lines if "carried" in line]
        # max() would lose a value that is not a number.
        return next((value for value in found if math.isnan(value)), max(found, default=None))

    @property
    def crossing(self) -> int:
        """The trainer's own rollouts that one round crossed: part of the tokens from each of two versions."""
        return sum(int(line["carried"]["crossing"]) for line in self.lines if "carried" in line)


def synced(stage: Stage, versions: int, say: Say) -> Leg:
    """The first leg: trains for ``versions`` versions with a sync after each, under load."""
    leg = Leg("synced")
    stage.apply(MANIFESTS / "router.yaml")
    url = _router(stage, "router")
    stage.config("run", {"router": url, "versions": str(versions)})
    stage.apply(MANIFESTS / "trainer.yaml")
    pod = _trainer(stage, "trainer")
    results = stage.volume(pod, "results")
    follower = Follower(results / "progress.jsonl")

    def base() -> bool:
        leg.lines += follower.events()
        return bool(leg.lines)

    say("trainer started; the first round waits for all engines, brings the base version, and opens them")
    stage.wait("base version synced", base, _BASE_SECONDS, "trainer")
    say(f"base version committed in round {leg.lines[0]['sync']['round']}; requests begin")
    stage.apply(MANIFESTS / "load.yaml")
    _follow(stage, leg, follower, versions, say, "trainer", "router", "load")
    leg.checkpoint = results / "checkpoint"
    stage.wait("final checkpoint", (leg.checkpoint / "model.safetensors").exists, 30.0, "trainer")
    leg.books = _end_load(stage)
    return leg


def colocated(stage: Stage, versions: int, say: Say) -> Leg:
    """Trains on the engines' own devices: the engines sleep for each step. No load beside it, there is nobody awake."""
    leg = Leg("colocated")
    stage.apply(MANIFESTS / "router.yaml")
    stage.config("run", {"router": _router(stage, "router"), "versions": str(versions)})
    stage.apply(MANIFESTS / "colocated-trainer.yaml")
    results = stage.volume(_trainer(stage, "trainer"), "results")
    say("trainer started on the engines' devices; the first round brings the base version and opens the engines")
    _follow(stage, leg, Follower(results / "progress.jsonl"), versions, say, "trainer", "router")
    leg.checkpoint = results / "checkpoint"
    stage.wait("final checkpoint", (leg.checkpoint / "model.safetensors").exists, 90.0, "trainer")
    return leg


def engine_addresses(stage: Stage) -> dict[str, str]:
    """Pod address of each engine of the pool, by name."""
    pods: list[Obj] = stage.items("pods", "-l", "rlfleet.dev/pool=engines")
    if not pods:
        raise DemoError("the engine pods are gone", stage.logs())
    return {str(pod["metadata"]["name"]): str(pod["status"]["podIP"]) for pod in pods}


def unsynced(stage: Stage, versions: int, say: Say) -> Leg:
    """The second leg: the same training, but only the base version is ever synced."""
    leg = Leg("unsynced")
    url = _router(stage, "router-unsynced")
    # The trainer's pod is there already: it waits for this.
    stage.config("run-unsynced", {"router": url, "versions": str(versions)})
    pod = _trainer(stage, "trainer-unsynced")
    follower = Follower(stage.volume(pod, "results") / "progress.jsonl")
    _follow(stage, leg, follower, versions, say, "trainer-unsynced", "router-unsynced")
    return leg


def _router(stage: Stage, name: str) -> str:
    pod: Obj = stage.wait(f"pod {name} Ready", lambda: stage.pod_ready(name), _ROUTER_SECONDS, name)
    return f"http://{pod['status']['podIP']}:{ROUTER_PORT}"


def _trainer(stage: Stage, name: str) -> Obj:
    pod: Obj = stage.wait(f"pod {name} Ready", lambda: stage.pod_ready(name), _TRAINER_SECONDS, name)
    return pod


def _follow(stage: Stage, leg: Leg, follower: Follower, versions: int, say: Say, *watched: str) -> None:
    def finished() -> bool:
        for line in follower.events():
            leg.lines.append(line)
            if text := describe(line):
                say(text)
        return len(leg.curve) >= versions

    stage.wait(f"{leg.name} leg finished", finished, _LEG_SECONDS, *watched)


def describe(line: dict[str, Any]) -> str:
    """One line of live progress for one line of the trainer's report."""
    if "meanReward" not in line:
        return ""
    text = f"  version {line['version']:3d}   reward {line['meanReward']:.3f}"
    if "sync" not in line:
        return f"{text}   not synced"
    timings = line["sync"].get("timings", {})
    transports = ", ".join(f"{count} {name.lower()}" for name, count in sorted(line["sync"]["transports"].items()))
    took, paused = timings.get("totalMs", "?"), timings.get("pausedMs", "-")
    return f"{text}   round {took:>5} ms   paused {paused:>5} ms   {transports or 'all engines asleep'}"


def _end_load(stage: Stage) -> dict[str, Any]:
    """Ends the load in order and returns its books. They stand on the last line of its output."""
    log = stage.log("load", "load")
    if log is None:
        raise DemoError("the load client never started", stage.logs())
    stage.cluster.kubectl(
        "delete",
        "pod",
        "load",
        "--namespace",
        NAMESPACE,
        f"--timeout={_BOOKS_SECONDS:.0f}s",
        timeout=_BOOKS_SECONDS + 5,
    )
    lines = log.read_text().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise DemoError("the load client wrote no summary", [("load", lines[-15:])])
    books: dict[str, Any] = json.loads(lines[-1])
    return books
