"""What scenarios of adopted pods share: the guide's manifests and commands, and what status says of such engines."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from e2e.scenarios.kit import ROOT, Fleet, wait_until

ENGINE = [
    "python", "-m", "e2e.sim.engine", "--host", "$(POD_IP)", "--port", "30000", "--backend", "numpy",
    "--no-health-generation",
]  # fmt: skip
SYNC = {"deadlines": {"pendingSeconds": 30, "stagingSeconds": 30, "pausedSeconds": 30}, "drainSeconds": 2}
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def manifest(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The workload and the pool of one example, for pipeline ``p``."""
    workload, pool = yaml.safe_load_all((ROOT / f"docs/examples/{name}.yaml").read_text())
    pool["spec"]["pipeline"] = "p"
    return workload, pool


def with_reference_engine(template: dict[str, Any]) -> None:
    """Put a reference engine in the place of a pod template's engine, which is its first container."""
    engine = template["spec"]["containers"][0]
    engine.pop("args", None)
    engine.update({"command": ENGINE, "env": [POD_IP]})
    template["spec"]["terminationGracePeriodSeconds"] = 1


def example() -> tuple[dict[str, Any], dict[str, Any]]:
    """The documented StatefulSet and pool, with a reference engine in place of SGLang."""
    workload, pool = manifest("adopt")
    with_reference_engine(workload["spec"]["template"])
    return workload, pool


def guide(folder: Path) -> list[str]:
    """The guide's blocks of commands, and in ``folder`` the files that they name."""
    page = (ROOT / "docs/guides/adopt.md").read_text()
    found = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    examples = folder / "docs/examples"
    examples.mkdir(parents=True)
    (examples / "adopt.yaml").write_text(yaml.safe_dump_all(example()))
    (examples / "adopt-tls.yaml").write_text((ROOT / "docs/examples/adopt-tls.yaml").read_text())
    return [block.replace("rlpipeline demo", "rlpipeline p") for block in found]


def shell(fleet: Fleet, folder: Path, commands: str) -> str:
    """Run commands of the guide in the test's namespace."""
    programs = fleet.cluster.program("kubectl").parent
    kubectl = f'kubectl() {{ command kubectl -n {fleet.namespace} "$@"; }}\n'
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KUBECONFIG": str(fleet.cluster.kubeconfig)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", kubectl + commands],
        cwd=folder, env=env, capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def states(fleet: Fleet, name: str = "adopted") -> dict[str, str]:
    """State of each engine by pod name, as status shows it."""
    return {e["name"]: e["state"] for e in fleet.status("enginepool", name).get("engines") or []}


def active(fleet: Fleet, name: str = "adopted") -> set[str]:
    """UIDs of the pods whose engines status shows as Active: a pod that was replaced under its name is another."""
    engines = fleet.status("enginepool", name).get("engines") or []
    return {str(e["podUID"]) for e in engines if e["state"] == "Active"}


def message(obj: dict[str, Any], kind: str) -> tuple[str, str]:
    """Reason and message of a condition."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next(((str(c["reason"]), str(c["message"])) for c in conditions if c["type"] == kind), ("", ""))


def says(fleet: Fleet, pool: str, kind: str, reason: str, words: Iterable[str]) -> bool:
    """A pool's condition has this reason, and its message all of these words."""
    have, text = message(fleet.get("enginepool", pool), kind)
    return have == reason and all(w in text for w in words)


def keys(fleet: Fleet) -> None:
    """The operator's public keys have reached the pipeline's status."""
    wait_until(lambda: fleet.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")


def incarnation(fleet: Fleet, pod: str, pool: str = "adopted") -> str:
    """Of one engine, as status shows it."""
    engines = fleet.status("enginepool", pool).get("engines") or []
    return next((str(e.get("incarnation") or "") for e in engines if e["name"] == pod), "")
