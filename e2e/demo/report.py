"""What the demo promised, checked against what happened, and the table at its end.

Invariant: a check reads evidence from where it arises (rounds from the apiserver, answers from the client's own books,
checksums from the engines) and is listed whether it holds or not; the demo succeeds only if all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from e2e.demo.leg import Leg
from e2e.demo.proof import Proof

LOGPROB_TOLERANCE = 1e-3
#: The reward check: the mean of the last versions must exceed the mean of the first ones by this much.
REWARD_GAIN = 0.15
_ENDS = 3

_PHASES = (
    ("plan", "planMs"),
    ("stage", "stageMs"),
    ("pause", "quiesceMs"),
    ("transfer", "transferMs"),
    ("verify", "verifyMs"),
    ("publish", "publishMs"),
    ("reopen", "reopenMs"),
    ("total", "totalMs"),
    ("PAUSED", "pausedMs"),
)


@dataclass(frozen=True)
class Check:
    """One promise."""

    promise: str
    holds: bool
    found: str


def reward_gain(curve: Sequence[float]) -> float:
    """By how much the mean reward rose from the first to the last versions."""
    count = min(_ENDS, len(curve))
    return sum(curve[-count:]) / count - sum(curve[:count]) / count if count else 0.0


def reward_rises(curve: Sequence[float]) -> bool:
    """The demo's reward check."""
    return len(curve) > _ENDS and reward_gain(curve) >= REWARD_GAIN


def committed_versions(rounds: Iterable[Mapping[str, Any]]) -> set[int]:
    """Versions that a round has committed, as the apiserver has it."""
    return {int(r["spec"]["version"]) for r in rounds if r.get("status", {}).get("committed")}


def never_committed(books: Mapping[str, Any], committed: set[int]) -> dict[str, int]:
    """Answers by version label, of labels that stand for no committed version."""
    labels = {str(version) for version in committed}
    return {label: count for label, count in books.get("versions", {}).items() if label not in labels}


def checks(
    synced: Leg,
    unsynced: Leg,
    versions: int,
    rounds: Sequence[Mapping[str, Any]],
    proof: Proof,
    *,
    mix: tuple[int, int] = (2, 2),
    compared: str = "checksum",
) -> list[Check]:
    """All promises of the demo. ``mix``: serialized and broadcast engines; ``compared``: what the proof compares."""
    committed = committed_versions(rounds)
    expected = set(range(-1, versions))
    mixed = [r for r in rounds if _transports(r) == mix]
    books = synced.books
    strangers = never_committed(books, committed)
    difference = synced.logprob_difference
    gain, same_length = reward_gain(synced.curve), reward_gain(synced.curve[: len(unsynced.curve)])
    return [
        Check(
            f"every version from the base to {versions - 1} is committed",
            committed == expected,
            f"{len(committed)} of {len(expected)}",
        ),
        Check(
            f"every round used both transports: {mix[0]} serialized, {mix[1]} broadcast",
            len(mixed) == len(rounds),
            f"{len(mixed)} of {len(rounds)}",
        ),
        Check(
            f"the mean reward rises by at least {REWARD_GAIN}",
            reward_rises(synced.curve),
            f"{_mean(synced.curve[:_ENDS]):.3f} -> {_mean(synced.curve[-_ENDS:]):.3f}",
        ),
        Check(
            f"check can fail: without syncs the same check fails over {len(unsynced.curve)} versions "
            f"(with them it holds over as many: +{same_length:.3f})",
            not reward_rises(unsynced.curve) and same_length >= REWARD_GAIN and gain > 0,
            f"{_mean(unsynced.curve[:_ENDS]):.3f} -> {_mean(unsynced.curve[-_ENDS:]):.3f}",
        ),
        Check(
            f"engines' log-probabilities are those of the weights they claim, within {LOGPROB_TOLERANCE:g}",
            difference is not None and difference <= LOGPROB_TOLERANCE,
            "no samples" if difference is None else f"largest difference {difference:.1e}",
        ),
        Check(
            "no request failed while weights changed",
            books.get("sent", 0) > 0 and books.get("failed") == 0 and books.get("inFlight") == 0,
            f"{books.get('sent')} sent, {books.get('answered')} answered, {books.get('failed')} failed "
            f"{books.get('examples') or ''}".rstrip(),
        ),
        Check(
            "no answer came from a version that was never committed",
            bool(books.get("versions")) and not strangers,
            f"{sum(strangers.values())} {strangers or ''}".rstrip(),
        ),
        Check(
            f"weights proven: each engine's {compared} equals an engine's that loaded the final weights from disk",
            proof.holds,
            f"{sum(v == proof.from_disk for v in proof.engines.values())} of {len(proof.engines)} "
            f"({(proof.from_disk or 'none')[:12]})",
        ),
    ]


def round_table(rounds: Iterable[Mapping[str, Any]], rewards: Mapping[int, float]) -> list[str]:
    """One line per round: transports, bytes, milliseconds per phase, paused, and the reward under its version."""
    lines = [
        "version  serialized  broadcast    bytes  "
        + "".join(f"{title:>9}" for title, _ in _PHASES)
        + "   reward   (ms)"
    ]
    for r in sorted(rounds, key=lambda r: (int(r["spec"]["version"]), int(r["spec"].get("attempt", 1)))):
        status, version = r.get("status", {}), int(r["spec"]["version"])
        serialized, broadcast = _transports(r)
        timings = status.get("timings") or {}
        reward = rewards.get(version)
        lines.append(
            f"{'base' if version < 0 else version:>7}  {serialized:>10}  {broadcast:>9}  {status.get('bytes', 0):>7}  "
            + "".join(f"{timings.get(field, '-'):>9}" for _, field in _PHASES)
            + (f"   {reward:.3f}" if reward is not None else "        -")
            + ("" if status.get("phase") == "Succeeded" else f"   {status.get('phase')}")
        )
    return lines


def rewards_by_version(leg: Leg) -> dict[int, float]:
    """The mean reward of samples from each version."""
    return {int(line["sampledFrom"]): float(line["meanReward"]) for line in leg.lines if "meanReward" in line}


def check_table(found: Sequence[Check]) -> list[str]:
    """One line per promise."""
    return [f"{'ok  ' if c.holds else 'FAIL'}  {c.promise}: {c.found}" for c in found]


def _transports(r: Mapping[str, Any]) -> tuple[int, int]:
    plan = r.get("status", {}).get("plan") or {}
    return int(plan.get("serialized") or 0), int(plan.get("broadcast") or 0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
