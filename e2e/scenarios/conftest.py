"""Fixtures of the round scenarios: an operator process per test module, a fleet per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.local import LocalCluster
from e2e.engines.fixtures import expected, models, private_network, told
from e2e.scenarios.kit import Fleet, Operator, operators

__all__ = ["expected", "models", "private_network", "told"]


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Operators are forked by a process that has imported them."""
    with operators() as Operator.nursery:
        yield
    Operator.nursery = None


@pytest.fixture(scope="module")
def operator(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that is ready; a test that kills it starts it again."""
    one = Operator(cluster, tmp_path_factory.mktemp("operator"))
    one.start()
    yield one
    one.stop()


@pytest.fixture
def fleet(cluster: LocalCluster, operator: Operator, namespace: str) -> Fleet:
    """An empty namespace in which a test makes its pipeline, pool and trainer."""
    if operator.process is None:
        operator.start()
    return Fleet(cluster, namespace)
