"""Ports on which broadcast groups meet: who may use which, and what proves that one is free again. Pure.

A claim is written into RLPipeline.status before anybody listens. Two pipelines whose senders share an address (one pod,
or host network on one node) write into different objects, so no single write can decide between them. The rule is:
write, then read all pipelines; whoever then sees somebody else's claim on the same port gives its own up. Of two that
claim at once at least one reads after the other has written.

Invariants:
- two claims that both passed that look never name one address and port;
- a claim ends by proof only: the sender process that could listen says that nothing of it runs, or is gone. Without
  proof it is *leaked*: shown, and its port not used again;
- nobody is asked to join before the sender has said that it listens, so where claims cannot help (an address under two
  names, a program that is none of ours) the kernel decides, and the next port is tried.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlfleet.api.v1alpha1.rlpipeline_status import MAX_CLAIMS
from rlfleet.api.wire import SenderStatus

Taken = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Claim:
    """One port of one address, for the groups of one operation."""

    address: str
    port: int
    operation: str
    """UID of the SyncRound."""
    incarnation: str
    """The sender process that may listen."""
    pod: str = ""
    pod_uid: str = ""
    """Its pod; empty for a sender that is named by URL."""
    leaked: bool = False

    @property
    def where(self) -> tuple[str, int]:
        """What nobody else may use meanwhile."""
        return canonical(self.address), self.port


def canonical(address: str) -> str:
    """One text for one IP address. Two names of one host stay two: only the bind decides between those."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()


def claims_of(status: Mapping[str, Any]) -> tuple[Claim, ...]:
    """``RLPipeline.status.rendezvousClaims``."""
    return tuple(
        Claim(
            address=str(r["address"]),
            port=int(r["port"]),
            operation=str(r["operation"]),
            incarnation=str(r["senderIncarnation"]),
            pod=str(r.get("senderPod") or ""),
            pod_uid=str(r.get("senderPodUID") or ""),
            leaked=bool(r.get("leaked")),
        )
        for r in status.get("rendezvousClaims") or []
    )


def rows(claims: Iterable[Claim]) -> list[dict[str, Any]] | None:
    """The same for a status write; None, which removes the field, where there are none."""
    out: list[dict[str, Any]] = []
    for c in claims:
        row: dict[str, Any] = {
            "address": c.address,
            "port": c.port,
            "operation": c.operation,
            "senderIncarnation": c.incarnation,
        }
        if c.pod:
            row |= {"senderPod": c.pod, "senderPodUID": c.pod_uid}
        if c.leaked:
            row["leaked"] = True
        out.append(row)
    return out or None


def own(claims: Iterable[Claim], *, operation: str, incarnation: str) -> Claim | None:
    """The claim that this operation may use with this sender process."""
    return next((c for c in claims if not c.leaked and (c.operation, c.incarnation) == (operation, incarnation)), None)


def taken(pipelines: Iterable[Mapping[str, Any]], *, but: str) -> Taken:
    """What all pipelines but the one with UID ``but`` claim, leaked or not."""
    return frozenset(
        c.where for p in pipelines if p["metadata"]["uid"] != but for c in claims_of(p.get("status") or {})
    )


def pick(
    first: int,
    last: int,
    *,
    address: str,
    begin: int,
    others: Taken,
    mine: Sequence[Claim],
    refused: frozenset[int] = frozenset(),
) -> int | None:
    """A port of the range that nobody claims and the sender has not refused; None: there is none.

    ``begin`` (any number) says where in the range to look first, so that pipelines seldom want the same one. ``mine``:
    this pipeline's other claims; with as many as status can hold no further port is given out.
    """
    if len(mine) >= MAX_CLAIMS:
        return None
    held = others | {c.where for c in mine}
    width = last - first + 1
    for shift in range(width):
        port = first + (begin + shift) % width
        if port not in refused and (canonical(address), port) not in held:
            return port
    return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one execution of an operation needs a port for, and the range that it may come from."""

    address: str
    operation: str
    incarnation: str
    first: int
    last: int
    begin: int
    pod: str = ""
    pod_uid: str = ""

    def claim(self, port: int) -> Claim:
        """A claim of ours."""
        return Claim(self.address, port, self.operation, self.incarnation, self.pod, self.pod_uid)


@dataclass(frozen=True, slots=True)
class Use:
    """The port is ours alone: the sender may be asked to listen on it."""

    port: int


@dataclass(frozen=True, slots=True)
class Write:
    """Make these claims durable, look at all pipelines anew, and ask again. ``port``: the new one among them."""

    claims: tuple[Claim, ...]
    port: int


def step(
    claims: Sequence[Claim],
    wanted: Wanted,
    others: Taken,
    *,
    refused: frozenset[int] = frozenset(),
    fresh: frozenset[int] = frozenset(),
) -> Use | Write | None:
    """How an execution comes to its port; None: there is none.

    ``claims``: of this pipeline, as they are durable. ``others``: of all others, read *after* ``claims`` were
    written. ``refused``: ports that the sender could not listen on, with a recorded end. ``fresh``: ports that this
    very execution claimed, so that nobody before it can have had the sender listen on them.
    """
    mine = own(claims, operation=wanted.operation, incarnation=wanted.incarnation)
    if mine is not None and mine.port not in refused and mine.where not in others:
        return Use(mine.port)
    kept = [c for c in claims if c is not mine]
    if mine is not None and mine.port not in refused and mine.port not in fresh:
        kept.append(replace(mine, leaked=True))
    port = pick(
        wanted.first,
        wanted.last,
        address=wanted.address,
        begin=wanted.begin,
        others=others,
        mine=kept,
        refused=refused,
    )
    return None if port is None else Write((*kept, wanted.claim(port)), port)


def judged(
    claims: Iterable[Claim],
    *,
    sender: SenderStatus | None,
    address: str,
    gone: frozenset[str] = frozenset(),
) -> tuple[Claim, ...]:
    """The claims that stay after the operations that made them ended; all of these are leaked.

    ``sender``: what the sender at ``address`` said just now, None: nothing. ``gone``: UIDs of pods that are proven
    gone. A claim is released when its process says that no operation runs in it, when another process answers in its
    place (out of the same pod, or under the address of a sender that is named by URL), or when its pod is gone.
    Silence releases nothing.
    """
    kept = []
    for c in claims:
        if c.pod_uid and c.pod_uid in gone:
            continue
        if sender is not None and sender.incarnation == c.incarnation:
            if sender.in_flight is None:
                continue
        elif sender is not None and _replaced(c, sender, address):
            continue
        kept.append(replace(c, leaked=True))
    return tuple(kept)


def _replaced(c: Claim, sender: SenderStatus, address: str) -> bool:
    if c.pod_uid:
        return sender.pod_uid == c.pod_uid
    return canonical(address) == canonical(c.address)


def doubtful(claims: Iterable[Claim], *, sender: SenderStatus | None, address: str) -> tuple[Claim, ...]:
    """Claims for which it is worth asking whether their pods are gone: the sender's answer does not release them."""
    return tuple(c for c in judged(claims, sender=sender, address=address) if c.pod_uid)


def leak_message(claims: Iterable[Claim]) -> str:
    """What the Degraded condition says; empty: nothing has leaked."""
    leaked = [c for c in claims if c.leaked]
    if not leaked:
        return ""
    named = ", ".join(f"{c.address}:{c.port} of sender {c.pod or c.incarnation}" for c in leaked[:4])
    more = f" and {len(leaked) - 4} more" if len(leaked) > 4 else ""
    return (
        f"the sender never said how the broadcast ended that listened on {named}{more}: the ports are not used again "
        "until that sender answers or its pod is gone; restart the trainer if it hangs"
    )
