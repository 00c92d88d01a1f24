"""The elector and the guard at the real apiserver: conditional writes, lost answers, deleted Leases, cut renewals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Caller, Peer, Peers
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials
from rlfleet.kube.errors import Conflict, NotLeader, Unknown
from rlfleet.kube.guard import Guard
from rlfleet.kube.leader import Elector
from rlfleet.kube.limiter import RateLimiter
from rlfleet.kube.resources import LEASES, Resource
from rlfleet.plan.leader import Timing
from tests.kube.proxy import Mode, Proxy

pytestmark = pytest.mark.cluster

CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
T = 10.0
#: Renewals are frequent and their deadline is long, so that a busy machine ends no term.
TIMING = Timing(lease=6, renew=4, retry=0.2)


class Seen:
    """What guard and elector report."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.transitions = -1
        self.failures = 0

    def mutation_refused(self, target: str) -> None:
        self.refused.append(target)

    def leading(self, leads: bool, transitions: int) -> None:
        self.transitions = transitions

    def renewal_failed(self) -> None:
        self.failures += 1


@dataclass
class Candidate:
    """One process's part in an election."""

    name: str
    elector: Elector
    guard: Guard
    seen: Seen
    running: asyncio.Task[None]

    @property
    def leads(self) -> bool:
        return self.guard.leads

    async def stop(self) -> None:
        """As at SIGKILL: nothing is released."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


@asynccontextmanager
async def candidate(client: KubeClient, namespace: str, name: str, timing: Timing = TIMING) -> AsyncIterator[Candidate]:
    seen = Seen()
    guard = Guard(margin=timing.margin, observer=seen)
    elector = Elector(client, guard, namespace=namespace, name="lease", identity=name, timing=timing, observer=seen)
    one = Candidate(name, elector, guard, seen, asyncio.create_task(elector.run()))
    try:
        yield one
    finally:
        await one.stop()


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def lease(kube: KubeClient, namespace: str) -> dict[str, Any]:
    return await kube.get(LEASES, namespace, "lease", timeout=T)


async def rewrite(kube: KubeClient, namespace: str, change: Callable[[dict[str, Any]], None]) -> None:
    """A stranger changes the Lease, as often as it takes against the holder's renewals."""
    async with asyncio.timeout(120):
        while True:
            obj = await lease(kube, namespace)
            change(obj)
            try:
                await kube.replace(LEASES, namespace, "lease", obj, timeout=T)
                return
            except Conflict:
                continue


async def test_of_several_that_start_together_one_leads(kube: KubeClient, namespace: str) -> None:
    async with candidate(kube, namespace, "a") as a, candidate(kube, namespace, "b") as b:
        await until(lambda: a.leads or b.leads)
        first, second = (a, b) if a.leads else (b, a)
        made = await lease(kube, namespace)
        for _ in range(3):  # the other one has looked and stood by while renewals went on
            before = (await lease(kube, namespace))["spec"]["renewTime"]
            async with asyncio.timeout(120):
                while (now := await lease(kube, namespace))["spec"]["renewTime"] == before:
                    await asyncio.sleep(0.02)
            assert now["spec"]["holderIdentity"] == first.name
        assert (now["metadata"]["uid"], now["spec"]["leaseTransitions"]) == (made["metadata"]["uid"], 0)
        assert now["spec"]["leaseDurationSeconds"] == 6
        assert first.leads
        assert not second.leads


async def test_a_silent_leader_is_followed_and_then_learns_it(kube: KubeClient, namespace: str) -> None:
    async with candidate(kube, namespace, "a") as a:
        await until(lambda: a.leads)
        # What its guard goes by is its own clock: it allows nothing long before another one leads.
        await a.stop()
        async with candidate(kube, namespace, "b") as b:
            await until(lambda: not a.leads)
            assert not b.leads
            await until(lambda: b.leads)
            found = await lease(kube, namespace)
            assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("b", 1)


async def test_a_released_lease_is_taken_without_waiting(kube: KubeClient, namespace: str) -> None:
    slow = Timing(lease=600, renew=500, retry=60)
    async with candidate(kube, namespace, "a", slow) as a, candidate(kube, namespace, "b", slow) as b:
        await until(lambda: a.leads or b.leads)
        first, second = (a, b) if a.leads else (b, a)
        await first.stop()
        with pytest.raises(RuntimeError, match="must be revoked"):
            await first.elector.release()
        first.guard.revoke("stopping")
        await first.elector.release()
        # Neither the lease nor a look every minute could tell it within the time of this test.
        await until(lambda: second.leads, 30)
        assert not first.leads
        assert (await lease(kube, namespace))["spec"]["leaseTransitions"] == 1


async def test_a_leader_that_cannot_renew_stops_before_it_ends(
    kube: KubeClient, proxied: KubeClient, proxy: Proxy, namespace: str
) -> None:
    async with candidate(proxied, namespace, "a") as a:
        await until(lambda: a.leads)
        proxy.mode = Mode.DROP
        async with candidate(kube, namespace, "b") as b:
            await until(lambda: not a.leads)
            assert not b.leads, "mutations stop before anybody else may lead"
            async with asyncio.timeout(120):
                await a.running
            await until(lambda: b.leads)
            a.guard.lead(float("inf"))
            assert not a.leads, "the end of a term is final"


async def test_renewals_whose_answers_are_lost_keep_the_term(
    kube: KubeClient, proxied: KubeClient, proxy: Proxy, namespace: str
) -> None:
    async with candidate(proxied, namespace, "a") as a:
        await until(lambda: a.leads)
        for _ in range(4):
            before = (await lease(kube, namespace))["spec"]["renewTime"]
            failures = a.seen.failures
            proxy.mode = Mode.CUT
            await until(lambda seen=failures: a.seen.failures > seen)
            proxy.mode = Mode.PASS
            async with asyncio.timeout(120):
                while (await lease(kube, namespace))["spec"]["renewTime"] == before:
                    await asyncio.sleep(0.02)
        assert a.leads
        assert not a.running.done()


async def test_a_first_write_whose_answer_is_lost_is_recognized(kube: KubeClient, namespace: str) -> None:
    class LostAnswer:
        """The creation is carried out, and its answer lost."""

        def __getattr__(self, name: str) -> Any:
            return getattr(kube, name)

        async def create(self, *args: Any, **kwargs: Any) -> None:
            await kube.create(*args, **kwargs)
            raise Unknown("connection broke")

    # Not recognized, the Lease would have to expire first.
    lossy: Any = LostAnswer()
    async with candidate(lossy, namespace, "a", Timing(lease=600, renew=500, retry=0.2)) as a:
        await until(lambda: a.leads)


@pytest.mark.parametrize("how", ["deleted", "taken", "released", "counted back"])
async def test_a_leader_whose_lease_is_meddled_with_ends(kube: KubeClient, namespace: str, how: str) -> None:
    async with candidate(kube, namespace, "a") as a:
        await until(lambda: a.leads)
        if how == "deleted":
            uid = (await lease(kube, namespace))["metadata"]["uid"]
            await kube.delete(LEASES, namespace, "lease", uid=uid, timeout=T)
        else:
            change = {
                "taken": {"holderIdentity": "x", "leaseTransitions": 1},
                "released": {"holderIdentity": ""},
                "counted back": {"leaseTransitions": 7},
            }[how]
            await rewrite(kube, namespace, lambda obj: obj["spec"].update(change))
        async with asyncio.timeout(120):
            await a.running
        assert not a.leads


async def test_a_note_on_the_lease_changes_nothing(kube: KubeClient, namespace: str) -> None:
    async with candidate(kube, namespace, "a") as a:
        await until(lambda: a.leads)
        await rewrite(kube, namespace, lambda obj: obj["metadata"].update(annotations={"who": "was here"}))
        noted = (await lease(kube, namespace))["spec"]["renewTime"]
        async with asyncio.timeout(120):
            while (now := await lease(kube, namespace))["spec"]["renewTime"] == noted:
                await asyncio.sleep(0.02)
        assert a.leads
        assert now["metadata"]["annotations"] == {"who": "was here"}


async def test_a_lease_made_anew_goes_on_counting(kube: KubeClient, namespace: str) -> None:
    async with candidate(kube, namespace, "a") as a, candidate(kube, namespace, "b") as b:
        await until(lambda: a.leads or b.leads)
        first, second = (a, b) if a.leads else (b, a)
        await rewrite(kube, namespace, lambda obj: obj["spec"].update(leaseTransitions=41, holderIdentity="x"))
        async with asyncio.timeout(120):
            await first.running
        await until(lambda: second.seen.transitions == 41)
        uid = (await lease(kube, namespace))["metadata"]["uid"]
        await kube.delete(LEASES, namespace, "lease", uid=uid, timeout=T)
        await until(lambda: second.leads)
        assert (await lease(kube, namespace))["spec"]["leaseTransitions"] == 42


# ---------------------------------------------------------------------------------------------- what is guarded


async def test_who_does_not_lead_sends_no_write_and_no_order(credentials: Credentials, namespace: str) -> None:
    async def source() -> Credentials:
        return credentials

    seen = Seen()
    guard = Guard(margin=1, clock=lambda: 100.0, observer=seen)
    # Nobody listens there: an order that were sent would be Silent, not NotLeader.
    gate, caller = Peer("g", "uid", "http://127.0.0.1:9"), Caller("p", "o", 1)
    peers = Peers(SigningKeys(bytes(32)), guard)
    config = {"metadata": {"name": "c"}}
    async with KubeClient(source, limiter=RateLimiter(1000, 1000), guard=guard) as client:
        for _ in range(2):
            with pytest.raises(NotLeader):
                await client.create(CONFIGMAPS, namespace, config, timeout=T)
            with pytest.raises(NotLeader):
                await peers.gate_fence(gate, caller)
            guard.lead(100.9)  # less than the margin
        assert seen.refused == ["apiserver", "peer"] * 2
        assert not (await client.list(CONFIGMAPS, namespace, timeout=T, field_selector="metadata.name=c")).items
        guard.lead(101)
        made = await client.create(CONFIGMAPS, namespace, config, timeout=T)
        assert await guard.quiet(0)
        guard.revoke("test")
        with pytest.raises(NotLeader, match="test"):
            await client.delete(CONFIGMAPS, namespace, "c", uid=made["metadata"]["uid"], timeout=T)
    await peers.close()


async def test_quiet_waits_for_mutations_under_way() -> None:
    guard = Guard.unelected()
    with guard.mutation():
        guard.revoke("stopping")
        assert not await guard.quiet(0.01)
    assert await guard.quiet(0.01)
