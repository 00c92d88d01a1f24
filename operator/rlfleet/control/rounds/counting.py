"""Catch-up attempts in ``EnginePool.status.catchUp``: read, count, say why.

Invariants:
- this field has one writer, the executor that holds the pipeline's slot; the pool's reconciler writes all others;
- every write carries the resourceVersion that the counts were read at, and is computed anew when that was stale, so
  nobody's count is lost; a round's second write of the same attempt changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import API_SECONDS, WRITE_TRIES, Ledger
from rlfleet.kube.errors import Conflict, NotFound, Unavailable, Unknown
from rlfleet.kube.resources import ENGINEPOOLS
from rlfleet.plan.allowance import Count, count, note
from rlfleet.plan.rounds import Engine, Member

Obj = dict[str, Any]


def counts_of(pools: Iterable[Mapping[str, Any]]) -> tuple[Count, ...]:
    """The counts of these EnginePools."""
    return tuple(
        Count(
            engine=str(c["engine"]),
            incarnation=str(c["incarnation"]),
            version=int(c["version"]),
            attempts=int(c["attempts"]),
            round=str(c["round"]),
            reason=str(c.get("reason") or ""),
        )
        for pool in pools
        for c in (pool.get("status") or {}).get("catchUp") or []
    )


def _rows(counts: Iterable[Count]) -> list[Obj]:
    return [
        {
            "engine": c.engine,
            "incarnation": c.incarnation,
            "version": c.version,
            "attempts": c.attempts,
            "round": c.round,
            **({"reason": c.reason} if c.reason else {}),
        }
        for c in counts
    ]


async def count_attempts(
    ledger: Ledger, fleet: Fleet, members: Sequence[Member], version: int, round_uid: str
) -> frozenset[str]:
    """Count one attempt for each member, before its engine is touched; the names of those that were counted."""
    committed = ledger.committed
    assert committed is not None
    await ledger.still_ours()
    counted: frozenset[str] = frozenset()
    for pool, engines in _by_pool(fleet, (m.engine for m in members)).items():
        present = {e.name: e for e in fleet.engines.values() if e.pool == pool and not e.gone}
        accepted: frozenset[str] = frozenset()

        def change(
            old: tuple[Count, ...], engines: Sequence[Engine] = engines, present: Mapping[str, Engine] = present
        ) -> tuple[Count, ...]:
            nonlocal accepted
            new, accepted = count(
                old, engines, round_uid=round_uid, version=version, present=present, committed=committed
            )
            return new

        if await _write(ledger, pool, change):
            counted |= accepted
    return counted


async def note_reasons(ledger: Ledger, fleet: Fleet, reasons: Mapping[str, Reason], round_uid: str) -> None:
    """Say at each counted attempt of this round why it failed."""
    for pool in _by_pool(fleet, reasons):
        await _write(ledger, pool, lambda old: note(old, reasons, round_uid=round_uid))


def _by_pool(fleet: Fleet, names: Iterable[str]) -> dict[str, list[Engine]]:
    found: dict[str, list[Engine]] = {}
    for name in names:
        engine = fleet.engines.get(name)
        if engine is not None:
            found.setdefault(engine.pool, []).append(engine)
    return found


async def _write(ledger: Ledger, pool: str, change: Callable[[tuple[Count, ...]], tuple[Count, ...]]) -> bool:
    """Apply ``change`` to one pool's counts; False: the pool is gone, and its engines are going."""
    for attempt in range(WRITE_TRIES):
        try:
            live = await ledger.kube.get(ENGINEPOOLS, ledger.namespace, pool, timeout=API_SECONDS)
            old = counts_of([live])
            new = change(old)
            if new == old:
                return True
            await ledger.kube.patch_status(
                ENGINEPOOLS,
                ledger.namespace,
                pool,
                resource_version=live["metadata"]["resourceVersion"],
                status={"catchUp": _rows(new)},
                timeout=API_SECONDS,
            )
            return True
        except NotFound:
            return False
        except (Conflict, Unknown, Unavailable):
            if attempt == WRITE_TRIES - 1:
                raise
            await asyncio.sleep(0.05 * 2**attempt)
    return False
