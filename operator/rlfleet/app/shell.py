"""kopf as the shell: what it is told, and what it tells us.

Invariant: kopf delivers events of our kinds and runs start-up and clean-up; it stores nothing on objects and handles
nothing. Nothing but namespace, name and what finds the owners is taken from an event.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import kopf

from rlfleet.api import labels
from rlfleet.app.login import login
from rlfleet.app.triggers import Triggers


class Backoffs:
    """Pauses between kopf's retries, without end: an apiserver that is away for long, or one namespace that may not be
    read any more, must not end the streams of all others (and with them the process)."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 3), itertools.repeat(5.0))


def settings(*, named_namespaces: bool) -> kopf.OperatorSettings:
    """``named_namespaces``: only those are looked at, so a Role in each of them is enough."""
    s = kopf.OperatorSettings()
    s.peering.standalone = True
    s.posting.enabled = False
    s.watching.server_timeout = 300
    s.watching.connect_timeout = 10
    s.networking.request_timeout = 30
    s.networking.error_backoffs = Backoffs()
    s.queueing.exit_timeout = 2.0
    s.scanning.disabled = named_namespaces
    return s


def registry(
    triggers: Triggers,
    *,
    kubeconfig: str,
    start_up: Callable[[], Awaitable[None]],
    clean_up: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """Who is called for what. ``clean_up`` returns when everything has ended."""
    registry = kopf.OperatorRegistry()

    kopf.on.login(registry=registry)(functools.partial(login, kubeconfig=kubeconfig))

    @kopf.on.startup(registry=registry)
    async def startup(**_: Any) -> None:
        await start_up()

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await clean_up()

    @kopf.on.event(labels.GROUP, labels.VERSION, "enginepools", registry=registry)
    async def pool(*, type: str, namespace: str | None, name: str, spec: kopf.Spec, meta: kopf.Meta, **_: Any) -> None:
        triggers.deletion("enginepools", namespace or "", name, meta)
        triggers.pool(namespace or "", name, None if type == "DELETED" else spec)

    @kopf.on.event(labels.GROUP, labels.VERSION, "rlpipelines", registry=registry)
    async def pipeline(
        *, type: str, namespace: str | None, name: str, spec: kopf.Spec, meta: kopf.Meta, **_: Any
    ) -> None:
        triggers.deletion("rlpipelines", namespace or "", name, meta)
        triggers.pipeline(namespace or "", name, None if type == "DELETED" else spec)

    @kopf.on.event(labels.GROUP, labels.VERSION, "syncrounds", registry=registry)
    async def round_(*, namespace: str | None, name: str, spec: kopf.Spec, meta: kopf.Meta, **_: Any) -> None:
        triggers.deletion("syncrounds", namespace or "", name, meta)
        triggers.round(namespace or "", spec)

    @kopf.on.event(labels.GROUP, labels.VERSION, "trainerdemands", registry=registry)
    async def demand(*, namespace: str | None, name: str, **_: Any) -> None:
        triggers.demand(namespace or "", name)

    return registry
