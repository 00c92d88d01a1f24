"""pytest fixtures for scenarios with real engines: their checkpoints, what is expected of them, and their pools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.hollow.control import HollowError
from e2e.engines.asking import RealEngine
from e2e.engines.environments import ENVIRONMENTS, installed
from e2e.engines.making import make, shared_memory
from e2e.engines.namespace import inside
from e2e.engines.serving import pool
from e2e.scenarios.kit import Fleet

#: Seeds of the models that trainers publish.
SEEDS = (100, 101, 102)
#: The seed of the checkpoint that engines start with.
DISK = 103
Expected = dict[int, list[list[int]]]
#: Marks of tests with real engines in pods, and of those that are none of CI's.
RUNS = [pytest.mark.usefixtures("private_network", "told"), pytest.mark.cluster, pytest.mark.engines]
LONG_RUNS = [*RUNS, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def private_network() -> Iterator[None]:
    """Nothing of this runs in anybody's network; SGLang's files in shared memory go afterwards."""
    if not inside():
        pytest.skip("real engines listen on every interface: run them by `make test-engines`")
    with shared_memory():
        yield


@pytest.fixture(scope="session")
def models(private_network: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by seed, and the answers that transformers gives for each."""
    python = next((p for engine in ENVIRONMENTS if (p := installed(engine)) is not None), None)
    if python is None:
        pytest.fail("no engine is installed: make engines")
    folder = tmp_path_factory.mktemp("models")
    make(python, folder, (*SEEDS, DISK))
    return folder


@pytest.fixture(scope="session")
def expected(models: Path) -> Expected:
    """By seed: the reference's greedy answers. They tell the seeds apart."""
    read = {int(seed): answers for seed, answers in json.loads((models / "expected.json").read_text()).items()}
    assert len({json.dumps(answers) for answers in read.values()}) == len(SEEDS) + 1
    return read


@pytest.fixture
def told(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[None]:
    """After a failure: what pools and pods say, and the last lines of every container, before all of it goes."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        return
    for kind in ("rlpipelines", "enginepools", "pods"):
        for obj in fleet.cluster.get(kind, "-n", fleet.namespace)["items"]:
            status = obj.get("status") or {}
            said = [c for c in status.get("conditions") or [] if c.get("message") or c.get("status") != "True"]
            print(f"{kind} {obj['metadata']['name']}: {status.get('phase', '')} {json.dumps(said)}")
            for part in obj["spec"].get("containers") or []:
                with suppress(HollowError, OSError):
                    log = fleet.cluster.hollow.log(fleet.namespace, obj["metadata"]["name"], part["name"])
                    print(f"  {part['name']}:", *log.read_text(errors="replace").splitlines()[-12:], sep="\n    ")


#: Deadlines for engines that share two cores with everything else.
SYNC: dict[str, Any] = {"deadlines": {"pendingSeconds": 120, "stagingSeconds": 60, "pausedSeconds": 60}}
SERIALIZED = {"mode": "CPUSerialize", "backend": "gloo"}
BROADCAST = {"mode": "Broadcast", "backend": "gloo"}


def pipeline(fleet: Fleet, transport: dict[str, Any], **how: Any) -> None:
    """Create or change the pipeline; ``how`` goes into spec.sync."""
    from e2e.scenarios.test_transports import NODE, TRAIN

    fleet.pipeline(transport=transport, trainer={"gpus": [{"node": NODE, "devices": TRAIN}]}, sync={**SYNC, **how})


def sync(fleet: Fleet, version: int, seed: int) -> dict[str, Any]:
    """Publish, order a round and wait for its success; its status. What it cost is printed."""
    status: dict[str, Any] = fleet.sync(version, seed=seed)["status"]
    assert status["phase"] == "Succeeded", status
    plan, took = status["plan"], status["timings"]
    print(f"version {version}: {plan.get('serialized', 0)} serialized, {plan.get('broadcast', 0)} broadcast, {took}")
    return status


def start(
    fleet: Fleet, kind: str, models: Path, replicas: int = 1, *, present: int = 0, **spec: Any
) -> list[RealEngine]:
    """A pool of real engines with the checkpoint of ``DISK``, ready. ``present``: engines of other pools."""
    if installed(kind) is None:
        pytest.fail(f"{kind} is not installed: make engines")
    fleet.pool(replicas, **{**pool(kind, models, DISK), **spec})
    pods = fleet.ready_engines(present + replicas, 600)
    mine = [p for p in pods if p["metadata"]["labels"]["rlfleet.dev/pool"] == spec.get("name", "e")]
    return [RealEngine.of_pod(kind, pod) for pod in mine]
