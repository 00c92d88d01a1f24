"""What the tests of the resources share: the documented examples, edits of them, and the apiserver's answers."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.local import ClusterError, LocalCluster

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
FILES = {
    "RLPipeline": "pipeline.yaml",
    "EnginePool": "pool.yaml",
    "SyncRound": "round.yaml",
    "TrainerDemand": "demand.yaml",
}

Example = Callable[..., dict[str, Any]]


def edited(obj: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with values set by path ("spec.a.0.b"); None removes the field."""
    made = copy.deepcopy(dict(obj))
    for path, value in edits.items():
        at: Any = made
        *parents, last = path.split(".")
        for step in parents:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        if value is None:
            at.pop(last, None)
        elif isinstance(at, list):
            at[int(last)] = value
        else:
            at[last] = value
    return made


@pytest.fixture(scope="session")
def example() -> Example:
    """``example("RLPipeline", {"spec.transport.mode": "Broadcast"})``: a documented example, edited."""
    loaded = {kind: yaml.safe_load((EXAMPLES / name).read_text()) for kind, name in FILES.items()}

    def make(kind: str, edits: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return edited(loaded[kind], edits or {})

    return make


class Server:
    """The apiserver as a user of kubectl meets it, in one namespace."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self._cluster = cluster
        self.namespace = namespace

    def kubectl(self, *args: str, stdin: Any = None) -> str:
        """Run kubectl; ClusterError when it fails."""
        text = None if stdin is None else json.dumps(stdin)
        return self._cluster.kubectl(*args, "--namespace", self.namespace, input=text)

    def create(self, obj: dict[str, Any], *, dry: bool = False) -> dict[str, Any]:
        """Create it and return what the server stored (or would store)."""
        dry_run = ["--dry-run=server"] if dry else []
        made: dict[str, Any] = json.loads(self.kubectl("create", "-f", "-", "-o", "json", *dry_run, stdin=obj))
        return made

    def patch(self, obj: dict[str, Any], patch: dict[str, Any], *flags: str) -> dict[str, Any]:
        """Merge-patch the object and return what the server stored."""
        name = f"{obj['kind'].lower()}s.rlfleet.dev/{obj['metadata']['name']}"
        args = ["patch", name, "--type=merge", "-p", json.dumps(patch), "-o", "json", *flags]
        made: dict[str, Any] = json.loads(self.kubectl(*args))
        return made

    def answer(self, call: Callable[[], Any]) -> str:
        """What kubectl says when the call is refused; fails when it is not."""
        with pytest.raises(ClusterError) as refused:
            call()
        return str(refused.value)


@pytest.fixture
def server(cluster: LocalCluster, namespace: str) -> Server:
    """The apiserver, in a namespace of the test's own."""
    return Server(cluster, namespace)


@pytest.fixture(scope="module")
def shared_server(cluster: LocalCluster) -> Iterator[Server]:
    """The apiserver, in a namespace that a module's tests share: they run dry or give every object its own name."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    cluster.kubectl("create", "namespace", name)
    yield Server(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def own_name() -> dict[str, str]:
    """An edit that gives an example a name of the test's own."""
    return {"metadata.name": f"n-{uuid.uuid4().hex[:10]}"}
