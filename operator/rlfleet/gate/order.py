"""What the orders of a gate have in common: how an action is made, how a failed engine call is told.

Every action has a ``check`` that refuses before anything is logged or touched, and a ``run`` that ends with a result
or raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlfleet.api.wire import ErrorReason, OperationRequest
from rlfleet.calls import CallError, NoAnswer, NotSent
from rlfleet.engine import View
from rlfleet.gate.context import GateContext
from rlfleet.gate.errors import EffectUnknown, GateError

#: Seconds for one call that passes the engine's scheduler while nothing else keeps it busy.
ENGINE_SECONDS = 10.0
#: Least seconds for a call that is made at all: enough for an engine that is well.
MIN_SECONDS = 1.0
READ_BACK_SECONDS = 0.25
#: How often an engine is looked at before it counts as one that does not tell.
LOOKS = 3

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """How one kind of order is checked and carried out."""

    check: Callable[[GateContext, OperationRequest], Awaitable[None]]
    run: Callable[[GateContext, OperationRequest], Awaitable[Result]]


async def no_check(_: GateContext, __: OperationRequest) -> None:
    """Nothing to refuse."""


def engine_failure(what: str, error: CallError) -> GateError:
    """Translate a failed engine call; no answer to an order means that its effect is unknown."""
    if isinstance(error, NotSent):
        return GateError(ErrorReason.ENGINE_UNREACHABLE, f"{what}: {error}")
    if isinstance(error, NoAnswer):
        return EffectUnknown(ErrorReason.DEADLINE_EXCEEDED, f"{what}: {error}")
    return GateError(ErrorReason.ENGINE_REFUSED, f"{what}: {error}")


async def seen(ctx: GateContext, told: Callable[[View], bool]) -> View:
    """The engine now. One that just went on with all its requests may be too busy to answer the first question."""
    for _ in range(LOOKS - 1):
        view, _report = await ctx.engine.observe(busy=False)
        if told(view):
            return view
        await asyncio.sleep(READ_BACK_SECONDS)
    view, _report = await ctx.engine.observe(busy=False)
    return view
