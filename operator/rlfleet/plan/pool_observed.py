"""All that the status of an EnginePool is made of.

Invariant: it is data only; what is not known of an engine is absent here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlfleet.api.conditions import Reason
from rlfleet.plan.pool_elastic import Elastic, Row
from rlfleet.plan.rounds import Committed
from rlfleet.plan.start_failures import StartFailure


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a person should look at."""

    reason: Reason
    message: str
    stops: bool = False
    """No pod is made because of it."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a pool's status is made of."""

    generation: int
    replicas: int
    rows: tuple[Row, ...]
    pool: str
    routers: frozenset[str]
    template_hash: str | None
    committed: Committed | None = None
    pipeline_found: bool = True
    pipeline_deleting: bool = False
    problems: tuple[Problem, ...] = ()
    waits: tuple[tuple[Reason, str], ...] = ()
    awake: int | None = None
    """How many engines are to be awake; None: all of ``replicas``."""
    elastic: Elastic = field(default_factory=Elastic)
    selector: str = ""
    """Label selector of the pool's pods, as text."""
    source: str = "template"
    """Which of spec.source the engines come from."""
    unknown: Problem | None = None
    """Why nothing is known of the engines from Dynamo's discovery."""
    replaces: bool = False
    """spec.sync.onFailure of the pipeline is Replace."""
    rolling: bool = False
    """The operator itself replaces pods of an earlier template."""

    refused_since: int | None = None
    """Since when not all missing pods could be made, in milliseconds since the epoch; None: all could."""
    failures: Mapping[int, StartFailure] = field(default_factory=dict)
    """Engines that fail before they serve, by index."""

    @property
    def adopted(self) -> bool:
        """Somebody else makes the pods."""
        return self.source != "template"
