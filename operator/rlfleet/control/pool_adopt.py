"""Adopted pods of a pool: found in the view of pods, judged against every other EnginePool of the namespace.

Invariant: nothing is written to a pod that somebody else makes, and none is deleted: what is wrong with one is said in
the pool's conditions, with its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS
from rlfleet.plan.adopt import Adopted, adopted, adopts, indices, selector_of, source_of
from rlfleet.plan.drops import is_closed
from rlfleet.plan.lifecycle import PodFact, adopted_fact
from rlfleet.plan.pool_observed import Problem
from rlfleet.plan.rounds import Engine

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.pool_memory import PoolMemory
    from rlfleet.kube.client import Obj


@dataclass(frozen=True, slots=True)
class Found:
    """Pods of an adopting pool as its engines, and what a person should know of the others that it selects."""

    facts: tuple[PodFact, ...]
    ended: tuple[PodFact, ...]
    """Finished pods that are no engines any more; their addresses are to leave the routers."""
    problems: tuple[Problem, ...]

    def engines(self, facts: Iterable[PodFact]) -> list[PodFact]:
        """Those of ``facts`` that are engines, with whatever was learned of them since."""
        mine = {f.uid for f in self.facts}
        return [f for f in facts if f.uid in mine]


async def find(ctx: Context, pool: Obj) -> Found | None:
    """The adopted engines of ``pool``; None: it makes its pods itself. The other pools are read live."""
    if not adopts(pool):
        return None
    meta = pool["metadata"]
    listed = await ctx.kube.at(Priority.SCALE).list(ENGINEPOOLS, meta["namespace"], timeout=ctx.settings.api_timeout)
    pools = [p for p in listed.items if p["metadata"]["uid"] != meta["uid"]]
    got = adopted(pool, [pool, *pools], ctx.pods.select(meta["namespace"], selector_of(pool)))
    places = indices(got.pods)
    facts = tuple(adopted_fact(p, places[p["metadata"]["uid"]]) for p in got.pods)
    ended = tuple(adopted_fact(p, -1) for p in got.ended)
    return Found(facts, ended, tuple(_problems(meta["name"], source_of(pool), got)))


def _problems(name: str, source: str, got: Adopted) -> list[Problem]:
    found = []
    lost = [c for c in got.contested if not c[2]]
    for pod, other, has in [*lost[:1], *[c for c in got.contested if c[2]][:1]]:
        more = f" and {len(got.contested) - 1} more pods" if len(got.contested) > 1 else ""
        text = (
            f"EnginePools {name} and {other} both select pod {pod}{more}; {name if has else other} has it. Make "
            f"spec.source.{source}.selector of one of them narrower, in another EnginePool"
        )
        # Whoever gets a pod goes on with it; whoever does not is not what its spec says.
        found.append(Problem(Reason.SELECTORS_OVERLAP, text, stops=not has))
    if got.gateless:
        names = ", ".join(got.gateless[:4]) + (f" and {len(got.gateless) - 4} more" if len(got.gateless) > 4 else "")
        text = f"pod {names}: no container named gate, so it is no engine; add the gate to its template"
        found.append(Problem(Reason.GATE_MISSING, text))
    if got.misnamed:
        text = f"pod {got.misnamed[0]}: its name is no DNS label of at most 63 characters, so it is no engine"
        found.append(Problem(Reason.INVALID_NAME, text))
    return found


def still_open(facts: tuple[PodFact, ...], memory: PoolMemory) -> list[str]:
    """Names of pods whose engines are not proven closed, as far as their gates have answered just now."""
    return [f.name for f in facts if f.live and not _shut(f, memory)]


def _shut(fact: PodFact, memory: PoolMemory) -> bool:
    gate = memory.gates.get(fact.uid) if memory.answered.get(fact.uid) else None
    if gate is None:
        return not fact.ip
    if gate.engine.state is not wire.EngineState.READY and gate.holds is None:
        return not any(gate.routed.values())  # it has never served, and its gate pauses it as soon as it is up
    return is_closed(Engine(fact.name, "", fact.uid, "", gate))
