"""A fleet at the real apiserver whose operator is the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.client import Client, SyncResult
from tests.client.fleet import INCARNATION, SECONDS, Fleet
from tests.fault.proxy import FaultProxy

Sync = Callable[..., "Future[SyncResult]"]


@pytest.fixture
def fleet(cluster: LocalCluster, namespace: str) -> Fleet:
    """A namespace with the pipeline ``demo`` and a known sender."""
    made = Fleet(cluster, namespace)
    made.create_pipeline()
    made.sender_seen()
    return made


@pytest.fixture
def client(cluster: LocalCluster, fleet: Fleet) -> Iterator[Client]:
    """An admin's client."""
    with Client(fleet.namespace, "demo", cluster.kubeconfig) as made:
        yield made


@pytest.fixture
def proxy(cluster: LocalCluster, tmp_path: Path) -> Iterator[FaultProxy]:
    """A misbehaving way to the apiserver."""
    with FaultProxy(cluster.kubeconfig, tmp_path, name="trainer") as made:
        yield made


@pytest.fixture
def proxied(proxy: FaultProxy, fleet: Fleet) -> Iterator[Client]:
    """A client that talks through ``proxy``."""
    with Client(fleet.namespace, "demo", proxy.kubeconfig) as made:
        yield made


@pytest.fixture
def sync() -> Iterator[Sync]:
    """Starts ``client.sync`` in a thread, as a trainer that waits."""
    with ThreadPoolExecutor() as pool:

        def begin(client: Client, version: int, **how: Any) -> Future[SyncResult]:
            return pool.submit(client.sync, version, **({"sender_incarnation": INCARNATION, "timeout": SECONDS} | how))

        yield begin
