"""Which pods the command line takes for engines: those that pools make, and those that they adopt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlfleet.cli.cluster import Cluster
from rlfleet.cli.engines import engine_pods, is_engine
from rlfleet.cli.failures import CliError
from rlfleet.client.credentials import Access
from tests.plan.pool_kit import pool
from tests.plan.test_adopt import adopting, controlled, pod
from tests.web.apiserver import Apiserver


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A pool with a pod, and a pool that adopts."""
    made = controlled(pod("made", **{"rlfleet.dev/pool": "a"}))
    made["metadata"]["ownerReferences"][0] |= {"kind": "EnginePool", "apiVersion": "rlfleet.dev/v1alpha1", "name": "a"}
    pods = [
        made,
        pod("adopted", app="x"),
        controlled(pod("evicted", app="x"), "Failed"),
        pod("gateless", gated=False, app="x"),
        pod("stranger", app="y"),
    ]
    pools = [pool(), adopting("b", app="x")]
    served = Apiserver({"pods": pods, "enginepools": pools, "rlpipelines": [{"metadata": {"name": "p"}}]})
    await served.server.start_server()
    found = Cluster(Access(str(served.server.make_url("")).rstrip("/"), None, lambda: "Bearer all"), "ns")
    yield found
    found.close()
    await served.server.close()


async def test_engines_are_pods_that_pools_make_or_adopt(cluster: Cluster) -> None:
    found = await asyncio.to_thread(engine_pods, cluster)
    assert [p["metadata"]["name"] for p in found] == ["adopted", "evicted", "made"], "its log may tell why it ended"


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [("made", {"rlfleet.dev/pool": "a"}, True), ("adopted", {"app": "x"}, True), ("stranger", {"app": "y"}, False)],
)
async def test_a_person_may_put_an_adopted_engine_out_of_service(
    cluster: Cluster, name: str, labels: dict[str, str], expected: bool
) -> None:
    assert await asyncio.to_thread(is_engine, cluster, pod(name, **labels)) is expected


async def test_a_name_stays_one_part_of_the_path_whatever_is_in_it(cluster: Cluster) -> None:
    assert (await asyncio.to_thread(cluster.get, "rlpipelines", "p"))["metadata"]["name"] == "p"
    for name in ("p?x=1", "p#x"):
        with pytest.raises(CliError, match="not found"):
            await asyncio.to_thread(cluster.get, "rlpipelines", name)
