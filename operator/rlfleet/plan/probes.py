"""What one greedy token says about an engine that has just been resumed. Pure.

Invariants:
- a probe without an answer is unknown, not bad: a busy engine may only be late, and is not taken out for that;
- tokens are compared only where nothing better is known: in layouts whose engines have no checksum that means anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """One engine's answer: ``token``, or ``error`` where it said no; neither: it did not answer in time."""

    engine: str
    layout: str
    token: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """Engines that may not serve (``bad``) and those of which nothing is known (``unknown``), each with why."""

    bad: dict[str, str]
    unknown: dict[str, str]


def judge_probes(probes: Iterable[Probe], *, proven_layouts: Collection[str]) -> ProbeVerdict:
    """Compare greedy tokens within each layout that is not in ``proven_layouts`` (its checksums agreed).

    As with checksums: a strict majority of at least three decides; without one, engines that disagree are all bad.
    """
    bad: dict[str, str] = {}
    unknown: dict[str, str] = {}
    layouts: dict[str, list[Probe]] = {}
    for p in probes:
        if p.error is not None:
            bad[p.engine] = p.error
        elif p.token is None:
            unknown[p.engine] = "it did not answer its one-token probe in time"
        elif p.layout not in proven_layouts:
            layouts.setdefault(p.layout, []).append(p)
    for members in layouts.values():
        counts = Counter(p.token for p in members)
        if len(counts) == 1:
            continue
        winner, votes = counts.most_common(1)[0]
        decided = len(members) >= 3 and votes * 2 > len(members)
        for p in members:
            if not decided:
                bad[p.engine] = f"its greedy token {p.token} differs from its peers' and no majority decides"
            elif p.token != winner:
                bad[p.engine] = f"its greedy token is {p.token}, that of its peers is {winner}"
    return ProbeVerdict(bad, unknown)
