"""pytest fixtures for scenarios with real engines: their checkpoints, what is expected of them, and their pools."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.engines.asking import RealEngine
from e2e.engines.environments import ENVIRONMENTS, installed
from e2e.engines.serving import template
from e2e.scenarios.kit import ROOT, Fleet
from tests.netns import INSIDE

#: Seeds of the models that trainers publish.
SEEDS = (100, 101, 102)
#: The seed of the checkpoint that engines start with.
DISK = 103
Expected = dict[int, list[list[int]]]


@pytest.fixture(scope="session", autouse=True)
def private_network() -> Iterator[None]:
    """Nothing of this runs in anybody's network; SGLang's files in shared memory go afterwards."""
    if not os.environ.get(INSIDE):
        pytest.skip("real engines listen on every interface: run them by `make test-engines`")
    shared = Path("/dev/shm")
    before = set(shared.glob("sglang_*"))
    yield
    for left in set(shared.glob("sglang_*")) - before:
        left.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def models(private_network: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by seed, and the answers that transformers gives for each."""
    python = next((p for engine in ENVIRONMENTS if (p := installed(engine)) is not None), None)
    if python is None:
        pytest.fail("no engine is installed: make engines")
    folder = tmp_path_factory.mktemp("models")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "e2e.engines.tiny", str(folder), *map(str, (*SEEDS, DISK))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def expected(models: Path) -> Expected:
    """By seed: the reference's greedy answers. They tell the seeds apart."""
    read = {int(seed): answers for seed, answers in json.loads((models / "expected.json").read_text()).items()}
    assert len({json.dumps(answers) for answers in read.values()}) == len(SEEDS) + 1
    return read


def start(fleet: Fleet, engine: str, models: Path, replicas: int = 1, **spec: Any) -> list[RealEngine]:
    """A pool of real engines with the checkpoint of ``DISK``, ready."""
    if installed(engine) is None:
        pytest.fail(f"{engine} is not installed: make engines")
    made = {
        "engine": {"type": engine, "gpusPerEngine": 1},
        "source": {"template": template(engine, models, DISK)},
        **spec,
    }
    fleet.pool(replicas, **made)
    return [RealEngine(engine, pod) for pod in fleet.ready_engines(replicas, 300)]
