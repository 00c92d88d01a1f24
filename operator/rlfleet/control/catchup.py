"""Between rounds: read what catching up is decided on, and open a CatchUp (DESIGN section 5, Catch-up).

Invariant: what is opened is a SyncRound whose name says what it is for, so an operator that dies before it learns that
it created one finds it again; whether it still makes sense is decided anew when it is executed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlfleet.api import labels, naming
from rlfleet.api.conditions import Reason
from rlfleet.api.timestamps import epoch_ms
from rlfleet.control.rounds.catchup_ready import transporting
from rlfleet.control.rounds.counting import counts_of
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.ledger import API_SECONDS, Ledger
from rlfleet.control.rounds.objects import kind_of
from rlfleet.control.rounds.sender_link import SenderLink
from rlfleet.kube.errors import AlreadyExists
from rlfleet.kube.resources import SYNCROUNDS
from rlfleet.plan.catchup import CatchUpPlan, Failure, plan_catch_up
from rlfleet.plan.rounds import Engine, held

if TYPE_CHECKING:
    from rlfleet.control.context import Context

log = logging.getLogger(__name__)
Obj = dict[str, Any]


def failures_of(rounds: Iterable[Obj], manifest_digest: str) -> tuple[Failure, ...]:
    """The recorded CatchUps of these bytes that failed or were cancelled, each with the engines that it left closed."""
    found = []
    for r in rounds:
        status = r.get("status") or {}
        failure = status.get("failure")
        if kind_of(r) != "CatchUp" or status.get("outcome") not in ("Failed", "Cancelled") or not failure:
            continue
        if r["spec"].get("manifestDigest") != manifest_digest:
            continue
        members = status.get("members")
        left = {m["engine"] for m in members or [] if m["result"] not in ("Ok", "Lost", "Dropped")}
        # Without results nobody of it was touched, or nobody of it got further.
        engines = left or set(r["spec"].get("engines") or ())
        reason = Reason.parse(failure["reason"])
        found.append(Failure(frozenset(engines), epoch_ms(status["finishedAt"]), reason, failure["message"]))
    return tuple(found)


def plan(
    ctx: Context,
    ledger: Ledger,
    sender: SenderLink,
    fleet: Fleet,
    rounds: list[Obj],
    pools: list[Obj],
    *,
    refresh_waits: bool,
) -> CatchUpPlan:
    """Decide from what this reconcile has read. ``refresh_waits``: a Refresh is there that can not start yet."""
    committed = ledger.committed
    spec = ledger.spec
    slot = None
    if committed is not None and sender.status is not None:
        slot = held(sender.status, committed.version, committed.manifest_digest)
    return plan_catch_up(
        list(fleet.engines.values()),
        pipeline=ledger.uid,
        committed=committed,
        sender=sender.status,
        sender_problem=sender.problem,
        counts=counts_of(p for p in pools if p["spec"]["pipeline"] == ledger.name),
        failures=failures_of(rounds, committed.manifest_digest) if committed is not None else (),
        how=transporting(spec, sender.train, slot),
        on_failure=str(spec["sync"]["onFailure"]),
        now_ms=ctx.now_ms(),
        refresh_waits=refresh_waits,
    )


async def open_round(ledger: Ledger, sender: SenderLink, engines: Iterable[Engine], rounds: list[Obj]) -> Obj | None:
    """Create the SyncRound for these engines; None: one of this name appeared meanwhile, so look again."""
    committed = ledger.committed
    assert committed is not None
    assert sender.status is not None
    members = sorted(engines, key=lambda e: e.name)
    taken = {r["metadata"]["name"] for r in rounds}
    attempt = 1
    while (name := _name(ledger, members, attempt)) in taken:
        attempt += 1
    meta = ledger.pipeline["metadata"]
    owner = {"apiVersion": labels.API_VERSION, "kind": "RLPipeline", "name": meta["name"], "uid": meta["uid"]}
    body = {
        "metadata": {
            "name": name,
            "namespace": ledger.namespace,
            "labels": {labels.PIPELINE: ledger.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "pipeline": ledger.name,
            "version": committed.version,
            "kind": "CatchUp",
            "manifestDigest": committed.manifest_digest,
            "senderIncarnation": sender.status.incarnation,
            "attempt": attempt,
            "engines": [e.name for e in members],
        },
    }
    try:
        made = await ledger.kube.create(SYNCROUNDS, ledger.namespace, body, timeout=API_SECONDS)
    except AlreadyExists:
        return None
    log.info("opened", extra={"round": name, "pipeline": f"{ledger.namespace}/{ledger.name}"})
    return made


def _name(ledger: Ledger, members: list[Engine], attempt: int) -> str:
    committed = ledger.committed
    assert committed is not None
    return naming.catch_up_name(
        ledger.name,
        ledger.uid,
        committed.manifest_digest,
        (e.incarnation for e in members),
        committed.version,
        attempt,
    )
