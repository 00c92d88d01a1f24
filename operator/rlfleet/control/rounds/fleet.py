"""The engines of one pipeline as observed, and orders to many gates at once.

Invariants:
- pods are read live here (not from a view): what is frozen, committed or opened rests on the apiserver's answer;
- an order is asked again under the same operation id until its record has ended or the deadline has passed, so a lost
  answer, a gate restart or an operator restart never starts a second operation;
- no answer leaves ``status`` None, which every planner reads as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels, wire
from rlfleet.api.conditions import Reason
from rlfleet.control.claims import read_allocations
from rlfleet.control.peers import Caller, Peer, Refused, Silent, fan_out
from rlfleet.control.rounds.pods import engine_of, gate_peer, is_gone, is_owned, made_by
from rlfleet.control.rounds.results import POLL_SECONDS, Ended
from rlfleet.control.workers import listings, stand
from rlfleet.discovery.client import Unknown
from rlfleet.kube.errors import ApiError, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, PODS
from rlfleet.plan.adopt import adopted, adopts, believed, engine_process, indices, selector_of
from rlfleet.plan.demand import grants_of, held_devices
from rlfleet.plan.dra import claim_evidence, engine_uses
from rlfleet.plan.drops import is_unwanted
from rlfleet.plan.dynamo import Listing
from rlfleet.plan.elastic import ceiling, last_asleep, last_draining, wish
from rlfleet.plan.endings import disruption_of
from rlfleet.plan.identity import is_poisoned
from rlfleet.plan.lifecycle import pod_fact
from rlfleet.plan.rounds import Engine
from rlfleet.plan.topology import Device

if TYPE_CHECKING:
    from rlfleet.control.context import Context
    from rlfleet.control.rounds.ledger import Ledger

Obj = dict[str, Any]

#: Seconds between two looks at operations that somebody else started.
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Given:
    """An adopted pod, its pool, and its place there."""

    pod: Obj
    pool: str
    index: int


@dataclass(slots=True)
class Fleet:
    """All engine pods of a pipeline, by pod name."""

    ctx: Context
    namespace: str
    pipeline: str
    pipeline_uid: str
    engines: dict[str, Engine] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    pods: dict[str, Obj] = field(default_factory=dict)
    pools: dict[str, Obj] = field(default_factory=dict)
    held: frozenset[Device] = frozenset()
    """Devices that a trainer demands: engines on them are to sleep."""
    departing: dict[str, str] = field(default_factory=dict)
    """Pods (UIDs) that somebody has asked to go, seen by this execution, with why others did (see ``departure``)."""
    processes: dict[str, str] = field(default_factory=dict)
    """Adopted engines: what the kubelet calls the containers that run now, by pod name."""
    owed: int = 0
    """Engines that are to be awake and have no pod yet."""
    workers: dict[str, Listing | Unknown] = field(default_factory=dict)
    """What Dynamo frontends said last, by pool."""

    @classmethod
    def of(cls, ctx: Context, ledger: Ledger) -> Fleet:
        """The engines of the ledger's pipeline, nobody asked yet."""
        held = held_devices(grants_of(ledger.status))
        return cls(ctx, ledger.namespace, ledger.name, ledger.uid, held=held)

    async def read_pods(self) -> None:
        """List the engine pods and their pools live; statuses already known stay with the same pod UID."""
        kube = self.ctx.kube.at(Priority.ROUND)
        listed, pools = await asyncio.gather(
            kube.list(
                PODS,
                self.namespace,
                label_selector=f"{labels.PIPELINE}={self.pipeline},{labels.POOL}",
                timeout=self.ctx.settings.api_timeout,
            ),
            kube.list(ENGINEPOOLS, self.namespace, timeout=self.ctx.settings.api_timeout),
        )
        self.pools = {p["metadata"]["name"]: p for p in pools.items}
        made = [pod for pod in listed.items if is_owned(pod)]
        given = await self._adopted(pools.items)
        claimed = {claim for pod in [*made, *(g.pod for g in given)] for claim, _ in engine_uses(pod)}
        claims = await read_allocations(self.ctx, self.namespace, claimed)
        known = {e.pod_uid: e.status for e in self.engines.values()}
        self.engines = {}
        self.peers = {}
        self.pods = {}
        self.processes = {g.pod["metadata"]["name"]: engine_process(g.pod) for g in given}
        for pod, engine in [
            *((pod, engine_of(pod)) for pod in made),
            *((g.pod, engine_of(g.pod, adopter=g.pool, index=g.index)) for g in given),
        ]:
            pool = self.pools.get(engine.pool)
            maker = pool if made_by(pod, pool) or engine.name in self.processes else None
            engine = replace(
                engine,
                unwanted=is_unwanted(pod, maker, held=self.held),
                claimed=claim_evidence(engine_uses(pod), claims),
                draining=pool is not None and engine.pod_uid in last_draining(pool),
            )
            self.pods[engine.name] = pod
            self.engines[engine.name] = replace(engine, status=self._met(engine.name, known.get(engine.pod_uid)))
            peer = gate_peer(pod)
            if peer is not None and not engine.gone:
                self.peers[engine.name] = peer
            if engine.leaving:
                self.departing[engine.pod_uid] = disruption_of(pod)
        await self._discover()
        self.ctx.gates.forget(self.pipeline_uid, {e.pod_uid for e in self.engines.values()})
        self.rest()

    async def _adopted(self, pools: Sequence[Obj]) -> list[Given]:
        """Pods that pools of this pipeline adopt; listed live, one call for each such pool."""
        mine = [p for p in pools if adopts(p) and p["spec"]["pipeline"] == self.pipeline]
        kube = self.ctx.kube.at(Priority.ROUND)
        texts = [",".join(f"{k}={v}" for k, v in sorted(selector_of(p).items())) for p in mine]
        lists = await asyncio.gather(
            *(kube.list(PODS, self.namespace, label_selector=t, timeout=self.ctx.settings.api_timeout) for t in texts)
        )
        found = []
        for pool, listed in zip(mine, lists, strict=True):
            got = adopted(pool, pools, listed.items).pods
            places = indices(got)
            found += [Given(p, pool["metadata"]["name"], places[p["metadata"]["uid"]]) for p in got]
        return found

    def departure(self, pod_uid: str) -> str | None:
        """Why a pod was ended by somebody who asked for it, in the API's words; None: nobody asked, as far as is known.

        A pod can come, be told to go and be gone between two looks; then the view of pods has seen it. An engine that
        had ended before was not ended by that: its pool sweeps such a pod up, and the engine was lost.
        """
        seen = self.ctx.pods.by_uid(pod_uid) or self.ctx.pods.last_of(pod_uid)
        if pod_uid not in self.departing and seen is not None:
            why = disruption_of(seen)
            if why or "deletionTimestamp" in seen["metadata"]:
                self.departing[pod_uid] = why
        said = self.departing.get(pod_uid)
        before = self.ctx.pods.before_deletion(pod_uid)
        if before is None and seen is not None and "deletionTimestamp" not in seen["metadata"]:
            before = seen  # the view lags behind what was read live
        if not said and before is not None and pod_fact(before, owner_uid="").finished:
            return None
        return said

    def _met(self, name: str, status: wire.GateStatus | None) -> wire.GateStatus | None:
        """What a gate says, as far as it is believed."""
        if status is None or name not in self.processes:
            return status
        return believed(status, self.processes[name])

    async def _discover(self) -> None:
        """Ask Dynamo frontends for their workers; once per look at the engines, so before each phase of a round."""
        self.workers = await listings(
            self.ctx, (p for p in self.pools.values() if p["spec"]["pipeline"] == self.pipeline)
        )

    def rest(self) -> None:
        """Mark the engines that are to sleep, or that discovery keeps out, by what is known of them now."""
        if self.workers:
            self.engines |= stand(self.ctx.workers, self.pools, self.workers, self.engines.values())
        mine = {name: pool for name, pool in self.pools.items() if pool["spec"]["pipeline"] == self.pipeline}
        found = wish(
            self.engines.values(),
            {name: ceiling(pool) for name, pool in mine.items()},
            held=self.held,
            last_asleep=frozenset(uid for pool in mine.values() for uid in last_asleep(pool)),
        )
        self.owed = found.owed
        self.engines = {
            n: e if e.resting == (n in found.resting) else replace(e, resting=n in found.resting)
            for n, e in self.engines.items()
        }

    def take(self, name: str, status: wire.GateStatus | None, refusal: str = "") -> None:
        """Remember what a gate said of itself (None: nothing, or that it refuses us)."""
        if status is not None:
            self.ctx.gates.answered(self.pipeline_uid, status)
        self.engines[name] = replace(self.engines[name], status=self._met(name, status), refusal=refusal)

    def live(self) -> list[str]:
        """Names of pods that are not proven gone."""
        return sorted(name for name, e in self.engines.items() if not e.gone)

    def heard(self) -> list[str]:
        """Names of live engines whose gates answered when they were last asked."""
        return [n for n in self.live() if self.engines[n].status is not None]

    async def poll(self, names: Iterable[str] | None = None, *, seconds: float | None = None) -> None:
        """Ask gates for their status; those that do not answer (within ``seconds``) become unknown."""

        async def ask(name: str) -> wire.GateStatus:
            try:
                async with asyncio.timeout(seconds):
                    return await self.ctx.peers.gate_status(self.peers[name], self.pipeline_uid)
            except TimeoutError as e:
                raise Silent(self.peers[name], f"no answer within {seconds:g} s") from e

        targets = [n for n in (self.live() if names is None else names) if n in self.peers]
        answers, _ = await asyncio.gather(fan_out(targets, ask), self._discover())
        for name, answer in answers.items():
            self.take(name, answer if isinstance(answer, wire.GateStatus) else None)
        self.rest()

    async def fence(self, caller: Caller, names: Iterable[str] | None = None) -> int:
        """Raise the fence at gates and read their status; the highest generation that a gate refused us with, or 0.

        A gate with a poisoned fence is no reason to claim above it: that would carry the damage to everybody.
        """
        targets = [n for n in (self.live() if names is None else names) if n in self.peers]
        answers, _ = await asyncio.gather(
            fan_out(targets, lambda n: self.ctx.peers.gate_fence(self.peers[n], caller)), self._discover()
        )
        above = 0
        for name, answer in answers.items():
            refusal = answer.body.reason.value if isinstance(answer, Refused) else ""
            self.take(name, answer if isinstance(answer, wire.GateStatus) else None, refusal)
            if isinstance(answer, Refused) and answer.body.held is not None:
                held = answer.body.held.generation
                if is_poisoned(held, now_ms=self.ctx.now_ms()):
                    self.take(name, None, f"{Reason.FENCE_POISONED.value}: it holds generation {held}")
                else:
                    above = max(above, held)
        self.rest()
        return above

    async def await_in_flight(self, deadline: Callable[[], float]) -> None:
        """Wait for operations that somebody before us started: they end by themselves, within their gates' deadlines.

        ``deadline``: loop time until which that is waited for; asked only where something runs.
        """
        busy = self._busy()
        end = deadline() if busy else 0.0
        while busy and self.ctx.clock.monotonic() < end:
            await self.poll(busy)
            busy = self._busy()
            if busy:
                await asyncio.sleep(LOOK_SECONDS)

    def _busy(self) -> list[str]:
        return [n for n, e in self.engines.items() if e.status is not None and e.status.in_flight]

    def attempts(self, name: str, caller: Caller, step: str) -> int:
        """The highest attempt at this step in the gate's log for this operation; 0: none yet."""
        engine = self.engines.get(name)
        known = engine.status.attempts if engine is not None and engine.status is not None else {}
        return known.get(f"{caller.operation}/{step}", 0)

    async def run(
        self,
        caller: Caller,
        step: str,
        orders: Mapping[str, Any],
        *,
        deadline: float,
        again: bool = False,
    ) -> dict[str, Ended]:
        """Give each named engine its order and wait for the recorded ends, until ``deadline`` (loop seconds).

        Without ``again`` the latest attempt in the gate's log is joined. ``again``: the next attempt, which is
        allowed only after the earlier one has a recorded end.
        """

        async def one(name: str) -> wire.OperationRecord:
            engine, peer = self.engines[name], self.peers[name]
            known = self.attempts(name, caller, step)
            attempt = known + 1 if again else max(1, known)
            return await self._drive(caller, peer, engine.incarnation, step, attempt, orders[name], deadline)

        targets = [n for n in orders if n in self.peers and n in self.engines]
        results: dict[str, Ended] = dict(await fan_out(targets, one, limit=1024))
        for name in orders:
            if name not in results:
                results[name] = Silent(Peer(name, "", ""), "the pod has no address")
        return results

    async def _vanished(self, peer: Peer) -> bool:
        """The pod is proven gone; an apiserver that does not say so proves nothing."""
        try:
            pod = await self.ctx.kube.at(Priority.ROUND).get(
                PODS, self.namespace, peer.name, timeout=self.ctx.settings.api_timeout
            )
        except NotFound:
            return True
        except ApiError:
            return False
        return pod["metadata"]["uid"] != peer.pod_uid or is_gone(pod)

    async def _drive(
        self, caller: Caller, peer: Peer, incarnation: str, step: str, attempt: int, order: Any, deadline: float
    ) -> wire.OperationRecord:
        """Start, then poll. Silence is retried under the same id; a refusal is final but Busy."""
        op_id = wire.operation_id(caller.operation, step, attempt, incarnation)
        pause = 0.05
        record: wire.OperationRecord | None = None
        opens, lost = isinstance(order, wire.ResumeOrder | wire.OpenOrder), False
        while True:
            left = deadline - self.ctx.clock.monotonic()
            try:
                if record is None:
                    if opens:
                        self.ctx.gates.sent(peer.pod_uid, op_id, caller.generation)
                    record = await self.ctx.peers.gate_start(
                        peer, caller, incarnation=incarnation, step=step, attempt=attempt, order=order
                    )
                elif record.state is wire.OperationState.RUNNING:
                    if left <= 0:
                        return record
                    record = await self.ctx.peers.operation(peer, caller, op_id, wait=min(left, POLL_SECONDS))
                if record.state is not wire.OperationState.RUNNING:
                    if opens and record.state is not wire.OperationState.UNKNOWN:
                        self.ctx.gates.ended(peer.pod_uid, op_id)
                    return record
                continue
            except Refused as e:
                if opens and record is None and not lost:
                    self.ctx.gates.ended(peer.pod_uid, op_id)  # it never began
                if e.body.reason is not wire.ErrorReason.BUSY or left <= 0:
                    raise
            except Silent:
                lost = True
                # A pod that is gone never answers: nobody waits for it while all others are paused.
                if left <= 0 or await self._vanished(peer):
                    raise
            await asyncio.sleep(min(pause, max(0.0, left)))
            pause = min(1.0, pause * 2)
