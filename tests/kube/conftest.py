"""A client of the test cluster, and one whose connections run through a proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials, load
from rlfleet.kube.limiter import RateLimiter
from tests.kube.proxy import Proxy, proxy_to


@pytest.fixture
async def credentials(cluster: LocalCluster) -> Credentials:
    return await load(str(cluster.kubeconfig))


@pytest.fixture
async def kube(credentials: Credentials) -> AsyncIterator[KubeClient]:
    async def source() -> Credentials:
        return credentials

    async with KubeClient(source, limiter=RateLimiter(1000, 1000)) as client:
        yield client


@pytest.fixture
async def proxy(credentials: Credentials) -> AsyncIterator[Proxy]:
    async with proxy_to(credentials.server) as running:
        yield running


@pytest.fixture
async def proxied(credentials: Credentials, proxy: Proxy) -> AsyncIterator[KubeClient]:
    async def source() -> Credentials:
        return replace(credentials, server=proxy.url)

    async with KubeClient(source, limiter=RateLimiter(1000, 1000)) as client:
        yield client
