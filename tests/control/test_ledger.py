"""The durable record of rounds, on the real apiserver: who may move a round, and what is told of those who may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.api.v1alpha1.syncround_status import AttemptOp
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.control.context import Context
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Peers
from rlfleet.control.rounds.ledger import FenceLost, Ledger, RoundGone
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import credential_source
from rlfleet.kube.errors import Conflict
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.guard import Guard
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS, RLPIPELINES, SYNCROUNDS

pytestmark = pytest.mark.cluster

T = 10.0
ROUND: dict[str, Any] = {
    "metadata": {"name": "r"},
    "spec": {"pipeline": "p", "version": 1, "senderIncarnation": "s1"},
}


class World:
    """A pipeline with one round, and operators that hold them in hand."""

    def __init__(self, ctx: Context, namespace: str) -> None:
        self.ctx = ctx
        self.namespace = namespace

    async def operator(self, holder: str) -> Ledger:
        """One operator that has just read both objects."""
        pipeline = await self.ctx.kube.get(RLPIPELINES, self.namespace, "p", timeout=T)
        ledger = Ledger(self.ctx, pipeline, holder=holder)
        ledger.round = await self.round()
        return ledger

    async def round(self) -> dict[str, Any]:
        """The round, live."""
        return await self.ctx.kube.get(SYNCROUNDS, self.namespace, "r", timeout=T)

    async def tries(self) -> list[tuple[str, str, str | None]]:
        """Recorded tries: (op, result, reason)."""
        rows = ((await self.round()).get("status") or {}).get("attempts") or []
        return [(r["op"], r["result"], r.get("reason")) for r in rows]

    def refusals(self, reason: str) -> float:
        """The counter."""
        assert isinstance(self.ctx.metrics, OperatorMetrics)
        line = f'rlfleet_round_refusals_total{{reason="{reason}"}} '
        text = self.ctx.metrics.render().decode()
        return float(next(x for x in text.splitlines() if x.startswith(line)).removeprefix(line))


@pytest.fixture
async def world(cluster: LocalCluster, namespace: str) -> AsyncIterator[World]:
    async with KubeClient(credential_source(str(cluster.operator_kubeconfig))) as kube:
        spec = {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}}
        keys, guard = SigningKeys(bytes(32)), Guard.unelected()
        ctx = Context(
            kube=kube,
            pods=Reflector(kube, PODS),
            peers=Peers(keys, guard),
            keys=keys,
            events=EventRecorder(kube, instance="test"),
            enqueue=lambda key, *, after=0.0, priority=None: None,
            guard=guard,
            metrics=OperatorMetrics(),
        )
        async with KubeClient(credential_source(str(cluster.kubeconfig))) as admin:
            await admin.create(RLPIPELINES, namespace, {"metadata": {"name": "p"}, "spec": spec}, timeout=T)
            await admin.create(SYNCROUNDS, namespace, ROUND, timeout=T)
        yield World(ctx, namespace)


async def claim(ledger: Ledger) -> None:
    assert ledger.round is not None
    await ledger.claim({"kind": "Refresh", "name": "r", "uid": ledger.round["metadata"]["uid"], "committed": False})


async def advance(ledger: Ledger, phase: str) -> None:
    await ledger.write_round({"phase": phase, "lease": ledger.lease()}, what=phase)


async def settle(ledger: Ledger, outcome: str) -> None:
    await ledger.write_round({"phase": outcome, "outcome": outcome}, op=AttemptOp.SETTLE, what=outcome)


async def test_every_try_is_recorded_with_the_write_that_it_makes(world: World) -> None:
    mine = await world.operator("a")
    await claim(mine)
    await advance(mine, "Planned")
    await advance(mine, "Staging")
    await settle(mine, "Failed")
    applied = [(op, "Applied", None) for op in ("Claim", "Advance", "Advance", "Settle")]
    assert await world.tries() == applied
    generations = {r["generation"] for r in (await world.round())["status"]["attempts"]}
    assert generations == {mine.generation}


async def test_a_deposed_operator_is_refused_and_its_try_is_recorded(world: World) -> None:
    old = await world.operator("a")
    await claim(old)
    await advance(old, "Planned")
    new = await world.operator("b")
    await claim(new)
    await advance(new, "Planned")  # the barrier's write of the new generation
    before = (await world.round())["status"]
    with pytest.raises(FenceLost):
        await advance(old, "Staging")
    assert (await world.tries())[-1] == ("Advance", "Rejected", "NotOwner")
    assert world.refusals("NotOwner") == 1
    # Nothing but the list has changed, and the owner goes on although its copy is old now.
    assert {**(await world.round())["status"], "attempts": 0} == {**before, "attempts": 0}
    await advance(new, "Staging")
    tries = await world.tries()
    assert tries[-1] == ("Advance", "Applied", None)
    assert ("Advance", "Rejected", "NotOwner") in tries
    assert ("Handoff", "Applied", None) in tries


async def test_a_deposed_operator_cannot_commit_and_says_so(world: World) -> None:
    old = await world.operator("a")
    await claim(old)
    new = await world.operator("a")  # the same name: a process that was thawed, and its successor
    await claim(new)
    committed = {"version": 1, "manifestDigest": "sha256:" + "a" * 64}
    with pytest.raises(FenceLost):
        await old.write_pipeline({"committed": committed}, what="commit")
    assert ("Advance", "Rejected", "StaleFence") in await world.tries()
    assert "committed" not in (await world.ctx.kube.get(RLPIPELINES, world.namespace, "p", timeout=T))["status"]


async def test_an_identical_settle_succeeds_and_a_conflicting_one_is_refused(world: World) -> None:
    first = await world.operator("a")
    await claim(first)
    await advance(first, "Planned")
    same, other = await world.operator("a"), await world.operator("a")
    same.generation = other.generation = first.generation
    await settle(first, "Succeeded")
    await settle(same, "Succeeded")  # its own copy is from before: the answer of the first write was lost to it
    with pytest.raises(FenceLost):
        await settle(other, "Failed")
    assert (await world.round())["status"]["phase"] == "Succeeded"
    tries = await world.tries()
    assert tries[-1] == ("Settle", "Rejected", "AlreadySettled")
    assert tries.count(("Settle", "Applied", None)) == 1
    # A successor that finds it settled records that it asked for the same.
    late = await world.operator("b")
    await claim(late)
    await settle(late, "Succeeded")
    assert (await world.tries())[-1] == ("Settle", "Duplicate", None)
    assert world.refusals("AlreadySettled") == 1


async def test_an_ended_round_is_not_advanced(world: World) -> None:
    mine = await world.operator("a")
    await claim(mine)
    await settle(mine, "Cancelled")
    with pytest.raises(FenceLost):
        await advance(mine, "Staging")
    assert (await world.tries())[-1] == ("Advance", "Rejected", "NotOpen")


async def test_a_claim_beside_another_operation_is_refused(world: World) -> None:
    late = await world.operator("b")
    first = await world.operator("a")
    await first.claim({"kind": "Repair", "name": "x", "uid": "another-operation", "committed": False})
    # As if the clock of the apiserver had gone on meanwhile: a generation alone would not refuse it.
    late.pipeline["status"] = {"fence": first.generation + 1_000_000}
    with pytest.raises(Conflict):
        await claim(late)
    assert await world.tries() == [("Claim", "Rejected", "Excluded")]


async def test_a_round_that_is_gone_is_told_by_the_counter(world: World, cluster: LocalCluster) -> None:
    mine = await world.operator("a")
    await claim(mine)
    cluster.kubectl("delete", "syncround", "r", "-n", world.namespace)
    with pytest.raises(RoundGone):
        await advance(mine, "Planned")
    assert world.refusals("UnknownRound") == 1


async def test_the_list_of_tries_is_bounded(world: World) -> None:
    mine = await world.operator("a")
    await claim(mine)
    for n in range(25):
        await mine.write_round({"phase": "Holding"}, what=f"try-{n}")
    rows = (await world.round())["status"]["attempts"]
    assert len(rows) == 20
    assert rows[-1]["requestId"].endswith("try-24")
