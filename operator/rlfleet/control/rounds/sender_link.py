"""The weight sender of a pipeline: which pod it is, what it last said, and orders to it.

Invariants:
- exactly one running pod may be the sender: with two, nobody is;
- no answer leaves ``status`` None; only a pod that the apiserver says is gone is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlfleet.api import naming, wire
from rlfleet.api.conditions import Reason
from rlfleet.control.claims import read_allocations
from rlfleet.control.peers import Caller, Peer, PeerError, Refused, Silent
from rlfleet.control.rounds.pods import is_gone
from rlfleet.control.rounds.results import POLL_SECONDS, Ended
from rlfleet.kube.errors import NotFound
from rlfleet.kube.limiter import Priority
from rlfleet.kube.resources import PODS
from rlfleet.plan.checkpoint import SHELF, path_template
from rlfleet.plan.dra import Allocation, block_claims, block_evidence, claim_evidence, uses
from rlfleet.plan.identity import is_poisoned
from rlfleet.plan.repair import left_hold
from rlfleet.plan.topology import Evidence, Identity, identify, report_evidence, spec_evidence

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]

#: Audience of control tokens for a sender that is named by URL: no pod UID is known for it.
URL_SENDER = "rlfleet-sender"
#: For so long a sender is told again that a hold has ended, if it did not answer.
RELEASE_SECONDS = 3.0


@dataclass(slots=True)
class SenderLink:
    """The pipeline's weight sender: which pod it is, and what it last said."""

    ctx: Context
    namespace: str
    pipeline: str
    pipeline_uid: str
    peer: Peer | None = None
    status: wire.SenderStatus | None = None
    problem: tuple[Reason, str] | None = None
    node: str = ""
    #: No pod of the selector runs, or may still run: the process that held the weights is proven gone.
    absent: bool = False
    #: An order was given whose end it has not told, and it has not been asked since.
    unheard: bool = False
    #: What ResourceClaims say of the trainer's devices, and what its spec does.
    claimed: Evidence | None = None
    declared: Evidence | None = None
    #: The ResourceClaims that were read for it, by name; the train blocks' among them.
    allocations: dict[str, Allocation] = field(default_factory=dict)

    @property
    def train(self) -> Identity:
        """The train pool, from every source that knows of it."""
        report = report_evidence("the sender", self.status.devices if self.status else None, part=True)
        return identify([s for s in (self.claimed, report, self.declared) if s is not None])

    @property
    def said(self) -> wire.SenderStatus | None:
        """Its status, if that is from after the latest order; None: nobody knows what runs there."""
        return None if self.unheard else self.status

    @property
    def by_url(self) -> bool:
        """Named by URL: nothing but its own answers tells of its process."""
        return self.peer is not None and self.peer.pod_uid == URL_SENDER

    async def find(self, spec: Mapping[str, Any]) -> None:
        """Resolve ``spec.weights.sender`` to one running pod (or a URL) and ask it; with checkpoints there is none."""
        self.peer, self.status, self.problem, self.absent = None, None, None, False
        self.declared = spec_evidence((spec.get("trainer") or {}).get("gpus"))
        pod = await self._resolve(spec)
        self.claimed = await self._claims(spec, pod)
        await self.ask()

    async def _resolve(self, spec: Mapping[str, Any]) -> Obj | None:
        """Set ``peer``, or ``problem`` where there is none; the sender's pod, if it is one of ours."""
        if path_template(spec) is not None:
            self.status = SHELF
            return None
        sender = (spec.get("weights") or {}).get("sender") or {}
        port = int(sender.get("port") or wire.DEFAULT_SENDER_PORT)
        if sender.get("url"):
            self.peer = Peer("sender", URL_SENDER, str(sender["url"]), kind="sender")
            return None
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
            message = f"no running pod matches {selector!r} (spec.weights.sender){_others(listed.items)}"
            self.problem = Reason.SENDER_ABSENT, message
            return None
        if len(running) > 1:
            names = ", ".join(sorted(p["metadata"]["name"] for p in running)[:4])
            self.problem = (
                Reason.SENDER_AMBIGUOUS,
                f"{len(running)} running pods match {selector!r} ({names}): one trainer may claim a pipeline",
            )
            return None
        pod = running[0]
        ip = pod["status"]["podIP"]
        host = f"[{ip}]" if ":" in ip else ip
        self.node = str(pod["spec"].get("nodeName") or "")
        scheme, server_name = "http", ""
        if self.ctx.settings.tls_secret:
            scheme, server_name = "https", naming.sender_server_name(self.namespace)
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self.peer = Peer(name, uid, f"{scheme}://{host}:{port}", server_name, kind="sender")
        return pod

    async def _claims(self, spec: Mapping[str, Any], pod: Obj | None) -> Evidence | None:
        """What ResourceClaims say: those of the train blocks, which are all of it, else those of the sender's pod."""
        blocks = block_claims(self.pipeline, spec)
        used = blocks or (uses(pod) if pod is not None else ())
        found = self.allocations = await read_allocations(self.ctx, self.namespace, {claim for claim, _ in used})
        if blocks:
            return block_evidence(blocks, found, owner=self.pipeline_uid)
        return claim_evidence(used, found, part=True)

    async def ask(self) -> None:
        """Read the sender's status; silence leaves it unknown with the problem said."""
        if self.peer is None:
            return
        try:
            self.status = await self.ctx.peers.sender_status(self.peer, self.pipeline_uid)
            self.problem, self.unheard = None, False
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

    async def gone(self, peer: Peer | None = None) -> bool:
        """The pod of the sender (of ``peer``) is proven gone; a sender named by URL never is: nothing proves it."""
        peer = peer or self.peer
        if peer is None or peer.pod_uid == URL_SENDER:
            return False
        try:
            pod = await self.ctx.kube.at(Priority.ROUND).get(
                PODS, self.namespace, peer.name, timeout=self.ctx.settings.api_timeout
            )
        except NotFound:
            return True
        return pod["metadata"]["uid"] != peer.pod_uid or is_gone(pod)

    @property
    def host(self) -> str:
        """The sender's address, on which it can host a rendezvous."""
        assert self.peer is not None
        return urlsplit(self.peer.url).hostname or ""

    async def release(self, caller: Caller) -> None:
        """End the hold of the caller's operation, so that a trainer that waits for it can publish.

        What is not answered is asked again for a while, since the trainer could publish nothing meanwhile; after that
        ``end_left_hold`` comes back to it.
        """
        # The one that holds: whoever looks for the sender anew between two tries may find none, or another.
        peer = self.peer
        if peer is None:
            return
        until = self.ctx.clock.monotonic() + RELEASE_SECONDS
        while True:
            try:
                self.status = await self.ctx.peers.release(peer, caller)
                self.unheard = False
                return
            except PeerError as e:
                # A sender that is gone must not keep a round from ending; the hold has a deadline of its own, too.
                if isinstance(e, Refused) or self.ctx.clock.monotonic() >= until:
                    log.info("hold not released", extra={"roundUID": caller.operation, "why": str(e)})
                    return
            await asyncio.sleep(0.2)

    async def end_left_hold(self) -> None:
        """End a hold whose operation has ended without that the sender was told; while nobody owns the pipeline."""
        left = left_hold(self.said, pipeline=self.pipeline_uid)
        if left is None:
            return
        log.info("a hold outlived its operation", extra={"pipeline": self.pipeline, "roundUID": left.operation})
        await self.release(Caller(left.pipeline, left.operation, left.generation))

    async def run(
        self,
        caller: Caller,
        step: str,
        attempt: int,
        order: Any,
        *,
        incarnation: str,
        deadline: float,
        begun: asyncio.Event | None = None,
    ) -> Ended:
        """Give the sender one order and wait for its recorded end, until ``deadline`` (loop seconds).

        ``begun`` is set once the sender says that it runs.
        """
        # The one that is given the order: whoever watches over the wait looks for the sender anew meanwhile.
        peer = self.peer
        assert peer is not None
        self.unheard = True
        op_id = wire.operation_id(caller.operation, step, attempt, incarnation)
        record: wire.OperationRecord | None = None
        while True:
            left = deadline - self.ctx.clock.monotonic()
            try:
                if record is None:
                    record = await self.ctx.peers.sender_start(
                        peer, caller, incarnation=incarnation, step=step, attempt=attempt, order=order
                    )
                if record.state is not wire.OperationState.RUNNING:
                    self.unheard = False
                    return record
                if begun is not None:
                    begun.set()
                if left <= 0:
                    return record
                record = await self.ctx.peers.operation(peer, caller, op_id, wait=min(left, POLL_SECONDS))
            except Refused as e:
                # An order of a predecessor still runs there; it ends by itself, within its own deadline.
                if e.body.reason is not wire.ErrorReason.BUSY or left <= 0:
                    return e
                await asyncio.sleep(min(0.2, max(0.0, left)))
            except Silent as e:
                if left <= 0 or await self.gone(peer):
                    return e
                await asyncio.sleep(min(0.5, max(0.0, left)))


def _others(pods: Sequence[Obj]) -> str:
    """The pods that match and do not run, with what they do instead: of a trainer that failed, its log says why."""
    said = [
        f"{p['metadata']['name']} ({'Terminating' if 'deletionTimestamp' in p['metadata'] else phase})"
        for p in sorted(pods, key=lambda p: str(p["metadata"]["name"]))
        if (phase := (p.get("status") or {}).get("phase"))
    ]
    return f"; there is {', '.join(said[:4])}" if said else ""
