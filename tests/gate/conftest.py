"""Fixtures: a gate per test, an engine and a router that tests share; every process is ended by its own handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gate.kit import Engine, Gate, Operator, Router, address


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """The engine that tests share, the last of the list; one that a test killed is followed by a new one."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A running engine that looks fresh: not paused, label "default", no faults. Its weights may be any."""
    if not engines or engines[-1].process.popen.poll() is not None:
        engines.append(Engine(tmp_path_factory.mktemp("engine")).up())
    engines[-1].reset()
    return engines[-1]


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[..., Gate]]:
    made: list[Gate] = []

    def make(engine_url: str, host: str | None = None, **env: str) -> Gate:
        directory = tmp_path / f"gate{len(made)}"
        directory.mkdir()
        gate = Gate(directory, engine_url, host or address(), **env)
        made.append(gate)
        return gate.start()

    yield make
    for gate in made:
        gate.close()


@pytest.fixture
def gate(engine: Engine, make_gate: Callable[..., Gate]) -> Gate:
    return make_gate(engine.url)


@pytest.fixture
def operator(gate: Gate) -> Operator:
    """Enrolled, and the start-up promise holds."""
    return Operator(gate).ready()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    try:
        yield made.start()
    finally:
        made.close()
