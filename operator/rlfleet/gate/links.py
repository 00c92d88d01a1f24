"""The gate's two neighbours, as it sees them now: its engine and the routers it was enrolled with.

Invariants:
- what is not known is None, never a guess; every question has a short deadline;
- a label that differs from the proven weights takes the proof away for good: an engine that reads "default" has lost
  its weights, whatever was proven before;
- a router marked gone counts as done and is not asked; one that does not answer counts as open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlfleet.api.wire import EngineReport, EngineState, RouterEndpoint
from rlfleet.calls import CallError, Refused
from rlfleet.engine import Capability, EngineAdapter, Facts, View, known
from rlfleet.gate.rules import proven_paused, voids_proof
from rlfleet.gate.store import Store
from rlfleet.router import Entry, RouterAdapter, make_router, normal, usable_key

log = logging.getLogger(__name__)

#: What an engine that is refused is not asked for, whoever looks at its capabilities only.
_LOADS = frozenset({Capability.SERIALIZED, Capability.PARTS, Capability.BROADCAST})
#: Seconds for the questions behind one status answer; operators wait 5 s for it.
STATUS_SECONDS = 1.5
ROUTER_SECONDS = 1.5
#: Seconds for the questions that are asked once; an engine may have to collect the answers first.
FACTS_SECONDS = 15.0
#: Seconds that an engine's loop gets to answer a liveness probe, whose own limit is longer.
LOOP_SECONDS = 10.0
#: Seconds for the one checksum that tells whether checksums mean anything.
CHECKSUM_SECONDS = 10.0


class EngineLink:
    """The engine process beside this gate."""

    def __init__(
        self,
        adapter: EngineAdapter,
        store: Store,
        *,
        listener: Callable[[], str | None] = lambda: None,
        allow_unknown_version: bool = False,
    ) -> None:
        self.adapter = adapter
        #: Which socket listens where the engine answers, now (gate.listener); None: not known.
        self.listener = listener
        self._store = store
        self._allow_unknown_version = allow_unknown_version
        self._facts: Facts | None = None
        self._asking: asyncio.Task[Facts | None] | None = None
        self._guarded: bool | None = None
        self._crossing: asyncio.Task[bool | None] | None = None
        #: Why it did not tell its facts when it was asked last.
        self._said = ""
        self._met = False
        #: How many processes were forgotten: an answer of one of them says nothing about the one that is here.
        self._life = 0

    async def close(self) -> None:
        """Close connections; touches nothing at the engine."""
        asked = [task for task in (self._asking, self._crossing) if task is not None]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self.adapter.close()

    def forget(self) -> None:
        """Another process answers from now on: what was asked once is asked again."""
        if self._asking is not None:
            self._asking.cancel()
        self._facts, self._asking, self._met, self._guarded, self._said = None, None, False, None, ""
        self._life += 1

    async def facts(self) -> Facts | None:
        """Version, layout and capabilities; asked once, because they can not change while the process lives."""
        if self._facts is None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_facts())
            # By its own name: when this one is done, another caller may have begun to ask anew before we run again.
            asked, life = self._asking, self._life
            # A checksum may take longer than a caller of ours waits; it goes on, and the next one finds its answer.
            done, _ = await asyncio.wait({asked}, timeout=STATUS_SECONDS)
            # The question to a process that is gone was cancelled; whoever waited for its answer goes on without.
            if done and life == self._life:
                self._facts = self._facts or asked.result()
        return self._facts

    async def loop_answers(self) -> bool:
        """Whether a question crosses the engine's loop within LOOP_SECONDS, or can not: there is no path for one.

        Anybody may ask that of a gate, so however many do, the engine has one question of theirs to answer.
        """
        if self._crossing is None or self._crossing.done():
            self._crossing = asyncio.create_task(self.adapter.idle(LOOP_SECONDS, memory_here=False))
        return await asyncio.shield(self._crossing) is not False

    async def _ask_facts(self) -> Facts | None:
        try:
            facts = await self.adapter.facts(FACTS_SECONDS)
            if Capability.CHECKSUM in facts.capabilities and not await self._checksum_means_something():
                facts = replace(facts, capabilities=facts.capabilities - {Capability.CHECKSUM})
        except CallError as e:
            # One that says no is up, and will hardly say yes the next time: people must be able to see it. Once: it is
            # asked several times a second while nothing closes it.
            news, self._said = str(e) != self._said, str(e)
            level = logging.WARNING if isinstance(e, Refused) and news else logging.DEBUG
            log.log(level, "engine facts are not known yet: %s", e)
            return None
        unknown = None if self._allow_unknown_version else known.refusal(self.adapter.type, facts.version)
        if facts.refused is None and unknown is None:
            return facts
        log.error("no weights can be brought to this engine: %s", facts.refused or unknown)
        return replace(facts, refused=facts.refused or unknown, capabilities=facts.capabilities - _LOADS)

    async def _checksum_means_something(self) -> bool:
        """Asked once, while nothing is served yet: that the path exists does not say that its hashes hash anything."""
        if self._store.checksum_meaningful is None:
            answer = await self.adapter.checksum(CHECKSUM_SECONDS)
            self._store.checksum_meaningful = answer is not None and answer.meaningful
        return bool(self._store.checksum_meaningful)

    async def observe(self, *, busy: bool) -> tuple[View, EngineReport]:
        """The engine now. ``busy``: an operation runs that may change the label, so it is not compared."""
        held = self._store.holds
        view, facts, guarded = await asyncio.gather(
            self.adapter.view(STATUS_SECONDS), self.facts(), self._see_guarded()
        )
        if not busy and held is not None and voids_proof(view.label, held):
            self._disprove(str(view.label), held.version)
        if view.reachable and view.model is not None:
            self._met = True
        return view, EngineReport(
            state=self._state(view),
            type=self.adapter.type,
            version=facts.version if facts else None,
            paused=self.paused(view),
            weight_label=view.label,
            world_size=facts.world_size if facts else None,
            layout=facts.layout if facts else None,
            running=view.running,
            waiting=view.waiting,
            model=view.model or (facts.model if facts else None),
            refused=facts.refused if facts else None,
            guarded=guarded,
            instance=view.instance,
        )

    async def _see_guarded(self) -> bool | None:
        """Tried out once per process: what it was started with does not change."""
        if self._guarded is None:
            life = self._life
            seen = await self.adapter.guarded(STATUS_SECONDS)
            if life == self._life:
                self._guarded = seen
        return self._guarded

    def _disprove(self, label: str, version: int) -> None:
        now = self._store.holds
        if now is not None and now.version == version:
            log.error("the engine's label is %r although version %d was proven: the proof is void", label, version)
            self._store.holds = None

    def _state(self, view: View) -> EngineState:
        if view.reachable:
            return EngineState.READY if view.model is not None else EngineState.STARTING
        return EngineState.UNREACHABLE if self._met else EngineState.STARTING

    def paused(self, view: View) -> bool | None:
        """False where the engine admits requests, True where a verified pause still shows, else None."""
        return proven_paused(view.admitting, self._store.paused)


@dataclass(slots=True)
class _Shared:
    """An adapter, and how many use it now."""

    adapter: RouterAdapter
    users: int = 0


class Routers:
    """The routers of this engine's pool, as the latest enrolment names them."""

    def __init__(self, store: Store, keys_dir: Path | None = None) -> None:
        self._store = store
        self._keys_dir = keys_dir
        self._adapters: dict[tuple[str, str, str | None, str], _Shared] = {}
        #: Router name -> how it refused to be read when it was looked at last. Silence is none: its words would change.
        self.refusals: dict[str, str] = {}

    async def close(self) -> None:
        """Close connections; touches no entry."""
        for shared in self._adapters.values():
            await shared.adapter.close()
        self._adapters.clear()

    @property
    def own_url(self) -> str:
        """The URL under which routers know this engine."""
        enrolment = self._store.enrolment
        return normal(enrolment.engine_url) if enrolment is not None else ""

    def endpoints(self) -> list[RouterEndpoint]:
        """Routers that are not gone."""
        enrolment = self._store.enrolment
        return [r for r in enrolment.routers if not r.gone] if enrolment is not None else []

    @asynccontextmanager
    async def using(self, router: RouterEndpoint) -> AsyncIterator[RouterAdapter]:
        """The adapter for one router; its connections stay open for as long as the enrolment names the router."""
        key = _key_of(router)
        if key not in self._adapters:
            self._adapters[key] = _Shared(make_router(*key[:3], partial(self._key, key[3])))
        shared = self._adapters[key]
        shared.users += 1
        try:
            yield shared.adapter
        finally:
            shared.users -= 1
            await self._prune()

    async def _prune(self) -> None:
        """Close the connections to routers that the enrolment does not name any more, but those in use."""
        wanted = {_key_of(r) for r in self.endpoints()}
        for key in [k for k, shared in self._adapters.items() if k not in wanted and not shared.users]:
            await self._adapters.pop(key).adapter.close()

    def _key(self, named: str) -> str:
        """The key that the pool's router of this name demands, as its Secret has it now; empty: none is there."""
        try:
            return usable_key((self._keys_dir / named).read_bytes()) if self._keys_dir is not None else ""
        except FileNotFoundError:
            return ""
        except OSError as e:
            log.warning("the key of router %s can not be read: %s", named, e)
            return ""

    async def routed(self) -> dict[str, bool | None]:
        """Router name -> whether it lists our URL; None: it does not answer."""
        return {name: None if entry is None else entry.listed for name, entry in (await self.look()).items()}

    async def look(self) -> dict[str, Entry | None]:
        """Router name -> our entry there; None: it does not answer."""
        endpoints = self.endpoints()
        await self._prune()
        answers = await asyncio.gather(*(self._look(r) for r in endpoints))
        self.refusals = {
            r.name: str(a)[:400] for r, a in zip(endpoints, answers, strict=True) if isinstance(a, Refused)
        }
        return {r.name: None if isinstance(a, CallError) else a for r, a in zip(endpoints, answers, strict=True)}

    async def _look(self, router: RouterEndpoint) -> Entry | CallError:
        try:
            async with self.using(router) as adapter:
                return await adapter.look(self.own_url, ROUTER_SECONDS)
        except CallError as e:
            log.debug("router %s: %s", router.name, e)
            return e


def _key_of(router: RouterEndpoint) -> tuple[str, str, str | None, str]:
    """What an adapter is made from; last the pool's name of the router, to which replicas add that of their pod."""
    return router.type.value, router.url, router.metrics, router.name.partition(":")[0]


def now_ms() -> int:
    """Wall clock in milliseconds since the epoch."""
    return int(time.time() * 1000)
