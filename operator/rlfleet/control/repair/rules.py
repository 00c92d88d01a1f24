"""Repair rules run isolated: one that raises is reported by its name, and the others still run.

Invariant: nothing that a rule finds wrong keeps another rule from running. Only a proof that somebody else leads ends
all of them, for then none of this is ours to do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.ledger import FenceLost
from rlfleet.kube.errors import Conflict, NotLeader, TooManyRequests

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_ERROR = 300


class RuleName(StrEnum):
    """Names of the rules, as they appear in the log, the metric, Events and the Degraded condition."""

    FINALIZER_CEILINGS = "FinalizerCeilings"  # nothing that is being deleted waits for us longer than the ceiling
    ENDED_ROUNDS = "EndedRounds"  # ended rounds hold on to no finalizer of ours
    TRAIN_BLOCKS = "TrainBlocks"  # every train block has its ResourceClaim, and no claim outlives its block
    OUTLIVED_ROUNDS = "OutlivedRounds"  # rounds whose status came back from the past are settled
    ABANDONED_ROUNDS = "AbandonedRounds"  # rounds in mid-air that no claim names are settled by evidence
    STRANGERS = "Strangers"  # engines of a deleted pipeline of the same name are taken over or replaced
    HOLDS = "Holds"  # no sender holds weights for an operation that has ended
    PORT_CLAIMS = "PortClaims"  # rendezvous ports are free again once it is proven that nobody listens
    ENGINES = "Engines"  # engines are resumed, routed or closed by the resume rule
    ELASTIC = "Elastic"  # engines sleep or wake as spec.active and the trainer's demands want it
    CLOSED_ENGINES = "ClosedEngines"  # engines that nothing heals any more are replaced
    HISTORY = "History"  # rounds past their time go; always last


class Rules:
    """Runs the rules of one reconcile and remembers which of them failed, by name."""

    def __init__(self, ctx: Context, pipeline: dict[str, Any]) -> None:
        self._ctx = ctx
        self._pipeline = pipeline
        meta = pipeline["metadata"]
        self._memory = ctx.repairs.of(meta["namespace"], meta["name"], meta["uid"])
        self.failed: dict[RuleName, str] = {}
        self.again = False
        """A rule lost a race and wants another turn."""

    async def run(self, name: RuleName, rule: Callable[[], Awaitable[T]]) -> T | None:
        """The rule's result, or None where it raised, or rests because the apiserver asked for that."""
        if self._memory.rests(name.value, self._ctx.clock.monotonic()):
            self.again = True
            return None
        try:
            return await rule()
        except (FenceLost, NotLeader):
            raise
        except (Conflict, TooManyRequests) as e:
            # Somebody wrote between our read and our write, or we are to ask later: nothing is wrong with the rule.
            log.debug("repair rule %s goes again: %s", name.value, e)
            if isinstance(e, TooManyRequests):
                self._memory.put_off(name.value, self._ctx.clock.monotonic() + e.retry_after)
            self.again = True
            return None
        except Exception as e:  # whatever is wrong with one rule must not keep the others from running
            error = f"{type(e).__name__}: {e}"[:_MAX_ERROR]
            meta = self._pipeline["metadata"]
            log.exception(
                "repair rule failed", extra={"rule": name.value, "pipeline": f"{meta['namespace']}/{meta['name']}"}
            )
            self.failed[name] = error
            self._ctx.metrics.repair_rule_failed(name.value)
            # The recorder writes the same sentence once in a while, however often the rule fails.
            note = f"repair rule {name.value} failed: {error}"
            self._ctx.events.record(self._pipeline, "Warning", Reason.REPAIR_RULE_FAILED.value, note, action="Repair")
            return None

    @property
    def trouble(self) -> tuple[Reason, str] | None:
        """What the Degraded condition says of failed rules; None: all ran."""
        if not self.failed:
            return None
        name, error = next(iter(self.failed.items()))
        more = f" (and {', '.join(n.value for n in list(self.failed)[1:])})" if len(self.failed) > 1 else ""
        return Reason.REPAIR_RULE_FAILED, f"repair rule {name.value}{more} failed: {error}"
