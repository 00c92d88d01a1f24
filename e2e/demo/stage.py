"""The stage of the demo: one local cluster with its operator, and what the demo asks of them.

Invariants: everything lies below one state folder and every process carries the cluster's mark, so one call removes
all of it, whatever happened before, and a guard makes that call when we are killed; the operator runs under its own
service account, never as admin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import processes
from e2e.cluster.guard import Guard
from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import ROOT, ClusterError, LocalCluster
from e2e.cluster.processes import CLUSTER_MARK, Process
from e2e.demo.follow import tail

MANIFESTS = Path(__file__).parent / "manifests"
NAMESPACE = "demo"
NODES = 4
_POLL_SECONDS = 0.5
#: The training needs the cores more than we do.
_CHECK_SECONDS = 3.0
_OPERATOR_STOP_SECONDS = 10.0

Say = Callable[[str], None]
Obj = dict[str, Any]


class DemoError(Exception):
    """The demo cannot go on. ``logs`` holds the last lines of what failed, as (title, lines)."""

    def __init__(self, message: str, logs: list[tuple[str, list[str]]] | None = None) -> None:
        super().__init__(message)
        self.logs = logs or []


class Stage:
    """Cluster and operator below ``state``. ``up`` starts them, ``down`` removes everything.

    ``guarded``: they also go when this process is killed; not for what is to outlive it. ``recast``: changes objects of
    the manifests before they are applied. ``patience``: how many times longer than usual to wait for anything.
    """

    def __init__(
        self, state: Path, say: Say, *, guarded: bool, recast: Callable[[Obj], Obj] | None = None, patience: float = 1.0
    ) -> None:
        self.cluster = LocalCluster(state, nodes=NODES, say=say)
        self.recast = recast
        self._patience = patience
        self._guarded = guarded
        self._guard: Guard | None = None
        self._say = say
        self._operator: Process | None = None

    # ---- life -------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Starts control plane, nodes and operator. Raises ClusterError, BuildError or DemoError."""
        if self._guarded:
            self._guard = Guard(self.cluster.state)
        self.cluster.up()
        self._start_operator()

    def down(self) -> None:
        """Stops every process and removes every file. Can be called at any time, more than once."""
        if self._operator is not None:
            processes.stop([self._operator], grace_seconds=_OPERATOR_STOP_SECONDS)
            self._operator = None
        self.cluster.down()
        if self._guard is not None:
            self._guard.release()
            self._guard = None

    def _start_operator(self) -> None:
        self._operator = processes.start(
            "operator",
            [sys.executable, "-m", "rlfleet.app.cli", "operator", "--health-bind=127.0.0.1:0", "--log-format=text"],
            log=self.operator_log,
            environment={**self.environment, "KUBECONFIG": str(self.cluster.operator_kubeconfig)},
            record=self.cluster.state / "run" / "operator.json",
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes beside the cluster; it carries the cluster's mark, so none outlives it."""
        record = json.loads((self.cluster.state / "cluster.json").read_text())
        return {
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self.cluster.state),
            CLUSTER_MARK: record["mark"],
        }

    @property
    def operator_log(self) -> Path:
        """The operator's output."""
        return self.cluster.state / "logs" / "operator.log"

    # ---- objects ----------------------------------------------------------------------------------------------

    def apply(self, *files: Path) -> None:
        """Applies manifests into the demo's namespace."""
        if self.recast is not None:
            objects = [self.recast(o) for file in files for o in yaml.safe_load_all(file.read_text())]
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
            self.cluster.kubectl("apply", "--server-side", "--namespace", NAMESPACE, "-f", "-", input=text)
            return
        arguments = [word for file in files for word in ("-f", str(file))]
        self.cluster.kubectl("apply", "--server-side", "--namespace", NAMESPACE, *arguments)

    def items(self, kind: str, *arguments: str) -> list[Obj]:
        """All objects of a kind in the demo's namespace."""
        found: list[Obj] = self.cluster.get(kind, "--namespace", NAMESPACE, *arguments)["items"]
        return found

    def one(self, kind: str, name: str) -> Obj:
        """One object of the demo's namespace."""
        found: Obj = self.cluster.get(kind, name, "--namespace", NAMESPACE)
        return found

    def config(self, name: str, values: dict[str, str]) -> None:
        """Writes a ConfigMap: what a manifest cannot know beforehand."""
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "data": values,
            }
        )

    # ---- waiting ----------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], Any], seconds: float, *watched: str) -> Any:
        """Waits until ``condition`` returns something true, and returns it.

        Ends at once, with logs, when the operator or a container of the watched pods has failed.
        """
        seconds *= self._patience
        deadline = time.monotonic() + seconds
        checked = 0.0
        while not (found := condition()):
            if time.monotonic() - checked > _CHECK_SECONDS:
                self.check(*watched)
                checked = time.monotonic()
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not within {seconds:.0f} s", self.logs())
            time.sleep(_POLL_SECONDS)
        return found

    def check(self, *watched: str) -> None:
        """Raises DemoError when the operator has ended, or a container of one of these pods has failed."""
        if self._operator is not None and not self._operator.alive():
            raise DemoError("the operator ended", [("operator", tail(self.operator_log, 25))])
        if not watched:
            return
        for pod in self.items("pods"):
            if pod["metadata"]["name"] not in watched:
                continue
            for status in _statuses(pod):
                if (code := _failed(status)) is not None:
                    name, container = pod["metadata"]["name"], status["name"]
                    raise DemoError(
                        f"container {container} of pod {name} ended with exit code {code}",
                        [(f"{name}/{container}", self.log_tail(name, container, 25))],
                    )

    def pod_ready(self, name: str) -> Obj | None:
        """The pod when it is Ready, else None."""
        for pod in self.items("pods"):
            conditions = pod.get("status", {}).get("conditions", [])
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            if pod["metadata"]["name"] == name and ready:
                return pod
        return None

    def volume(self, pod: Obj, name: str) -> Path:
        """The host directory that stands for a volume of a running pod."""
        return self.cluster.state / "hollow" / "pods" / str(pod["metadata"]["uid"]) / "volumes" / name

    # ---- logs -------------------------------------------------------------------------------------------------

    def log(self, pod: str, container: str) -> Path | None:
        """The file with a container's output; None while the node does not know the pod."""
        try:
            return self.cluster.hollow.log(NAMESPACE, pod, container)
        except HollowError:
            return None

    def log_tail(self, pod: str, container: str, lines: int = 15) -> list[str]:
        """The last lines of a container."""
        path = self.log(pod, container)
        return ["(no output)"] if path is None else tail(path, lines)

    def logs(self) -> list[tuple[str, list[str]]]:
        """The last lines of everything that looks wrong, and what the resources say about it."""
        found = [("what the resources say", self._conditions()), ("operator", tail(self.operator_log))]
        for pod in self.items("pods"):
            for status in _statuses(pod):
                odd = _failed(status) is not None or status.get("restartCount") or not status.get("ready")
                if odd and "waiting" not in status.get("state", {}):
                    name, container = pod["metadata"]["name"], status["name"]
                    found.append((f"{name}/{container}", self.log_tail(name, container)))
        return found

    def _conditions(self) -> list[str]:
        lines = []
        for kind in ("rlpipelines", "enginepools"):
            for obj in self.items(kind):
                for c in obj.get("status", {}).get("conditions", []):
                    lines.append(
                        f"{kind}/{obj['metadata']['name']}: {c['type']}={c['status']} "
                        f"{c.get('reason', '')}: {c.get('message', '')}"
                    )
        for obj in self.items("syncrounds"):
            status = obj.get("status", {})
            if status.get("phase") == "Succeeded":
                continue
            failure = status.get("failure") or {}
            lines.append(
                f"syncrounds/{obj['metadata']['name']}: {status.get('phase')} {failure.get('stage', '')} "
                f"{failure.get('reason', '')}: {failure.get('message', '')}"
            )
        for pod in self.items("pods"):
            lines.append(f"pods/{pod['metadata']['name']}: {pod.get('status', {}).get('phase')}")
        return lines


def _statuses(pod: Obj) -> list[Obj]:
    status = pod.get("status", {})
    found: list[Obj] = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return found


def _failed(status: Obj) -> int | None:
    """The exit code of a container that has ended badly."""
    for state in (status.get("state", {}), status.get("lastState", {})):
        code = state.get("terminated", {}).get("exitCode", 0)
        if code:
            return int(code)
    return None


__all__ = ["MANIFESTS", "NAMESPACE", "ClusterError", "DemoError", "Stage"]
