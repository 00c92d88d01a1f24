"""Fixtures: one engine, one gate, one router per test; every process is ended by its own handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gate.kit import Engine, Gate, Operator, Router, address


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    started = Engine(tmp_path)
    try:
        yield started.up()
    finally:
        started.close()


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
    return make_gate(engine.url, engine.host)


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
