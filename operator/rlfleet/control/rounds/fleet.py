"""Engines and the sender of one pipeline as observed, and orders to many gates at once.

Invariants:
- only pods that a pool made are engines: a label alone, which anybody may write, makes nobody a member of a round;
- pods are read live here (not from a view): what is frozen, committed or opened rests on the apiserver's answer;
- an order is asked again under the same operation id until its record has ended or the deadline has passed, so a lost
  answer, a gate restart or an operator restart never starts a second operation;
- no answer leaves ``status`` None, which every planner reads as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels, wire
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller, Peer, PeerError, Refused, Silent, fan_out
from rlfleet.kube.errors import ApiError, NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import ENGINEPOOLS, PODS
from rlfleet.plan.drops import is_unwanted
from rlfleet.plan.identity import is_poisoned
from rlfleet.plan.rounds import Engine

if TYPE_CHECKING:
    from rlfleet.control.context import Context

Obj = dict[str, Any]
Ended = wire.OperationRecord | PeerError

#: Seconds of one long poll; short enough that a pod found gone in between is noticed.
POLL_SECONDS = 5.0
#: Audience of control tokens for a sender that is named by URL: no pod UID is known for it.
URL_SENDER = "rlfleet-sender"


def gate_port(pod: Mapping[str, Any]) -> int:
    """The port that the pod's gate listens on, from the pod itself (the pool's spec may have changed since)."""
    for container in [*(pod["spec"].get("initContainers") or []), *(pod["spec"].get("containers") or [])]:
        if container.get("name") == "gate":
            for port in container.get("ports") or []:
                return int(port["containerPort"])
    return wire.DEFAULT_GATE_PORT


def gate_peer(pod: Mapping[str, Any]) -> Peer | None:
    """Where the pod's gate is; None while the pod has no address."""
    ip = (pod.get("status") or {}).get("podIP")
    if not ip:
        return None
    host = f"[{ip}]" if ":" in ip else ip
    meta = pod["metadata"]
    return Peer(meta["name"], meta["uid"], f"http://{host}:{gate_port(pod)}")


def is_gone(pod: Mapping[str, Any]) -> bool:
    """The pod's engine has ended for good: the pod has finished, or its engine container has and never restarts."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    if pod["spec"].get("restartPolicy") != "Never":
        return False
    engine: Mapping[str, Any] = next(
        (c for c in status.get("containerStatuses") or [] if c.get("name") == "engine"), {}
    )
    return "terminated" in (engine.get("state") or {})


def is_unborn(pod: Mapping[str, Any]) -> bool:
    """Nothing of the pod has ever run: it waits for a node or an image, so no engine of it can serve."""
    status = pod.get("status") or {}
    if not status.get("podIP"):
        return True
    gate: Mapping[str, Any] = next(
        (c for c in status.get("initContainerStatuses") or [] if c.get("name") == "gate"), {}
    )
    return "waiting" in (gate.get("state") or {}) and not gate.get("lastState") and not gate.get("restartCount")


def is_owned(pod: Mapping[str, Any]) -> bool:
    """An EnginePool controls the pod."""
    return any(
        o.get("controller") and o.get("kind") == "EnginePool" and o.get("apiVersion", "").startswith(f"{labels.GROUP}/")
        for o in pod["metadata"].get("ownerReferences") or []
    )


def _owner(pod: Mapping[str, Any], pool: Mapping[str, Any] | None) -> bool:
    """``pool`` is the very pool that made the pod, not a later one of its name."""
    uid = pool["metadata"]["uid"] if pool is not None else None
    return any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or [])


def engine_of(pod: Mapping[str, Any]) -> Engine:
    """An engine pod as the planner sees it, before its gate was asked."""
    meta = pod["metadata"]
    peer = gate_peer(pod)
    return Engine(
        name=meta["name"],
        pool=(meta.get("labels") or {}).get(labels.POOL, ""),
        pod_uid=meta["uid"],
        url=peer.url if peer else "",
        status=None,
        gone=is_gone(pod),
        leaving="deletionTimestamp" in meta,
        owned=is_owned(pod),
        unborn=is_unborn(pod),
    )


def ok(result: Ended | None) -> bool:
    """The operation has a recorded, successful end."""
    return isinstance(result, wire.OperationRecord) and result.state is wire.OperationState.SUCCEEDED


def why(result: Ended | None) -> tuple[Reason, str]:
    """What a result that is not ok says, as a reason of the closed list and a message."""
    if isinstance(result, Refused):
        return Reason.parse(result.body.reason.value), result.body.message
    if isinstance(result, Silent):
        return Reason.DEADLINE_EXCEEDED, result.what
    if isinstance(result, wire.OperationRecord):
        if result.error is not None:
            return Reason.parse(result.error.reason.value), result.error.message
        if result.state is wire.OperationState.RUNNING:
            return Reason.DEADLINE_EXCEEDED, f"{result.kind} did not end in time"
        if result.state is wire.OperationState.UNKNOWN:
            return Reason.UNCERTAIN, f"{result.kind} has no recorded end"
    return Reason.DEADLINE_EXCEEDED, "no answer"


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
        known = {e.pod_uid: e.status for e in self.engines.values()}
        self.engines = {}
        self.peers = {}
        self.pods = {}
        for pod in listed.items:
            if not is_owned(pod):
                continue
            engine = engine_of(pod)
            pool = self.pools.get(engine.pool)
            engine = replace(engine, unwanted=is_unwanted(pod, pool if _owner(pod, pool) else None))
            self.pods[engine.name] = pod
            self.engines[engine.name] = replace(engine, status=known.get(engine.pod_uid))
            peer = gate_peer(pod)
            if peer is not None and not engine.gone:
                self.peers[engine.name] = peer
        self.ctx.gates.forget(self.pipeline_uid, {e.pod_uid for e in self.engines.values()})

    def take(self, name: str, status: wire.GateStatus | None, refusal: str = "") -> None:
        """Remember what a gate said of itself (None: nothing, or that it refuses us)."""
        if status is not None:
            self.ctx.gates.answered(self.pipeline_uid, status)
        self.engines[name] = replace(self.engines[name], status=status, refusal=refusal)

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
        answers = await fan_out(targets, ask)
        for name, answer in answers.items():
            self.take(name, answer if isinstance(answer, wire.GateStatus) else None)

    async def fence(self, caller: Caller, names: Iterable[str] | None = None) -> int:
        """Raise the fence at gates and read their status; the highest generation that a gate refused us with, or 0.

        A gate with a poisoned fence is no reason to claim above it: that would carry the damage to everybody.
        """
        targets = [n for n in (self.live() if names is None else names) if n in self.peers]
        answers = await fan_out(targets, lambda n: self.ctx.peers.gate_fence(self.peers[n], caller))
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
        return above

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


@dataclass(slots=True)
class SenderLink:
    """The pipeline's weight sender: which pod it is, and what it last said."""

    ctx: Context
    namespace: str
    pipeline_uid: str
    peer: Peer | None = None
    status: wire.SenderStatus | None = None
    problem: tuple[Reason, str] | None = None
    node: str = ""
    #: No pod of the selector runs, or may still run: the process that held the weights is proven gone.
    absent: bool = False

    async def find(self, spec: Mapping[str, Any]) -> None:
        """Resolve ``spec.weights.sender`` to one running pod (or a URL) and ask it."""
        self.peer, self.status, self.problem, self.absent = None, None, None, False
        sender = (spec.get("weights") or {}).get("sender") or {}
        port = int(sender.get("port") or wire.DEFAULT_SENDER_PORT)
        if sender.get("url"):
            self.peer = Peer("sender", URL_SENDER, str(sender["url"]))
        else:
            labels_wanted = (sender.get("podSelector") or {}).get("matchLabels") or {}
            selector = ",".join(f"{k}={v}" for k, v in sorted(labels_wanted.items()))
            listed = await self.ctx.kube.at(Priority.ROUND).list(
                PODS, self.namespace, label_selector=selector, timeout=self.ctx.settings.api_timeout
            )
            running = [
                p
                for p in listed.items
                if (p.get("status") or {}).get("phase") == "Running"
                and (p.get("status") or {}).get("podIP")
                and "deletionTimestamp" not in p["metadata"]
            ]
            if not running:
                phases = {str((p.get("status") or {}).get("phase")) for p in listed.items if not is_gone(p)}
                self.absent = phases <= {"Pending"}
                self.problem = Reason.SENDER_ABSENT, f"no running pod matches {selector!r} (spec.weights.sender)"
                return
            if len(running) > 1:
                names = ", ".join(sorted(p["metadata"]["name"] for p in running)[:4])
                self.problem = (
                    Reason.SENDER_AMBIGUOUS,
                    f"{len(running)} running pods match {selector!r} ({names}): one trainer may claim a pipeline",
                )
                return
            pod = running[0]
            ip = pod["status"]["podIP"]
            host = f"[{ip}]" if ":" in ip else ip
            self.node = str(pod["spec"].get("nodeName") or "")
            self.peer = Peer(pod["metadata"]["name"], pod["metadata"]["uid"], f"http://{host}:{port}")
        await self.ask()

    async def ask(self) -> None:
        """Read the sender's status; silence leaves it unknown with the problem said."""
        if self.peer is None:
            return
        try:
            self.status = await self.ctx.peers.sender_status(self.peer, self.pipeline_uid)
            self.problem = None
            held = self.status.fence.generation
            if is_poisoned(held, now_ms=self.ctx.now_ms()):
                self.status = None
                self.problem = (
                    Reason.FENCE_POISONED,
                    f"the sender holds generation {held}, more than a day ahead of the clock: restart the trainer",
                )
        except Silent as e:
            self.status = None
            self.problem = Reason.SENDER_UNREACHABLE, str(e)
        except Refused as e:
            self.status = None
            self.problem = Reason.parse(e.body.reason.value), str(e)

    async def gone(self) -> bool:
        """The sender's pod is proven gone (a sender named by URL never is: nothing proves it)."""
        if self.peer is None or self.peer.pod_uid == URL_SENDER:
            return False
        try:
            pod = await self.ctx.kube.at(Priority.ROUND).get(
                PODS, self.namespace, self.peer.name, timeout=self.ctx.settings.api_timeout
            )
        except NotFound:
            return True
        return pod["metadata"]["uid"] != self.peer.pod_uid or is_gone(pod)

    @property
    def host(self) -> str:
        """The sender's address, on which it can host a rendezvous."""
        assert self.peer is not None
        authority = self.peer.url.split("//", 1)[1].split("/", 1)[0]
        return authority.rsplit(":", 1)[0].strip("[]") if ":" in authority else authority

    async def run(
        self, caller: Caller, step: str, attempt: int, order: Any, *, incarnation: str, deadline: float
    ) -> Ended:
        """Give the sender one order and wait for its recorded end, until ``deadline`` (loop seconds)."""
        assert self.peer is not None
        op_id = wire.operation_id(caller.operation, step, attempt, incarnation)
        record: wire.OperationRecord | None = None
        while True:
            left = deadline - self.ctx.clock.monotonic()
            try:
                if record is None:
                    record = await self.ctx.peers.sender_start(
                        self.peer, caller, incarnation=incarnation, step=step, attempt=attempt, order=order
                    )
                if record.state is not wire.OperationState.RUNNING or left <= 0:
                    return record
                record = await self.ctx.peers.operation(self.peer, caller, op_id, wait=min(left, POLL_SECONDS))
            except Refused as e:
                # An order of a predecessor still runs there; it ends by itself, within its own deadline.
                if e.body.reason is not wire.ErrorReason.BUSY or left <= 0:
                    return e
                await asyncio.sleep(min(0.2, max(0.0, left)))
            except Silent as e:
                if left <= 0 or await self.gone():
                    return e
                await asyncio.sleep(min(0.5, max(0.0, left)))
