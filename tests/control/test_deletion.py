"""Our finalizers on the real apiserver: what they hold, and that the ceiling ends it, whatever it waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.control.context import Context
from rlfleet.control.deletion import KINDS, bury, release, watch_deletion
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Peers
from rlfleet.control.queue import After, Done
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import credential_source
from rlfleet.kube.errors import NotFound
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.guard import Guard
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS, SYNCROUNDS
from rlfleet.plan.deletion import CEILING_SECONDS, FINALIZERS

pytestmark = pytest.mark.cluster

T = 10.0
SPECS: dict[str, Any] = {
    "rlpipelines": {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}},
    "enginepools": {
        "pipeline": "p",
        "engine": {"type": "SGLang"},
        "source": {"template": {"spec": {"containers": [{"name": "engine", "image": "x"}]}}},
        "gate": {"image": "rlfleet/gate"},
    },
    "syncrounds": {"pipeline": "p", "version": 1, "senderIncarnation": "s1"},
}


@dataclass(slots=True)
class LaterContext(Context):
    """The apiserver's clock as it will be ``later_ms`` from now."""

    later_ms: int = 0

    def now_ms(self) -> int:
        """See Context."""
        return Context.now_ms(self) + self.later_ms


class World:
    """Objects in one namespace, made by an administrator, and an operator that looks at them."""

    def __init__(self, kube: KubeClient, admin: KubeClient, namespace: str) -> None:
        self.kube, self.admin, self.namespace = kube, admin, namespace

    def operator(self, *, later: float = 0.0) -> LaterContext:
        """What the operator's reconciles get, ``later`` seconds from now."""
        keys, guard = SigningKeys(bytes(32)), Guard.unelected()
        return LaterContext(
            kube=self.kube,
            pods=Reflector(self.kube, PODS),
            peers=Peers(keys, guard),
            keys=keys,
            events=EventRecorder(self.kube, instance="test"),
            enqueue=lambda key, *, after=0.0, priority=None: None,
            guard=guard,
            metrics=OperatorMetrics(),
            later_ms=round(later * 1000),
        )

    async def make(self, plural: str, *finalizers: str, **status: Any) -> dict[str, Any]:
        """One object."""
        meta = {"name": "x", "finalizers": list(finalizers)}
        res = KINDS[plural]
        made = await self.admin.create(res, self.namespace, {"metadata": meta, "spec": SPECS[plural]}, timeout=T)
        if status:
            version = made["metadata"]["resourceVersion"]
            made = await self.admin.patch_status(
                res, self.namespace, "x", resource_version=version, status=status, timeout=T
            )
        return made

    async def delete(self, plural: str, obj: dict[str, Any]) -> None:
        """Ask for its end."""
        await self.admin.delete(KINDS[plural], self.namespace, "x", uid=obj["metadata"]["uid"], timeout=T)

    async def found(self, plural: str) -> dict[str, Any] | None:
        """The object, or None."""
        try:
            return await self.kube.get(KINDS[plural], self.namespace, "x", timeout=T)
        except NotFound:
            return None


@pytest.fixture
async def world(cluster: LocalCluster, namespace: str) -> AsyncIterator[World]:
    async with (
        KubeClient(credential_source(str(cluster.operator_kubeconfig))) as kube,
        KubeClient(credential_source(str(cluster.kubeconfig))) as admin,
    ):
        yield World(kube, admin, namespace)


@pytest.mark.parametrize("plural", KINDS)
async def test_a_finalizer_of_ours_goes_at_its_ceiling_and_is_said(world: World, plural: str) -> None:
    made = await world.make(plural, FINALIZERS[plural], "somebody.else/keeps-this")
    in_time = world.operator()
    assert await watch_deletion(in_time, world.namespace, f"{plural}/x") == Done(), "nobody deletes it"
    await world.delete(plural, made)
    again = await watch_deletion(in_time, world.namespace, f"{plural}/x")
    assert isinstance(again, After)
    almost = world.operator(later=CEILING_SECONDS - 30)
    assert isinstance(await watch_deletion(almost, world.namespace, f"{plural}/x"), After)
    held = await world.found(plural)
    assert held is not None
    assert FINALIZERS[plural] in held["metadata"]["finalizers"]

    late = world.operator(later=CEILING_SECONDS + 5)
    assert await watch_deletion(late, world.namespace, f"{plural}/x") == Done()
    kept = await world.found(plural)
    assert kept is not None
    assert kept["metadata"]["finalizers"] == ["somebody.else/keeps-this"], "only ours is ours to remove"
    kind = KINDS[plural].kind
    assert isinstance(late.metrics, OperatorMetrics)
    assert f'rlfleet_finalizer_ceiling_total{{kind="{kind}"}} 1.0' in late.metrics.render().decode()
    assert late.events.pending == 1
    await world.admin.patch_metadata(
        KINDS[plural],
        world.namespace,
        "x",
        resource_version=kept["metadata"]["resourceVersion"],
        finalizers=[],
        timeout=T,
    )
    assert await world.found(plural) is None
    assert await watch_deletion(late, world.namespace, f"{plural}/x") == Done()


async def test_a_finalizer_is_removed_from_the_object_that_was_meant_and_from_no_other(world: World) -> None:
    first = await world.make("syncrounds", FINALIZERS["syncrounds"])
    await world.delete("syncrounds", first)
    await release(world.operator(), SYNCROUNDS, first)
    assert await world.found("syncrounds") is None
    again = await world.make("syncrounds", FINALIZERS["syncrounds"])
    await world.delete("syncrounds", again)
    await release(world.operator(), SYNCROUNDS, first)  # late, and for the one before
    held = await world.found("syncrounds")
    assert held is not None
    assert held["metadata"]["finalizers"] == [FINALIZERS["syncrounds"]]


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_claimed_round_whose_pipeline_is_gone_is_told_and_let_go(world: World, deleted: bool) -> None:
    lease = {"holder": "h", "generation": 7, "acquiredAt": "2026-01-01T00:00:00Z", "renewedAt": "2026-01-01T00:00:00Z"}
    made = await world.make("syncrounds", FINALIZERS["syncrounds"], phase="Transferring", lease=lease)
    if deleted:
        await world.delete("syncrounds", made)
        made = (await world.found("syncrounds")) or made
    await bury(world.operator(), world.namespace, [made])
    left = await world.found("syncrounds")
    if deleted:
        assert left is None
        return
    assert left is not None
    assert not left["metadata"].get("finalizers")
    assert left["status"]["phase"] == "Failed"
    assert left["status"]["failure"]["reason"] == "PipelineNotFound"


async def test_a_round_that_nobody_claimed_waits_for_its_pipeline(world: World) -> None:
    made = await world.make("syncrounds")
    await bury(world.operator(), world.namespace, [made])
    assert await world.found("syncrounds") == made
