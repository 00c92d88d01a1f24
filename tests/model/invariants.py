"""What must hold in every state. Invariants over steps are noted in ``World.wrong`` where the step is made."""

from __future__ import annotations

from tests.model.state import State


def broken(state: State) -> str:
    """The first invariant that does not hold, in words; empty: all hold."""
    world, columns = state
    if world.wrong:
        return world.wrong
    for c in columns:
        # An engine serves when its process admits requests and a router sends it some. Nobody can help it where the
        # engine of an adopted pod starts anew behind an open router, until it is closed for the first time.
        if c.alive and c.admit and c.routed and c.bytes != world.truth and not c.life.fresh:
            return f"pod {c.pod} serves bytes {c.bytes}, committed are {world.truth}"
    return ""
