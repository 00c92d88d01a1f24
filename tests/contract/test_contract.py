"""One contract for all adapters: against the reference engine always, against real engines where they are installed.

What is observed at real engines is committed (results.json); the reference engine must answer alike, but for what
differences.py explains. ``make test-engines`` runs the real ones and compares; with ``RLFLEET_WRITE_CONTRACT=1`` it
writes the file anew.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.engines.environments import installed
from e2e.engines.fixtures import DISK
from tests.contract import results
from tests.contract.bench import Bench, Missed, plain
from tests.contract.cases import CASES
from tests.contract.subjects import REAL, REFERENCE, ROOT, Real, Reference, Subject
from tests.netns import INSIDE

KINDS = ("SGLang", "VLLM")
#: A request may end before this process comes to meet it.
TRIES = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that real engines start with."""
    folder = tmp_path_factory.mktemp("models")
    python = next((p for kind in KINDS if (p := installed(kind)) is not None), None)
    if python is not None and os.environ.get(INSIDE):
        environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-m", "e2e.engines.tiny", str(folder), str(DISK)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, where), id=f"{kind}-{where}", marks=[pytest.mark.engines] if where == REAL else [])
        for where in (REFERENCE, REAL)
        for kind in KINDS
    ],
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Subject]:
    kind, where = request.param
    if where == REAL:
        if not os.environ.get(INSIDE):
            pytest.skip("real engines listen on every interface: run them by `make test-engines`")
        if installed(kind) is None:
            pytest.fail(f"{kind} is not installed: make engines")
    made = (Reference if where == REFERENCE else Real)(kind, tmp_path_factory.mktemp(f"{kind}-{where}"), models)
    try:
        yield made.up()
    finally:
        made.close()


@pytest.fixture
async def bench(subject: Subject, tmp_path: Path) -> AsyncIterator[Bench]:
    adapter = subject.adapter()
    made = Bench(subject, adapter, tmp_path)
    try:
        await made.restore()
        yield made
    finally:
        await adapter.close()


@pytest.mark.parametrize("name", list(CASES))
async def test_an_adapter_keeps_its_promise(bench: Bench, name: str) -> None:
    case = CASES[name]
    missing = [c for c in case.covers if c not in bench.capabilities]
    if missing and not name.startswith("pause_"):
        pytest.skip(f"this engine has no {', '.join(missing)}")
    observed: Any = None
    async with asyncio.timeout(300):
        for left in reversed(range(TRIES)):
            try:
                observed = plain(await case.run(bench))
                break
            except Missed:
                assert left, "its request always ended before it was met: make it longer"
                await bench.restore()
    results.compare(bench.subject.kind, bench.subject.where, name, observed, sorted(bench.capabilities))
