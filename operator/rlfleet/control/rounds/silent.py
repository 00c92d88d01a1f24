"""Silent gates before a commit: take their engines out of the routers, where that is enough (plan.everyone).

Invariant: every router of the pool is found by a live read and read back after the removal; one that does not answer is
taken for one that still routes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.pods import engine_ports
from rlfleet.control.routers import RouterClients, base_url, resolve
from rlfleet.kube.resources import PODS
from rlfleet.plan.everyone import Silence, closable_routers, may_be_asked_to_leave, removal_suffices
from rlfleet.plan.template import engine_port

if TYPE_CHECKING:
    from rlfleet.control.rounds.executor import Executor
    from rlfleet.kube.client import Obj

log = logging.getLogger(__name__)


class LivePods:
    """Pods of a namespace as listed just now, in the shape in which routers are looked for."""

    def __init__(self, pods: list[Obj]) -> None:
        self._pods = pods

    def select(self, namespace: str, match_labels: Mapping[str, str]) -> list[Obj]:
        """Those that bear all of these labels."""
        return [
            p
            for p in self._pods
            if p["metadata"]["namespace"] == namespace
            and match_labels.items() <= (p["metadata"].get("labels") or {}).items()
        ]


async def left_out(run: Executor, silent: Iterable[str]) -> tuple[str, ...]:
    """Which of these engines count as closed although their gates do not answer."""
    fleet, memory = run.fleet, run.ctx.gates
    led_since = memory.led_since(run.ledger.uid, run.ledger.generation)
    known: dict[str, tuple[Silence, Obj]] = {}
    for name in silent:
        pool = fleet.pools.get(fleet.engines[name].pool)
        uid = fleet.engines[name].pod_uid
        fact = Silence(
            led_since=led_since,
            answered=memory.last_answer(uid),
            refuses=bool(fleet.engines[name].refusal),
            unanswered=memory.unanswered(uid),
            routers=closable_routers(pool),
            removed=False,
        )
        if pool is not None and may_be_asked_to_leave(fact):
            known[name] = fact, pool
    if not known:
        return ()
    listed = await run.ledger.kube.list(PODS, run.ledger.namespace, timeout=run.ctx.settings.api_timeout)
    live = LivePods(listed.items)
    clients = RouterClients(run.ctx.kube, timeout=run.ctx.settings.router_timeout, guard=run.ctx.guard)
    done: list[str] = []
    try:
        for name, (fact, pool) in known.items():
            removed = await _remove(clients, pool, live, fleet.pods[name])
            if removal_suffices(replace(fact, removed=removed)):
                done.append(name)
    finally:
        await clients.close()
    if done:
        log.warning("silent gates: engines taken out of the routers: %s", ", ".join(done[:8]))
    return tuple(done)


async def _remove(clients: RouterClients, pool: Obj, live: LivePods, pod: Obj) -> bool:
    ip = (pod.get("status") or {}).get("podIP")
    if not ip:
        return False
    found = resolve(pool, live)
    if any(p.reason is Reason.ROUTER_AMBIGUOUS for p in found.problems):
        return False  # more routers than are looked after
    # The port that the pool names now, and the one with which the pod was made.
    for port in {engine_port(pool), *engine_ports(pod)}:
        errors = await clients.remove(found.endpoints, base_url(ip, port), found.keys)
        if any(errors.values()):
            return False
    return True
