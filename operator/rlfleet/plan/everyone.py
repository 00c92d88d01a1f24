"""When a silent gate may be left out of "everyone is fenced before the commit" (DESIGN section 5).

Invariant: nobody can reach its engine, which may hold other weights than those that are committed. That takes all of:
it is in no router, read back; nothing that is still on its way can open it again (this process alone has driven the
pipeline since that gate last answered, and has no open or resume there without an end); and there is no other door, so
never in a pool without routers, nor where the pod itself is one by its readiness or a label: whoever watches pods then
leads to the engine, and nobody can read back who has seen the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlfleet.plan.template import BY_THE_POD


@dataclass(frozen=True, slots=True)
class Silence:
    """What is known of one gate that does not answer."""

    led_since: int | None
    """Generation of this process's first claim after which nobody else claimed the pipeline; None: not the owner."""
    answered: int | None
    """Generation that the gate showed when it last answered this process; None: it never has."""
    refuses: bool
    """It is not silent but refuses our fence: somebody else may be driving it."""
    unanswered: bool
    """This process sent it an open or a resume whose end it has not seen."""
    routers: int
    """Routers that its pool names (``closable_routers``); gone ones count."""
    removed: bool
    """Every one of them that runs was read back without the engine's address."""


def closable_routers(pool: Mapping[str, Any] | None) -> int:
    """How many routers the pool names; 0 where taking an engine out of all of them leaves a door open."""
    routers = [] if pool is None else pool["spec"].get("routers") or []
    return 0 if any(r.get("type") in BY_THE_POD for r in routers) else len(routers)


def may_be_asked_to_leave(s: Silence) -> bool:
    """Whether removal from the routers could suffice; if not, it is not even tried: the engine may go on serving."""
    if s.refuses or s.led_since is None or s.answered is None:
        return False
    # With our generation stored, whatever an earlier owner still has on its way to the gate is refused there.
    return s.answered >= s.led_since and not s.unanswered and s.routers > 0


def removal_suffices(s: Silence) -> bool:
    """The silent gate's engine counts as closed."""
    return may_be_asked_to_leave(s) and s.removed
